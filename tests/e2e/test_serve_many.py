"""More at a time than one connection to a keeper takes: 1,024 streams is what the wire allows on each."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import server_kit
from sloplet.wire.schema import MAX_STREAMS

pytestmark = pytest.mark.anyone
MANY = MAX_STREAMS + 50


@pytest.fixture
def _files() -> Iterator[None]:
    """As many open files as that many connections take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MANY * 3:  # the server has two for each: the client's, and its share of those to the keeper
        pytest.skip(f"capability: {hard} open files at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("_files")
def test_more_commands_at_a_time_than_one_connection_takes(tmp_path: Path) -> None:
    with server_kit.served(tmp_path / "home", "--allow-fake") as server:
        told = asyncio.run(_all(server))
    assert told == ["opened"] * MANY


async def _all(server: server_kit.Served) -> list[str]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"Authorization": f"Bearer {server.key}"}
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, limits=limits, timeout=60, trust_env=False
    ) as client:
        boxes = []
        for _ in range(4):  # one agent has a bound of its own
            made = await client.post("/v1/sandboxes", json={"engine": "fake"})
            assert made.status_code == 201, made.text
            boxes.append(made.json()["id"])
        opened, release = asyncio.Semaphore(0), asyncio.Event()

        async def watch(number: int) -> str:
            path = f"/v1/sandboxes/{boxes[number % len(boxes)]}/files/watch"
            async with client.stream("GET", path, params={"path": "."}) as answer:
                status = answer.status_code
                opened.release()
                await release.wait()
            return "opened" if status == 200 else str(status)

        watching = [asyncio.ensure_future(watch(number)) for number in range(MANY)]
        for _ in range(MANY):
            await opened.acquire()
        # and the keeper itself still answers
        assert (await client.get(f"/v1/sandboxes/{boxes[0]}")).status_code == 200
        release.set()
        return await asyncio.gather(*watching)
