"""The timeline when things meet: commands, pauses, forks and ends at once, and clocks that jump."""

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
from sloplet.errors import SlopletError
from sloplet.wire.mux import request
from sloplet.wire.schema import Op, Tag

pytestmark = pytest.mark.anyone


async def _read(box: AsyncSandbox, name: str = "note") -> str:
    return await box.files.read_text(name)


async def _fork(box: AsyncSandbox) -> None:
    for child in await box.fork(3):
        await child.kill()


SAVING: dict[str, Callable[[AsyncSandbox], Awaitable[Any]]] = {
    "snapshot": lambda box: box.snapshot(),
    "pause": lambda box: box.pause(),
    "fork": _fork,
    "template": lambda box: box.template("warm"),
}


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


@pytest.mark.parametrize("act", SAVING)
def test_killed_while_it_is_saved(act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            await SAVING[act](box)
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
    "release": lambda box, n: box._controller.release(box.id),  # type: ignore[union-attr]
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
