"""What builds and pulls over HTTP stand on: places, what waits to be told, folders that go with their server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from state_helpers import start

from sloplet.build.running import RunSettings
from sloplet.errors import BuildFailed, DiskFull, ServerBusy
from sloplet.images.progress import ImageProgress
from sloplet.images.threads import Abandoned
from sloplet.server import imaging
from sloplet.server.bodies import check_room, spooled
from sloplet.server.building import settings_for
from sloplet.server.contexts import private_folder
from sloplet.server.imaging import Places, Told, followed, stoppable
from sloplet.server.keys import KeyLimits
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


def test_of_one_tenant_a_part_of_the_places() -> None:
    places = Places(4, "build")
    with places.take("a"), places.take("a"):
        with pytest.raises(ServerBusy, match="2 of yours") as caught:
            places.check("a")
        assert caught.value.retry_after
        with places.take("b"), places.take("c"):
            with pytest.raises(ServerBusy, match="4 are under way"):
                places.check("d")
        places.check("d")
    places.check("a")
    only = Places(1, "build")
    with only.take("a"), pytest.raises(ServerBusy):
        only.check("b")


def told(work: Callable[[Told], Coroutine[Any, Any, dict[str, Any]]]) -> list[tuple[str, Any]]:
    async def all_of_it() -> list[bytes]:
        return [each async for each in followed(work, lambda count: b"event: missed\ndata: %d\n\n" % count)]

    found = []
    for piece in asyncio.run(all_of_it()):
        name, data = piece.decode().splitlines()[:2]
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_progress_that_was_not_told_yet_is_replaced() -> None:
    async def work(tell: Told) -> dict[str, Any]:
        for done in range(1000):
            tell.progress(ImageProgress("download", "a", done, 1000))
            tell.progress(ImageProgress("download", "b", done, 1000))
        tell.progress(ImageProgress("done", "x"))
        return {"id": "x"}

    events = told(work)
    assert [(name, data.get("key"), data.get("done")) for name, data in events] == [
        ("progress", "a", 999), ("progress", "b", 999), ("done", None, None),
    ]  # fmt: skip


def test_a_log_has_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imaging, "_MOST_LOG", 1000)

    async def work(tell: Told) -> dict[str, Any]:
        for _ in range(100):
            tell.line(b'event: log\ndata: "0123456789"\n\n')
        tell.always(b'event: end\ndata: "of it"\n\n')
        return {}

    names = [name for name, _ in told(work)]
    assert names.count("log") < 50
    assert names[-3:] == ["end", "missed", "done"]
    assert names.count("log") + next(data for name, data in told(work) if name == "missed") == 100


def test_errors_come_after_what_was_told() -> None:
    async def work(tell: Told) -> dict[str, Any]:
        tell.always(b"event: x\ndata: 1\n\n")
        raise BuildFailed("it failed")

    async def until() -> bytes:
        events = followed(work)
        first = await anext(events)
        with pytest.raises(BuildFailed):
            await anext(events)
        return first

    assert asyncio.run(until()) == b"event: x\ndata: 1\n\n"


def test_who_stops_to_follow_ends_it() -> None:
    ended: list[str] = []

    async def work(tell: Told) -> dict[str, Any]:
        tell.always(b"event: x\ndata: 1\n\n")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("yes")
        return {}

    async def leave() -> None:
        events = followed(work)
        await anext(events)
        await events.aclose()

    asyncio.run(leave())
    assert ended == ["yes"]


def test_threads_are_told_to_stop_and_waited_for() -> None:
    seen: list[str] = []

    def work(check: Callable[[ImageProgress], None]) -> None:
        try:
            while True:
                check(ImageProgress("download"))
        except Abandoned:
            seen.append("stopped")
            raise

    async def leave() -> None:
        task = asyncio.ensure_future(stoppable(work))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert seen == ["stopped"]

    asyncio.run(leave())


def test_what_a_server_that_died_left_goes(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with private_folder(home) as living:
        (home.cache / "build-0123").write_text("a record of the build cache")

        def doomed() -> None:
            with private_folder(home) as folder:
                (folder / "file").write_text("x")
                os.kill(os.getpid(), signal.SIGKILL)

        pid, read = start(doomed)
        os.close(read)
        os.waitpid(pid, 0)
        left = {path.name for path in home.cache.iterdir()} - {living.name, "build-0123"}
        assert len(left) == 1
        with private_folder(home) as fresh:
            assert {path.name for path in home.cache.iterdir()} == {living.name, fresh.name, "build-0123"}
    assert [path.name for path in home.cache.iterdir()] == ["build-0123"]


@pytest.mark.parametrize(
    ("asked", "limits", "engine", "least"),
    [
        (RunSettings(), KeyLimits(), "auto", None),
        (RunSettings(), KeyLimits(at_least="gvisor"), "auto", "gvisor"),
        (RunSettings(at_least="microvm"), KeyLimits(at_least="gvisor"), "auto", "microvm"),
        (RunSettings(at_least="container"), KeyLimits(at_least="gvisor"), "auto", "gvisor"),
        (RunSettings(), KeyLimits(engines=("container", "gvisor")), "auto", None),
        (RunSettings(), KeyLimits(engines=("gvisor",)), "auto", "container"),  # then the policy chooses, not the build
        (RunSettings(engine="container"), KeyLimits(engines=("gvisor",)), "container", None),  # which it refuses
    ],
)
def test_what_steps_run_on(asked: RunSettings, limits: KeyLimits, engine: str, least: str | None) -> None:
    found = settings_for(asked, limits)
    assert (found.engine, found.at_least) == (engine, least)


def test_what_is_left_of_the_disk_is_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home").open()
    real = os.statvfs(home.path)
    check_room(home)

    class Small:
        f_frsize, f_blocks = 4096, 1 << 30
        f_bavail = (1 << 30) // 4096 - 1

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    with pytest.raises(DiskFull):
        check_room(home)

    async def send() -> None:
        async def body() -> AsyncIterator[bytes]:
            yield b"x" * 100

        async with spooled(body(), home):
            raise AssertionError

    with pytest.raises(DiskFull):
        asyncio.run(send())
    Small.f_blocks, Small.f_bavail = 1000, 51  # of a small disk a twentieth
    check_room(home)
    monkeypatch.undo()
    assert os.statvfs(home.path).f_blocks == real.f_blocks
