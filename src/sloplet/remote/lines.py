"""HTTP/1.1 for what is small and often: JSON there, JSON back, over connections that stay. h11 speaks the protocol.

httpx does the rest (``http.py``): proxies, and bodies that are streamed. Here it would cost a millisecond a request,
and a tenth of a second to import.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import h11

from .place import Place

MOST_IDLE = 16
MOST = 128  #: requests at a time; others wait
_EXPIRES = 45.0  # seconds that an idle connection is trusted: less than the server keeps it
MOST_BODY = 1 << 28  #: bytes of an answer
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


class Lost(Exception):
    """No answer came. ``sent``: the request may have reached the server. ``foreign``: what came is not HTTP."""

    def __init__(self, why: BaseException | str, *, sent: bool, foreign: bool = False) -> None:
        super().__init__(str(why))
        self.why = why
        self.sent = sent
        self.foreign = foreign


class Answer:
    """What the server said."""

    __slots__ = ("content", "headers", "status_code")

    def __init__(self, status_code: int, headers: dict[str, str], content: bytes) -> None:
        self.status_code = status_code
        self.headers = headers  #: names in small letters
        self.content = content

    def json(self) -> Any:
        return json.loads(self.content)


class _Line(asyncio.Protocol):
    """One connection: one request at a time."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 18)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._head: h11.Response | None = None
        self._body = bytearray()
        self.open = False
        self.idle_since = 0.0

    async def ask(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        assert self._transport is not None
        if not self.open:
            raise Lost("the connection was closed", sent=False)
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        http = self._http
        parts = [http.send(h11.Request(method=method, target=target, headers=headers))]
        if body:
            parts.append(http.send(h11.Data(data=body)))
        parts.append(http.send(h11.EndOfMessage()))
        self._transport.write(b"".join(part for part in parts if part))
        try:
            return await self._answer
        except BaseException:
            self.close()
            raise

    def reusable(self) -> bool:
        """Make it ready for the next request, if it can be."""
        if not self.open or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True
        found = transport.get_extra_info("socket")
        for option in KEEP_ALIVE if found is not None else ():
            with suppress(OSError):
                cast(socket.socket, found).setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nobody asked
            return
        self._take(data)

    def eof_received(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._take(b"")

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Lost(error or "the server closed the connection", sent=True))

    def _take(self, data: bytes) -> None:
        assert self._answer is not None
        http = self._http
        try:
            http.receive_data(data)
            if self._head is None and not b"HTTP/".startswith(bytes(http.trailing_data[0][:5])):
                raise h11.RemoteProtocolError("this is not HTTP")  # h11 would wait for more of it
            while (event := http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    self._head = event
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > MOST_BODY:
                        raise h11.RemoteProtocolError("the answer is too long")
                elif isinstance(event, h11.EndOfMessage):
                    self._done()
                    return
                elif isinstance(event, h11.ConnectionClosed):
                    raise h11.RemoteProtocolError("the server closed the connection")
        except h11.RemoteProtocolError as error:
            self._answer.set_exception(Lost(error, sent=True, foreign=bool(data) and self._head is None))
            self.close()

    def _done(self) -> None:
        assert self._answer is not None
        assert self._head is not None
        names = {name.decode("latin-1"): value.decode("latin-1") for name, value in self._head.headers}
        self._answer.set_result(Answer(self._head.status_code, names, bytes(self._body)))
        self._head = None
        self._body.clear()


class Lines:
    """The connections to one server. Belongs to one loop."""

    def __init__(self, place: Place, headers: Mapping[str, str]) -> None:
        self._place = place
        host = f"[{place.host}]" if ":" in place.host else place.host
        self._headers = [("Host", f"{host}:{place.port}"), *headers.items()]
        self._idle: list[_Line] = []
        self._turns = asyncio.Semaphore(MOST)

    async def ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes, connect: float) -> Answer:
        """``Lost`` if no answer came."""
        sent = [*self._headers, *headers.items()]
        if body or method in ("POST", "PUT", "PATCH"):
            sent.append(("Content-Length", str(len(body))))
        async with self._turns:
            line = self._take() or await self._connect(connect)
            answer = await line.ask(method, target, sent, body)
        if line.reusable() and len(self._idle) < MOST_IDLE:
            line.idle_since = asyncio.get_running_loop().time()
            self._idle.append(line)
        else:
            line.close()
        return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def forget(self) -> None:
        """In a forked child: they are the parent's, and are neither used nor closed here."""
        _graveyard.append(self._idle)
        self._idle = []

    def _take(self) -> _Line | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            line = self._idle.pop()
            if line.open and now - line.idle_since < _EXPIRES:
                return line
            line.close()
        return None

    async def _connect(self, timeout: float) -> _Line:
        place = self._place
        context = place.context()
        try:
            async with asyncio.timeout(timeout):
                _, line = await asyncio.get_running_loop().create_connection(
                    _Line, place.host, place.port, ssl=context, server_hostname=place.host if context else None
                )
        except OSError as error:  # TimeoutError is one
            raise Lost(error, sent=False) from error
        return line


_graveyard: list[object] = []
