"""The HTTP protocol of the server: uvicorn's, with bounds for those who have shown no key yet.

- A connection that asks nothing, or does not come to the end of its request's head, is closed after a while; a head has
  a longest length. (uvicorn counts only the time between two requests.)
- At most so many connections at a time. When there are more, the one that has been idle longest goes; if none is, the
  new one is answered 503.
- A body that nobody wants any more, because its request was refused, is read on for a while, so that the client sees
  the answer instead of a connection that breaks; then the connection is closed.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import struct
from collections import OrderedDict
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState as UvicornState

from ..errors import RequestInvalid, ServerBusy, SlopletError
from .metrics import Metrics
from .problems import MEDIA_TYPE, problem

HEAD_SECONDS = 15.0  #: from the connect to the end of a request's head
IDLE_SECONDS = 75.0  #: from an answer to the end of the next one's
LINGER_SECONDS = 10.0
MAX_HEAD = 64 << 10  #: bytes
_UNWANTED, _REST = 4 << 20, 0.01  # after so many bytes of an unwanted body, so many seconds of rest
_SMALL = 1 << 16  # bytes of a body that is worth being copied
_OWN_FILES = 40  # what the server itself needs, without connections


def most_connections(wanted: int) -> int:
    """How many there can be. Raises what this process may open as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 2 * wanted + 1024  # a connection may need one to a keeper besides its own
    if soft != resource.RLIM_INFINITY and soft < enough:
        soft = enough if hard == resource.RLIM_INFINITY else min(hard, enough)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(8, soft - soft // 8 - _OWN_FILES))


class Door:
    """What the connections of a server share. ``most``: how many there may be."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most = most
        self.metrics = metrics
        self.idle: OrderedDict[BoundedHttp, None] = OrderedDict()  #: without a request; the longest first

    def protocol(
        self, config: Config, server_state: UvicornState, app_state: dict[str, Any], _loop: Any = None
    ) -> BoundedHttp:
        """For ``uvicorn.Config(http=...)``."""
        return BoundedHttp(self, config, server_state, app_state, _loop)


class _Joining:
    """A transport that sends an answer's head together with what follows in the same step: uvicorn writes them one
    after the other, and whoever reads would be woken twice."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data if len(data) < _SMALL else head)
            if len(data) < _SMALL:
                return
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHttp(HttpToolsProtocol):
    def __init__(
        self, door: Door, config: Config, server_state: UvicornState, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._door = door
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._unread = 0  # bytes of a head that has not come to its end
        self._head = 0  # bytes of its headers
        self._whole = True  # whether the body of the last request was read to its end
        self._unwanted = 0  # bytes of one that was thrown away

    # -- connections -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Joining(transport, self.loop))  # type: ignore[arg-type]
        door = self._door
        door.metrics.connections += 1
        if len(self.connections) > door.most:
            door.metrics.crowded += 1
            if not door.idle:
                self._refuse_connection()
                return
            oldest, _ = door.idle.popitem(last=False)
            oldest.transport.abort()
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._busy()
        super().connection_lost(exc)

    def _busy(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._door.idle.pop(self, None)

    def _wait(self, seconds: float) -> None:
        """Nothing is being done for it: it may be closed, and is at the latest after that time."""
        self._busy()
        self._door.idle[self] = None
        self._timer = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._busy()
        if not self.transport.is_closing():
            self._door.metrics.timed_out += 1
            self.transport.abort()

    def _abort(self) -> None:
        """Reset the connection, in the middle of an answer: whoever reads it is to know that it is not whole."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _refuse_connection(self) -> None:
        error = ServerBusy("the server has as many connections as it can have", hint="try again later", retry_after=2)
        self._last_words("503 Service Unavailable", error, "retry-after: 2\r\n")

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered as all else that is wrong."""
        self._last_words("400 Bad Request", RequestInvalid(msg))

    def _last_words(self, status: str, error: SlopletError, more: str = "") -> None:
        body = json.dumps(problem(error)).encode()
        head = f"HTTP/1.1 {status}\r\n{more}content-type: {MEDIA_TYPE}\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()

    # -- requests ----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            if self._unread > MAX_HEAD:
                self.send_400_response("the head of the request is too long")
                return
            self._unread += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["sloplet.abort"] = self._abort  # type: ignore[typeddict-unknown-key]
        self._in_head, self._unread, self._head = True, 0, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head += len(name) + len(value)

    def on_headers_complete(self) -> None:
        self._in_head, self._whole = False, False
        if self._head + len(self.url) > MAX_HEAD or not self.url.startswith(b"/"):
            # The parser makes "400" of this. Of "GET http://name/" that name would be the Host, which nobody checks.
            raise ValueError("a head that is too long, or a target that is no path")
        self._busy()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:  # read to be thrown away, and not as fast as it comes
            self._unwanted += len(body)
            if self._unwanted > _UNWANTED:
                self._unwanted = 0
                self.flow.pause_reading()
                self.loop.call_later(_REST, self.flow.resume_reading)

    def on_message_complete(self) -> None:
        self._whole = True
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete and not self.transport.is_closing():
            self._wait(IDLE_SECONDS)

    def on_response_complete(self) -> None:
        more = bool(self.pipeline)
        super().on_response_complete()
        if not more and not self.transport.is_closing():
            self._unset_keepalive_if_required()  # its timer; ours knows of bodies, too
            self._wait(IDLE_SECONDS if self._whole else LINGER_SECONDS)
