"""The timeline: saved whole or not at all, one change at a time, and the source runs on whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from live_fake import World, in_world

from sloplet import AsyncSandbox, errors
from sloplet.errors import SlopletError, StateUnwritable

pytestmark = pytest.mark.anyone


async def _read(box: AsyncSandbox, name: str = "note") -> str:
    return await box.files.read_text(name)


# -- what fails in the middle -----------------------------------------------------------------------


async def _snapshot(box: AsyncSandbox) -> None:
    await box.snapshot("second")


async def _template(box: AsyncSandbox) -> None:
    await box.template("warm")


async def _pause(box: AsyncSandbox) -> None:
    await box.pause()


async def _fork(box: AsyncSandbox) -> None:
    for child in await box.fork(3):
        await child.kill()


async def _rollback(box: AsyncSandbox) -> None:
    await box.rollback("first")


async def _command(box: AsyncSandbox) -> None:
    await box.run("true")


async def _undo(box: AsyncSandbox) -> None:
    await box.undo()


async def _checkpoint(box: AsyncSandbox) -> None:
    timeline = box._controller.timeline  # type: ignore[union-attr]
    await timeline._whole(timeline._checkpoint(box._controller.find_live(box.id)))  # type: ignore[union-attr]


Act = Callable[[AsyncSandbox], Awaitable[None]]
#: What is done, and a step of it that fails as on a full disk.
STEPS: list[tuple[Act, str]] = [
    (_snapshot, "add_snapshot"), (_snapshot, "set_head"), (_template, "add_snapshot"),
    (_pause, "add_snapshot"), (_pause, "mark_paused"), (_fork, "add_snapshot"), (_fork, "reserve"),
    (_rollback, "set_head"), (_command, "add_snapshot"), (_checkpoint, "add_snapshot"), (_checkpoint, "replace_saved"),
]  # fmt: skip


@pytest.mark.parametrize(("act", "step"), STEPS, ids=[f"{act.__name__[1:]}-{step}" for act, step in STEPS])
def test_a_step_that_fails(act: Act, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error; the sandbox runs on with all it had; nothing is left of the attempt; the next one works."""

    async def work(world: World) -> None:
        box = await world.box("dev", undo=2)
        await box.files.write("note", "first")
        await box.snapshot("first")
        await box.files.write("note", "now")
        before, files = world.states(), world.left()
        with monkeypatch.context() as patch:
            patch.setattr(world.runtime.store, step, _full)
            with pytest.raises(SlopletError, match="full"):
                await act(box)
        assert (await box.info()).state == "running"
        assert await _read(box) in ("now", "first" if act is _rollback else "now")
        assert world.engine.running == {world.runtime.find_live(box.id).place}  # type: ignore[union-attr]
        if step != "set_head":
            assert world.states() == before
            assert len(world.left()) == len(files)
        if act is _snapshot and step == "set_head":
            return  # it is there, under its name
        await act(box)
        await box.kill()

    in_world(tmp_path, monkeypatch, work)


def _full(*_: Any, **__: Any) -> Any:
    raise StateUnwritable("the disk is full")


def test_a_resume_that_cannot_be_recorded_leaves_it_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        box = await world.box("dev")
        await box.files.write("note", "kept")
        await box.pause()
        for step in ("claim", "mark_resumed"):
            with monkeypatch.context() as patch:
                patch.setattr(world.runtime.store, step, _full)
                with pytest.raises(StateUnwritable):
                    await box.resume()
            assert world.runtime.store.find(box.id).state == "paused"
            assert world.engine.running == set(), step
            assert world.states() == ["pause"]
        assert await _read(box) == "kept"

    in_world(tmp_path, monkeypatch, work)


def test_a_start_that_fails_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rollback, resume, fork: the engine says no."""

    async def work(world: World) -> None:
        box = await world.box("dev")
        await box.files.write("note", "kept")
        await box.snapshot("first")

        async def no(_: Any) -> None:
            raise errors.StartFailed("no")

        async def yes(_: Any) -> None:
            pass

        world.engine.starting = no
        for job in (box.rollback("first"), box.fork(3), box.fork(2, names=["a", "b"]), box.fork(snapshot="first")):
            with pytest.raises(errors.StartFailed):
                await job
            assert await _read(box) == "kept"
        await box.pause()
        with pytest.raises(errors.StartFailed):
            await box.resume()
        with pytest.raises(errors.StartFailed):
            await box.run("true")
        assert (await box.info()).state == "paused"
        world.engine.starting = yes
        assert await _read(box) == "kept"
        assert [info.name for info in await world.runtime.list()] == ["dev"]

    in_world(tmp_path, monkeypatch, work)


def test_some_of_a_fork_fail_then_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        box = await world.box("dev")
        await world.box("taken")

        async def every_third(_: Any) -> None:
            await asyncio.sleep(0)
            if len(world.engine.started) % 3 == 2:
                raise errors.StartFailed("no")

        with pytest.raises(errors.SandboxExists):
            await box.fork(4, names=["a", "b", "Taken", "c"])
        assert sorted(info.name or "" for info in await world.runtime.list()) == ["dev", "taken"]
        world.engine.starting = every_third
        with pytest.raises(errors.StartFailed):
            await box.fork(6)
        assert len(await world.runtime.list()) == 2
        assert len(world.engine.running) == 2
        assert world.states() == []

    in_world(tmp_path, monkeypatch, work)


# -- the tree ----------------------------------------------------------------------------------------


def test_heads_follow_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when one that sleeps is undone or rolled back: what comes next descends from what is there."""

    async def work(world: World) -> None:
        box = await world.box("dev", undo=3)
        first = await box.snapshot("first")
        second = await box.snapshot("second")
        await box.run("echo one > note")
        await box.run("echo two > note")
        await box.pause()
        await box.undo()
        assert await _read(box) == "one\n"
        third = await box.snapshot("third")
        assert (second.parent, third.parent) == (first.id, second.id)
        await box.pause()
        await box.rollback("first")
        assert (await box.snapshot("fourth")).parent == first.id
        child = (await box.fork(1, snapshot="second"))[0]
        with pytest.raises(errors.SnapshotInUse):
            await box.delete_snapshot("second")
        await box.delete_snapshot("second", force=True)
        assert (await child.snapshot("own")).parent == first.id
        assert {each.name: each.parent for each in await box.snapshots()}["third"] == first.id

    in_world(tmp_path, monkeypatch, work)
