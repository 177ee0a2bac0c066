"""Links are checked when a sandbox is made: none leads nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_fake import World, in_world

from sloplet import Network
from sloplet.errors import ControlUnavailable, SpecError
from sloplet.runtime import Runtime

pytestmark = pytest.mark.anyone


def test_a_link_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(made: World) -> None:
        with pytest.raises(SpecError, match="the link 'db' leads to 'nope', and there is no such sandbox"):
            await made.box(network=Network(), links={"db": "nope"})
        assert await made.runtime.list() == []
        await made.box("there")
        with pytest.raises(ControlUnavailable):  # the fake has no network; the link is none of its problems
            await made.box(network=Network(), links={"db": "there:5432"})

    in_world(tmp_path / "home", monkeypatch, work)


def test_a_link_to_one_that_the_keeper_cannot_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(made: World) -> None:
        keeper = Runtime(made.runtime.home, holder="keeper")
        try:
            box = await made.box()
            with pytest.raises(SpecError, match="lives in a program that the keeper cannot reach"):
                await keeper.create(box.spec.make("web", network=Network(), links={"db": box}))
        finally:
            await keeper.aclose()

    in_world(tmp_path / "home", monkeypatch, work)
