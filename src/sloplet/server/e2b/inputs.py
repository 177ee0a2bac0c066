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

_REST = 30.0  # seconds after which a stream that was opened for input only is let go
_Key = tuple[str, int]


@dataclass
class _Way:
    """How input gets there: over the streams of those who follow, or one of its own."""

    followers: list[Stream] = field(default_factory=list)
    own: Stream | None = None
    closed: bool = False  #: its stdin has seen the end
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = None


class Inputs:
    def __init__(self) -> None:
        self._ways: dict[_Key, _Way] = {}

    @contextmanager
    def following(self, sandbox: str, pid: int, stream: Stream) -> Iterator[None]:
        """While somebody follows a command, input may go by his stream."""
        key = (sandbox, pid)
        way = self._ways.setdefault(key, _Way())
        way.followers.append(stream)
        try:
            yield
        finally:
            way.followers.remove(stream)
            self._tidy(key, way)

    async def send(self, call: Call, process: Command, given: tuple[str, bytes]) -> None:
        kind, data = given
        if (kind == "pty") != process.tty:
            if process.tty:
                raise rpc_error("failed_precondition", "tty assigned to process: input goes to the pty, not to stdin")
            raise rpc_error("failed_precondition", "tty not assigned to process: input goes to stdin, not to a pty")
        way = self._way(call, process)
        async with way.turn:
            if way.closed or not (process.tty or process.stdin):
                raise rpc_error("failed_precondition", "stdin not enabled or closed")
            await (await self._stream(call, process, way)).send(data)

    async def close(self, call: Call, process: Command) -> None:
        way = self._way(call, process)
        async with way.turn:
            if not way.closed:
                way.closed = True
                await (await self._stream(call, process, way)).send_end()

    async def control(self, call: Call, process: Command, fields: Fields) -> None:
        way = self._way(call, process)
        async with way.turn:
            (await self._stream(call, process, way)).ctrl(fields)

    def _way(self, call: Call, process: Command) -> _Way:
        return self._ways.setdefault((call.record.sandbox, process.pid), _Way())

    async def _stream(self, call: Call, process: Command, way: _Way) -> Stream:
        if way.followers:
            return way.followers[0]
        if way.own is not None and not _over(way.own):
            self._rest(call, process, way)
            return way.own
        flags = int(ExecFlag.LOSSY)
        fields = request(Op.ATTACH, (Tag.PID, process.pid)).add(Tag.FLAGS, flags)
        stream = await call.open(fields.add(Tag.FROM_OUT, -1).add(Tag.FROM_ERR, -1))
        try:
            await stream.started()
        except ProcessNotFound:
            raise rpc_error("not_found", f"process with pid {process.os_pid} not found") from None
        except SlopletError as error:
            raise call.gone(error) from None
        stream.ctrl(Fields((Tag.KIND, int(CtrlKind.DISCARD))))
        way.own = stream
        self._rest(call, process, way)
        return stream

    def _rest(self, call: Call, process: Command, way: _Way) -> None:
        if way.timer is not None:
            way.timer.cancel()
        key = (call.record.sandbox, process.pid)
        way.timer = asyncio.get_running_loop().call_later(_REST, self._let_go, key, way)

    def _let_go(self, key: _Key, way: _Way) -> None:
        if way.turn.locked():  # the command does not take what it was sent yet
            way.timer = asyncio.get_running_loop().call_later(_REST, self._let_go, key, way)
            return
        if way.own is not None:
            way.own.reset()
            way.own = None
        way.timer = None
        self._tidy(key, way)

    def _tidy(self, key: _Key, way: _Way) -> None:
        if not way.followers and way.own is None and way.timer is None and self._ways.get(key) is way:
            del self._ways[key]


def _over(stream: Stream) -> bool:
    return getattr(stream, "outcome", None) is not None
