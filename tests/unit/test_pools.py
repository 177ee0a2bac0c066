"""Warm pools: handed out once, refilled, bounded, never stale, and gone with the program."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from live_fake import World, in_world

from sloplet import AsyncSandbox, errors, pools
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone


async def _full(world: World, box: AsyncSandbox, wanted: int | None = None) -> None:
    """Wait until its pool is."""
    async with asyncio.timeout(20):
        while world.runtime.pools.count(box.spec) != (box.spec.pool if wanted is None else wanted):
            await asyncio.sleep(0.001)


def test_twenty_at_once_get_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        await _full(world, await world.box(pool=5))
        ready = set(world.engine.running)
        boxes = await asyncio.gather(*(world.box(pool=5) for _ in range(20)))
        ids = [box.id for box in boxes]
        assert len(set(ids)) == 20
        assert len(ready & set(ids)) >= 5, "control: what was ready was handed out"
        for number, box in enumerate(boxes):
            await box.files.write("mine", str(number))
        assert [await box.files.read_text("mine") for box in boxes] == [str(number) for number in range(20)]
        await _full(world, boxes[0])
        assert not set(ids) & {entry.live.info.id for entry in _ready(world)}
        for box in boxes:
            await box.kill()
        await _full(world, boxes[0])  # those that ended do not come back
        assert not set(ids) & {entry.live.info.id for entry in _ready(world)}

    in_world(tmp_path, monkeypatch, work)


def _ready(world: World) -> list[Any]:
    return [entry for pool in world.runtime.pools._pools.values() for entry in pool.ready]


def test_nobody_sees_what_nobody_has_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        box = await world.box("dev", pool=2)
        await _full(world, box)
        assert [info.name for info in await world.runtime.list()] == ["dev"]
        assert len(world.engine.running) == 3, "control: they are there"
        hidden = _ready(world)[0].live.info.id
        for job in (world.runtime.find(hidden), world.runtime.pause(hidden), world.runtime.snapshot(hidden)):
            with pytest.raises(errors.SandboxNotFound):
                await job
        await world.runtime.kill(hidden)
        assert (await world.box(pool=2)).id

    in_world(tmp_path, monkeypatch, work)


def test_a_name_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        first = await world.box("dev", pool=2)
        await _full(world, first)
        for _ in range(3):
            with pytest.raises(errors.SandboxExists):
                await world.runtime.create(SandboxSpec.make("Dev", engine="fake", pool=2))
        await _full(world, first)
        other = await world.box("other", pool=2)
        assert (await other.run("echo hello")).stdout == "hello\n"
        assert (await first.run("echo hello")).stdout == "hello\n"
        assert len(await world.runtime.list()) == 2

    in_world(tmp_path, monkeypatch, work)


def test_one_that_died_is_not_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        first = await world.box(pool=2)
        await _full(world, first)
        dead = _ready(world)[0]
        dead.live.instance.kill()
        await dead.live.instance.wait()
        boxes = [await world.box(pool=2) for _ in range(3)]
        assert dead.live.info.id not in [box.id for box in boxes]
        for box in boxes:
            assert (await box.run("echo hello")).stdout == "hello\n"

    in_world(tmp_path, monkeypatch, work)


def test_a_template_that_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was started from the old one is given up; without one there is nothing to start from."""

    async def work(world: World) -> None:
        source = await world.box("source")
        await source.files.write("note", "old")
        template = await source.template("warm")
        first = await world.box(template="warm", pool=2)
        await _full(world, first)
        assert await first.files.read_text("note") == "old"
        stale = {entry.live.info.id for entry in _ready(world)}
        await world.runtime.delete_snapshot(template.id, force=True)
        with pytest.raises(errors.SnapshotNotFound):
            await world.box(template="warm", pool=2)
        await source.files.write("note", "new")
        await source.template("warm")
        second = await world.box(template="warm", pool=2)
        assert await second.files.read_text("note") == "new"
        assert second.id not in stale
        await _full(world, second)
        assert not stale & world.engine.running

    in_world(tmp_path, monkeypatch, work)


def test_other_settings_are_another_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        first = await world.box(pool=1, env={"A": "1"})
        await _full(world, first)
        second = await world.box(pool=1, env={"A": "2"})
        assert (await second.run("echo $A")).stdout == "2\n"
        assert (await (await world.box(pool=1, env={"A": "1"})).run("echo $A")).stdout == "1\n"
        named = await world.box("dev", pool=1, env={"A": "1"}, ttl=500, undo=2)
        assert (named.name, named.spec.undo) == ("dev", 2)
        await named.run("echo one > note")
        await named.undo()
        assert not await named.files.exists("note")
        assert (await named.info()).expires_at is not None

    in_world(tmp_path, monkeypatch, work)


def test_bounded_and_given_up_when_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        monkeypatch.setattr(pools, "MOST", 5)
        first = await world.box(pool=4)
        second = await world.box(pool=4, env={"A": "1"})
        async with asyncio.timeout(20):
            while world.runtime.pools.ready < 5:
                await asyncio.sleep(0.001)
        third = await world.box(pool=4, env={"A": "2"})
        assert (await third.run("echo $A")).stdout == "2\n", "a full pool keeps nobody from starting one"
        assert world.runtime.pools.ready <= 5
        monkeypatch.setattr(pools, "UNUSED", 0.05)
        world.runtime.pools.fill(first.spec)
        others = world.runtime.pools.count(second.spec)
        await _full(world, first, 0)
        assert world.runtime.pools.count(second.spec) == others

    in_world(tmp_path, monkeypatch, work)


def test_starts_that_fail_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        monkeypatch.setattr(pools, "_RETRY", 0.01)
        failures = iter(range(5))

        async def fail_some(request: Any) -> None:
            if world.engine.started and next(failures, None) is not None:
                raise errors.StartFailed("no")

        world.engine.starting = fail_some
        await _full(world, await world.box(pool=3))

    in_world(tmp_path, monkeypatch, work)


def test_a_claim_that_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment: it is on record and held, or gone."""

    async def work(world: World) -> None:
        first = await world.box(pool=3)
        for steps in range(25):
            await _full(world, first)
            task = asyncio.ensure_future(world.runtime.create(first.spec))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await _full(world, first)
        async with asyncio.timeout(10):
            while world.engine.running != {info.id for info in await world.runtime.list()} | {
                entry.live.info.id for entry in _ready(world)
            }:
                await asyncio.sleep(0.01)

    in_world(tmp_path, monkeypatch, work)
