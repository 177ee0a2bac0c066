"""``ssh -L``: a connection to a port inside, and to nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import asyncssh

from ...errors import SlopletError
from ...network.ports import was_refused
from ...wire.mux import request
from ...wire.schema import Op, Tag
from ...wire.streams import HostStream
from ..problems import without_paths

if TYPE_CHECKING:
    from asyncssh import SSHTCPChannel

    from .ahead import Opener

#: What is the sandbox itself, to who asks from outside: to the agent's own choice, or one address.
INSIDE: dict[str, str | None] = {"localhost": None, "127.0.0.1": None, "::1": "::1"}
_OPENING = 60.0
_HELD = 256 * 1024  # bytes that wait for the sandbox to take them


async def dial(opener: Opener, host: str, port: int) -> HostStream:
    """Connected. asyncssh.ChannelOpenError."""
    fields = request(Op.DIAL, (Tag.PORT, port))
    if (address := INSIDE[host]) is not None:
        fields.add(Tag.ADDRESS, address)
    stream = None
    try:
        async with asyncio.timeout(_OPENING):
            stream = await opener(fields)
            assert isinstance(stream, HostStream)
            await stream.started()
            return stream
    except BaseException as error:
        refused = False
        if isinstance(stream, HostStream):
            stream.reset()
            refused = was_refused(stream)
        if not isinstance(error, (SlopletError, TimeoutError)):
            raise
        why = (
            f"nothing listens on port {port} inside"
            if refused
            else without_paths(str(error))[:200] or "it took too long"
        )
        raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, why) from error


class Forward(asyncssh.SSHTCPSession[bytes]):
    """Ties the channel to the stream: bytes both ways, half-close, reset; each side holds up the other."""

    def __init__(self, stream: HostStream, on_end: Callable[[], None]) -> None:
        self._stream, self._on_end = stream, on_end
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        self._held = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._tasks: list[asyncio.Task[None]] = []

    def connection_made(self, chan: SSHTCPChannel[bytes]) -> None:
        self._chan = chan

    def session_started(self) -> None:
        self._tasks = [asyncio.ensure_future(self._inwards()), asyncio.ensure_future(self._outwards())]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.reset()
        self._on_end()
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        self._held += len(data)
        self._waiting.put_nowait(data)
        if self._held > _HELD:
            self._chan.pause_reading()

    def eof_received(self) -> bool:
        self._waiting.put_nowait(b"")
        return True  # the other direction goes on

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def _inwards(self) -> None:
        try:
            while data := await self._waiting.get():
                await self._stream.send(data)
                self._held -= len(data)
                if self._held <= _HELD:
                    self._chan.resume_reading()
            await self._stream.send_end()
        except SlopletError:
            self._chan.abort()

    async def _outwards(self) -> None:
        try:
            while (piece := await self._stream.recv()) is not None:
                self._chan.write(piece.data)
                await self._writable.wait()
            outcome = self._stream.outcome
            if outcome is not None and Tag.ERRNO in outcome:
                self._chan.abort()
                return
            self._chan.write_eof()
            await self._stream.result()
            self._chan.close()
        except (SlopletError, OSError):  # OSError: the channel was closed meanwhile
            self._chan.abort()
