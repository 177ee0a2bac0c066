"""One TCP socket tied to one stream that we opened: bytes both ways, half-close, reset, credit for back-pressure.

No task and no thread: ``_pump`` runs when something has arrived on the stream, the loop calls when the socket is ready.
At most one window (256 KiB) a direction is ever held here; a side that does not read holds up the other.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from ..wire.schema import INITIAL_CREDIT, MAX_PAYLOAD, Tag
from ..wire.streams import HostStream

_LUMP = INITIAL_CREDIT // 2
_RESET, _ORDER = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)  # SO_LINGER: what closing it is


def resets(sock: socket.socket, how: bytes = _RESET) -> None:
    """Whatever closes it is a reset to the other side, also the end of this process: an end by force must not be taken
    for an end in order. From its first moment on; ``close_socket`` ends it in order nevertheless."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, how)


def close_socket(sock: socket.socket, *, reset: bool) -> None:
    """Close it; with a reset, or in order: then what was sent still goes out."""
    resets(sock, _RESET if reset else _ORDER)
    sock.close()


class Tie:
    """Owns both from now on. ``on_done`` is called once, when the socket is closed."""

    def __init__(self, stream: HostStream, connection: socket.socket, on_done: Callable[[Tie], None]) -> None:
        self._stream = stream
        self._socket = connection
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self._rest = memoryview(b"")  # of the stream's, that the kernel did not take yet
        self._taken = 0  # of the stream's, and not yet granted back
        self._reading = self._writing = False
        self._eof = self._shut = self._done = False
        self._stalled = False  # the wire is congested
        connection.setblocking(False)
        resets(connection)

    def start(self) -> None:
        self._stream.on_change(self._pump)
        self._pump()

    def cut(self) -> None:
        """Both sides see a reset. Idempotent."""
        if not self._done:
            self._stream.on_change(None)
            self._stream.reset()
            self._finish(reset=True)

    def forget(self) -> None:
        """In a forked child: the connection is the parent's."""
        self._done = True
        self._socket.close()

    # -- stream to socket --------------------------------------------------------------

    def _pump(self) -> None:
        """Runs inside the mux's dispatch: it must not raise."""
        if self._done:
            return
        try:
            if not self._writing:
                self._inwards()
            if not self._done:
                self._want_input()
        except OSError:
            self.cut()

    def _inwards(self) -> None:
        stream = self._stream
        while True:
            if not self._rest:
                piece = stream.take()
                if piece is None:
                    break
                self._rest = memoryview(piece.data)
            try:
                sent = self._socket.send(self._rest)
            except (BlockingIOError, InterruptedError):
                sent = 0
            self._rest = self._rest[sent:]
            self._taken += sent
            if self._taken >= _LUMP:
                stream.grant(self._taken)
                self._taken = 0
            if self._rest:
                self._want_room(True)
                return
        self._want_room(False)
        if stream.outcome is not None:
            self._finish(reset=Tag.ERRNO in stream.outcome)
        elif stream.mux.error is not None:
            self._finish(reset=True)
        elif stream.peer_ended and not self._shut:
            self._shut = True
            self._socket.shutdown(socket.SHUT_WR)

    def _want_room(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._socket, self._on_writable)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._socket)
        self._writing = wanted

    def _on_writable(self) -> None:
        try:
            self._inwards()
        except OSError:
            self.cut()

    # -- socket to stream --------------------------------------------------------------

    def _want_input(self) -> None:
        wanted = not self._eof and self._stream.credit > 0 and not self._stalled
        if wanted and not self._reading:
            self._loop.add_reader(self._socket, self._on_readable)
        elif self._reading and not wanted:
            self._loop.remove_reader(self._socket)
        self._reading = wanted

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(min(MAX_PAYLOAD, self._stream.credit))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.cut()
            return
        if data:
            self._stream.send_now(data)
        else:
            self._eof = True
            self._stream.end_now()
        if self._stream.mux.congested:
            self._stalled = True
            self._stream.mux.when_drained(self._drained)
        self._want_input()

    def _drained(self) -> None:
        self._stalled = False
        self._pump()

    # -- end ---------------------------------------------------------------------------

    def _finish(self, *, reset: bool) -> None:
        self._done = True
        self._stream.on_change(None)
        if self._reading:
            self._loop.remove_reader(self._socket)
        if self._writing:
            self._loop.remove_writer(self._socket)
        close_socket(self._socket, reset=reset)
        self._on_done(self)
