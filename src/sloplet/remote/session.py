"""The client's end of a session with a server: a multiplexer whose bytes go by whatever WebSocket there is just now.

What is written waits here while there is none, and while the server has not used what it was sent before; a
``TunnelMux`` takes that for congestion, as of any slow connection.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable
from typing import Any

from .. import __version__
from ..controller import Data
from ..errors import ProtocolError, SlopletError
from ..keeper.connection import KeeperMux, KeeperStream
from ..wire.fields import Fields
from ..wire.outgoing import WayOut
from ..wire.schema import INITIAL_CREDIT, Tag
from ..wire.session import WINDOW, ByteSession, gently
from .websocket import WebSocket

_MESSAGE = (1 << 18) + 4096  # four full frames, and a little
_QUIET = 1.0
_MOST_AHEAD = 1 << 20
_WIDEST = 4 * WINDOW
_LONGEST_GRACE = 86400.0
_ID_RE = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


class Session:
    """``lost`` is told once, when the server does not keep to the protocol."""

    def __init__(self, hello: dict[str, Any], lost: Callable[[Session, SlopletError], None]) -> None:
        if not isinstance(hello["session"], str) or not _ID_RE.match(hello["session"]):
            raise ProtocolError("a session without a name")
        self.id = hello["session"]
        # What the server says is not believed beyond reason: so long is waited for it, so much is kept for it.
        self.grace = min(_LONGEST_GRACE, max(0.0, float(hello["grace"])))
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self.bytes = ByteSession(window=min(_WIDEST, int(hello["window"])), takes=2 * WINDOW)
        self._socket: WebSocket | None = None
        self._quiet: asyncio.TimerHandle | None = None
        self._queue: deque[bytes | memoryview] = deque()
        self._flushing = False
        self.size = 0  #: bytes that wait here
        self.sent = 0  #: bytes that went, ever
        self.mux = TunnelMux(self)
        self.mux.hello(Fields((Tag.MESSAGE, __version__)))

    # -- its WebSocket -----------------------------------------------------------------

    def attach(self, socket: WebSocket, received: int) -> None:
        """Go on over this one: the server has ``received`` bytes. ProtocolError if it cannot have."""
        again = self.bytes.again(received)
        self._socket = socket
        for piece in gently(again):
            socket.send_binary(piece)
        socket.send_text(json.dumps({"ack": self.bytes.ack()}))
        self.flush()

    @property
    def attached(self) -> bool:
        """Whether it has a connection now."""
        return self._socket is not None

    def detach(self) -> None:
        self._socket = None

    def on_binary(self, data: bytes) -> None:
        try:
            self.bytes.take(len(data))
        except ProtocolError as error:
            self._lost(self, error)
            return
        self.mux.feed(data)
        self.bytes.use(len(data))
        if self.bytes.ack_due:
            self._acknowledge()
        elif self._quiet is None:
            self._quiet = self._loop.call_later(_QUIET, self._acknowledge)

    def on_text(self, text: str) -> None:
        try:
            self.bytes.on_ack(int(json.loads(text)["ack"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self._lost(self, ProtocolError("the server sent a message that is not understood"))
        except ProtocolError as error:
            self._lost(self, error)
        else:
            self.flush()

    def _acknowledge(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None
        if self._socket is not None and self.bytes.untold:
            self._socket.send_text(f'{{"ack":{self.bytes.ack()}}}')

    # -- wire.outgoing.WayOut ----------------------------------------------------------

    @property
    def waiting(self) -> int:
        return self.size

    @property
    def end(self) -> int:
        return self.sent + self.size

    def hold(self) -> None:
        raise NotImplementedError("nothing is saved over a tunnel")

    def let_go(self) -> None:
        raise NotImplementedError("nothing is saved over a tunnel")

    def put(self, *parts: bytes) -> None:
        for part in parts:
            self._queue.append(part)
            self.size += len(part)
        if not self._flushing:  # all that is said in one step of the loop is one message
            self._flushing = True
            self._loop.call_soon(self.flush)

    def stop(self) -> None:
        self._queue.clear()
        self.size = 0
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None

    def flush(self) -> None:
        """Send what may go now."""
        self._flushing = False
        waited = self.mux.congested
        while self._queue and self._socket is not None and self._socket.writable and self.bytes.room > 0:
            message = self._take(min(self.bytes.room, _MESSAGE))
            self.bytes.put(message)
            self.size -= len(message)
            self.sent += len(message)
            self._socket.send_binary(message)
        if waited and not self.mux.congested:
            self.mux.drained_now()

    def _take(self, most: int) -> bytes:
        parts: list[bytes | memoryview] = []
        while self._queue and most > 0:
            piece = self._queue.popleft()
            if len(piece) > most:
                self._queue.appendleft(memoryview(piece)[most:])
                piece = memoryview(piece)[:most]
            parts.append(piece)
            most -= len(piece)
        return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)


class TunnelStream(KeeperStream):
    """A stream whose reader proves quick is sent more ahead: the way is longer than that to a keeper."""

    _eaten = 0
    _more = INITIAL_CREDIT

    async def recv(self, *, auto_credit: bool = True) -> Data | None:
        piece = await super().recv(auto_credit=auto_credit)
        if piece is not None and auto_credit and self._more <= _MOST_AHEAD:
            self._eaten += len(piece.data)
            if self._eaten >= 2 * self._more:
                self.grant(self._more)
                self._eaten, self._lump, self._more = 0, self._more, self._more * 2
        return piece


class TunnelMux(KeeperMux):
    """The opener's side, over a session."""

    stream_type = TunnelStream

    def __init__(self, session: Session) -> None:
        self._session = session
        super().__init__(-1, -1, on_lost=self._on_wrong, refuse=False)

    def _way_out(self, write_fd: int) -> WayOut:
        return self._session

    def _watch(self) -> None:
        pass  # what comes is fed

    def _unwatch(self) -> None:
        pass

    def drained_now(self) -> None:
        self._on_drained()

    def _on_wrong(self, error: SlopletError) -> None:
        self._session._lost(self._session, error)
