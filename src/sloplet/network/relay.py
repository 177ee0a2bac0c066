"""One connection of a program inside, tied to a socket of the host. Callbacks only: no task, and one buffer.

- in (socket to sandbox): read only while the stream has credit, the wire is not congested, and the meter gives room;
  what is read is sent at once. A program that reads slowly costs the window that the agent holds, and nothing here.
- out (sandbox to socket): credit goes back as the kernel takes the bytes; what it does not take yet waits, bounded by
  that credit. ``outward`` sees every byte first: it may hold some back, and refuse.

Each direction ends by itself (a half close); when both have, the connection is done.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Protocol

from ..wire.fields import Fields
from ..wire.mux import AgentStream
from ..wire.schema import INITIAL_CREDIT, MAX_PAYLOAD, Channel, Tag
from .channel import Refused
from .limits import Meter
from .tie import close_socket

_LUMP = INITIAL_CREDIT // 4


class Outward(Protocol):
    """What a sandbox sends, before it leaves. ``feed`` may ``detach`` the relay: what it returns is then dropped."""

    def feed(self, data: bytes) -> bytes:
        """What may go out now. Refused."""

    def end(self) -> bytes:
        """The sandbox has sent all: what was held back. Refused."""

    @property
    def done(self) -> bool:
        """Nothing more is to be looked at: from now on all may pass."""


class Relay:
    """``on_end(relay, errno, error)`` is called once, after both sides were closed: errno 0 if both ended in order;
    ``error``: what ``outward`` raised."""

    def __init__(
        self,
        stream: AgentStream,
        sock: socket.socket,
        meter: Meter,
        on_end: Callable[[Relay, int, Exception | None], None],
    ) -> None:
        self.bytes_out = 0
        self.bytes_in = 0
        self.outward: Outward | None = None
        self._stream = stream
        self._sock = sock
        self._fd = sock.fileno()
        self._meter = meter
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._reading = self._writing = False
        self._stalled_in = self._stalled_out = False  # it waits for the wire, or for the meter
        self._rest: memoryview | None = None  # what the kernel has not taken
        self._owed = 0  # credit to be granted once it has
        self._sent_all = self._heard_all = False
        self._done = False

    def start(self) -> None:
        self._stream.on_change(self._changed)
        self._changed()

    @property
    def done(self) -> bool:
        return self._done

    def fileno(self) -> int:
        return self._fd

    def cut(self, code: int = errno.ECONNRESET) -> None:
        """End it now, with a reset to both sides. Idempotent."""
        self._end(code)

    def detach(self) -> socket.socket:
        """Let go of both sides, for somebody else to go on with them. What ``outward`` was given and held is his."""
        self._done = True
        self._let_go()
        self._stream.grant(self._owed)
        return self._sock

    def release(self, held: Callable[[], bytes]) -> None:
        """What ``outward`` has held back until now goes out; ``held`` gives it, and may refuse."""
        if not self._done:
            self._guarded(lambda: self._release(held()))

    def _release(self, data: bytes) -> None:
        if data:
            self._rest = memoryview(bytes(self._rest or b"") + data)
            if not self._writing and not self._stalled_out:
                self._push()

    def _changed(self) -> None:
        """Something came from the sandbox. Runs inside the mux's dispatch: it must not raise."""
        if self._done:
            return
        stream = self._stream
        if stream.was_reset or stream.mux.error is not None:
            self._end(errno.ECONNRESET)
            return
        if self._rest is None and not self._stalled_out:
            self._guarded(self._push)
        if not self._done:
            self._guarded(self._look)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._end(error.errno or errno.EIO)
        except Refused as error:
            self._end(errno.EACCES, error)
        except Exception as error:
            self._end(errno.EIO, error)

    # -- from the sandbox ----------------------------------------------------------------

    def _push(self) -> None:
        stream = self._stream
        while not self._done:
            if self._rest is None and not self._next():
                break
            if not self._drain():
                return
        if not self._done and stream.peer_ended and not self._sent_all:
            self._finish_out()

    def _next(self) -> bool:
        """Take the next piece to be sent. False if there is none."""
        while True:
            piece = self._stream.take()
            if piece is None:
                return False
            data = piece.data
            self._owed += len(data)
            if self.outward is not None:
                data = self.outward.feed(data)
                if self._done:
                    return False
                if self.outward.done:
                    self.outward = None
            if data:
                self._rest = memoryview(data)
                return True

    def _drain(self) -> bool:
        """Send what is there. False if something is left."""
        while self._rest is not None:
            room = self._meter.room()
            if not room:
                self._stalled_out = True
                self._meter.wait(self._go_on_out)
                return False
            try:
                sent = self._sock.send(self._rest[:room])
            except BlockingIOError:
                self._write_later()
                return False
            self._meter.count(sent)
            self.bytes_out += sent
            self._rest = self._rest[sent:] if sent < len(self._rest) else None
        if self._owed >= _LUMP:
            self._stream.grant(self._owed)
            self._owed = 0
        return True

    def _finish_out(self) -> None:
        if self.outward is not None:
            data, self.outward = self.outward.end(), None
            if data:
                self._rest = memoryview(data)
                if not self._drain():
                    return
        self._sent_all = True
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
        self._end_if_over()

    def _write_later(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        self._writing = False
        self._loop.remove_writer(self._fd)
        self._guarded(self._push)

    def _go_on_out(self) -> None:
        self._stalled_out = False
        if not self._done:
            self._guarded(self._push)

    # -- to the sandbox ------------------------------------------------------------------

    def _look(self) -> None:
        """Read the socket, or not."""
        wanted = not self._heard_all and not self._stalled_in and self._stream.credit > 0
        if wanted is not self._reading:
            self._reading = wanted
            if wanted:
                self._loop.add_reader(self._fd, self._readable)
            else:
                self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        self._guarded(self._pull)
        if not self._done:
            self._guarded(self._look)

    def _pull(self) -> None:
        stream = self._stream
        if stream.mux.congested:
            self._stalled_in = True
            stream.mux.when_drained(self._go_on_in)
            return
        room = self._meter.room()
        if not room:
            self._stalled_in = True
            self._meter.wait(self._go_on_in)
            return
        size = min(stream.credit, MAX_PAYLOAD, room)
        if size <= 0:
            return
        try:
            data = self._sock.recv(size)
        except (BlockingIOError, InterruptedError):
            return
        if data:
            self._meter.count(len(data))
            self.bytes_in += len(data)
            stream.send_now(data, Channel.OUT)
            return
        self._heard_all = True
        stream.end_now()
        self._end_if_over()

    def _go_on_in(self) -> None:
        self._stalled_in = False
        if not self._done:
            self._guarded(self._look)

    # -- ending --------------------------------------------------------------------------

    def _end_if_over(self) -> None:
        if self._sent_all and self._heard_all:
            self._end(0)

    def _end(self, code: int, error: Exception | None = None) -> None:
        if self._done:
            return
        self._done = True
        self._let_go()
        close_socket(self._sock, reset=bool(code))
        self._stream.close(closing(code))
        self._on_end(self, code, error)

    def _let_go(self) -> None:
        self._stream.on_change(None)
        if self._reading:
            self._loop.remove_reader(self._fd)
        if self._writing:
            self._loop.remove_writer(self._fd)
        self._reading = self._writing = False
        self._rest = None


def closing(code: int, message: str = "") -> Fields:
    """The fields of a CLOSE."""
    if not code:
        return Fields()
    return Fields((Tag.ERRNO, code), (Tag.MESSAGE, message or os.strerror(code)))
