"""A world for inspection: a listener where programs connect to, our code, and real servers behind it."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import socket
import ssl
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sloplet.network.authority import Authority
from sloplet.network.guard import Guard
from sloplet.network.inspect import check_http, inspect_tls
from sloplet.network.secrets import SecretTable
from sloplet.network.tls import TlsChannel, upstream_context

NAME = "api.example.test"
PLACE = "sloplet-secret-token-0123456789abcdef"
VALUE = "s3cr3t/value+of=the token"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Spec:
    name: str = "TOKEN"
    hosts: tuple[str, ...] = (NAME,)
    where: tuple[str, ...] = ("headers",)
    placeholder: str = PLACE


@dataclass(frozen=True)
class Verdict:
    allow: bool | None
    reason: str = "not by the rules"


class Pipe:
    """asyncio's streams as a Channel."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read(self) -> bytes:
        return await self.reader.read(65536)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def end(self) -> None:
        if self.writer.can_write_eof() and not self.writer.transport.is_closing():
            self.writer.write_eof()

    def abort(self) -> None:
        sock = self.writer.get_extra_info("socket")
        if not self.writer.transport.is_closing() and not self.writer.get_extra_info("sslcontext"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the peer sees a reset
        self.writer.transport.abort()


@functools.cache
def internet() -> tuple[Authority, str]:
    """The CA that real servers have here, and a file with it."""
    return _in_file(Authority(b"i" * 32, "internet"))


@functools.cache
def sandbox_ca() -> tuple[Authority, str]:
    """The CA of the sandbox, and a file with it."""
    return _in_file(Authority(b"s" * 32, "sandbox"))


def _in_file(authority: Authority) -> tuple[Authority, str]:
    """With a file that is there as long as this process."""
    file = tempfile.NamedTemporaryFile(suffix=".pem", delete=False)  # noqa: SIM115
    file.write(authority.ca_pem)
    file.close()
    atexit.register(os.unlink, file.name)
    return authority, file.name


@functools.cache
def servers_trust() -> ssl.SSLContext:
    """Reading the machine's own store takes long."""
    return upstream_context(internet()[1])


@dataclass
class World:
    port: int  #: where the program connects to
    refused: list[str] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  #: how each connection was over: "", or the error's name
    secrets: SecretTable | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self, tls: ssl.SSLContext | None = None, name: str = NAME) -> Pipe:
        """As a program would connect."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=tls, server_hostname=name if tls else None
        )
        return Pipe(reader, writer)

    async def say(self, data: bytes, tls: ssl.SSLContext | None = None) -> bytes:
        """One connection: sends this, ends, and gives all that comes back."""
        pipe = await self.open(tls)
        await pipe.write(data)
        if tls is None:
            await pipe.end()
        got = b""
        try:
            while piece := await pipe.read():
                got += piece
        except ConnectionError:
            got += b"<RESET>"
        pipe.abort()
        return got


@asynccontextmanager
async def world(
    handler: Handler,
    *,
    tls: bool = False,
    name: str = NAME,
    port: int | None = None,
    judge: Callable[[str, str], Verdict] | None = None,
    secrets: SecretTable | None = None,
    strict: bool = True,
    server_name: str | None = None,
    trust: ssl.SSLContext | None = None,
    dial: Callable[[], Awaitable[Pipe]] | None = None,
) -> AsyncIterator[World]:
    """``handler`` serves (inside TLS with ``tls``); all connections go through ours."""
    context = internet()[0].leaf(server_name or name) if tls else None

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0, ssl=context)
    upstream_port = server.sockets[0].getsockname()[1]

    async def default_dial() -> Pipe:
        return Pipe(*await asyncio.open_connection("127.0.0.1", upstream_port))

    made: World
    alive: set[asyncio.Task[None] | None] = set()  # asyncio itself would let them be collected while they wait

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        alive.add(asyncio.current_task())
        client = Pipe(reader, writer)
        guard = Guard(
            name,
            (443 if tls else 80) if port is None else port,
            judge,
            secrets,
            made.refused.append,
            lambda method, path: made.seen.append((method, path)),
            lambda: strict,
        )
        try:
            if tls:
                await inspect_tls(client, dial or default_dial, guard, sandbox_ca()[0], trust or servers_trust())
            else:
                await check_http(client, await (dial or default_dial)(), guard)
            made.ends.append("")
        except (OSError, asyncio.CancelledError) as error:
            made.ends.append(type(error).__name__)
        finally:
            alive.discard(asyncio.current_task())
            writer.close()
            made.idle.set()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    made = World(listener.sockets[0].getsockname()[1], secrets=secrets)
    try:
        yield made
    finally:
        for one in (listener, server):
            one.close()
            await one.wait_closed()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def program_context(*, verify: bool = True, alpn: list[str] | None = None) -> ssl.SSLContext:
    """A program inside that trusts the sandbox's CA."""
    context = ssl.create_default_context(cafile=sandbox_ca()[1]) if verify else ssl.create_default_context()
    if alpn:
        context.set_alpn_protocols(alpn)
    return context


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def echo(log: list[bytes] | None = None) -> Handler:
    """Answers each request with its own head and body (Content-Length framing only) as text."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            message = await read_head(reader)
            lower = message.lower()
            if b"content-length: " in lower:
                length = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
                message += await reader.readexactly(length)
            elif b"transfer-encoding: chunked" in lower:
                while True:
                    line = await reader.readuntil(b"\r\n")
                    size = int(line, 16)
                    chunk = await reader.readexactly(size + 2)
                    message += line + chunk
                    if not size:
                        break
            if log is not None:
                log.append(message)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(message), message))
            await writer.drain()
            if b"connection: close" in lower:
                return

    return handler


_open: list[Pipe] = []


def run(main: Coroutine[None, None, None]) -> None:
    """A test's own loop; nothing in it may take long."""

    async def bounded() -> None:
        try:
            async with asyncio.timeout(60):
                await main
        finally:
            while _open:
                _open.pop().abort()
            for _ in range(3):  # asyncio closes them in its next rounds
                await asyncio.sleep(0)

    asyncio.run(bounded())


async def pair() -> tuple[Pipe, Pipe]:
    """Two ends of one connection."""
    a, b = socket.socketpair()
    made = Pipe(*await asyncio.open_connection(sock=a)), Pipe(*await asyncio.open_connection(sock=b))
    _open.extend(made)
    return made


async def drain(channel: Pipe | TlsChannel) -> bytes:
    got = []
    while piece := await channel.read():
        got.append(piece)
    return b"".join(got)
