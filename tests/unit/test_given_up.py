"""Work that nobody waits for any more, or that fails midway, leaves no file open: not until the garbage collector comes
by either. What is deleted but open still fills the disk, and what is held cannot be deleted."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from archive_helpers import export
from live_fake import World as Living
from live_fake import in_world
from snapshot_helpers import World

from sloplet import errors
from sloplet.archive.work import Work
from sloplet.engines.base import ResolvedImage, StartRequest
from sloplet.state.opened import Opened

pytestmark = pytest.mark.anyone


@contextmanager
def no_file_stays_open(below: Path) -> Iterator[None]:
    """With the garbage collector off."""
    gc.collect()
    gc.disable()
    try:
        before = _open_below(below)
        yield
        assert _open_below(below) == before
    finally:
        gc.enable()


def _open_below(path: Path) -> list[str]:
    """But for the records and the locks of a home."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
        if name.startswith(f"{path}/") and not name.startswith((f"{path}/home/run/", f"{path}/home/state.db")):
            found.append(name)
    return sorted(found)


def test_what_is_open_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError), no_file_stays_open(tmp_path):
        kept = (tmp_path / "file").open("w")
    kept.close()


def _give_up(work: Work, count: int) -> None:
    raise errors.SnapshotError("the export was given up")


def _full(fd: int, data: bytes) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("of", ["state", "image"])
@pytest.mark.parametrize(
    ("place", "act"), [("sloplet.archive.work.Work.step", _give_up), ("sloplet.archive.write.write_all", _full)]
)
def test_an_export_that_fails(
    of: str, place: str, act: Callable[..., None], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a file. Its error is kept meanwhile, as a task keeps it."""
    folder = tmp_path / "image"
    folder.mkdir()
    reading: list[str] = []

    def later(*words: Any) -> None:
        reading[:] = [name for name in _open_below(tmp_path) if name.endswith("big")]
        if reading and (of == "image") == reading[0].startswith(str(folder)):
            act(*words)

    data = os.urandom(3_000_000)  # more than is packed before something is written
    (folder / "big").write_bytes(data)
    monkeypatch.setattr(place, later)
    image = ResolvedImage("rootfs", folder)
    with no_file_stays_open(tmp_path), pytest.raises(errors.SlopletError, match=r"given up|space") as kept:
        export(world, tmp_path / "archive", files={"big": data}, image=image)
    assert reading, "it was in the middle"
    assert kept.value.__traceback__ is not None


def test_a_start_from_a_template_that_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While every byte of the template is read, in a thread: it can be deleted afterwards."""

    async def work(world: Living) -> None:
        await (await world.box()).template("warm")
        loop, reached, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        verify = Opened.verify

        def late(opened: Opened) -> None:
            loop.call_soon_threadsafe(reached.set)
            assert go.wait(30)
            verify(opened)

        monkeypatch.setattr(Opened, "verify", late)
        with no_file_stays_open(tmp_path / "snapshots"):
            task = asyncio.ensure_future(world.box(template="warm"))
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go.set()
            async with asyncio.timeout(10):
                while _open_below(tmp_path / "snapshots"):
                    await asyncio.sleep(0)
        (template,) = await world.runtime.snapshots(role="template")
        async with asyncio.timeout(10):
            await world.runtime.delete_snapshot(template.id)

    in_world(tmp_path, monkeypatch, work)


@pytest.mark.parametrize("moment", ["place", "start", "end"])
def test_a_diff_that_is_given_up(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that it looked at is gone, with its place, whenever that was. ``in_world`` looks."""

    async def work(world: Living) -> None:
        box = await world.box()
        before = await box.snapshot()
        ask: asyncio.Task[Any]
        came: list[str] = []
        loop, make_place, discard = asyncio.get_running_loop(), world.runtime.home.make_place, world.runtime.discard

        def cancel() -> None:
            came.append(moment)
            ask.cancel()

        def place(*words: Any) -> Any:
            loop.call_soon_threadsafe(cancel)
            while not came:
                os.sched_yield()
            return make_place(*words)

        async def start(_: StartRequest) -> None:
            cancel()

        async def end(copy: Any) -> None:
            cancel()
            await discard(copy)

        with no_file_stays_open(tmp_path / "snapshots"):
            if moment == "place":
                monkeypatch.setattr(type(world.runtime.home), "make_place", lambda home, *words: place(*words))
            elif moment == "start":
                world.engine.starting = start
            else:
                monkeypatch.setattr(world.runtime, "discard", end)
            ask = asyncio.ensure_future(box.diff(before.id))
            with pytest.raises(asyncio.CancelledError):
                await ask
            assert came
            await world.runtime.delete_snapshot(before.id)

    in_world(tmp_path, monkeypatch, work)
