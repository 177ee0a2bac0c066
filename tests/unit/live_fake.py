"""A fake engine whose sandboxes can be saved: files only, but by all the steps of a real one, in milliseconds.

What the timeline promises (whole or not at all, one change at a time, nothing asked of one that stands still) does not
depend on what an engine writes, so it is tested here often and at every step; that gVisor's states are whole is
tested with gVisor (tests/hostile/test_l_*.py).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sloplet import AsyncSandbox
from sloplet.engines import fake, registry
from sloplet.engines.base import Instance, Probe, StartRequest
from sloplet.engines.fakeagent.agent import FakeAgent
from sloplet.engines.fakeagent.vfs import ROOT
from sloplet.errors import SlopletError
from sloplet.runtime import Runtime
from sloplet.state.home import Home
from sloplet.wire.fields import Fields
from sloplet.wire.mux import AgentStream
from sloplet.wire.schema import FreezeFlag, Op, Tag

T = TypeVar("T")


class LiveAgent(FakeAgent):
    """Stands still on FREEZE: what is asked then waits, and is counted."""

    restored: dict[str, str] | None = None
    frozen = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.kept: list[AgentStream] = []
        super().__init__(*args, **settings)

    def accept(self, stream: AgentStream) -> None:
        op = stream.request.integer(Tag.OP, 0)
        if op == Op.FREEZE and stream.request.integer(Tag.FLAGS, 0) & FreezeFlag.SERVE:
            stream.close(Fields((Tag.COUNT, 0), (Tag.PIDS, 0)))  # its files are about to be told
        elif op == Op.FREEZE:
            self.frozen = True
            stream.close(Fields((Tag.COUNT, 0), (Tag.PIDS, 0)))
        elif op == Op.THAW:
            self.frozen = False
            kept, self.kept = self.kept, []
            for each in kept:
                super().accept(each)
            stream.close(Fields())
        elif self.frozen:
            self.kept.append(stream)
        else:
            super().accept(stream)

    async def serve(self, stream: AgentStream) -> None:
        await self.greeted.wait()
        found, self.restored = self.restored, None
        for name, data in (found or {}).items():
            self.kernel.vfs.publish(f"{self.workdir}/{name}", "/", ROOT, data.encode(), 0o666)
        await super().serve(stream)

    def files_now(self) -> dict[str, str]:
        if self.restored is not None:
            return self.restored  # nobody has looked yet
        entries = self.kernel.vfs.find(self.workdir, "/", ROOT).entries
        return {name: node.data.decode() for name, node in entries.items() if not node.is_dir}


class LiveFake(fake.FakeEngine):
    """``saving`` is awaited in the middle of each save, ``starting`` at each start; both may raise."""

    def __init__(self) -> None:
        self.saving: Callable[[], Awaitable[None]] = _nothing
        self.starting: Callable[[StartRequest], Awaitable[None]] = _nothing_of
        self.running: set[str] = set()
        self.started: list[str] = []

    def probe(self) -> Probe:
        found = super().probe()
        return replace(found, capabilities=replace(found.capabilities, live_snapshots=True, ports=True))

    async def start(self, request: StartRequest) -> Instance:
        await self.starting(request)
        instance: Any = await super().start(request)
        agent: LiveAgent = instance._agent
        if request.restore is not None:
            with os.fdopen(os.open("state", os.O_RDONLY, dir_fd=request.restore)) as file:
                agent.restored = json.load(file)
        self.running.add(request.id)
        self.started.append(request.id)

        async def save(folder: int) -> None:
            assert agent.frozen, "it is saved while it runs"
            assert not agent.kept, "something was asked of it while it stood still"
            fd = os.open("state", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            with os.fdopen(fd, "w") as file:
                json.dump(agent.files_now(), file)
            await self.saving()

        cleanup = instance.cleanup

        def gone() -> None:
            cleanup()
            self.running.discard(request.id)

        instance.save, instance.cleanup = save, gone
        return instance  # type: ignore[no-any-return]


async def _nothing() -> None:
    pass


async def _nothing_of(request: StartRequest) -> None:
    pass


class World:
    """A runtime with that engine, in a home of its own."""

    def __init__(self, path: Path, engine: LiveFake, holder: str = "embedded") -> None:
        self.engine = engine
        self.path = path
        self.runtime = Runtime(Home(path), holder=holder)

    async def box(self, name: str | None = None, **settings: Any) -> AsyncSandbox:
        made = AsyncSandbox(name, engine="fake", controller=self.runtime, **settings)
        await made.start()
        return made

    def states(self) -> list[str]:
        """The roles of all that is saved, each opened and checked."""
        found = self.runtime.store.list_snapshots()
        for snapshot in found:
            self.runtime.saved.open(snapshot.id).close()
        return [snapshot.role for snapshot in found]

    def left(self) -> list[str]:
        """Places, files of saved states and locks that are there now; what is listed counts."""
        places = [str(path.relative_to(self.path)) for path in (self.path / "sandboxes").glob("*/*")]
        return sorted(places + [f"snapshots/{name}" for name in os.listdir(self.path / "snapshots")])


def in_world(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[World], Coroutine[Any, Any, T]],
    holder: str = "embedded",
) -> T:
    """Run it; afterwards nothing may be left."""
    engine = LiveFake()
    monkeypatch.setitem(registry._loaded, "fake", engine)
    monkeypatch.setattr(fake, "FakeAgent", LiveAgent)

    async def main() -> T:
        world = World(path, engine, holder)
        try:
            async with asyncio.timeout(60):
                return await work(world)
        finally:
            for info in await world.runtime.list():
                with suppress(SlopletError):
                    await world.runtime.kill(info.id)
            for template in await world.runtime.snapshots(role="template"):
                await world.runtime.delete_snapshot(template.id, force=True)
            await world.runtime.aclose()
            left = world.left()
            assert engine.running == set(), "something still runs"
            assert left == [], f"files are left: {left}"

    return asyncio.run(main())
