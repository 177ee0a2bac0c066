"""Input of commands, sent by requests of its own: each command has one stream that it goes by, in its order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...controller import Stream
from ...errors import ProcessNotFound, SlopletError
from ...wire.fields import Fields
from ...wire.mux import request
from ...wire.schema import CtrlKind, ExecFlag, Op, Tag
from .answers import rpc_error

if TYPE_CHECKING:
    from .calls import Call
    from .ps import Command

_REST = 30.0  # seconds after which such a stream is let go
_Key = tuple[str, int]


@dataclass
class _Way:
    """How input gets to a command."""

    stream: Stream | None = None
    closed: bool = False  #: its stdin has seen the end
    users: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = None


class Inputs:
    def __init__(self) -> None:
        self._ways: dict[_Key, _Way] = {}

    async def send(self, call: Call, process: Command, given: tuple[str, bytes]) -> None:
        kind, data = given
        if (kind == "pty") != process.tty:
            if process.tty:
                raise rpc_error("failed_precondition", "tty assigned to process: input goes to the pty, not to stdin")
            raise rpc_error("failed_precondition", "tty not assigned to process: input goes to stdin, not to a pty")
        with self._way(call, process) as way:
            async with way.turn:
                if way.closed or not (process.tty or process.stdin):
                    raise rpc_error("failed_precondition", "stdin not enabled or closed")
                await (await self._stream(call, process, way)).send(data)

    async def close(self, call: Call, process: Command) -> None:
        with self._way(call, process) as way:
            async with way.turn:
                if not way.closed:
                    way.closed = True
                    await (await self._stream(call, process, way)).send_end()

    async def control(self, call: Call, process: Command, fields: Fields) -> None:
        """Not behind input that nobody takes."""
        with self._way(call, process) as way:
            (await self._stream(call, process, way)).ctrl(fields)

    @contextmanager
    def _way(self, call: Call, process: Command) -> Iterator[_Way]:
        key = (call.record.sandbox, process.pid)
        way = self._ways.setdefault(key, _Way())
        way.users += 1
        try:
            yield way
        finally:
            way.users -= 1
            if way.timer is not None:
                way.timer.cancel()
            way.timer = asyncio.get_running_loop().call_later(_REST, self._let_go, key, way)

    async def _stream(self, call: Call, process: Command, way: _Way) -> Stream:
        if way.stream is not None and not _over(way.stream):
            return way.stream
        fields = request(Op.ATTACH, (Tag.PID, process.pid)).add(Tag.FLAGS, int(ExecFlag.LOSSY))
        stream = await call.open(fields.add(Tag.FROM_OUT, -1).add(Tag.FROM_ERR, -1))
        try:
            await stream.started()
        except BaseException as error:
            stream.reset()
            if isinstance(error, ProcessNotFound):
                raise rpc_error("not_found", f"process with pid {process.os_pid} not found") from None
            raise (call.gone(error) if isinstance(error, SlopletError) else error) from None
        stream.ctrl(Fields((Tag.KIND, int(CtrlKind.DISCARD))))
        if way.stream is not None and not _over(way.stream):  # somebody was quicker
            stream.reset()
            return way.stream
        way.stream = stream
        return stream

    def _let_go(self, key: _Key, way: _Way) -> None:
        if way.users:
            return
        if way.stream is not None:
            way.stream.reset()
        if self._ways.get(key) is way:
            del self._ways[key]


def _over(stream: Stream) -> bool:
    return getattr(stream, "outcome", None) is not None
