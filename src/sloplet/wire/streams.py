"""One stream on the multiplexer: the opener's end and the answering end, each bounded by its credit.

All methods belong to the loop's thread.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..controller import Data
from ..errors import ProtocolError
from .failures import close_error
from .fields import Fields, decode_fields
from .frames import Frame
from .schema import INITIAL_CREDIT, MAX_CREDIT, MAX_PAYLOAD, Channel, FrameType, Tag

if TYPE_CHECKING:
    from .mux import HostMux, Mux

_MERGE = 8192
_CREDIT = struct.Struct("<I")
#: CTRL is not under credit: what one read may bring must fit, and what waits is bounded all the same.
_MAX_CTRLS, _MAX_CTRL = 4096, 256


class Waiters:
    """Wakes whoever waits for any change of a stream. Waiting is cancel-safe: state lives in the stream.

    ``callback`` is for a relay, which has no task of its own per stream; it must not raise.
    """

    __slots__ = ("_futures", "callback")

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []
        self.callback: Callable[[], None] | None = None

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        await future

    def wake(self) -> None:
        if self._futures:
            futures, self._futures = self._futures, []
            for future in futures:
                if not future.done():
                    future.set_result(None)
        if self.callback is not None:
            self.callback()


class BaseStream:
    """What both ends of a stream share: receiving under credit, sending under credit."""

    _lump = INITIAL_CREDIT // 2  # what is consumed is granted back in such lumps

    def __init__(self, mux: Mux, stream_id: int) -> None:
        self._mux = mux
        self.id = stream_id
        self._queue: deque[Data] = deque()
        self._window = INITIAL_CREDIT  # what the peer may still send
        self._unacked = 0  # consumed, not yet granted back
        self._credit = INITIAL_CREDIT  # what we may still send
        self._peer_ended = False
        self._sent_end = False
        self._closed = False
        self._waiters = Waiters()

    async def recv(self, *, auto_credit: bool = True) -> Data | None:
        while not self._queue:
            if self._peer_ended or self._closed:
                return None
            self._mux.check()
            await self._waiters.wait()
        item = self._queue.popleft()
        if auto_credit:
            self._unacked += len(item.data)
            if self._unacked >= self._lump:
                self.grant(self._unacked)
                self._unacked = 0
        return item

    # -- without waiting, for relays ---------------------------------------------------

    def on_change(self, callback: Callable[[], None] | None) -> None:
        """Call it whenever something has arrived on this stream, or its connection is lost."""
        self._waiters.callback = callback

    @property
    def mux(self) -> Mux:
        return self._mux

    @property
    def credit(self) -> int:
        """What we may send now."""
        return self._credit

    @property
    def peer_ended(self) -> bool:
        """Whether the peer said END (or gave up); what it sent before may still be in the queue."""
        return self._peer_ended

    def take(self) -> Data | None:
        """The next DATA that is here; nothing is granted for it."""
        return self._queue.popleft() if self._queue else None

    def send_now(self, data: bytes, channel: int = Channel.IN) -> int:
        """Send as much as credit allows, without looking at congestion; how much that was. Dropped (and
        counted as sent) if the operation has ended."""
        if self._dead():
            return len(data)
        piece = data[: min(self._credit, MAX_PAYLOAD)]
        if piece:
            self._credit -= len(piece)
            self._mux.write(FrameType.DATA, self.id, piece, channel)
        return len(piece)

    def end_now(self) -> None:
        """No more DATA from us. Idempotent."""
        if not self._dead():
            self._sent_end = True
            self._mux.write(FrameType.END, self.id)

    def grant(self, count: int) -> None:
        if self._closed or self._peer_ended or count <= 0:
            return
        self._window += count
        self._mux.write(FrameType.CREDIT, self.id, _CREDIT.pack(count))

    async def _send(self, data: bytes, channel: int) -> None:
        at = 0
        while at < len(data):
            while self._credit <= 0 or self._mux.congested:
                if self._dead():
                    return
                self._mux.check()
                if self._credit <= 0:
                    await self._waiters.wait()
                else:
                    await self._mux.drained()
            if self._dead():
                return
            piece = data[at : at + min(self._credit, MAX_PAYLOAD)]
            at += len(piece)
            self._credit -= len(piece)
            self._mux.write(FrameType.DATA, self.id, piece, channel)

    def _dead(self) -> bool:
        return self._closed or self._sent_end

    def _count(self, frame: Frame) -> None:
        self._window -= len(frame.payload)
        if self._window < 0:
            raise ProtocolError("DATA beyond its credit")

    def _on_data(self, frame: Frame) -> None:
        if self._peer_ended:
            raise ProtocolError("DATA after END")
        self._count(frame)
        last = self._queue[-1] if self._queue else None
        if last is not None and last.channel == frame.channel and len(last.data) + len(frame.payload) <= _MERGE:
            # One-byte frames would otherwise cost a hundred times their credit in objects.
            self._queue[-1] = Data(frame.channel, last.data + frame.payload)
        else:
            self._queue.append(Data(frame.channel, frame.payload))
        self._waiters.wake()

    def _on_end(self) -> None:
        self._peer_ended = True
        self._waiters.wake()

    def _on_credit(self, payload: bytes) -> None:
        self._credit += _CREDIT.unpack(payload)[0]
        if self._credit > MAX_CREDIT:
            raise ProtocolError("more than 16 MiB of credit")
        self._waiters.wake()


class HostStream(BaseStream):
    """The opener's end; implements ``controller.Stream``."""

    _mux: HostMux

    def __init__(self, mux: HostMux, stream_id: int, request: Fields) -> None:
        super().__init__(mux, stream_id)
        self.request = request
        self._reply: Fields | None = None
        self._result: Fields | None = None
        self._abandoned = False

    async def started(self) -> Fields:
        while self._reply is None:
            if self._result is not None:
                return self._checked(self._result)
            self._mux.check()
            await self._waiters.wait()
        return self._reply

    @property
    def errno(self) -> int:
        """What it was closed with; 0 if all went well, or it is open."""
        return self._result.integer(Tag.ERRNO, 0) if self._result is not None else 0

    async def result(self) -> Fields:
        while self._result is None:
            self._mux.check()
            await self._waiters.wait()
        return self._checked(self._result)

    def _checked(self, result: Fields) -> Fields:
        if Tag.ERRNO in result:
            raise close_error(self.request, result)
        return result

    async def send(self, data: bytes) -> None:
        await self._send(data, Channel.IN)

    async def send_end(self) -> None:
        self.end_now()

    @property
    def reply(self) -> Fields | None:
        """The REPLY, if it has come."""
        return self._reply

    @property
    def outcome(self) -> Fields | None:
        """The CLOSE as it is, error or not, if it has come."""
        return self._result

    def ctrl(self, fields: Fields) -> None:
        if not self._closed:
            self._mux.write(FrameType.CTRL, self.id, fields.encode())

    def reset(self) -> None:
        if not self._closed and not self._abandoned:
            self._abandoned = True
            self._queue.clear()
            self._mux.write(FrameType.RESET, self.id)
            self._waiters.wake()

    def _handle(self, frame: Frame) -> None:
        if frame.type is FrameType.DATA:
            if frame.channel == Channel.IN:
                raise ProtocolError("the answer's DATA is on the request's channel")
            if self._abandoned:
                self._count(frame)
                return
            self._on_data(frame)
        elif frame.type is FrameType.CREDIT:
            self._on_credit(frame.payload)
        elif frame.type is FrameType.END:
            self._on_end()
        elif frame.type is FrameType.REPLY:
            if self._reply is not None:
                raise ProtocolError("a second REPLY")
            self._reply = decode_fields(frame.payload)
            self._waiters.wake()
        else:
            result = decode_fields(frame.payload)
            self._result = self._mux.annotate(self, result) if self._mux.annotate else result
            self._closed = True
            self._mux.forget(self.id)
            self._waiters.wake()


class AgentStream(BaseStream):
    """The answering end: the keeper's, the fake engine's, or a host's that an agent asks something of."""

    def __init__(self, mux: Mux, stream_id: int, request: Fields) -> None:
        super().__init__(mux, stream_id)
        self.request = request
        self.was_reset = False
        self._ctrls: deque[Fields] = deque()
        #: Called for each CREDIT the opener grants (a relay passes it on); None: nobody asks.
        self.on_credit: Callable[[int], None] | None = None

    def reply(self, fields: Fields) -> None:
        if not self._closed:
            self._mux.write(FrameType.REPLY, self.id, fields.encode())

    def close(self, fields: Fields) -> None:
        """The one CLOSE; later calls do nothing."""
        if not self._closed:
            self._closed = True
            self._mux.write(FrameType.CLOSE, self.id, fields.encode())
            self._mux.forget(self.id)
            self._waiters.wake()

    def refuse(self, error: int, message: str) -> None:
        self.close(Fields((Tag.ERRNO, error), (Tag.MESSAGE, message)))

    @property
    def closed(self) -> bool:
        return self._closed

    async def send(self, data: bytes, channel: int = Channel.OUT) -> None:
        await self._send(data, channel)

    def send_now(self, data: bytes, channel: int = Channel.OUT) -> int:
        return super().send_now(data, channel)

    def _dead(self) -> bool:
        return self._closed or self._sent_end or self.was_reset

    async def recv(self, *, auto_credit: bool = True) -> Data | None:
        if self.was_reset:
            return None
        return await super().recv(auto_credit=auto_credit)

    async def control(self) -> Fields | None:
        """The next CTRL; None once the stream is closed or was reset."""
        while not self._ctrls:
            if self._closed or self.was_reset:
                return None
            self._mux.check()
            await self._waiters.wait()
        return self._ctrls.popleft()

    def take_control(self) -> Fields | None:
        """The next CTRL that is here."""
        return self._ctrls.popleft() if self._ctrls else None

    async def reset_or_closed(self) -> None:
        while not (self._closed or self.was_reset):
            self._mux.check()
            await self._waiters.wait()

    def _handle(self, frame: Frame) -> None:
        if frame.type is FrameType.DATA:
            if frame.channel != Channel.IN:
                raise ProtocolError("the request's DATA is on the answer's channel")
            self._on_data(frame)
        elif frame.type is FrameType.CREDIT:
            self._on_credit(frame.payload)
            if self.on_credit is not None:
                self.on_credit(_CREDIT.unpack(frame.payload)[0])
        elif frame.type is FrameType.END:
            self._on_end()
        elif frame.type is FrameType.CTRL:
            if len(self._ctrls) >= _MAX_CTRLS:
                raise ProtocolError("too many CTRL frames at once")
            if len(frame.payload) > _MAX_CTRL:
                raise ProtocolError("a CTRL frame that is too long")
            self._ctrls.append(decode_fields(frame.payload))
            self._waiters.wake()
        elif frame.type is FrameType.RESET:
            self.was_reset = True
            self._peer_ended = True
            self._queue.clear()
            self._waiters.wake()
