"""Two ends of a multiplexer: one that speaks byte by byte and may lie, and two honest ones, joined."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

from sloplet.errors import SlopletError, WireClosed
from sloplet.wire.fields import Fields
from sloplet.wire.frames import FROM_HOST, Frame, FrameDecoder, encode_frame
from sloplet.wire.mux import AgentMux, AgentStream, HostMux, HostStream, request
from sloplet.wire.schema import VERSION, FrameType, Op, Tag

HELLO = encode_frame(FrameType.HELLO, 0, Fields((Tag.VERSION, VERSION)).encode())
OPEN = request(Op.STAT, (Tag.PATH, "x"))


class Peer:
    """The other end of a HostMux, byte by byte: an agent that may lie."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.fd = ours.detach()
        self.sock = theirs
        theirs.setblocking(False)
        self.mux = HostMux(self.fd, self.fd)
        self.mux.hello(Fields())
        self.decoder = FrameDecoder(FROM_HOST | {FrameType.REPLY, FrameType.CLOSE}, wide=True)
        self.frames: list[Frame] = []

    async def send(self, *data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, b"".join(data))

    async def read(self, count: int) -> list[Frame]:
        """The next frames from the host."""
        while len(self.frames) < count:
            data = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
            assert data, "the host closed the connection"
            self.frames += self.decoder.feed(data)
        taken, self.frames = self.frames[:count], self.frames[count:]
        return taken

    async def fault(self) -> SlopletError:
        """Wait for the mux to give up."""
        while self.mux.error is None:
            await asyncio.sleep(0)
        return self.mux.error

    def close(self) -> None:
        self.mux.fail(WireClosed("the test is over"))
        self.sock.close()
        os.close(self.fd)


def with_peer(scenario: Callable[[Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        peer = Peer()
        try:
            async with asyncio.timeout(30):
                await scenario(peer)
        finally:
            peer.close()

    asyncio.run(main())


class Pair:
    """A HostMux and an AgentMux, joined."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.fds = (ours.detach(), theirs.detach())
        self.accepted: asyncio.Queue[AgentStream] = asyncio.Queue()
        self.agent = AgentMux(self.fds[1], self.fds[1], self.accepted.put_nowait)
        self.host = HostMux(self.fds[0], self.fds[0])
        self.host.hello(Fields())
        self.agent.hello(Fields())

    async def open(self, fields: Fields = OPEN) -> tuple[HostStream, AgentStream]:
        stream = self.host.open(fields)
        return stream, await self.accepted.get()

    def close(self) -> None:
        self.host.fail(WireClosed("the test is over"))
        self.agent.fail(WireClosed("the test is over"))
        for fd in self.fds:
            os.close(fd)


def with_pair(scenario: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        pair = Pair()
        try:
            async with asyncio.timeout(30):
                await scenario(pair)
        finally:
            pair.close()

    asyncio.run(main())


def data(stream: int, payload: bytes, channel: int = 1) -> bytes:
    return encode_frame(FrameType.DATA, stream, payload, channel)


async def spin(times: int = 20) -> None:
    for _ in range(times):
        await asyncio.sleep(0)
