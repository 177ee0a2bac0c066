"""The multiplexer: many streams over one pair of file descriptors, on the running event loop.

``HostMux`` opens streams (the library, a keeper's client); ``AgentMux`` answers them (the keeper towards
its clients, the fake engine). Both are bounded: a stream buffers at most its credit, the output queue has a
high-water mark, and a peer that breaks a rule of docs/wire.md loses the connection.

All methods belong to the loop's thread. Reads and writes are raw non-blocking system calls, because
a round trip is the product's pulse: asyncio's transports cost about twice as much here.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections import deque
from collections.abc import Callable

from ..controller import Data
from ..errors import ProtocolError, SlopletError, WireClosed, from_dict
from .failures import close_error
from .fields import Fields, decode_fields
from .frames import FROM_AGENT, FROM_HOST, Frame, FrameDecoder, encode_frame
from .schema import (
    INITIAL_CREDIT,
    MAX_CREDIT,
    MAX_PAYLOAD,
    MAX_STREAMS,
    VERSION,
    Channel,
    FrameType,
    Op,
    Tag,
)

_READ_SIZE = 65536
_HIGH_WATER = 1 << 20
_MERGE = 8192
_CREDIT = struct.Struct("<I")
#: CTRL is not under credit: what one read may bring must fit, and what waits is bounded all the same.
_MAX_CTRLS, _MAX_CTRL = 4096, 256


class _Waiters:
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


class _Stream:
    """What both ends of a stream share: receiving under credit, sending under credit."""

    def __init__(self, mux: _Mux, stream_id: int) -> None:
        self._mux = mux
        self.id = stream_id
        self._queue: deque[Data] = deque()
        self._window = INITIAL_CREDIT  # what the peer may still send
        self._unacked = 0  # consumed, not yet granted back
        self._credit = INITIAL_CREDIT  # what we may still send
        self._peer_ended = False
        self._sent_end = False
        self._closed = False
        self._waiters = _Waiters()

    async def recv(self, *, auto_credit: bool = True) -> Data | None:
        while not self._queue:
            if self._peer_ended or self._closed:
                return None
            self._mux.check()
            await self._waiters.wait()
        item = self._queue.popleft()
        if auto_credit:
            self._unacked += len(item.data)
            if self._unacked >= INITIAL_CREDIT // 2:
                self.grant(self._unacked)
                self._unacked = 0
        return item

    # -- without waiting, for relays ---------------------------------------------------

    def on_change(self, callback: Callable[[], None] | None) -> None:
        """Call it whenever something has arrived on this stream, or its connection is lost."""
        self._waiters.callback = callback

    @property
    def mux(self) -> _Mux:
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

    def _on_data(self, frame: Frame) -> None:
        if self._peer_ended:
            raise ProtocolError("DATA after END")
        self._window -= len(frame.payload)
        if self._window < 0:
            raise ProtocolError("DATA beyond its credit")
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


class HostStream(_Stream):
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
                self._window -= len(frame.payload)
                if self._window < 0:
                    raise ProtocolError("DATA beyond its credit")
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


class AgentStream(_Stream):
    """The answering end: the keeper's, or the fake engine's."""

    _mux: AgentMux

    def __init__(self, mux: AgentMux, stream_id: int, request: Fields) -> None:
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

    async def send(self, data: bytes, channel: int = Channel.OUT) -> None:
        await self._send(data, channel)

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


class _Mux:
    """Reads frames, writes frames, fails everybody when the connection is lost."""

    #: Whether to stop reading a peer that asks and asks and does not read the answers. Never both sides of a
    #: connection, or they could wait for each other for ever.
    _patient = False

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        decoder: FrameDecoder,
        on_lost: Callable[[SlopletError], None] | None,
    ) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._decoder = decoder
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._out: deque[bytes] = deque()
        self._out_size = 0
        self._writing = False
        self._error: SlopletError | None = None
        self._lost = False
        self._pauses = 0
        self._choked = False
        self._room = _Waiters()
        self._hello: Fields | None = None
        self._hello_waiters = _Waiters()
        self._pongs = 0
        self._pulse = _Waiters()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self._loop.add_reader(read_fd, self._on_readable)

    def set_on_lost(self, on_lost: Callable[[SlopletError], None]) -> None:
        self._on_lost = on_lost

    @property
    def peer(self) -> Fields | None:
        """The other side's HELLO, if it has come."""
        return self._hello

    def pause(self) -> None:
        """Read nothing until ``resume``; counted."""
        self._pauses += 1
        if self._pauses == 1 and not self._lost:
            self._loop.remove_reader(self._read_fd)

    def resume(self) -> None:
        self._pauses -= 1
        if not self._pauses and not self._lost:
            self._loop.add_reader(self._read_fd, self._on_readable)

    @property
    def congested(self) -> bool:
        return self._out_size > _HIGH_WATER

    @property
    def error(self) -> SlopletError | None:
        return self._error

    def check(self) -> None:
        if self._error is not None:
            # A fresh object for each waiter: exceptions carry the traceback of whoever raised them.
            raise from_dict(self._error.to_dict())

    async def drained(self) -> None:
        while self.congested:
            self.check()
            await self._room.wait()

    async def answers(self) -> None:
        """Return once the other side has answered a PING: it lives, and reads what it is sent."""
        wanted = self._pongs + 1
        self.write(FrameType.PING, 0)
        while self._pongs < wanted:
            self.check()
            await self._pulse.wait()

    async def peer_hello(self) -> Fields:
        while self._hello is None:
            self.check()
            await self._hello_waiters.wait()
        return self._hello

    def write(self, type: FrameType, stream: int, payload: bytes = b"", channel: int = 0) -> None:
        if self._lost:
            return
        data = encode_frame(type, stream, payload, channel)
        if not self._out:
            try:
                sent = os.write(self._write_fd, data)
            except BlockingIOError:
                sent = 0
            except OSError:
                # The reading side will see EOF and tell the reason; what we say no longer matters.
                return
            if sent == len(data):
                return
            data = data[sent:]
        self._out.append(data)
        self._out_size += len(data)
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._write_fd, self._on_writable)
        if self._out_size > 4 * _HIGH_WATER and self._patient and not self._choked:
            self._choked = True
            self.pause()

    def _on_writable(self) -> None:
        while self._out:
            data = self._out[0]
            try:
                sent = os.write(self._write_fd, data)
            except BlockingIOError:
                return
            except OSError:
                self._out.clear()
                self._out_size = 0
                break
            self._out_size -= sent
            if sent < len(data):
                self._out[0] = data[sent:]
                return
            self._out.popleft()
        self._writing = False
        self._loop.remove_writer(self._write_fd)
        if self._choked:
            self._choked = False
            self.resume()
        self._room.wake()

    def _on_readable(self) -> None:
        try:
            data = os.read(self._read_fd, _READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._connection_lost(WireClosed(f"the connection broke: {error.strerror}"))
            return
        if not data:
            self._connection_lost(WireClosed("the other side closed the connection"))
            return
        try:
            for frame in self._decoder.feed(data):
                self._dispatch(frame)
        except ProtocolError as error:
            self._connection_lost(error)

    def _dispatch(self, frame: Frame) -> None:
        if frame.type is FrameType.HELLO:
            if self._hello is not None:
                raise ProtocolError("a second HELLO")
            hello = decode_fields(frame.payload)
            version = hello.integer(Tag.VERSION)
            if version != VERSION:
                raise ProtocolError(f"the other side speaks version {version} of the wire, this one {VERSION}")
            self._hello = hello
            self._hello_waiters.wake()
        elif self._hello is None:
            raise ProtocolError(f"{frame.type.name} before HELLO")
        elif frame.type is FrameType.PING:
            if self._out_size > MAX_PAYLOAD:
                raise ProtocolError("PINGs without reading the answers")
            self.write(FrameType.PONG, 0, frame.payload)
        elif frame.type is FrameType.PONG:
            self._pongs += 1
            self._pulse.wake()
        else:
            self._on_stream_frame(frame)

    def _on_stream_frame(self, frame: Frame) -> None:
        raise NotImplementedError

    def _all_streams(self) -> list[_Stream]:
        raise NotImplementedError

    def _detach(self) -> None:
        """Stop using the fds. They are the owner's to close."""
        if not self._lost:
            self._lost = True
            self._loop.remove_reader(self._read_fd)
            if self._writing:
                self._writing = False
                self._loop.remove_writer(self._write_fd)
            self._out.clear()
            self._out_size = 0

    def _connection_lost(self, error: SlopletError) -> None:
        self._detach()
        if self._on_lost is not None:
            self._on_lost(error)
        else:
            self.fail(error)

    def fail(self, error: SlopletError) -> None:
        """Everybody who waits, now or later, gets this error."""
        self._detach()
        if self._error is None:
            self._error = error
        for stream in self._all_streams():
            stream._waiters.wake()
        self._room.wake()
        self._pulse.wake()
        self._hello_waiters.wake()


class HostMux(_Mux):
    """The opener's side. ``annotate`` may add fields to a result as it passes (out-of-memory kills)."""

    stream_type: type[HostStream] = HostStream

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        *,
        on_lost: Callable[[SlopletError], None] | None = None,
        annotate: Callable[[HostStream, Fields], Fields] | None = None,
    ) -> None:
        super().__init__(read_fd, write_fd, FrameDecoder(FROM_AGENT), on_lost)
        self.annotate = annotate
        self._streams: dict[int, HostStream] = {}
        self._next = 1

    def hello(self, fields: Fields) -> None:
        self.write(FrameType.HELLO, 0, Fields((Tag.VERSION, VERSION), *fields).encode())

    def open(self, request: Fields) -> HostStream:
        self.check()
        stream = self.stream_type(self, self._next, request)
        self.write(FrameType.OPEN, self._next, request.encode())
        self._streams[self._next] = stream
        self._next += 2
        return stream

    def forget(self, stream_id: int) -> None:
        self._streams.pop(stream_id, None)

    def _on_stream_frame(self, frame: Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is None:
            raise ProtocolError(f"{frame.type.name} for stream {frame.stream}, which is not open")
        stream._handle(frame)

    def _all_streams(self) -> list[_Stream]:
        return list(self._streams.values())


class AgentMux(_Mux):
    """The answering side. ``accept`` is called with each new stream; it must see that ``close`` is called once."""

    _patient = True

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        accept: Callable[[AgentStream], None],
        *,
        on_lost: Callable[[SlopletError], None] | None = None,
    ) -> None:
        super().__init__(read_fd, write_fd, FrameDecoder(FROM_HOST, wide=True), on_lost)
        self._accept = accept
        self._streams: dict[int, AgentStream] = {}
        self._last = -1

    def hello(self, fields: Fields) -> None:
        self.write(FrameType.HELLO, 0, Fields((Tag.VERSION, VERSION), *fields).encode())

    def forget(self, stream_id: int) -> None:
        self._streams.pop(stream_id, None)

    def _on_stream_frame(self, frame: Frame) -> None:
        if frame.type is FrameType.OPEN:
            if frame.stream <= self._last or frame.stream % 2 == 0:
                raise ProtocolError(f"OPEN with stream id {frame.stream}")
            self._last = frame.stream
            stream = AgentStream(self, frame.stream, decode_fields(frame.payload))
            self._streams[frame.stream] = stream
            if len(self._streams) > MAX_STREAMS:
                stream.close(Fields((Tag.ERRNO, 24), (Tag.MESSAGE, "too many streams are open at once")))
                return
            self._accept(stream)
            return
        known = self._streams.get(frame.stream)
        if known is not None:
            known._handle(frame)
        elif frame.stream > self._last or frame.stream % 2 == 0:
            raise ProtocolError(f"{frame.type.name} for stream {frame.stream}, which was never opened")

    def _all_streams(self) -> list[_Stream]:
        return list(self._streams.values())


def request(op: Op, *items: tuple[Tag, int | bytes | str]) -> Fields:
    """The fields of an OPEN."""
    return Fields((Tag.OP, int(op)), *items)
