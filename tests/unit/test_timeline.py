"""The timeline: saved whole or not at all, one change at a time, and the source runs on whatever fails."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from live_fake import World, in_world

from sloplet import AsyncSandbox, errors
from sloplet.errors import SlopletError, StateUnwritable
from sloplet.wire.mux import request
from sloplet.wire.schema import Op, Tag

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
    timeline = box._given.timeline  # type: ignore[union-attr]
    await timeline._whole(timeline._checkpoint(box._given.find_live(box.id)))  # type: ignore[union-attr]


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


# -- meetings ----------------------------------------------------------------------------------------


def test_one_that_is_used_is_not_put_to_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that comes just when idle sleep has made up its mind runs to its end."""

    async def work(world: World) -> None:
        box = await world.box("dev", idle=0.05)
        begin, loop = world.runtime.saved.begin, asyncio.get_running_loop()
        came: list[asyncio.Task[Any]] = []

        def begin_late() -> Any:
            """The first thing that a pause does: just now somebody runs a command."""
            asyncio.run_coroutine_threadsafe(_come(), loop).result(10)
            return begin()

        async def _come() -> None:
            if not came:
                came.append(asyncio.ensure_future(box.run("until [ -e go ]; do sleep 0.01; done; echo done")))
                live = world.runtime.find_live(box.id)
                while live is not None and not live.running:
                    await asyncio.sleep(0)

        monkeypatch.setattr(world.runtime.saved, "begin", begin_late)
        while not came or world.runtime.timeline.at_work:
            await asyncio.sleep(0.001)
        await box.files.write("go", "")
        assert (await came[0]).stdout == "done\n"
        while (await box.info()).state != "paused":  # and then it sleeps
            await asyncio.sleep(0.01)

    in_world(tmp_path, monkeypatch, work)


def test_one_whose_time_was_over_while_it_slept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone for whoever opens it, with all that was saved of it; a clock that jumped ahead does the same."""

    async def work(world: World) -> None:
        box = await world.box("dev", ttl=1000)
        await box.pause()
        assert world.states() == ["pause"]
        real = time.time
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: real() + 2000)
            with pytest.raises(errors.SandboxNotFound, match="time to live"):
                await box.resume()
            with pytest.raises(errors.SandboxNotFound):
                await box.run("true")
        assert world.states() == []
        again = await world.box("dev", ttl=1000)  # its name is free
        assert (await again.run("echo hello")).stdout == "hello\n"

    in_world(tmp_path, monkeypatch, work)


def test_a_clock_that_jumps_ends_nothing_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time to live and idle sleep go by a clock that does not jump; what is put on record when it pauses, too."""

    async def work(world: World) -> None:
        box = await world.box("dev", ttl=1000, idle=1000)
        real = time.time
        for jump in (10**6, -(10**6)):
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda jump=jump: real() + jump)
                assert (await box.run("echo hello")).stdout == "hello\n"
                info = await box.pause()
                assert info.expires_at is not None
                assert 900 < info.expires_at - time.time() <= 1000
                assert (await box.resume()).state == "running"

    in_world(tmp_path, monkeypatch, work)


def test_a_command_with_undo_that_meets_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause comes between the command's undo point and the command: it wakes the sandbox, and runs."""

    async def work(world: World) -> None:
        box = await world.box("dev", undo=1)
        timeline, runtime = world.runtime.timeline, world.runtime
        point = timeline._undo_point
        pauses: list[asyncio.Task[Any]] = []

        async def then_pause(sandbox_id: str, note: str) -> bool:
            done = await point(sandbox_id, note)
            if not pauses:
                pauses.append(asyncio.ensure_future(runtime.pause(sandbox_id)))
                live = runtime.find_live(sandbox_id)
                while live is not None and live.gate is None:
                    await asyncio.sleep(0)
            return done

        monkeypatch.setattr(timeline, "_undo_point", then_pause)
        assert (await box.run("echo hello")).stdout == "hello\n"
        await pauses[0]

    in_world(tmp_path, monkeypatch, work)


@pytest.mark.parametrize("act", [_snapshot, _pause, _fork, _template], ids=["snapshot", "pause", "fork", "template"])
def test_killed_while_it_is_saved(act: Act, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who saves it is told that it is dead, not to try again."""

    async def work(world: World) -> None:
        box = await world.box("dev")
        kills: list[asyncio.Task[None]] = []

        async def kill_it() -> None:
            kills.append(asyncio.ensure_future(world.runtime.kill(box.id)))
            await asyncio.sleep(0.01)
            raise errors.SaveFailed("the engine has ended", hint="it runs on")

        world.engine.saving = kill_it
        with pytest.raises(errors.SandboxDead):
            await act(box)
        await kills[0]
        assert world.states() == []

    in_world(tmp_path, monkeypatch, work)


def test_a_fork_of_one_that_is_just_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wakes it deletes what it slept in: not before the fork has it."""

    async def work(world: World) -> None:
        box = await world.box("dev")
        await box.files.write("note", "kept")
        await box.pause()
        timeline, saved = world.runtime.timeline, world.runtime.timeline.saved
        woken: list[asyncio.Task[Any]] = []

        def just_then(snapshot_id: str) -> Any:
            if woken:
                return saved(snapshot_id)
            woken.append(asyncio.ensure_future(box.resume()))
            return _late(saved, snapshot_id)

        monkeypatch.setattr(timeline, "saved", just_then)
        children = await box.fork(2)
        assert [await _read(child) for child in children] == ["kept", "kept"]
        await woken[0]
        assert await _read(box) == "kept"

    in_world(tmp_path, monkeypatch, work)


@asynccontextmanager
async def _late(saved: Callable[[str], Any], snapshot_id: str) -> AsyncIterator[Any]:
    await asyncio.sleep(0.2)
    async with saved(snapshot_id) as origin:
        yield origin


OPERATIONS: dict[str, Callable[[AsyncSandbox, int], Awaitable[Any]]] = {
    "pause": lambda box, n: box.pause(),
    "resume": lambda box, n: box.resume(),
    "run": lambda box, n: box.run(f"echo {n}"),
    "read": lambda box, n: box.files.read_text("note"),
    "snapshot": lambda box, n: box.snapshot(),
    "rollback": lambda box, n: box.rollback("first"),
    "fork": lambda box, n: _fork(box),
    "fork of first": lambda box, n: box.fork(2, snapshot="first"),
    "undo": lambda box, n: box.undo(),
    "release": lambda box, n: box._given.release(box.id),  # type: ignore[union-attr]
    "info": lambda box, n: box.info(),
}


@pytest.mark.parametrize("seed", range(100 if os.environ.get("SLOPLET_SOAK", "") not in ("", "0") else 5))
def test_everybody_at_once(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call ends with a result or a typed error; the sandbox is whole afterwards; in the end it is killed amid
    all of it, and nothing is left."""
    dice = random.Random(seed)

    async def work(world: World) -> None:
        box = await world.box("dev", undo=dice.choice((0, 2)), checkpoint_every=dice.choice((None, 1)))
        if box.spec.checkpoint_every:
            live = world.runtime.find_live(box.id)
            assert live is not None
            live.chores.append(world.runtime.background(world.runtime.timeline._checkpoints(live, 0.02)))
        await box.files.write("note", "kept")
        await box.snapshot("first")

        async def slow() -> None:
            await asyncio.sleep(dice.random() / 200)

        world.engine.saving = slow
        outcomes: dict[str, set[str]] = {}

        async def one(number: int) -> None:
            name = dice.choice(list(OPERATIONS))
            await asyncio.sleep(dice.random() / 20)
            try:
                async with asyncio.timeout(20):
                    await OPERATIONS[name](box, number)
                    outcomes.setdefault(name, set()).add("ok")
            except SlopletError as error:
                outcomes.setdefault(name, set()).add(type(error).__name__)

        await asyncio.gather(*(one(number) for number in range(60)))
        assert await _read(box) == "kept"
        assert all("ok" in found for name, found in outcomes.items() if name not in ("undo",)), outcomes
        assert not {"SandboxDead", "SandboxNotFound"} & set().union(*outcomes.values()), outcomes
        rest = asyncio.gather(*(one(number) for number in range(40)))
        await asyncio.sleep(0.02)
        await box.kill()
        await rest
        with pytest.raises(errors.SandboxNotFound):
            await world.runtime.find("dev")

    in_world(tmp_path, monkeypatch, work)


def test_a_caller_who_gives_up_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled in the middle of each change: it is made, or it is not; never half."""

    async def work(world: World) -> None:
        box = await world.box("dev")
        await box.files.write("note", "kept")
        await box.snapshot("first")
        jobs: list[Callable[[], Any]] = [
            box.pause,
            box.resume,
            lambda: box.rollback("first"),
            lambda: box.fork(2),
            box.snapshot,
            lambda: box.template("t"),
        ]
        for delay in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008):
            for job in jobs:
                task = asyncio.ensure_future(job())
                await asyncio.sleep(delay)
                task.cancel()
                with suppress(asyncio.CancelledError, SlopletError):
                    await task
                assert await _read(box) == "kept"
        while world.runtime.timeline.at_work:
            await asyncio.sleep(0.001)
        assert set(world.states()) <= {"snapshot", "template"}

    in_world(tmp_path, monkeypatch, work)


def test_what_is_asked_while_it_stands_still_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        box = await world.box("dev")
        go = asyncio.Event()
        world.engine.saving = lambda: _wait(go)
        saving = asyncio.ensure_future(box.snapshot("first"))
        live = world.runtime.find_live(box.id)
        assert live is not None
        while live.gate is None:
            await asyncio.sleep(0)
        command = asyncio.ensure_future(box.run("echo hello"))
        raw = asyncio.ensure_future(world.runtime.open(box.id, request(Op.METRICS)))
        await asyncio.sleep(0.05)
        assert not command.done()
        assert not raw.done()
        go.set()
        await saving
        assert (await command).stdout == "hello\n"
        assert Tag.MEMORY in await (await raw).result()

    in_world(tmp_path, monkeypatch, work)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
