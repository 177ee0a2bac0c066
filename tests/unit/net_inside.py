"""A sandbox's network without a sandbox: an egress, and what its agent would say, byte by byte; and a small world."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from sloplet.errors import WireClosed
from sloplet.netspec import Network, NetworkSpec
from sloplet.network.egress import Egress
from sloplet.network.log import Decision, NetworkLog
from sloplet.wire.fields import Fields, decode_fields
from sloplet.wire.frames import FROM_HOST, Frame, FrameDecoder, encode_frame
from sloplet.wire.mux import HostMux, request
from sloplet.wire.schema import INITIAL_CREDIT, MAX_PAYLOAD, VERSION, FrameType, Op, Tag

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class World:
    """Names, addresses and servers. Servers listen on the loopback, wherever the world believes them to be."""

    ca_file: str | None = None

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.dialled: list[tuple[str, int]] = []
        self.own: set[str] = set()  #: addresses of the machine itself
        self.failure: OSError | None = None
        self.held: asyncio.Event | None = None  #: connections wait for it
        self._places: dict[tuple[str, int], int] = {}
        self._servers: list[asyncio.Server] = []

    async def serve(
        self, address: str, port: int, handler: Handler, name: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        server = await asyncio.start_server(handler, "127.0.0.1", 0, limit=2**20, ssl=tls)
        self._servers.append(server)
        self._places[(address, port)] = server.sockets[0].getsockname()[1]
        if name:
            self.names[name] = [address]

    async def resolve(self, name: str) -> list[str]:
        self.asked.append(name)
        if name not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return list(self.names[name])

    async def connect(self, address: str, port: int) -> socket.socket:
        self.dialled.append((address, port))
        if self.held is not None:
            await self.held.wait()
        if self.failure is not None:
            raise self.failure
        if (address, port) not in self._places:
            raise OSError(errno.ECONNREFUSED, "nobody listens there")
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", self._places[(address, port)]))
        return made

    def is_own(self, address: str) -> bool:
        return address in self.own

    def close(self) -> None:
        for server in self._servers:
            server.close()


class Program:
    """One connection of a program inside, as its agent sees it."""

    def __init__(self, inside: Inside, stream: int) -> None:
        self._inside = inside
        self.stream = stream
        self.replied = asyncio.Event()
        self.closed: Fields | None = None
        self.got = bytearray()
        self.ended = False
        self.credit = INITIAL_CREDIT
        self.reads = True  #: gives credit back as bytes come
        self.changed = asyncio.Event()

    @property
    def errno(self) -> int:
        assert self.closed is not None
        return self.closed.integer(Tag.ERRNO, 0)

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.changed.clear()
            await self.changed.wait()

    async def answered(self) -> Program:
        """Connected, or refused."""
        await self.until(lambda: self.replied.is_set() or self.closed is not None)
        return self

    async def over(self) -> int:
        await self.until(lambda: self.closed is not None)
        return self.errno

    async def recv(self, count: int) -> bytes:
        await self.until(lambda: len(self.got) >= count or self.ended or self.closed is not None)
        data = bytes(self.got[:count])
        del self.got[:count]
        return data

    async def send(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            await self.until(lambda: self.credit > 0 or self.closed is not None)
            if self.closed is not None:
                return
            piece = data[at : at + min(self.credit, MAX_PAYLOAD)]
            self.credit -= len(piece)
            at += len(piece)
            await self._inside.write(encode_frame(FrameType.DATA, self.stream, piece))

    async def end(self) -> None:
        await self._inside.write(encode_frame(FrameType.END, self.stream))

    async def reset(self) -> None:
        await self._inside.write(encode_frame(FrameType.RESET, self.stream))

    async def grant(self, count: int) -> None:
        await self._inside.write(encode_frame(FrameType.CREDIT, self.stream, struct.pack("<I", count)))


class Inside:
    """An egress, and the agent's end of its wire."""

    def __init__(self, network: Network | NetworkSpec, world: World, **more: Any) -> None:
        spec = network.spec if isinstance(network, Network) else network
        self.log = NetworkLog("box")
        self.egress = Egress("box", spec, upstream=world, log=self.log, **more)
        ours, self._theirs = socket.socketpair()
        self._fd = ours.detach()
        self._theirs.setblocking(False)
        self.mux = HostMux(self._fd, self._fd, accept=self.egress.accept)
        self.mux.hello(Fields())
        self._programs: dict[int, Program] = {}
        self._next = 2
        self._lock = asyncio.Lock()
        self._reader = asyncio.ensure_future(self._read())

    async def hello(self) -> Inside:
        await self.write(encode_frame(FrameType.HELLO, 0, Fields((Tag.VERSION, VERSION)).encode()))
        return self

    async def write(self, data: bytes) -> None:
        async with self._lock:
            await asyncio.get_running_loop().sock_sendall(self._theirs, data)

    async def _read(self) -> None:
        decoder = FrameDecoder(FROM_HOST | {FrameType.REPLY, FrameType.CLOSE}, wide=True)
        while data := await asyncio.get_running_loop().sock_recv(self._theirs, 1 << 18):
            for frame in decoder.feed(data):
                await self._take(frame)

    async def _take(self, frame: Frame) -> None:
        program = self._programs.get(frame.stream)
        if program is None:
            return
        if frame.type is FrameType.REPLY:
            program.replied.set()
        elif frame.type is FrameType.DATA:
            program.got += frame.payload
            if program.reads:
                await program.grant(len(frame.payload))
        elif frame.type is FrameType.CREDIT:
            program.credit += struct.unpack("<I", frame.payload)[0]
        elif frame.type is FrameType.END:
            program.ended = True
        elif frame.type is FrameType.CLOSE:
            program.closed = decode_fields(frame.payload)
        program.changed.set()

    async def open(self, fields: Fields) -> Program:
        program = self._programs[self._next] = Program(self, self._next)
        self._next += 2
        await self.write(encode_frame(FrameType.OPEN, program.stream, fields.encode()))
        return program

    async def connect(self, host: str, port: int, *, wait: bool = True) -> Program:
        """To a name, as the agent says it after a question; or to an address."""
        fields = request(Op.CONNECT, (Tag.PORT, port))
        if host[:1].isdigit() or ":" in host:
            fields.add(Tag.ADDRESS, host)
        else:
            fields.add(Tag.ADDRESS, "198.18.0.7").add(Tag.NAME, host)
        program = await self.open(fields)
        return await program.answered() if wait else program

    async def resolve(self, name: str) -> int:
        return await (await self.open(request(Op.RESOLVE, (Tag.NAME, name)))).over()

    def last(self) -> Decision:
        self.egress.refresh()
        return self.log.read(limit=10_000)[-1]

    async def close(self) -> None:
        self.egress.close()
        await asyncio.sleep(0)
        self.mux.fail(WireClosed("the test is over"))
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._theirs.close()
        os.close(self._fd)


def with_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        try:
            async with asyncio.timeout(30):
                await scenario(world)
        finally:
            world.close()

    asyncio.run(main())


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says everything again, and ends when the other side does."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        pass
    finally:
        writer.close()


def greet(words: bytes) -> Handler:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        await echo(reader, writer)

    return serve
