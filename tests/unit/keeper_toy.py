"""A keeper's server inside the test, over a toy runtime whose one sandbox does what the test says."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from sloplet.errors import SandboxDead
from sloplet.keeper.client import KeeperClient
from sloplet.keeper.server import Server
from sloplet.state.home import Home
from sloplet.wire.fields import Fields
from sloplet.wire.mux import AgentMux, AgentStream, HostMux, HostStream, request
from sloplet.wire.schema import Op, Tag

Behaviour = Callable[[AgentStream], Awaitable[None]]


class ToyRuntime:
    """Just enough of a Runtime: one sandbox, whose agent does what the test says."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.on_gone: Any = None
        self.held = 1
        ours, theirs = socket.socketpair()
        self._sockets = (ours, theirs)
        self._tasks: set[Any] = set()
        self.streams: list[AgentStream] = []

        def accept(stream: AgentStream) -> None:
            self.streams.append(stream)
            self._tasks.add(asyncio.ensure_future(behaviour(stream)))

        self.agent = AgentMux(theirs.fileno(), theirs.fileno(), accept)
        self.agent.hello(Fields((Tag.PID, 1)))
        self.mux = HostMux(ours.fileno(), ours.fileno())
        self.mux.hello(Fields())

    async def open(self, sandbox_id: str, fields: Fields, *, wake: bool = True) -> HostStream:
        return self.mux.open(fields)

    def reap(self) -> None: ...

    async def end_all(self, reason: str) -> None:
        self.mux.fail(SandboxDead(reason))

    async def aclose(self) -> None:
        self.agent.fail(SandboxDead("the test is over"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self._sockets:
            each.close()


class World:
    def __init__(self, home: Home, server: Server, runtime: ToyRuntime) -> None:
        self.home, self.server, self.runtime = home, server, runtime
        self.client = KeeperClient(home, start=False)

    async def open(self, op: Op = Op.EXEC, *items: tuple[Tag, Any]) -> HostStream:
        stream = await self.client.open("toybox", request(op, *items))
        assert isinstance(stream, HostStream)
        return stream


@asynccontextmanager
async def keeper(behaviour: Behaviour | None, runtime: ToyRuntime | None = None) -> AsyncIterator[World]:
    folder = tempfile.mkdtemp(prefix="sk-")
    home = Home(folder).open()
    if runtime is None:
        assert behaviour is not None
        runtime = ToyRuntime(behaviour)
    server = Server(home, runtime, idle=60, log=lambda message: None)  # type: ignore[arg-type]
    ready = asyncio.Event()
    serving = asyncio.ensure_future(server.run(ready.set))
    try:
        await ready.wait()
        world = World(home, server, runtime)
        try:
            yield world
        finally:
            world.client.close()
    finally:
        server.retire()
        await serving
        shutil.rmtree(folder)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(limited())


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Poll with a deadline."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def settled(value: Callable[[], int]) -> int:
    """The value once it has not changed for a while."""
    last, same = value(), 0
    while same < 20:
        await asyncio.sleep(0.005)
        now = value()
        last, same = now, same + 1 if now == last else 0
    return last
