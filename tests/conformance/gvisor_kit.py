"""Sandboxes of an engine (gvisor, if none is named) as the engine gives them, without a runtime: started, asked over
the wire, saved."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sloplet.engines import registry
from sloplet.engines.base import Engine, Instance, ResolvedImage, StartRequest
from sloplet.errors import SandboxClosed
from sloplet.live import close_fds, first_answer, hello_fields
from sloplet.process import collect, make_capture
from sloplet.results import Result
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home, new_id
from sloplet.wire.fields import Fields
from sloplet.wire.mux import HostMux
from sloplet.wire.schema import Op, Tag
from sloplet.wire.streams import AgentStream

#: The ids of all that were ever begun.
made: list[str] = []


def engine(name: str = "gvisor") -> Engine:
    return registry.load(name)


@dataclass
class Held:
    """One started sandbox."""

    id: str
    instance: Instance
    mux: HostMux

    async def run(self, *argv: str, user: str = "") -> Result:
        request = Fields((Tag.OP, int(Op.EXEC)), *((Tag.ARGV, word) for word in argv))
        if user:
            request.add(Tag.USER, user)
        return await collect(self.mux.open(request), make_capture(1 << 20, True, None, None))

    async def op(self, op: Op) -> None:
        await self.mux.open(Fields((Tag.OP, int(op)))).result()

    async def save(self, folder: Path, *, stop: bool = False) -> None:
        """As the runtime does it: frozen first, thawed when it goes on or could not be saved."""
        await self.op(Op.FREEZE)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            await self.instance.save(descriptor)
        except BaseException:
            await self.op(Op.THAW)
            raise
        finally:
            os.close(descriptor)
        if stop:
            self.instance.kill()
            await self.instance.wait()
        else:
            await self.op(Op.THAW)


@asynccontextmanager
async def started(
    folder: Path | None = None,
    spec: SandboxSpec | None = None,
    *,
    name: str = "gvisor",
    accept: Callable[[AgentStream], None] | None = None,
) -> AsyncIterator[Held]:
    """A fresh sandbox, or what was saved in ``folder``; gone with all it held at the end. ``accept`` gets what its
    agent asks of the host."""
    sandbox_id = new_id()
    made.append(sandbox_id)
    place = Home().open().sandboxes / "tests" / sandbox_id
    place.mkdir(parents=True)
    restore = None if folder is None else os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        request = StartRequest(sandbox_id, spec or SandboxSpec(), ResolvedImage("host"), place, restore)
        instance = await engine(name).start(request)
        mux = HostMux(instance.read_fd, instance.write_fd, accept=accept)
        try:
            mux.hello(hello_fields(instance, "test"))
            await first_answer(instance, mux, 60)
            yield Held(sandbox_id, instance, mux)
        finally:
            instance.kill()
            await instance.wait()
            mux.fail(SandboxClosed("the test is over"))
            close_fds(instance)
            instance.cleanup()
    finally:
        if restore is not None:
            os.close(restore)
        shutil.rmtree(place)
