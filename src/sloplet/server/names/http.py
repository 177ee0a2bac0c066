"""One HTTP request of a visitor, carried to a port inside, and the answer carried back. Bodies are streamed.

Two tasks: one feeds the visitor's body inwards and notices when the visitor has gone, the other brings the answer.
Whichever ends first ends the other. The answer is read by h11 and written anew by the server: bytes from inside never
reach a visitor as a head.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass

import h11
from starlette.types import Receive, Send

from ...errors import SandboxNotFound, SlopletError
from .parts import Headers, Unsafe, answer_length, outer_headers
from .wires import Broken, Refusal, Way, Wire, Wires

_HEAD = 300.0  # until an answer begins
_QUIET = 3600.0  # that an answer may say nothing
_VISITOR = 120.0  # that a visitor may take to read or send the next piece
_CONTINUE = 1.0  # what a visitor that expects "100 Continue" is made to wait for it
_MOST_HINTS = 16  # answers of the 1xx kind before the one that counts
_REPEATABLE = frozenset(("GET", "HEAD", "OPTIONS"))


@dataclass(frozen=True)
class Asked:
    """A request as it goes in. ``length`` None: chunked."""

    method: str
    target: bytes
    headers: Headers
    length: int | None
    expects: bool = False  #: the visitor waits for "100 Continue" before it sends its body
    max_body: int = 1 << 40


class Exchange:
    """``run`` once. Refusal only while nothing was answered; afterwards the connection is cut short instead."""

    def __init__(self, wires: Wires, way: Way, asked: Asked, receive: Receive, send: Send) -> None:
        self._wires, self._way, self._place, self._asked = wires, way, way.place, asked
        self._receive, self._send = receive, send
        self._wire: Wire | None = None
        self._go = asyncio.Event()  # the body may be sent
        self._patience: asyncio.Timeout | None = None  # while the answer has not begun
        self.begun = False  # the visitor has been told something

    async def run(self) -> None:
        answering = asyncio.ensure_future(self._answer())
        feeding = asyncio.ensure_future(self._feed())
        try:
            await asyncio.wait((answering, feeding), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():  # the visitor has gone, or sent what it may not
                answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            if not answering.cancelled():
                self._told(answering.exception())
            elif feeding.done() and not feeding.cancelled():
                self._told(feeding.exception())
        finally:
            for task in (answering, feeding):
                task.cancel()
            await asyncio.gather(answering, feeding, return_exceptions=True)
            self._let_go()

    def _told(self, error: BaseException | None) -> None:
        """What failed, if anything, as the visitor is told: not at all once an answer has begun."""
        if error is None or self.begun:
            return
        if isinstance(error, (h11.RemoteProtocolError, ssl.SSLError, Unsafe)):
            raise Refusal(502, f"what answers on port {self._place.port} inside does not speak proper HTTP/1.1")
        if isinstance(error, Broken):
            raise Refusal(502, f"the server on port {self._place.port} inside closed the connection without an answer")
        if isinstance(error, TimeoutError):
            raise Refusal(504, f"the server on port {self._place.port} inside did not answer within {_HEAD:g} s")
        if isinstance(error, SlopletError) and not isinstance(error, SandboxNotFound):
            raise Refusal(503, "the sandbox stopped in the middle of it", "try again", error=type(error).__name__)
        raise error

    def _let_go(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            self._wires.keep(self._way, wire)

    # -- inwards -----------------------------------------------------------------------

    async def _feed(self) -> None:
        """Send the body, then wait until the visitor goes. Ends before the answer only if there is nobody to answer,
        or with a Refusal."""
        if self._asked.length != 0:
            await self._go.wait()
        sent, more = 0, True
        while more:
            try:
                async with asyncio.timeout(_VISITOR):
                    message = await self._receive()
            except TimeoutError:
                raise Refusal(408, "the rest of the request did not come", error="RequestInvalid") from None
            if message["type"] != "http.request":
                return
            data, more = message.get("body", b""), message.get("more_body", False)
            sent += len(data)
            if sent > self._asked.max_body:
                raise Refusal(413, "the body is larger than this server takes", error="RequestInvalid")
            if data:
                await self._pass(h11.Data(data=data))
        if self._asked.length != 0:
            await self._pass(h11.EndOfMessage())
        while (await self._receive())["type"] == "http.request":
            pass

    async def _pass(self, event: h11.Event) -> None:
        if self._wire is not None:
            # Inside nobody may want it any more: the answer tells that.
            with suppress(h11.LocalProtocolError, ssl.SSLError, SlopletError):
                await self._wire.send(event)
            if self._patience is not None and not self._patience.expired():  # a long upload is no silence
                self._patience.reschedule(asyncio.get_running_loop().time() + _HEAD)

    # -- outwards ----------------------------------------------------------------------

    async def _answer(self) -> None:
        repeatable = self._asked.method in _REPEATABLE and self._asked.length == 0
        response = await self._ask(kept=repeatable)
        if response is None:
            response = await self._ask(kept=False)
        if response is None:
            raise Broken
        await self._pass_on(response)

    async def _ask(self, *, kept: bool) -> h11.Response | None:
        """The head of the answer; None if a kept connection was none any more. Nothing was done then: the request may
        be repeated, and is not known to have arrived."""
        wire = self._wire = await self._wires.wire(self._way, kept=kept)
        try:
            await wire.send(self._head())
            if self._asked.length == 0:
                await wire.send(h11.EndOfMessage())
            if not self._asked.expects:
                self._go.set()
            async with asyncio.timeout(_HEAD) as self._patience:
                return await self._first(wire)
        except (Broken, SlopletError, ssl.SSLError, h11.RemoteProtocolError):
            if wire.fresh or wire.heard:
                raise
            wire.stream.reset()
            self._wire = None
            return None
        finally:
            self._patience = None

    def _head(self) -> h11.Request:
        asked = self._asked
        headers = list(asked.headers)
        if asked.length is None:
            headers.append((b"transfer-encoding", b"chunked"))
        elif asked.length or asked.method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
            headers.append((b"content-length", str(asked.length).encode()))
        if asked.expects:
            headers.append((b"expect", b"100-continue"))
        try:
            return h11.Request(method=asked.method, target=asked.target, headers=headers)
        except h11.LocalProtocolError:
            raise Refusal(400, "this request cannot be passed on", error="RequestInvalid") from None

    async def _first(self, wire: Wire) -> h11.Response:
        waiting = None
        if self._asked.expects:  # a server that does not know it waits for the body
            waiting = asyncio.get_running_loop().call_later(_CONTINUE, self._go.set)
        try:
            for _ in range(_MOST_HINTS):
                event = await wire.next_event()
                if isinstance(event, h11.Response):
                    return event
                if not isinstance(event, h11.InformationalResponse) or event.status_code == 101:
                    raise Broken
                self._go.set()
        finally:
            if waiting is not None:
                waiting.cancel()
        raise Unsafe("too many answers before the answer")

    async def _pass_on(self, response: h11.Response) -> None:
        wire = self._wire
        assert wire is not None
        status = response.status_code
        if not 200 <= status <= 599:
            raise Unsafe("a status that is none")
        length = answer_length(response.headers)
        headers = outer_headers(response.headers)
        if length is not None and status not in (204, 304):
            headers.append((b"content-length", str(length).encode()))
        self.begun = True
        await self._tell({"type": "http.response.start", "status": status, "headers": headers})
        while True:
            async with asyncio.timeout(_QUIET):
                event = await wire.next_event()
            if isinstance(event, h11.Data):
                await self._tell({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                raise Broken
        await self._tell({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tell(self, message: dict[str, object]) -> None:
        async with asyncio.timeout(_VISITOR):
            await self._send(message)
