"""The multiplexer: many streams over one pair of file descriptors, on the running event loop.

``HostMux`` opens streams (the library, a keeper's client), and answers those that an agent opens; ``AgentMux`` only
answers (the keeper towards its clients, the fake engine). Both are bounded: a stream buffers at most its credit, the
output queue has a high-water mark, and a peer that breaks a rule of docs/wire.md loses the connection.

All methods belong to the loop's thread. Reads and writes are raw non-blocking system calls, because
a round trip is the product's pulse: asyncio's transports cost about twice as much here.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import ProtocolError, SlopletError, WireClosed, from_dict
from .fields import Fields, decode_fields
from .frames import FROM_AGENT, FROM_HOST, Frame, FrameDecoder, encode_header
from .outgoing import Outgoing, WayOut
from .pipes import BUSY, Growth
from .schema import MAX_PAYLOAD, MAX_STREAMS, VERSION, FrameType, Op, Tag
from .streams import AgentStream, HostStream, Waiters

__all__ = ["AgentMux", "AgentStream", "HostMux", "HostStream", "request"]

_READ_SIZE = 65536
_READ_MORE = 1 << 18  # while there is plenty
_HIGH_WATER = 1 << 20
_OPENERS = frozenset({FrameType.OPEN, FrameType.RESET})
_ANSWERERS = frozenset({FrameType.REPLY, FrameType.CLOSE})
_JOINED = 4096  # a payload up to here is cheaper to copy than to hand over apart from its header


class Mux:
    """Reads frames, writes frames, fails everybody when the connection is lost."""

    #: Whether to stop reading a peer that asks and asks and does not read the answers. Never both sides of a
    #: connection, or they could wait for each other for ever.
    _patient = False
    _streams: dict[int, Any]  # by id; each side has its own kind of stream

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        decoder: FrameDecoder,
        on_lost: Callable[[SlopletError], None] | None,
    ) -> None:
        self._read_fd = read_fd
        self._decoder = decoder
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._growth = Growth()
        self._outgoing = self._way_out(write_fd)
        self._quiet = BUSY  # bytes that may still come before the pipe counts as busy
        self._error: SlopletError | None = None
        self._lost = False
        self._pauses = 0
        self._choked = False
        self._room = Waiters()
        self._when_room: list[Callable[[], None]] = []
        self._hello: Fields | None = None
        self._hello_waiters = Waiters()
        self._read_size = _READ_SIZE
        self.heard = 0  # how often something came from the other side
        self._pongs = 0
        self._pulse = Waiters()
        self._watch()

    # -- the connection itself: a subclass may have another kind than two descriptors ---

    def _way_out(self, write_fd: int) -> WayOut:
        return Outgoing(write_fd, self._on_drained, self._cannot_write, lambda: self._growth.grow(write_fd))

    def _watch(self) -> None:
        """Read what comes, from now on."""
        os.set_blocking(self._read_fd, False)
        self._loop.add_reader(self._read_fd, self._on_readable)

    def _unwatch(self) -> None:
        self._loop.remove_reader(self._read_fd)

    # -- for both sides ----------------------------------------------------------------

    def hold(self) -> None:
        """Keep what is written from now on until ``let_go``: the other side is to be saved between two frames."""
        self._outgoing.hold()

    def let_go(self) -> None:
        """Send what was held back. Idempotent."""
        self._outgoing.let_go()

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
            self._unwatch()

    def resume(self) -> None:
        self._pauses -= 1
        if not self._pauses and not self._lost:
            self._watch()

    @property
    def congested(self) -> bool:
        return self._outgoing.waiting > _HIGH_WATER

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

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call it once, when there is no congestion any more or the connection is lost; for relays. At once if there
        is none now."""
        if self.congested and not self._lost:
            self._when_room.append(callback)
        else:
            callback()

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
        head = encode_header(type, stream, len(payload), channel)
        if len(payload) <= _JOINED:
            self._outgoing.put(head + payload)
        else:
            self._outgoing.put(head, payload)
        if self._patient and not self._choked and self._outgoing.size > 4 * _HIGH_WATER:
            self._choked = True
            self.pause()

    def _on_drained(self) -> None:
        if self._choked:
            self._choked = False
            self.resume()
        self._room.wake()
        calls, self._when_room = self._when_room, []
        for call in calls:
            call()

    def _cannot_write(self, error: OSError) -> None:
        self._loop.call_soon(self._broken, WireClosed(f"the connection broke: {error.strerror}"))

    def _broken(self, error: SlopletError) -> None:
        if not self._lost:
            self._connection_lost(error)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._read_fd, self._read_size)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._connection_lost(WireClosed(f"the connection broke: {error.strerror}"))
            return
        if not data:
            self._connection_lost(WireClosed("the other side closed the connection"))
            return
        if self._quiet > 0:
            self._quiet -= len(data)
            if self._quiet <= 0:
                self._growth.grow(self._read_fd)
        self._read_size = _READ_MORE if len(data) >= _READ_SIZE else _READ_SIZE
        self.feed(data)

    def feed(self, data: bytes) -> None:
        """These bytes have come."""
        self.heard += 1
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
            if self._outgoing.size > MAX_PAYLOAD:
                raise ProtocolError("PINGs without reading the answers")
            self.write(FrameType.PONG, 0, frame.payload)
        elif frame.type is FrameType.PONG:
            self._pongs += 1
            self._pulse.wake()
        else:
            self._on_stream_frame(frame)

    def _on_stream_frame(self, frame: Frame) -> None:
        raise NotImplementedError

    def hello(self, fields: Fields) -> None:
        self.write(FrameType.HELLO, 0, Fields((Tag.VERSION, VERSION), *fields).encode())

    def forget(self, stream_id: int) -> None:
        self._streams.pop(stream_id, None)

    def _everybody(self) -> list[Any]:
        return list(self._streams.values())

    def _detach(self) -> None:
        """Stop using the fds. They are the owner's to close."""
        if not self._lost:
            self._lost = True
            self._unwatch()
            self._outgoing.stop()
            self._growth.forget()

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
        for stream in self._everybody():
            stream._waiters.wake()
        self._on_drained()
        self._pulse.wake()
        self._hello_waiters.wake()


class HostMux(Mux):
    """The opener's side. ``annotate`` may add fields to a result as it passes (out-of-memory kills).

    ``accept`` is called with each stream that the agent opens (even ids); it must see that ``close`` is called once,
    also after a reset. Without it OPEN is answered with EACCES, or, if not ``refuse``, breaks the protocol.
    """

    stream_type: type[HostStream] = HostStream

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        *,
        on_lost: Callable[[SlopletError], None] | None = None,
        annotate: Callable[[HostStream, Fields], Fields] | None = None,
        accept: Callable[[AgentStream], None] | None = None,
        refuse: bool = True,
    ) -> None:
        super().__init__(read_fd, write_fd, FrameDecoder(FROM_AGENT), on_lost)
        self.annotate = annotate
        self._streams: dict[int, HostStream] = {}
        self._next = 1
        self._accept = accept
        self._refuse = refuse
        self._served: dict[int, AgentStream] = {}
        self._last_served = 0
        self._closing: deque[int] = deque()  # where in the outgoing bytes the CLOSEs of served streams end

    def set_accept(self, accept: Callable[[AgentStream], None] | None) -> None:
        self._accept = accept

    def open(self, request: Fields) -> HostStream:
        self.check()
        stream = self.stream_type(self, self._next, request)
        self.write(FrameType.OPEN, self._next, request.encode())
        self._streams[self._next] = stream
        self._next += 2
        return stream

    @property
    def waiting(self) -> bool:
        """Whether anything was asked that has not been answered to its end."""
        return bool(self._streams)

    @property
    def asked(self) -> int:
        """How many streams of ours are open; MAX_STREAMS at most may be."""
        return len(self._streams)

    @property
    def serving(self) -> int:
        """How many streams of the agent's are open."""
        return len(self._served)

    def forget(self, stream_id: int) -> None:
        if self._served.pop(stream_id, None) is not None:
            self._closing.append(self._outgoing.end)
        else:
            super().forget(stream_id)

    def _everybody(self) -> list[Any]:
        return [*self._streams.values(), *self._served.values()]

    def _on_stream_frame(self, frame: Frame) -> None:
        if frame.stream % 2 == 0:
            self._on_agents_stream(frame)
            return
        stream = self._streams.get(frame.stream)
        if stream is None or frame.type in _OPENERS:
            raise ProtocolError(f"{frame.type.name} for stream {frame.stream}, which is not open")
        stream._handle(frame)

    def _on_agents_stream(self, frame: Frame) -> None:
        if frame.type in _ANSWERERS:
            raise ProtocolError(f"{frame.type.name} for stream {frame.stream}, which is the agent's own")
        if frame.type is FrameType.OPEN:
            self._on_open(frame)
        elif frame.stream in self._served:
            self._served[frame.stream]._handle(frame)
        elif frame.stream > self._last_served:
            raise ProtocolError(f"{frame.type.name} for stream {frame.stream}, which was never opened")
        # else: closed already; it crossed our CLOSE on the wire

    def _on_open(self, frame: Frame) -> None:
        if frame.stream <= self._last_served or (self._accept is None and not self._refuse):
            raise ProtocolError(f"OPEN with stream id {frame.stream}")
        while self._closing and self._closing[0] <= self._outgoing.sent:
            self._closing.popleft()
        if len(self._closing) > MAX_STREAMS:
            raise ProtocolError("streams are opened and opened without reading the answers")
        self._last_served = frame.stream
        stream = AgentStream(self, frame.stream, decode_fields(frame.payload))
        full = len(self._served) >= MAX_STREAMS
        self._served[frame.stream] = stream
        if full:
            stream.refuse(errno.EMFILE, "too many streams are open at once")
        elif self._accept is None:
            stream.refuse(errno.EACCES, "this sandbox has no network")
        else:
            self._try_accept(self._accept, stream)

    def _try_accept(self, accept: Callable[[AgentStream], None], stream: AgentStream) -> None:
        try:
            accept(stream)
        except Exception as error:  # whatever it is, no agent may wait for ever, and nothing is let through
            stream.refuse(errno.EIO, "the host failed to serve this")
            self._loop.call_exception_handler({"message": "a sandbox's stream could not be served", "exception": error})


class AgentMux(Mux):
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

    def _on_stream_frame(self, frame: Frame) -> None:
        if frame.type is FrameType.OPEN:
            if frame.stream <= self._last or frame.stream % 2 == 0:
                raise ProtocolError(f"OPEN with stream id {frame.stream}")
            self._last = frame.stream
            stream = AgentStream(self, frame.stream, decode_fields(frame.payload))
            self._streams[frame.stream] = stream
            if len(self._streams) > MAX_STREAMS:
                stream.refuse(errno.EMFILE, "too many streams are open at once")
                return
            self._accept(stream)
            return
        known = self._streams.get(frame.stream)
        if known is not None:
            known._handle(frame)
        elif frame.stream > self._last or frame.stream % 2 == 0:
            raise ProtocolError(f"{frame.type.name} for stream {frame.stream}, which was never opened")


def request(op: Op, *items: tuple[Tag, int | bytes | str]) -> Fields:
    """The fields of an OPEN."""
    return Fields((Tag.OP, int(op)), *items)
