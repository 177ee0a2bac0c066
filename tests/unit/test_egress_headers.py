"""Headers that requests are given on their way: over plain HTTP and in opened TLS, of the moment, or not at all."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Awaitable, Callable

import pytest
from inspect_helpers import Handler as HttpHandler
from inspect_helpers import echo as http_echo
from inspect_helpers import internet, sandbox_ca, servers_trust
from net_inside import Handler, Inside, Program, World, echo

from sloplet.errors import SpecError
from sloplet.netspec import Network
from sloplet.network.egress import Inspection

pytestmark = pytest.mark.anyone

NAME, OTHER = "api.example.com", "other.example.com"
AT, OTHER_AT = "93.184.216.34", "93.184.216.35"
BOTH = [f"{NAME}:*", f"{OTHER}:*"]


def scenario(work: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        try:
            async with asyncio.timeout(15):
                await work(world)
        finally:
            world.close()

    asyncio.run(main())


async def furnished(world: World) -> list[bytes]:
    """Two hosts with HTTP and HTTPS; what they were sent."""
    seen: list[bytes] = []
    for name, address in ((NAME, AT), (OTHER, OTHER_AT)):
        await world.serve(address, 80, quiet(http_echo(seen)), name)
        await world.serve(address, 443, quiet(http_echo(seen)), tls=internet()[0].leaf(name))
    return seen


def quiet(handler: HttpHandler) -> Handler:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    return serve


def inside(network: Network, world: World, **more: object) -> Inside:
    made = Inside(network, world, inspection=Inspection(sandbox_ca()[0], servers_trust), **more)
    made.egress.injected.set(dict(network.values))
    return made


def get(name: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET / HTTP/1.1\r\nHost: {name}", *headers, "Connection: close", "", ""]).encode()


async def plain(box: Inside, name: str, *headers: str) -> bytes:
    program = await box.connect(name, 80)
    await program.send(get(name, *headers))
    await program.until(lambda: program.ended or program.closed is not None)
    await program.end()
    await program.over()
    return bytes(program.got)


class Tls:
    """A program's TLS, through the wire."""

    def __init__(self, program: Program, name: str, cafile: str) -> None:
        self._program = program
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=cafile)
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=name)

    async def _do(self, step: Callable[[], object]) -> object:
        while True:
            try:
                done = step()
                await self._program.send(self._out.read())
                return done
            except ssl.SSLWantReadError:
                await self._program.send(self._out.read())
                data = await self._program.recv(65536) if self._program.got else await self._more()
                if not data:
                    raise ConnectionResetError from None
                self._in.write(data)

    async def _more(self) -> bytes:
        await self._program.until(
            lambda: bool(self._program.got) or self._program.ended or self._program.closed is not None
        )
        data = bytes(self._program.got)
        self._program.got.clear()
        return data

    async def open(self) -> None:
        await self._do(self._tls.do_handshake)

    async def send(self, data: bytes) -> None:
        self._tls.write(data)
        await self._program.send(self._out.read())

    async def read(self) -> bytes:
        return bytes(await self._do(lambda: self._tls.read(65536)))  # type: ignore[call-overload]


async def secure(box: Inside, name: str, cafile: str, *headers: str) -> bytes:
    tls = Tls(await box.connect(name, 443), name, cafile)
    await tls.open()
    await tls.send(get(name, *headers))
    return await tls.read()


def test_plain_and_opened_requests_get_them_and_others_do_not() -> None:
    async def work(world: World) -> None:
        seen = await furnished(world)
        network = Network(allow=BOTH, inspect="on-demand", headers={NAME: {"X-Token": "v4lue", "Authorization": "B a"}})
        box = await inside(network, world).hello()
        sent = ("x-tOKEN: mine", "X-TOKEN: again", "X-Other: 1")
        assert b" 200 OK" in await plain(box, NAME, *sent)
        assert b" 200 OK" in await secure(box, NAME, sandbox_ca()[1], *sent)
        assert len(seen) == 2
        for head in (message.lower() for message in seen):
            assert head.count(b"x-token:") == 1
            assert b"x-token: v4lue\r\n" in head
            assert b"authorization: b a\r\n" in head
            assert b"x-other: 1\r\n" in head
            assert b"mine" not in head
        await plain(box, OTHER)
        assert b"x-token" not in seen[-1].lower()
        # the TLS of others is not opened: the server's own certificate is seen
        await secure(box, OTHER, internet()[1])
        assert b"x-token" not in seen[-1].lower()
        box.egress.refresh()
        assert {row.name: row.protocol for row in box.log.read(limit=100) if row.port == 443} == {
            NAME: "https", OTHER: "tls",
        }  # fmt: skip
        told = repr([row.to_dict() for row in box.log.read(limit=100)])
        assert NAME in told
        assert "v4lue" not in told
        await box.close()

    scenario(work)


def test_without_a_value_nothing_is_sent() -> None:
    async def work(world: World) -> None:
        seen = await furnished(world)
        network = Network(allow=BOTH, headers={NAME: {"X-Token": "v4lue"}})
        box = await inside(network, world).hello()
        box.egress.forget_values()
        for answer in (await plain(box, NAME), await secure(box, NAME, sandbox_ca()[1])):
            assert b" 403 " in answer
            assert b"X-Token that requests to api.example.com get has no value" in answer
        assert seen == []
        assert "X-Token" in box.last().reason
        assert b" 200 " in await plain(box, OTHER)
        box.egress.set_values({"x-token@api.example.com": "again"})
        assert b" 200 " in await plain(box, NAME)
        assert b"X-Token: again" in seen[-1]
        await box.close()

    scenario(work)


def test_a_change_holds_for_the_next_request_of_an_open_connection() -> None:
    async def work(world: World) -> None:
        seen = await furnished(world)
        box = await inside(Network(allow=BOTH, headers={NAME: {"X-Token": "one"}}), world).hello()
        tls = Tls(await box.connect(NAME, 443), NAME, sandbox_ca()[1])
        await tls.open()
        request = f"GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode()
        for value in ("one", "two"):
            network = Network(allow=BOTH, headers={NAME: {"X-Token": value}})
            box.egress.set(network.spec, values=network.values)
            await tls.send(request)
            assert b"200" in await tls.read()
            assert f"X-Token: {value}\r\n".encode() in seen[-1]
        box.egress.set(Network(allow=BOTH).spec)
        await tls.send(request)
        assert b"200" in await tls.read()
        assert b"X-Token" not in seen[-1]
        await box.close()

    scenario(work)


def test_tls_that_was_not_opened_is_cut_when_its_host_gets_headers() -> None:
    async def work(world: World) -> None:
        seen = await furnished(world)
        box = await inside(Network(allow=BOTH, inspect="on-demand"), world).hello()
        programs = [await box.connect(name, 443) for name in (NAME, OTHER)]
        first, other = (Tls(one, name, internet()[1]) for one, name in zip(programs, (NAME, OTHER), strict=True))
        await first.open()
        await other.open()
        network = Network(allow=BOTH, inspect="on-demand", headers={NAME: {"X-Token": "v"}})
        box.egress.set(network.spec, values=network.values)
        assert await programs[0].over() == errno.ECONNRESET
        assert programs[1].closed is None
        await other.send(get(OTHER))
        assert b"200" in await other.read()
        await secure(box, NAME, sandbox_ca()[1])
        assert b"X-Token: v" in seen[-1]
        await box.close()

    scenario(work)


def test_where_tls_cannot_be_opened_it_does_not_pass() -> None:
    async def work(world: World) -> None:
        await furnished(world)
        network = Network(allow=BOTH, headers={NAME: {"X-Token": "v"}})
        box = await Inside(network, world).hello()
        tls = Tls(await box.connect(NAME, 443), NAME, internet()[1])
        with pytest.raises(ConnectionResetError):
            await tls.open()
        assert "its TLS is not opened" in box.last().reason
        await box.close()

    scenario(work)


def test_what_is_wrong_changes_nothing() -> None:
    async def work(world: World) -> None:
        network = Network(allow=BOTH, headers={NAME: {"X-Token": "one"}})
        box = await inside(network, world).hello()
        with pytest.raises(SpecError):
            box.egress.set(Network(headers={OTHER: ["X-A"]}).spec, values={"x-b@other.example.com": "1"})
        with pytest.raises(SpecError):
            box.egress.set_values({"x-token@api.example.com": "two", "x-b@api.example.com": "1"})
        assert box.egress.spec == network.spec
        assert box.egress.injected.values() == network.values
        await box.close()

    scenario(work)


def test_what_is_not_http_passes_as_it_is() -> None:
    async def work(world: World) -> None:
        await world.serve(AT, 7000, echo, NAME)
        box = await inside(Network(allow=BOTH, headers={NAME: {"X-Token": "one"}}), world).hello()
        program = await box.connect(NAME, 7000)
        await program.send(b"\x00\x01\x02")
        assert await program.recv(3) == b"\x00\x01\x02"
        await box.close()

    scenario(work)
