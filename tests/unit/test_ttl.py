"""When a sandbox's time is over: what is done then, what may come between, and what is left of it."""

from __future__ import annotations

import asyncio
import errno
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from keeper_helpers import end, keeping
from live_fake import World, in_world

from sloplet import AsyncSandbox
from sloplet.engines.fakeagent.changes import Changes
from sloplet.errors import SandboxDead, SandboxNotFound, SaveFailed, SpecError, UnsupportedOperation
from sloplet.spec import SandboxSpec, check_ttl
from sloplet.state.reaper import reap
from sloplet.wire.fields import Fields
from sloplet.wire.mux import AgentStream
from sloplet.wire.schema import ChangesFlag, Tag

pytestmark = pytest.mark.anyone


class Told:
    """The events of a world, as they come."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._more = asyncio.Event()

    async def until(self, wanted: str) -> dict[str, Any]:
        while True:
            for kind, data in self.events:
                if kind == wanted:
                    return data
            self._more.clear()
            await self._more.wait()

    def add(self, kind: str, data: dict[str, Any]) -> None:
        self.events.append((kind, data))
        self._more.set()


@asynccontextmanager
async def listening(world: World) -> AsyncIterator[Told]:
    told, source = Told(), world.runtime.events()

    async def listen() -> None:
        async for event in source:
            told.add(event.type, event.data)

    task = asyncio.ensure_future(listen())
    await asyncio.sleep(0)
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_it_sleeps_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        async with listening(world) as told:
            box = await world.box(ttl=0.05, on_ttl="pause")
            await box.files.write("note", "kept")
            data = await told.until("paused")
            assert (data["expired"], data["kind"]) == (True, "live")
            info = await world.runtime.find(box.id)
            assert (info.state, info.expires_at, info.spec.ttl) == ("paused", None, 0.05)
            assert not reap(world.runtime.home, world.runtime.store, lambda *_: None).expired
            assert await box.files.read_text("note") == "kept"
            live = world.runtime.held_live(box.id)
            assert live is not None
            assert (live.expires, live.info.expires_at) == (None, None)
            (listed,) = await world.runtime.list()
            assert (listed.state, listed.expires_at) == ("running", None)

    in_world(tmp_path, monkeypatch, work)


def test_what_cannot_be_paused_ends_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full() -> None:
        raise SaveFailed("the disk is full")

    async def work(world: World) -> None:
        world.engine.saving = full
        async with listening(world) as told:
            box = await world.box("dev", on_ttl="pause")
            assert (await box.set_ttl(0)).state == "ended"
            assert "the disk is full" in (await told.until("sleep.failed"))["reason"]
            reason = (await told.until("expired"))["reason"]
            assert "its time to live was over" in reason
            assert "the disk is full" in reason
            with pytest.raises(SandboxNotFound):
                await world.runtime.find(box.id)

    in_world(tmp_path, monkeypatch, work)


class Slowly:
    """An engine's ``saving`` that waits to be let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.begun.set()
        await self.go_on.wait()


def _is_over(world: World, box: AsyncSandbox) -> asyncio.Future[None]:
    """Its time is up, from now on."""
    live = world.runtime.held_live(box.id)
    assert live is not None
    live.expires = asyncio.get_running_loop().time()
    return asyncio.ensure_future(world.runtime.timeline.time_is_up(box.id))


async def _begun() -> None:
    """What was just asked for has come to where it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_longer_time_that_comes_meanwhile_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over while it is being saved for something else; whoever waits behind gives it another."""

    async def work(world: World) -> None:
        box = await world.box("dev", on_ttl="pause")
        world.engine.saving = slowly = Slowly()
        snapshot = asyncio.ensure_future(box.snapshot("first"))
        await slowly.begun.wait()
        over = _is_over(world, box)
        await _begun()
        longer = asyncio.ensure_future(world.runtime.set_ttl(box.id, 600))
        await _begun()
        slowly.go_on.set()
        await asyncio.gather(snapshot, over, longer)
        assert longer.result().state == "running"
        info = await box.info()
        assert info.state == "running"
        assert info.expires_at is not None
        assert (await world.runtime.list())[0].expires_at == info.expires_at
        await _is_over(world, box)  # the control: without that it sleeps
        assert (await box.info()).state == "paused"

    in_world(tmp_path, monkeypatch, work)


@pytest.mark.parametrize("ttl", [600, None])
def test_a_longer_time_while_it_is_put_to_sleep(
    ttl: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of the attempt, and it goes on with all it had."""

    async def work(world: World) -> None:
        box = await world.box("dev", on_ttl="pause")
        await box.files.write("note", "now")
        left = world.left()
        world.engine.saving = slowly = Slowly()
        over = _is_over(world, box)
        await slowly.begun.wait()
        longer = asyncio.ensure_future(world.runtime.set_ttl(box.id, ttl))
        await _begun()
        slowly.go_on.set()
        await asyncio.gather(over, longer)
        assert longer.result().state == "running"
        assert (longer.result().expires_at is None) == (ttl is None)
        assert (world.left(), len(world.engine.started)) == (left, 1)
        assert await box.files.read_text("note") == "now"

    in_world(tmp_path, monkeypatch, work)


def test_a_longer_time_while_its_sleep_is_put_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too late for the pause, and no later than that: it is woken."""

    async def work(world: World) -> None:
        box = await world.box("dev", on_ttl="pause")
        loop, store = asyncio.get_running_loop(), world.runtime.store
        mark, marking, go_on = store.mark_paused, asyncio.Event(), threading.Event()

        def slowly(*args: Any, **settings: Any) -> None:
            loop.call_soon_threadsafe(marking.set)
            assert go_on.wait(30)
            mark(*args, **settings)

        monkeypatch.setattr(store, "mark_paused", slowly)
        over = _is_over(world, box)
        await marking.wait()
        longer = asyncio.ensure_future(world.runtime.set_ttl(box.id, 600))
        await _begun()
        go_on.set()
        await asyncio.gather(over, longer)
        assert longer.result().state == "running"
        live = world.runtime.held_live(box.id)
        assert live is not None
        assert live.expires is not None
        assert live.info.expires_at == (await world.runtime.list())[0].expires_at

    in_world(tmp_path, monkeypatch, work)


def test_a_time_that_cannot_be_put_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise SaveFailed("the disk is full")

    async def work(world: World) -> None:
        box = await world.box("dev", ttl=600)
        live = world.runtime.held_live(box.id)
        assert live is not None
        before = (live.expires, live.info)
        with monkeypatch.context() as patch:
            patch.setattr(world.runtime.store, "set_expiry", full)
            with pytest.raises(SaveFailed):
                await box.set_ttl(5)
        assert live.expires == pytest.approx(before[0])
        assert live.info == before[1]

    in_world(tmp_path, monkeypatch, work)


@pytest.mark.parametrize("on_ttl", ["end", "pause"])
def test_of_two_times_the_later_word_counts(on_ttl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        box = await world.box("dev", on_ttl=on_ttl)
        async with world.runtime.timeline.turn(box.id):
            words = [asyncio.ensure_future(world.runtime.set_ttl(box.id, ttl)) for ttl in (0, 0.01, 600)]
            await _begun()
        await asyncio.gather(*words)
        info = await box.info()
        assert info.state == "running"
        assert info.expires_at is not None
        assert info.expires_at > time.time() + 500
        assert (await world.runtime.list())[0].expires_at == info.expires_at

    in_world(tmp_path, monkeypatch, work)


def test_one_that_sleeps_has_one_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        alarms, loop = world.runtime.timeline._alarms, asyncio.get_running_loop()
        box = await world.box("dev", ttl=600)
        set_at = loop.call_at
        made: list[asyncio.TimerHandle] = []

        def counted(when: float, call: Any, *args: Any, **more: Any) -> asyncio.TimerHandle:
            handle = set_at(when, call, *args, **more)
            if getattr(call, "__name__", "") == "_overslept":
                made.append(handle)
            return handle

        monkeypatch.setattr(loop, "call_at", counted)
        await box.pause()
        for ttl in (60, 70, 80):
            await box.set_ttl(ttl)
        assert [handle.cancelled() for handle in made] == [True, True, True, False]
        await box.set_ttl(None)
        assert (made[-1].cancelled(), alarms) == (True, {})
        await box.set_ttl(60)
        await box.resume()
        assert (made[-1].cancelled(), alarms) == (True, {})
        await box.pause()
        assert list(alarms) == [box.id]
        await world.runtime.kill(box.id)
        assert (made[-1].cancelled(), alarms) == (True, {})

    in_world(tmp_path, monkeypatch, work)


def test_files_only_on_an_engine_that_can_do_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        box = await world.box("dev", on_ttl="pause-disk", checkpoint_every=3600)
        await box.files.write("note", "kept")
        info = await box.set_ttl(0)
        assert (info.state, info.expires_at) == ("paused", None)
        assert info.saved is not None
        saved = await world.runtime.find_snapshot(info.saved)
        assert (saved.kind, saved.role) == ("disk", "pause")
        with pytest.raises(UnsupportedOperation, match="sleeps with its memory"):
            await _asleep_with_memory(world)
        assert await box.files.read_text("note") == "kept"

    in_world(tmp_path, monkeypatch, work)


async def _asleep_with_memory(world: World) -> None:
    other = await world.box("other")
    await other.pause()
    await other.snapshot("files", memory=False)


def test_one_that_sleeps_over_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was to sleep then sleeps on, and has no time when it wakes; one that was to end is gone."""

    async def work(world: World) -> None:
        stays, goes = await world.box("stays", ttl=600, on_ttl="pause"), await world.box("goes", ttl=600)
        for box in (stays, goes):
            await box.pause()
            assert (await box.info()).expires_at is not None
            world.runtime.store.set_expiry(box.id, time.time() - 1)
        assert world.runtime.store.asleep_expired() == [goes.id]
        assert not world.runtime.store.remove_expired(stays.id)
        with pytest.raises(SandboxNotFound, match="time to live"):
            await goes.resume()
        assert (await stays.resume()).expires_at is None
        assert (await world.runtime.list())[0].expires_at is None

    in_world(tmp_path, monkeypatch, work)


def test_settings_that_cannot_be_read_delete_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeper that may have been meant to sleep on: neither the reaper nor who opens it takes what is saved."""

    async def work(world: World) -> None:
        runtime = world.runtime
        box, control = await world.box("dev", ttl=600, on_ttl="pause"), await world.box("control", ttl=600)
        for each in (box, control):
            await each.pause()
            runtime.store.set_expiry(each.id, time.time() - 1)
        with runtime.store._write() as db:
            db.execute("UPDATE sandboxes SET spec = '{' WHERE id = ?", (box.id,))
        assert reap(runtime.home, runtime.store, lambda *_: None).expired == [control.id]
        assert not runtime.store.remove_expired(box.id)
        with pytest.raises(SandboxDead, match="damaged"):
            await runtime.resume(box.id)
        info = await runtime.find(box.id)
        assert info.saved is not None
        runtime.saved.open(info.saved).close()
        await runtime.kill(box.id)  # what is to be done with it is somebody's to say
        assert world.left() == []

    in_world(tmp_path, monkeypatch, work)


def test_a_time_that_is_taken_back_keeps_a_sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        box, control = await world.box("dev", ttl=600), await world.box("control", ttl=600)
        for each in (box, control):
            await each.pause()
            await each.set_ttl(0.05)
        await box.set_ttl(None)
        await asyncio.sleep(0.1)  # what is over by the clock
        assert reap(world.runtime.home, world.runtime.store, lambda *_: None).expired == [control.id]
        assert (await box.info()).state == "paused"
        for wrong in (control.id, "nobody"):
            with pytest.raises(SandboxNotFound):
                await world.runtime.set_ttl(wrong, 5)

    in_world(tmp_path, monkeypatch, work)


def test_a_keys_limit_holds_when_it_wakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        from dataclasses import replace

        spec = replace(SandboxSpec.make(engine="fake", ttl=60, on_ttl="pause"), longest=300.0)
        info = await world.runtime.create(spec)
        assert (await world.runtime.set_ttl(info.id, 0)).expires_at is None
        woken = await world.runtime.resume(info.id)
        assert woken.expires_at is not None
        assert 290 < woken.expires_at - time.time() <= 300
        live = world.runtime.held_live(info.id)
        assert live is not None
        assert live.expires is not None
        assert (await world.runtime.list())[0].expires_at == woken.expires_at

    in_world(tmp_path, monkeypatch, work)


def test_its_time_begins_when_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that took: nobody is told of an end that is not its own."""

    async def work(world: World) -> None:
        monkeypatch.setattr("sloplet.state.store._now", lambda _given=None: time.time() - 100)  # so long ago
        box = await world.box(ttl=60)
        info = await box.info()
        assert info.expires_at is not None
        assert 50 < info.expires_at - time.time() <= 60
        while (listed := (await world.runtime.list())[0]).state == "starting":
            await asyncio.sleep(0.01)
        assert listed.expires_at == info.expires_at
        told = {item.control: item for item in await box.guarantees()}
        assert told["ttl"].value == "60 s"

    in_world(tmp_path, monkeypatch, work)


def test_a_rollback_keeps_the_time_that_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        box = await world.box("dev", ttl=600)
        snapshot = await box.snapshot()
        wanted = (await box.set_ttl(60)).expires_at
        assert (await box.rollback(snapshot)).expires_at == wanted
        live = world.runtime.held_live(box.id)
        assert live is not None
        assert live.expires is not None
        assert live.expires - asyncio.get_running_loop().time() < 61
        told = {item.control: item for item in await box.guarantees()}
        assert told["ttl"].value.endswith("from now on")

    in_world(tmp_path, monkeypatch, work)


def test_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        box = await world.box("dev", ttl=600)
        (same,), (short,) = await box.fork(1), await box.fork(1, ttl="1m")
        for child, ttl in ((same, 600), (short, 60)):
            info = await child.info()
            assert info.expires_at is not None
            assert round(info.expires_at - info.created_at) == ttl == info.spec.ttl
            await child.kill()

    in_world(tmp_path, monkeypatch, work)


@pytest.mark.parametrize("step", ["add_snapshot", "mark_paused", "list_snapshots"])
def test_a_pause_of_files_that_fails(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on with all it had, nothing is left of the attempt, and the next one works."""

    def full(*_: Any, **__: Any) -> Any:
        raise SaveFailed("the disk is full")

    async def work(world: World) -> None:
        box = await world.box("dev")
        await box.files.write("note", "now")
        files = world.left()
        with monkeypatch.context() as patch:
            patch.setattr(world.runtime.store, step, full)
            with pytest.raises(SaveFailed):
                await box.pause(memory=False)
        assert (await box.info()).state == "running"
        assert await box.files.read_text("note") == "now"
        assert world.left() == files
        assert (await box.pause(memory=False)).state == "paused"
        assert await box.files.read_text("note") == "now"

    in_world(tmp_path, monkeypatch, work)


def test_files_of_a_sandbox_with_an_older_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live state that was restored has the agent of its time, which refuses flags that it does not know."""
    asked: list[int] = []
    tell = Changes.tell

    async def as_of_before(self: Changes, stream: AgentStream, request: Fields) -> Fields:
        asked.append(request.integer(Tag.FLAGS))
        if asked[-1] & ~ChangesFlag.CONTENTS:
            raise OSError(errno.EINVAL, "a flag this operation does not know")
        return await tell(self, stream, request)

    async def work(world: World) -> None:
        monkeypatch.setattr(Changes, "tell", as_of_before)
        box = await world.box("dev")
        await box.files.write("note", "kept")
        assert (await box.pause(memory=False)).state == "paused"
        assert asked == [ChangesFlag.CONTENTS | ChangesFlag.ATTRIBUTES, ChangesFlag.CONTENTS]
        assert await box.files.read_text("note") == "kept"

    in_world(tmp_path, monkeypatch, work)


def test_what_is_meant_to_stay_sleeps_when_its_keeper_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        kept = [await world.box(on_ttl="pause"), await world.box(on_ttl="pause-disk"), await world.box("named")]
        other = await world.box()
        await world.runtime.end_all("its keeper goes")
        states = {info.id: info.state for info in await world.runtime.list()}
        assert [states[box.id] for box in kept] == ["paused"] * 3
        assert states[other.id] == "dead"

    in_world(tmp_path, monkeypatch, work, holder="keeper")


def test_one_without_a_name_is_there_for_the_next_keeper() -> None:
    """An engine that cannot save processes; a real keeper that gets TERM; and by its id it goes on."""
    with keeping() as world:

        async def make() -> tuple[str, str]:
            from sloplet.keeper.client import keeper_controller

            controller = await keeper_controller()
            kept, other = [
                AsyncSandbox(engine="fake", on_ttl=how, controller=controller) for how in ("pause-disk", "end")
            ]
            await kept.files.write("note", "kept")
            await other.start()
            return kept.id, other.id

        kept, other = world.here(make)
        keeper = world.keeper()
        assert keeper is not None
        end(keeper, signal.SIGTERM)

        async def after() -> None:
            from sloplet.keeper.client import keeper_controller

            controller = await keeper_controller()
            assert {info.id: info.state for info in await controller.list()} == {kept: "paused", other: "dead"}
            assert (await controller.set_ttl(kept, 600)).state == "paused"  # no keeper is needed for that
            assert world.keeper() is None
            box = await AsyncSandbox.connect(kept, controller=controller)
            assert await box.files.read_text("note") == "kept"
            info = await controller.find(kept)
            assert info.state == "running"
            assert info.expires_at is not None
            assert (await controller.set_ttl(kept, 0)).state == "paused"
            assert (await controller.pause(kept)).state == "paused"
            for each in (kept, other):
                await controller.kill(each)

        world.here(after)


def test_settings() -> None:
    assert [check_ttl(value) for value in (None, 0, "0", 1.5, "2m")] == [None, 0.0, 0.0, 1.5, 120.0]
    assert SandboxSpec.from_dict(SandboxSpec.make(on_ttl="pause").to_dict()).on_ttl == "pause"
    old = SandboxSpec.make(ttl=5).to_dict()
    del old["on_ttl"], old["longest"]
    assert SandboxSpec.from_dict(old) == SandboxSpec.make(ttl=5), "a record of an older version"
    for wrong in ("stop", "", None, 1):
        with pytest.raises(SpecError):
            SandboxSpec.make(on_ttl=wrong)
