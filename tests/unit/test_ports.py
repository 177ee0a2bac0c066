"""Ports of a sandbox, listened on here: whose they are, what passes, and what a client sees when nothing does."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from sloplet.controller import Port
from sloplet.errors import PortUnavailable, SandboxDead, SandboxNotFound, SpecError
from sloplet.network import ports as module
from sloplet.network.ports import Ports
from sloplet.wire.fields import Fields
from sloplet.wire.mux import AgentMux, AgentStream, HostMux, HostStream
from sloplet.wire.schema import Op, Tag

pytestmark = pytest.mark.anyone

Server = Callable[[AgentStream], Awaitable[None]]


async def echo(stream: AgentStream) -> None:
    stream.reply(Fields())
    while (piece := await stream.recv()) is not None:
        await stream.send(piece.data)
    stream.close(Fields())


class Box:
    """A sandbox whose agent serves DIAL with the functions that a test gives for ports."""

    def __init__(self, **servers: Server) -> None:
        self.servers = {int(name.removeprefix("p")): server for name, server in servers.items()}
        self.dialled: list[int] = []
        self.gone: Exception | None = None
        self._sockets = socket.socketpair()
        self._tasks: set[asyncio.Task[None]] = set()
        ours, theirs = self._sockets
        self.agent = AgentMux(theirs.fileno(), theirs.fileno(), self._accept)
        self.agent.hello(Fields((Tag.PID, 1)))
        self.mux = HostMux(ours.fileno(), ours.fileno())
        self.mux.hello(Fields())

    def _accept(self, stream: AgentStream) -> None:
        assert stream.request.integer(Tag.OP) == Op.DIAL
        port = stream.request.integer(Tag.PORT)
        self.dialled.append(port)
        if port not in self.servers:
            stream.close(Fields((Tag.ERRNO, errno.ECONNREFUSED), (Tag.WHAT, "port")))
            return
        task: asyncio.Task[None] = asyncio.ensure_future(self.servers[port](stream))  # type: ignore[arg-type]
        self._tasks.add(task)

    async def open(self, sandbox_id: str, request: Fields, *, wake: bool = True) -> HostStream:
        if self.gone is not None:
            raise self.gone
        return self.mux.open(request)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for mux in (self.agent, self.mux):
            mux.fail(SandboxDead("the test is over"))
        for each in self._sockets:
            each.close()


def serve(work: Callable[[Box, Ports], Coroutine[Any, Any, None]], awake: bool = True, **servers: Server) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            box = Box(**servers)
            ports = Ports(box, lambda sandbox_id: awake)
            try:
                await work(box, ports)
            finally:
                ports.close_all()
                await box.aclose()

    asyncio.run(main())


async def connect(port: Port) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(port.address, port.outside)


async def is_reset(port: Port) -> bool:
    try:
        reader, writer = await connect(port)
        try:
            return await reader.read() == b"?"
        finally:
            writer.close()
    except ConnectionError:
        return True


def test_bytes_pass_and_each_direction_ends_by_itself() -> None:
    async def work(box: Box, ports: Ports) -> None:
        reader, writer = await connect(ports.expose("a", 80))
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.write(b"more")
        writer.write_eof()
        assert await reader.read() == b"more"  # and the other side's end came through
        writer.close()

    serve(work, p80=echo)


def test_eight_megabytes_both_ways_arrive_whole() -> None:
    async def work(box: Box, ports: Ports) -> None:
        reader, writer = await connect(ports.expose("a", 80))
        sent = os.urandom(1 << 20) * 8

        async def send() -> None:
            writer.write(sent)
            await writer.drain()
            writer.write_eof()

        sending = asyncio.ensure_future(send())
        assert await reader.read(-1) == sent
        await sending
        writer.close()

    serve(work, p80=echo)


def test_a_server_that_ends_first_lets_the_client_go_on() -> None:
    heard: list[bytes] = []

    async def greets(stream: AgentStream) -> None:
        stream.reply(Fields())
        await stream.send(b"220 hello")
        stream.end_now()
        while (piece := await stream.recv()) is not None:
            heard.append(piece.data)
        stream.close(Fields())

    async def work(box: Box, ports: Ports) -> None:
        reader, writer = await connect(ports.expose("a", 25))
        assert await reader.read() == b"220 hello"
        writer.write(b"quit")
        writer.write_eof()
        while not heard:
            await asyncio.sleep(0.005)
        assert b"".join(heard) == b"quit"
        writer.close()

    serve(work, p25=greets)


def test_where_nothing_listens_inside_a_client_is_reset_at_once() -> None:
    async def work(box: Box, ports: Ports) -> None:
        began = time.monotonic()
        assert await is_reset(ports.expose("a", 81))
        assert box.dialled == [81]
        assert time.monotonic() - began < module._JUST_WOKEN

    serve(work, p80=echo)


def test_one_that_was_asleep_is_given_a_moment_to_listen() -> None:
    async def work(box: Box, ports: Ports) -> None:
        port = ports.expose("a", 80)
        reader, writer = await connect(port)
        while len(box.dialled) < 2:
            await asyncio.sleep(0.005)
        box.servers[80] = echo
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.close()

    serve(work, awake=False)


def test_only_loopback_is_listened_on_and_only_what_was_asked_for() -> None:
    async def work(box: Box, ports: Ports) -> None:
        port = ports.expose("a", 80)
        assert port.address == "127.0.0.1"
        assert port.url == f"http://127.0.0.1:{port.outside}"
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.2", port.outside)) == errno.ECONNREFUSED
            # The positive control: the same probe finds what is there.
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port.outside)) == 0
        everywhere = ports.expose("a", 80, 0, "0.0.0.0")
        assert everywhere.outside != port.outside
        assert everywhere.url == f"http://127.0.0.1:{everywhere.outside}"
        assert Port.from_dict(port.to_dict()) == port

    serve(work, p80=echo)


def test_the_same_again_is_the_same_and_others_are_others() -> None:
    async def work(box: Box, ports: Ports) -> None:
        one = ports.expose("a", 80)
        assert ports.expose("a", 80) == one
        assert ports.expose("a", 80, one.outside) == one
        other = ports.expose("b", 80)
        assert other.outside != one.outside
        assert ports.list("a") == [one]
        assert ports.holders() == {"a", "b"}
        ports.close("a")
        assert (ports.list("a"), ports.list("b")) == ([], [other])
        with pytest.raises(ConnectionRefusedError):
            await connect(one)

    serve(work, p80=echo)


def test_a_taken_port_is_an_error_and_nothing_is_left() -> None:
    async def work(box: Box, ports: Ports) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
            number, other = taken.getsockname()[1], free.getsockname()[1]
            free.close()
            with pytest.raises(PortUnavailable, match=str(number)):
                ports.reserve("a", [(80, other), (81, number)])
            assert ports.holders() == set()
            with socket.create_server(("127.0.0.1", other)):
                pass
            with pytest.raises(PortUnavailable):
                ports.expose("a", 80, number)
            assert ports.holders() == set()

    serve(work, p80=echo)


@pytest.mark.parametrize(
    ("port", "host_port", "address"),
    [(0, 0, "127.0.0.1"), (65536, 0, "127.0.0.1"), (True, 0, "127.0.0.1"), (80, -1, "127.0.0.1"), (80, 0, "localhost"),
     (80, 0, "")],
)  # fmt: skip
def test_nonsense_is_refused(port: int, host_port: int, address: str) -> None:
    async def work(box: Box, ports: Ports) -> None:
        with pytest.raises(SpecError):
            ports.expose("a", port, host_port, address)
        assert ports.holders() == set()

    serve(work)


def test_nobody_is_served_before_the_sandbox_runs() -> None:
    async def work(box: Box, ports: Ports) -> None:
        ports.reserve("a", [(80, 0)])
        (port,) = ports.list("a")
        reader, writer = await connect(port)
        writer.write(b"hello")
        for _ in range(20):
            await asyncio.sleep(0)
        assert box.dialled == []
        assert ports.begin("a", [(80, 0)]) == ""
        assert await reader.readexactly(5) == b"hello"
        assert ports.list("a") == [port]
        writer.close()

    serve(work, p80=echo)


def test_begin_listens_for_what_the_settings_name_and_says_what_it_cannot() -> None:
    async def work(box: Box, ports: Ports) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            problem = ports.begin("a", [(80, 0), (81, taken.getsockname()[1])])
        assert [(port.inside, port.problem) for port in ports.list("a")] == [(80, ""), (81, problem)]
        assert "cannot be listened on" in problem
        assert [port.url for port in ports.list("a")][1] == ""
        assert Port.from_dict(ports.list("a")[1].to_dict()) == ports.list("a")[1]
        made = ports.expose("a", 81)  # anywhere else
        assert ports.list("a")[1] == made

    serve(work, p80=echo)


def test_to_listen_no_more_cuts_who_is_connected() -> None:
    async def work(box: Box, ports: Ports) -> None:
        one, two = ports.expose("a", 80), ports.expose("a", 81)
        reader, writer = await connect(one)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        ports.unexpose("a", 80)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        assert ports.list("a") == [two]
        writer.close()

    serve(work, p80=echo, p81=echo)


def test_a_sandbox_that_is_gone_is_listened_for_no_more() -> None:
    async def work(box: Box, ports: Ports) -> None:
        port = ports.expose("a", 80)
        box.gone = SandboxNotFound("there is no sandbox")
        assert await is_reset(port)
        async with asyncio.timeout(5):
            while ports.holders():
                await asyncio.sleep(0.005)

    serve(work, p80=echo)


def test_a_lost_wire_resets_who_is_connected() -> None:
    async def work(box: Box, ports: Ports) -> None:
        reader, writer = await connect(ports.expose("a", 80))
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        box.mux.fail(SandboxDead("it died"))
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()

    serve(work, p80=echo)


def test_connections_are_bounded_and_the_next_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 2)

    async def work(box: Box, ports: Ports) -> None:
        port = ports.expose("a", 80)
        clients = [await connect(port) for _ in range(3)]
        for _, writer in clients:
            writer.write(b"x")
        for reader, _ in clients[:2]:
            assert await reader.readexactly(1) == b"x"
        assert len(box.dialled) == 2
        clients[0][1].close()
        assert await clients[2][0].readexactly(1) == b"x"
        for _, writer in clients:
            writer.close()

    serve(work, p80=echo)


def test_a_sandboxs_listeners_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TOGETHER", 2)

    async def work(box: Box, ports: Ports) -> None:
        one, two, other = ports.expose("a", 80), ports.expose("a", 81), ports.expose("b", 80)
        clients = [await connect(one), await connect(two)]
        for reader, writer in clients:
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
        late = [await connect(one), await connect(two), await connect(other)]
        for _, writer in late:
            writer.write(b"x")
        assert await late[2][0].readexactly(1) == b"x"  # another sandbox's matter
        assert len(box.dialled) == 3
        for _, writer in clients:  # each makes room for one, of whichever listener
            writer.close()
        assert [await reader.readexactly(1) for reader, _ in late[:2]] == [b"x", b"x"]
        for _, writer in late:
            writer.close()

    serve(work, p80=echo, p81=echo)


def test_a_crowd_is_served_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 4)

    async def one(port: Port) -> bool:
        reader, writer = await connect(port)
        writer.write(b"x" * 1000)
        writer.write_eof()
        done = await reader.read() == b"x" * 1000
        writer.close()
        return done

    async def work(box: Box, ports: Ports) -> None:
        port = ports.expose("a", 80)
        assert await asyncio.gather(*(one(port) for _ in range(300))) == [True] * 300

    serve(work, p80=echo)


def test_a_client_that_does_not_read_holds_up_the_server_inside() -> None:
    sent = 0

    async def pours(stream: AgentStream) -> None:
        nonlocal sent
        stream.reply(Fields())
        for _ in range(1024):
            await stream.send(b"x" * 65536)
            sent += 65536
        stream.close(Fields())

    async def work(box: Box, ports: Ports) -> None:
        port = ports.expose("a", 80)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, (port.address, port.outside))
            before, same = -1, 0
            while same < 20:
                await asyncio.sleep(0.01)
                same = same + 1 if sent == before else 0
                before = sent
            assert 0 < sent < 16 << 20
            got = 0
            while data := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
                got += len(data)
            assert got == 1024 * 65536

    serve(work, p80=pours)


def test_a_link_is_a_socket_to_a_port_inside() -> None:
    async def work(box: Box, ports: Ports) -> None:
        made = await ports.dial("a", 80)
        loop = asyncio.get_running_loop()
        with made:
            await loop.sock_sendall(made, b"hello")
            made.shutdown(socket.SHUT_WR)
            assert await loop.sock_recv(made, 100) == b"hello"
            assert await loop.sock_recv(made, 100) == b""
        assert ports.holders() == set()

    serve(work, p80=echo)
