"""Whatever a program sends, in whatever pieces: what the server gets are whole requests for the one host."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import pairwise

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inspect_helpers import NAME, PLACE, Spec
from test_http1 import soup

from sloplet.network.guard import Guard
from sloplet.network.inspect import check_http
from sloplet.network.secrets import SecretTable

pytestmark = pytest.mark.anyone


class Memory:
    """A Channel whose other side is the test."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[bytes] = asyncio.Queue()
        self.written = bytearray()
        self.aborted = self.ended = False
        self.on_write = None

    async def read(self) -> bytes:
        if self.aborted:
            raise ConnectionAbortedError
        data = await self.incoming.get()
        if not data:
            self.incoming.put_nowait(b"")
        return data

    async def write(self, data: bytes) -> None:
        assert not self.ended, "written after the end"
        if self.aborted:
            raise ConnectionAbortedError
        self.written += data
        if self.on_write is not None:
            self.on_write(data)
        await asyncio.sleep(0)

    async def end(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.aborted = True


class Server:
    """Reads requests as h11 does, and answers each."""

    def __init__(self, channel: Memory) -> None:
        self.hosts: list[bytes] = []
        self.whole = 0  # requests that came to their end
        self.error = ""
        self._channel = channel
        self._h11 = h11.Connection(h11.SERVER)
        channel.on_write = self._got  # type: ignore[assignment]

    def _got(self, data: bytes) -> None:
        try:
            self._h11.receive_data(data)
            self._events()
        except h11.RemoteProtocolError as error:
            self.error = str(error)

    def _events(self) -> None:
        while (event := self._h11.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Request):
                self.hosts += [value for name, value in event.headers if name == b"host"]
            elif isinstance(event, h11.EndOfMessage):
                self.whole += 1
                answer = h11.Response(status_code=200, headers=[(b"content-length", b"2")])
                self._channel.incoming.put_nowait(self._h11.send(answer) or b"")
                self._channel.incoming.put_nowait(self._h11.send(h11.Data(data=b"ok")) or b"")
                self._h11.send(h11.EndOfMessage())
                if self._h11.our_state is h11.MUST_CLOSE:
                    self._channel.incoming.put_nowait(b"")
                    return
                self._h11.start_next_cycle()
            elif isinstance(event, h11.ConnectionClosed):
                return


async def _cut_is_fine(serving: Coroutine[None, None, None]) -> None:
    try:
        await serving
    except OSError:
        pass


async def served(pieces: list[bytes], guard: Guard) -> tuple[Server, Memory, Memory]:
    client, upstream = Memory(), Memory()
    server = Server(upstream)
    for piece in pieces:
        if piece:
            client.incoming.put_nowait(piece)
    client.incoming.put_nowait(b"")

    async def close() -> None:
        while not upstream.ended and not upstream.aborted:
            await asyncio.sleep(0)
        upstream.incoming.put_nowait(b"")

    closing = asyncio.create_task(close())
    try:
        await asyncio.wait_for(_cut_is_fine(check_http(client, upstream, guard)), 20)
    finally:
        closing.cancel()
    return server, client, upstream


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(marks)]


@settings(max_examples=300, deadline=None)
@given(soup(), st.lists(st.integers(0, 500), max_size=6))
def test_the_server_sees_whole_requests_for_this_host_only(data: bytes, cuts: list[int]) -> None:
    async def main() -> None:
        told: list[str] = []
        server, client, upstream = await served(pieces_of(data, cuts), Guard("a.com", 80, refused=told.append))
        assert server.error == ""
        assert all(host.lower() in (b"a.com", b"a.com.", b"a.com:80") for host in server.hosts)
        assert upstream.aborted
        assert len(told) <= 1
        if told and not client.aborted:
            assert b"X-Sloplet-Denied: 1" in client.written
        answers = client.written.count(b"HTTP/1.1 200")
        assert answers <= len(server.hosts)
        again, _, _ = await served([data], Guard("a.com", 80))
        assert again.whole == server.whole  # a head whose body turns out to be bad may have left, or not

    asyncio.run(main())


def test_the_fuzz_lets_something_through() -> None:
    async def main() -> None:
        data = b"POST / HTTP/1.1\r\nHost: a.com\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.1\r\nHost: a.com\r\n\r\n"
        server, client, _ = await served(pieces_of(data, [3, 50, 52]), Guard("a.com", 80))
        assert server.hosts == [b"a.com", b"a.com"]
        assert client.written.count(b"ok") == 2
        bad = Server(Memory())
        bad._got(b"GET / HTTP/1.1\r\nHost: a.com\r\nHost : b\r\n\r\n")
        assert bad.error

    asyncio.run(main())


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 200),
    st.integers(0, 100),
    st.booleans(),
    st.lists(st.integers(0, 600), max_size=8),
    st.integers(1, 50),
)
def test_a_placeholder_never_arrives_whole(before: int, after: int, chunked: bool, cuts: list[int], size: int) -> None:
    async def main() -> None:
        body = b"x" * before + PLACE.encode() + b"y" * after
        head = b"POST / HTTP/1.1\r\nHost: " + NAME.encode() + b"\r\n"
        if chunked:
            chunks = [body[at : at + size] for at in range(0, len(body), size)]
            coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
            data = head + b"Transfer-Encoding: chunked\r\n\r\n" + coded
        else:
            data = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        told: list[str] = []
        guard = Guard(NAME, 80, None, SecretTable([Spec()]), told.append)
        _, client, upstream = await served(pieces_of(data, cuts), guard)
        assert len(told) == 1
        assert b"403" in client.written
        got = bytes(upstream.written).partition(b"\r\n\r\n")[2]
        assert PLACE.encode() not in (b"".join(got.split(b"\r\n")[1::2]) if chunked else got)

    asyncio.run(main())
