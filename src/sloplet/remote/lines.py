"""HTTP/1.1 for what is small and often: JSON there, JSON back, over connections that stay. httptools reads the answers.

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

import httptools

from .place import Place

MOST_IDLE = 16
MOST = 128  #: requests at a time; others wait
_EXPIRES = 45.0  # seconds that an idle connection is trusted: less than the server keeps it
_MOST_HEAD = 1 << 18
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
    """One connection: one request at a time. Also what its parser tells."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._seen = 0  # bytes of a head that has not come to its end
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._headed = False  # whether the head has
        self.open = False
        self.idle_since = 0.0

    async def ask(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        assert self._transport is not None
        if not self.open:
            raise Lost("the connection was closed", sent=False)
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._seen, self._headed, self._headers, self._body = 0, False, {}, bytearray()
        head = f"{method} {target} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers) + "\r\n"
        self._transport.write(head.encode("latin-1") + body)
        try:
            return await self._answer
        except BaseException:
            self.close()
            raise

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
        try:
            self._take(data)
        except httptools.HttpParserUpgrade:
            self._fail(Lost("the server speaks of something else", sent=True))
        except httptools.HttpParserError as error:
            why = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
            self._fail(Lost(why or error, sent=True, foreign=not self._headed))

    def _take(self, data: bytes) -> None:
        if not self._headed:
            first = data[: 5 - self._seen] if self._seen < 5 else b""
            if first and not b"HTTP/"[self._seen :].startswith(first):
                raise httptools.HttpParserError("this is not HTTP")
            self._seen += len(data)
        self._parser.feed_data(data)
        if not self._headed and self._seen > _MOST_HEAD:
            raise httptools.HttpParserError("the head of the answer is too long")

    def eof_received(self) -> None:
        """An answer of no said length ends here."""
        if self._headed and not {"content-length", "transfer-encoding"} & self._headers.keys():
            self.on_message_complete()
        self.open = False

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._fail(Lost(error or "the server closed the connection", sent=True))

    def _fail(self, lost: Lost) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(lost)
        self.close()

    # -- of its parser -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._answer is not None and self._answer.done():
            self._headers, self._body = {}, bytearray()  # those are the answer's
            self.close()  # nobody asked for more

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headed = True

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > MOST_BODY:
            raise httptools.HttpParserError("the answer is too long")

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # the answer is still to come
            self._headers, self._headed = {}, False
            return
        if not self._parser.should_keep_alive():
            self.open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Answer(status, self._headers, bytes(self._body)))


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
        if line.open and len(self._idle) < MOST_IDLE:
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
