"""TLS over a Channel: both ends, every way to end, and no more in memory than is on its way."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from inspect_helpers import NAME, Pipe, drain, internet, pair, run

from sloplet.network import tls
from sloplet.network.tls import TlsChannel, TlsError, TlsTruncated, upstream_context

pytestmark = pytest.mark.anyone


async def ends(name: str = NAME, trust: ssl.SSLContext | None = None) -> tuple[TlsChannel, TlsChannel, Pipe, Pipe]:
    """A client, a server that is called NAME, and what is below them."""
    a, b = await pair()
    client = TlsChannel(a, trust or upstream_context(internet()[1]), server_hostname=name)
    server = TlsChannel(b, internet()[0].leaf(NAME))
    await asyncio.gather(client.handshake(), server.handshake())
    return client, server, a, b


@pytest.fixture(params=["TLSv1_2", "TLSv1_3"])
def trust(request: pytest.FixtureRequest) -> ssl.SSLContext:
    context = upstream_context(internet()[1])
    context.maximum_version = ssl.TLSVersion[request.param]
    return context


def test_much_both_ways_at_once(trust: ssl.SSLContext) -> None:
    async def main() -> None:
        client, server, _, _ = await ends(trust=trust)
        up, down = bytes(range(256)) * 40_000, bytes(reversed(range(256))) * 40_000

        async def send(channel: TlsChannel, data: bytes) -> None:
            for at in range(0, len(data), 300_001):
                await channel.write(data[at : at + 300_001])
            await channel.end()

        _, _, got_down, got_up = await asyncio.gather(
            send(client, up), send(server, down), drain(client), drain(server)
        )
        assert got_up == up
        assert got_down == down

    run(main())


def test_one_side_may_end_while_the_other_goes_on(trust: ssl.SSLContext) -> None:
    async def main() -> None:
        client, server, _, _ = await ends(trust=trust)
        await client.write(b"question")
        await client.end()
        await client.end()
        assert await drain(server) == b"question"
        await server.write(b"answer")
        await server.end()
        assert await drain(client) == b"answer"

    run(main())


def test_ending_loses_nothing_that_is_on_its_way(trust: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(tls, "_READ", 1000)  # so that there is more here than was asked for
        client, server, _, _ = await ends(trust=trust)
        data = bytes(range(256)) * 800
        sending = asyncio.create_task(server.write(data))
        got = await client.read()
        await client.end()
        while len(got) < len(data):
            got += await client.read()
        assert got == data
        await sending
        await server.end()
        assert await drain(client) == b""

    run(main())


def test_an_end_without_tls_is_no_end(trust: ssl.SSLContext) -> None:
    async def main() -> None:
        client, server, _, b = await ends(trust=trust)
        await server.write(b"part")
        await b.end()  # below TLS
        assert await client.read() == b"part"
        with pytest.raises(TlsTruncated):
            await client.read()

    run(main())


def test_a_reset_is_an_error(trust: ssl.SSLContext) -> None:
    async def main() -> None:
        client, server, _, _ = await ends(trust=trust)
        server.abort()
        with pytest.raises(OSError):  # noqa: PT011
            await client.read()

    run(main())


@pytest.mark.parametrize("case", ["name", "authority", "old"])
def test_a_server_that_cannot_be_verified_is_refused(case: str) -> None:
    async def main() -> None:
        a, b = await pair()
        trust = ssl.create_default_context() if case == "authority" else upstream_context(internet()[1])
        client = TlsChannel(a, trust, server_hostname="other.test" if case == "name" else NAME)
        context = internet()[0].leaf(NAME)
        if case == "old":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            with pytest.warns(DeprecationWarning, match="TLSv1"):
                context.minimum_version = ssl.TLSVersion.TLSv1
            with pytest.warns(DeprecationWarning, match="TLSv1"):
                context.maximum_version = ssl.TLSVersion.TLSv1_1
        server = TlsChannel(b, context)
        told, heard = await asyncio.gather(client.handshake(), server.handshake(), return_exceptions=True)
        assert isinstance(told, TlsError), told
        assert isinstance(heard, TlsError), heard  # it was told, by an alert
        if case != "old":
            assert "cannot be verified" in str(told)

    run(main())


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        a, _ = await pair()
        monkeypatch.setattr(tls, "_HANDSHAKE_SECONDS", 0.05)
        with pytest.raises(TlsError, match="too long"):
            await TlsChannel(a, internet()[0].leaf(NAME)).handshake()

    run(main())


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\0\2ab", b"\0" * 100])
def test_what_is_not_tls_is_an_error(data: bytes) -> None:
    async def main() -> None:
        a, b = await pair()
        await b.write(data)
        await b.end()
        with pytest.raises(TlsError):
            await TlsChannel(a, internet()[0].leaf(NAME)).handshake()

    run(main())


def test_a_slow_reader_stops_the_writer() -> None:
    async def main() -> None:
        client, server, _, _ = await ends()
        sent = 0

        async def send() -> None:
            nonlocal sent
            while True:
                await client.write(b"x" * 65536)
                sent += 65536

        writing = asyncio.create_task(send())
        before = -1
        while sent != before:  # until no buffer takes any more
            before = sent
            for _ in range(200):
                await asyncio.sleep(0)
        assert 0 < sent < 8 * 2**20
        got = 0
        while got < sent:
            got += len(await server.read())
        writing.cancel()

    run(main())
