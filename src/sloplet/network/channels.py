"""The two ends of a connection that is looked into, as ``channel.Channel``: the program's stream, and a socket."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

from ..errors import SlopletError
from ..wire.mux import AgentStream
from .limits import Meter
from .tie import close_socket

_PIECE = 256 * 1024


class StreamChannel:
    """The program's side. ``first``: what was read of it already. Here is where bytes are counted."""

    def __init__(self, stream: AgentStream, meter: Meter, first: bytes = b"") -> None:
        self.bytes_out = 0
        self.bytes_in = 0
        self.aborted = False
        self._stream = stream
        self._meter = meter
        self._first = first

    async def read(self) -> bytes:
        if self._first:
            data, self._first = self._first, b""
        else:
            data = await self._guarded(self._recv)
        await self._pay(len(data))
        self.bytes_out += len(data)
        return data

    async def _recv(self) -> bytes:
        piece = await self._stream.recv()
        if piece is None and self._stream.was_reset:
            raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return b"" if piece is None else piece.data

    async def write(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            piece = data[at : at + max(await self._room(), 1)]
            await self._guarded(self._send, piece)
            self._meter.count(len(piece))
            self.bytes_in += len(piece)
            at += len(piece)

    async def _send(self, data: bytes) -> None:
        await self._stream.send(data)
        if self._stream.was_reset:
            raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))

    async def _guarded(self, work: Callable[..., object], *arguments: object) -> bytes:
        if self.aborted:
            raise OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        try:
            result = await work(*arguments)  # type: ignore[misc]
        except SlopletError as error:  # the sandbox is gone
            raise OSError(errno.ECONNRESET, error.message) from error
        return result if isinstance(result, bytes) else b""

    async def _pay(self, size: int) -> None:
        """What came is here; the next is not read before there is room for this."""
        left = size
        while left > 0:
            step = min(left, await self._room())
            self._meter.count(step)
            left -= step

    async def _room(self) -> int:
        while not (room := self._meter.room()):
            waiting = asyncio.get_running_loop().create_future()
            self._meter.wait(lambda waiting=waiting: waiting.done() or waiting.set_result(None))  # type: ignore[misc]
            await waiting
        return room

    async def end(self) -> None:
        self._stream.end_now()

    def abort(self) -> None:
        self.aborted = True


class SocketChannel:
    """The server's side."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    async def read(self) -> bytes:
        while True:
            self._check()
            try:
                return self._socket.recv(_PIECE)
            except (BlockingIOError, InterruptedError):
                await self._until_readable()

    async def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._check()
            try:
                rest = rest[self._socket.send(rest) :]
            except (BlockingIOError, InterruptedError):
                await self._until_writable()

    async def end(self) -> None:
        if not self._closed:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError as error:
                if error.errno != errno.ENOTCONN:
                    raise

    def abort(self) -> None:
        self.close(reset=True)

    def close(self, *, reset: bool = False) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        for future, forget in ((self._reader, self._loop.remove_reader), (self._writer, self._loop.remove_writer)):
            if future is not None:
                forget(self._socket)
                if not future.done():
                    future.set_result(None)
        close_socket(self._socket, reset=reset)

    def _check(self) -> None:
        if self._closed:
            raise OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))

    async def _until_readable(self) -> None:
        future = self._reader = self._loop.create_future()
        self._loop.add_reader(self._socket, _done, future)
        try:
            await future
        finally:
            self._reader = None
            if not self._closed:
                self._loop.remove_reader(self._socket)

    async def _until_writable(self) -> None:
        future = self._writer = self._loop.create_future()
        self._loop.add_writer(self._socket, _done, future)
        try:
            await future
        finally:
            self._writer = None
            if not self._closed:
                self._loop.remove_writer(self._socket)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
