"""Ends: of callers in the middle of a create, and of keepers with real processes (container engine)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from keeper_helpers import end, keeping, wait_for
from keeper_toy import ToyRuntime, World, keeper, run, until

from sloplet.controller import SandboxInfo
from sloplet.engines import registry
from sloplet.errors import SandboxDead, SandboxError, SandboxNotFound, SlopletError, StateError
from sloplet.keeper.client import keeper_controller
from sloplet.keeper.connection import Connection
from sloplet.keeper.server import Server
from sloplet.sandbox import AsyncSandbox
from sloplet.spec import SandboxSpec
from sloplet.wire.mux import AgentStream

# -- a create that its caller does not see the end of -------------------------------------


class SlowRuntime(ToyRuntime):
    """Makes sandboxes when the test lets it."""

    def __init__(self) -> None:
        async def nothing(stream: AgentStream) -> None: ...

        super().__init__(nothing)
        self.held = 0
        self.made: dict[str, SandboxInfo] = {}
        self.asked = 0
        self.go = asyncio.Event()

    async def create_as(self, sandbox_id: str | None, spec: SandboxSpec) -> SandboxInfo:
        self.asked += 1
        await self.go.wait()
        sandbox_id = sandbox_id or f"id-{self.asked}"
        info = SandboxInfo(sandbox_id, spec.name, "running", "toy", "process", "keeper", 0.0, None, "/", spec)
        self.made[sandbox_id] = info
        return info

    async def kill(self, sandbox_id: str) -> None:
        self.made.pop(sandbox_id, None)

    def holds(self, sandbox_id: str) -> bool:
        return sandbox_id in self.made

    async def find(self, ref: str) -> SandboxInfo:
        for info in self.made.values():
            if ref in (info.id, info.name):
                return info
        if self.asked and not self.go.is_set():
            spec = SandboxSpec.make(ref)
            return SandboxInfo("id-1", ref, "starting", "toy", "process", "keeper", 0.0, None, "/", spec)
        raise SandboxNotFound("none")


@pytest.mark.parametrize("name", ["dev", None])
@pytest.mark.parametrize("when", ["before", "unheard"])
@pytest.mark.parametrize("how", ["lost", "cancelled"])
def test_a_create_whose_caller_goes_away(name: str | None, when: str, how: str) -> None:
    """Given up: undone. Lost: an unnamed one is undone, a named one stays, and `ls` shows it."""

    async def main() -> None:
        runtime = SlowRuntime()
        async with keeper(None, runtime) as world:
            connection = await world.client._ours()
            from sloplet.keeper.client import _request

            stream = connection.mux.open(_request("create", spec=SandboxSpec.make(name).to_dict()))
            await until(lambda: runtime.asked == 1)
            assert world.server.busy == 1  # it does not leave meanwhile
            if when == "unheard":
                runtime.go.set()
                await stream.started()
                assert len(runtime.made) == 1
            if how == "lost":
                world.client.close()
                await until(lambda: not world.server.clients)
            else:
                stream.reset()
                await until(lambda: world.server.busy == 0)
            runtime.go.set()
            await until(lambda: world.server.busy == 0)
            stays = how == "lost" and name is not None
            assert len(runtime.made) == int(stays)

    run(main())


def test_a_create_that_was_heard_stays() -> None:
    async def main() -> None:
        runtime = SlowRuntime()
        runtime.go.set()
        async with keeper(None, runtime) as world:
            await world.client.create(SandboxSpec.make(None))
            world.client.close()
            await until(lambda: not world.server.clients and not world.server.busy)
            assert len(runtime.made) == 1

    run(main())


class Choosing(NamedTuple):
    """A client that chose an id, while the sandbox is being made."""

    world: World
    runtime: SlowRuntime
    noted: asyncio.Future[None]  #: done when the id is on record
    making: asyncio.Task[SandboxInfo]


@asynccontextmanager
async def choosing() -> AsyncIterator[Choosing]:
    runtime = SlowRuntime()
    async with keeper(None, runtime) as world:
        noted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = world.client.make(SandboxSpec.make(None), sandbox_id="chosen", note=lambda: noted)
        making = asyncio.ensure_future(work)
        try:
            await until(lambda: runtime.asked == 1)
            yield Choosing(world, runtime, noted, making)
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)


@pytest.mark.parametrize("how", ["lost", "cancelled"])
def test_one_that_is_on_record_before_it_is_made(how: str) -> None:
    """Its client has chosen the id, and said that it knows of it: it stays without a client, unless it is given up."""

    async def main() -> None:
        async with choosing() as (world, runtime, noted, making):
            noted.set_result(None)
            await world.client.status()  # what was said before has arrived
            if how == "lost":
                world.client.close()
                await until(lambda: not world.server.clients)
                assert isinstance((await asyncio.gather(making, return_exceptions=True))[0], SlopletError)
            else:
                making.cancel()
                await until(lambda: world.server.busy == 0)
            runtime.go.set()
            await until(lambda: world.server.busy == 0)
            assert list(runtime.made) == (["chosen"] if how == "lost" else [])

    run(main())


@pytest.mark.parametrize("how", ["lost", "failed"])
def test_one_that_never_came_on_record(how: str) -> None:
    async def main() -> None:
        async with choosing() as (world, runtime, noted, making):
            if how == "lost":
                world.client.close()
                await until(lambda: not world.server.clients)
            else:
                noted.set_exception(StateError("the disk is full"))
                with pytest.raises(StateError):
                    await making
            runtime.go.set()
            await until(lambda: world.server.busy == 0)
            assert not runtime.made

    run(main())


def test_who_looks_by_its_id_for_one_that_is_being_made() -> None:
    """Its client knows the id before there is a record: it is not told that there is none."""

    async def main() -> None:
        async with choosing() as (world, runtime, noted, making):
            noted.set_result(None)
            runtime.asked = 0  # for this runtime's ``find`` there is nothing on record
            finding = asyncio.ensure_future(world.client.find("chosen"))
            await asyncio.wait({finding}, timeout=0.1)
            assert not finding.done()
            runtime.go.set()
            assert (await finding).id == (await making).id == "chosen"

    run(main())


def test_who_ends_by_its_id_one_that_is_being_made() -> None:
    async def main() -> None:
        async with choosing() as (world, runtime, noted, making):
            noted.set_result(None)
            runtime.asked = 0
            await world.client.kill("chosen")  # which does not wait until it is made
            with pytest.raises(SandboxError, match="given up"):
                await making
            runtime.go.set()
            assert not runtime.made

    run(main())


def test_one_whose_keeper_is_leaving_is_noted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        leaving = False
        monkeypatch.setattr(Server, "leaving", property(lambda server: leaving))
        runtime = SlowRuntime()
        runtime.go.set()
        async with keeper(None, runtime) as world:
            noted = 0

            async def note() -> None:
                nonlocal noted
                noted += 1

            real, tries = world.client._ours, 0

            async def ours() -> Connection:
                """The first time the keeper has just decided to leave."""
                nonlocal tries, leaving
                connection = await real()
                tries += 1
                leaving = tries == 1
                return connection

            world.client._ours = ours  # type: ignore[method-assign]
            info = await world.client.make(SandboxSpec.make(None), sandbox_id="chosen", note=note)
            assert (info.id, list(runtime.made), noted, tries) == ("chosen", ["chosen"], 2, 2)

    run(main())


def test_who_finds_a_sandbox_that_is_being_made_waits_for_it() -> None:
    async def main() -> None:
        runtime = SlowRuntime()
        async with keeper(None, runtime) as world:
            making = asyncio.ensure_future(world.client.create(SandboxSpec.make("dev")))
            await until(lambda: runtime.asked == 1)
            finding = asyncio.ensure_future(world.client.find("dev"))
            await asyncio.wait({finding}, timeout=0.1)
            assert not finding.done()
            runtime.go.set()
            assert (await finding).state == "running"
            assert (await making).id == (await finding).id

    run(main())


# -- with processes of its own -------------------------------------------------------------


def _container() -> bool:
    try:
        return registry.load("container").probe().available
    except Exception:
        return False


needs_container = pytest.mark.skipif(not _container(), reason="no container engine here")


@needs_container
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_its_keeper(number: signal.Signals) -> None:
    with keeping(idle=1) as world:

        async def begin() -> None:
            box = AsyncSandbox("dev", engine="container")
            await box.start()
            await box.spawn("trap '' TERM; sleep 8642 & setsid sleep 8643 & wait", detached=True)
            while len(_sleepers()) < 2:
                await asyncio.sleep(0.01)

        world.here(begin)
        keeper_pid = world.keeper()
        assert keeper_pid is not None
        end(keeper_pid, number)
        wait_for(lambda: not _sleepers())

        async def after() -> None:
            box = AsyncSandbox("dev", engine="container")
            with pytest.raises(SandboxDead, match="keeper"):
                await box.run("true")
            await box.kill()

        world.here(after)
        assert os.listdir(world.home / "sandboxes") == []


def _sleepers() -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if command in (b"sleep\x008642\x00", b"sleep\x008643\x00"):
            found.append(pid)
    return found


@needs_container
def test_a_flood_through_the_keeper_costs_a_few_megabytes() -> None:
    with keeping(idle=1) as world:

        async def flood() -> None:
            box = AsyncSandbox("dev", engine="container")
            await box.start()
            status = await (await keeper_controller()).status()
            assert status is not None
            before = _rss(status["pid"])
            readers = [await box.spawn("exec cat /dev/zero") for _ in range(8)]  # nobody reads these
            result = await box.run("head -c 300000000 /dev/zero", max_output="1m")
            assert (result.stdout_size, result.truncated) == (300_000_000, True)
            assert _rss(status["pid"]) - before < 24 << 20
            for process in readers:
                await process.kill()
            await box.kill()

        world.here(flood)


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
