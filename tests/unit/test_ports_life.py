"""Listeners belong to a sandbox's id: they stay through pause, wake and rollback, and go with the sandbox."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from live_fake import LiveAgent, World, in_world

from sloplet import AsyncSandbox
from sloplet.controller import Port
from sloplet.engines import fake
from sloplet.errors import PortUnavailable, SandboxNotFound, UnsupportedOperation
from sloplet.wire.fields import Fields
from sloplet.wire.mux import AgentStream
from sloplet.wire.schema import Op, Tag

pytestmark = pytest.mark.anyone


class Served(LiveAgent):
    """On its port 80 it tells its generation, which is another after each start."""

    def accept(self, stream: AgentStream) -> None:
        if stream.request.integer(Tag.OP, 0) == Op.DIAL and not self.frozen:
            if stream.request.integer(Tag.PORT) == 80:
                stream.reply(Fields())
                stream.send_now(b"hello", 1)
                stream.end_now()
                stream.close(Fields())
            else:
                stream.close(Fields((Tag.ERRNO, errno.ECONNREFUSED)))
        else:
            super().accept(stream)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(work: Callable[[World], Coroutine[Any, Any, None]], holder: str = "embedded") -> None:
        async def served(made: World) -> None:
            monkeypatch.setattr(fake, "FakeAgent", Served)
            await work(made)

        in_world(tmp_path / "home", monkeypatch, served, holder)

    return run


async def says(port: Port) -> bytes:
    reader, writer = await asyncio.open_connection(port.address, port.outside)
    try:
        return await reader.read()
    finally:
        writer.close()


def test_a_connection_wakes_one_that_sleeps(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        box = await made.box()
        port = await box.expose(80)
        assert await says(port) == b"hello"
        assert (await box.pause()).state == "paused"
        assert made.engine.running == set()
        assert await box.ports() == [port]
        assert await says(port) == b"hello"
        assert (await box.info()).state == "running"

    world(work)


def test_while_it_sleeps_its_holder_knows_that_it_is_wanted(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        box = await made.box("dev")
        await box.expose(80)
        await box.pause()
        assert made.runtime.held == 1
        await box.unexpose(80)
        assert made.runtime.held == 0

    world(work)


def test_one_that_sleeps_can_be_given_a_port(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        box = await made.box("dev")
        await box.pause()
        assert (await box.url(80)).startswith("http://127.0.0.1:")
        (port,) = await box.ports()
        assert await says(port) == b"hello"

    world(work)


def test_what_is_given_up_stays_so_until_it_is_wanted_again(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        box = await made.box("dev", ports=[80, 81])
        await box.unexpose(80)
        await box.pause()
        await box.run("true")
        assert [port.inside for port in await box.ports()] == [81]
        await box.unexpose(81)
        await box.pause()
        assert made.runtime.held == 1  # only here it is known
        await box.run("true")
        assert await box.ports() == []
        port = await box.expose(80)
        await box.pause()
        await box.run("true")
        assert await box.ports() == [port]
        await box.kill()
        assert made.runtime.held == 0
        assert made.runtime.exposed.holders() == set()

    world(work)


def test_one_that_sleeps_can_have_its_port_given_up(world: Callable[..., None]) -> None:
    """Also where nobody listens for it yet: by a keeper that has just come."""

    async def work(made: World) -> None:
        box = await made.box("dev", ports=[80])
        await box.pause()
        made.runtime.exposed.close_all()
        await box.unexpose(80)
        await box.run("true")
        assert await box.ports() == []

    world(work)


def test_rollback_keeps_the_listener(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        box = await made.box()
        port = await box.expose(80)
        await box.snapshot("base")
        await box.rollback("base")
        assert await box.ports() == [port]
        assert await says(port) == b"hello"

    world(work)


def test_a_fork_has_ports_of_its_own(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            number = probe.getsockname()[1]
        box = await made.box(ports={80: number})
        assert [port.outside for port in await box.ports()] == [number]
        children = await box.fork(2)
        ports = [port for child in children for port in await child.ports()]
        assert len({number, *(port.outside for port in ports)}) == 3
        assert [await says(port) for port in ports] == [b"hello"] * 2
        await children[0].kill()
        with pytest.raises(ConnectionRefusedError):
            await says(ports[0])
        assert await says(ports[1]) == b"hello"

    world(work)


@pytest.mark.parametrize("asleep", [False, True])
def test_the_end_of_the_sandbox_is_the_end_of_its_ports(world: Callable[..., None], asleep: bool) -> None:
    async def work(made: World) -> None:
        box = await made.box("dev", ports=[80])
        (port,) = await box.ports()
        assert await says(port) == b"hello"
        if asleep:
            await box.pause()
        await box.kill()
        with pytest.raises(ConnectionRefusedError):
            await says(port)
        assert made.runtime.held == 0

    world(work)


def test_its_death_too(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        box = await made.box(ports=[80])
        (port,) = await box.ports()
        live = made.runtime.find_live(box.id)
        assert live is not None
        live.instance.kill()
        await live.gone.wait()
        with pytest.raises(ConnectionRefusedError):
            await says(port)

    world(work)


def test_a_taken_port_lets_nothing_start(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            with pytest.raises(PortUnavailable):
                await made.box("dev", ports={80: taken.getsockname()[1]})
        assert made.engine.started == []
        with pytest.raises(SandboxNotFound):
            await made.runtime.find("dev")
        assert made.runtime.held == 0

    world(work)


def test_a_start_that_fails_leaves_no_listener(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        async def fail(request: object) -> None:
            raise PortUnavailable("not today")

        made.engine.starting = fail
        with socket.create_server(("127.0.0.1", 0)) as probe:
            number = probe.getsockname()[1]
        with pytest.raises(PortUnavailable, match="not today"):
            await made.box(ports={80: number})
        with socket.create_server(("127.0.0.1", number)):
            pass

    world(work)


def test_one_of_a_pool_is_given_its_ports(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        first = await made.box(pool=1)
        while not made.runtime.pools.ready:
            await asyncio.sleep(0.01)
        second = await made.box(pool=1, ports=[80])
        assert made.engine.started.index(second.id) == 1  # it had started ahead
        (port,) = await second.ports()
        assert await says(port) == b"hello"
        assert await first.ports() == []

    world(work)


def test_a_new_holder_listens_for_what_it_wakes(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        box = await made.box("dev", ports=[80])
        await box.pause()
        made.runtime.exposed.close_all()  # as if its keeper had been ended
        await box.resume()
        (port,) = await box.ports()
        assert await says(port) == b"hello"

    world(work)


def test_an_engine_whose_insides_cannot_be_reached_says_so_before_anything_starts() -> None:
    async def work() -> None:
        async with AsyncSandbox(engine="fake") as box:
            with pytest.raises(UnsupportedOperation, match="fake"):
                await box.url(80)
        with pytest.raises(UnsupportedOperation, match="container"):
            await AsyncSandbox(engine="fake", ports=[80]).start()

    asyncio.run(work())
