"""A pause waits for commands that have only just begun."""

from __future__ import annotations

import asyncio

import pytest

from sloplet.server.e2b import young
from sloplet.server.e2b.young import Young


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(young, "SETTLING", 0.2)


async def waited(commands: Young, sandbox: str = "a") -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await commands.settled(sandbox)
    return loop.time() - began


def test_one_that_has_just_begun_gets_its_time() -> None:
    async def work() -> None:
        commands = Young()
        commands.began("a")
        assert await waited(commands) >= 0.19
        assert await waited(commands) < 0.1

    asyncio.run(work())


def test_nobody_waits_for_what_has_ended_or_is_of_others() -> None:
    async def work() -> None:
        commands = Young()
        commands.began("b")
        ended = commands.began("a")
        assert await waited(commands, "c") < 0.1
        ended()
        ended()
        assert await waited(commands) < 0.1

    asyncio.run(work())


def test_who_begins_later_is_not_waited_for() -> None:
    async def work() -> None:
        commands = Young()
        commands.began("a")
        asyncio.get_running_loop().call_later(0.15, commands.began, "a")
        assert 0.19 <= await waited(commands) < 0.33

    asyncio.run(work())
