"""The requests and responses of one HTTP/1 connection, each checked and written anew on its way.

Two tasks: the program's requests towards the server, the server's responses back. Bodies stream; what is held is
bounded whatever either side does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from . import http1, httpbody
from .channel import Channel, Refused, linger
from .guard import Guard
from .http1 import CHUNKED, UNTIL_CLOSE, HeadReader, Malformed, Request, Response
from .httpcopy import Copy, Cut, whole
from .httppath import judged_path
from .needles import Scanner
from .tls import TlsTruncated

_PIPELINED = 32
_BUFFERED_BODY = 1024 * 1024
_SHOWN_PATH = 2048
_LAST_WORDS_SECONDS = 30.0


class _ServerGone(Exception):
    """It takes no more; what it has said already still counts."""


@dataclass
class _Sent:
    """A request that waits for its response."""

    method: bytes
    minor: int
    websocket: bool
    #: Whether the server switched to what was asked for.
    switched: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def answer(status: str, reason: str, *, head_only: bool = False) -> bytes:
    """A whole response that says why, for whoever reads it inside."""
    text = f"sloplet: {reason}\n".encode()
    fields = (
        (b"Content-Type", b"text/plain; charset=utf-8"),
        (b"Content-Length", b"%d" % len(text)),
        (b"X-Sloplet-Denied", b"1"),
        (b"Connection", b"close"),
    )
    number, _, words = status.partition(" ")
    return Response(fields, 1, int(number), words.encode()).encode() + (b"" if head_only else text)


class Exchange:
    """One connection. ``run`` it once."""

    def __init__(self, client: Channel, server: Channel, guard: Guard, *, secure: bool) -> None:
        """``secure``: both channels are inside TLS, and the server was verified."""
        self._client = client
        self._server = server
        self._guard = guard
        self._secure = secure
        self._here = guard.secrets.at(guard.name, guard.port, secure=secure) if guard.secrets is not None else None
        self._pending: deque[_Sent] = deque()
        self._changed = asyncio.Event()
        self._responding = False  # bytes of a final response are on their way
        self._switched = False  # it is HTTP no more
        self._sending: Copy | None = None  # a request that has been forwarded in part
        self._method = b""  # of the request that is being looked at
        self.requests = 0  #: that were forwarded

    async def run(self) -> None:
        """Until it is over; see ``inspect.check_http``."""
        requests = asyncio.create_task(self._requests())
        responses = asyncio.create_task(self._responses())
        whole = False
        try:
            await self._both(requests, responses)
            whole = True
        finally:
            for task in (requests, responses):
                task.cancel()
            await asyncio.gather(requests, responses, return_exceptions=True)
            self._server.abort()
            if not whole:
                self._client.abort()

    async def _both(self, requests: asyncio.Task[None], responses: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait({requests, responses}, return_when=asyncio.FIRST_COMPLETED)
            if requests.done():
                requests.result()
                await asyncio.wait({responses})
        except _ServerGone:
            await asyncio.wait({responses})
        except Refused as why:
            await self._refuse(str(why), responses)
            return
        try:
            responses.result()
        except Malformed as why:
            await self._bad_server(str(why))
            return
        requests.cancel()
        await asyncio.wait({requests})
        await linger(self._client)

    async def _refuse(self, reason: str, responses: asyncio.Task[None]) -> None:
        """In words if no other response is in the way, else by a reset."""
        self._guard.refused(reason)
        ours = 1 if self._sending else 0
        if self._switched:
            self._client.abort()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._when(lambda: responses.done() or not (len(self._pending) > ours or self._responding))
        free = len(self._pending) == ours and not self._responding and not responses.done()
        responses.cancel()
        await asyncio.wait({responses})
        self._server.abort()
        if free:
            await self._client.write(answer("403 Forbidden", reason, head_only=self._method == b"HEAD"))
            await linger(self._client)
        else:
            self._client.abort()

    async def _bad_server(self, reason: str) -> None:
        self._guard.refused(reason)
        if not self._responding:
            await self._client.write(answer("502 Bad Gateway", reason))
            await linger(self._client)
        else:
            self._client.abort()

    async def _when(self, ready: Callable[[], bool]) -> None:
        """Wait for responses to be forwarded, until it is so."""
        while not ready():
            self._changed.clear()
            await self._changed.wait()

    # -- the program's side ------------------------------------------------------------

    async def _requests(self) -> None:
        rest = b""
        while True:
            found = await self._request_head(rest)
            if found is None:
                await self._end_server()
                return
            request, rest = found
            await self._when(lambda: len(self._pending) < _PIPELINED)
            rest = await self._request(request, rest)
            if self._pending and self._pending[-1].websocket and await self._pending[-1].switched:
                await self._tunnel(rest)
                return
            if http1.is_last(request):
                while await self._from_client():
                    pass  # a server may or may not look at it: it does not get it
                await self._end_server()
                return

    async def _request_head(self, rest: bytes) -> tuple[Request, bytes] | None:
        """The next one as it came, and what follows it; None if there is none."""
        self._method = b""
        reader = HeadReader()
        lines = reader.feed(rest)
        while lines is None:
            data = await self._from_client()
            if not data:
                if reader.empty:
                    return None
                raise Cut("a request that ended in its head")
            lines = reader.feed(data)
        return http1.parse_request(lines), reader.rest

    async def _from_client(self) -> bytes:
        """Between requests: a program that leaves without TLS saying so has left."""
        try:
            return await self._client.read()
        except TlsTruncated:
            return b""

    async def _request(self, request: Request, rest: bytes) -> bytes:
        """Checks and forwards one; gives what came after it."""
        guard = self._guard
        self._method = request.method
        length = http1.request_length(request)
        request = http1.check_host(request, guard.name, guard.port, secure=self._secure)
        waits = request.minor == 1 and length != 0 and not rest and b"100-continue" in request.tokens(b"expect")
        request, websocket = http1.clean_request(request)
        if websocket and length:
            raise Malformed("a WebSocket handshake with a body")
        path = self._judge(request)
        scan = swap = None
        swapped = self._swapped(request)  # what is refused is refused before its body is asked for
        if self._here is not None:
            swap = self._here.body_swap(request) if length else None
            scan = self._here.body_scan() if length else None
        guard.seen(request.method.decode(), "".join(c if c.isprintable() else "?" for c in path[:_SHOWN_PATH]))
        self.requests += 1
        if waits:
            await self._continue()
            swapped = self._swapped(request)
        if swap is not None and 0 < length <= _BUFFERED_BODY and guard.secrets is not None:
            with guard.secrets.holding(length) as held:
                if held:
                    payload, rest = await self._short_body(length, rest, scan)
                    return await self._forward_swapped(self._swapped(request), swap.whole(payload), rest)
        request = swapped
        if swap is not None and length > 0:
            request = _chunked(request)
        self._pending.append(_Sent(request.method, request.minor, websocket))
        copy = Copy(httpbody.body(length), scan, swap, swap is not None or length == CHUNKED, trailers=False)
        self._sending = copy
        rest = await copy.run(request.encode(), rest, self._client.read, self._to_server)
        self._sending = None
        return rest

    def _swapped(self, request: Request) -> Request:
        """With the values of this moment: made anew whenever something was waited for, as one may be taken away."""
        swapped = request if self._here is None else self._here.swap_head(request)
        fields = swapped.fields
        for name, value in self._guard.headers():
            fields = http1.with_field(fields, name, value)
        return swapped if fields is swapped.fields else replace(swapped, fields=fields)

    def _judge(self, request: Request) -> str:
        """The path, if the request is allowed."""
        guard = self._guard
        path, ambiguous = judged_path(request.target)
        if guard.judge is not None:
            if guard.strict():
                http1.check_overrides(request)
            if ambiguous and guard.strict():
                raise Refused(
                    f"a path with {ambiguous} may mean something else to {guard.name}, where rules about paths apply; "
                    "write it without"
                )
            verdict = guard.judge(request.method.decode(), path)
            if verdict.allow is not True:
                raise Refused(verdict.reason)
        return path

    async def _continue(self) -> None:
        """The program holds its body back until it is asked for it. That is done here, and the server is not told: it
        could answer, and then take for a request what comes as a body."""
        await self._when(lambda: not (self._pending or self._responding))
        await self._client.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _short_body(self, length: int, rest: bytes, scan: Scanner | None) -> tuple[bytes, bytes]:
        """A short body in which something is to be swapped is read whole, so that its new length can be told."""
        payload, rest = await whole(length, rest, self._client.read)
        if scan is not None:
            scan.check(payload)
        return payload, rest

    async def _forward_swapped(self, request: Request, payload: bytes, rest: bytes) -> bytes:
        fields = http1.with_field(request.fields, b"Content-Length", b"%d" % len(payload))
        request = replace(request, fields=fields)
        self._pending.append(_Sent(request.method, request.minor, websocket=False))
        await self._to_server(request.encode() + payload)
        return rest

    async def _to_server(self, data: bytes) -> None:
        try:
            await self._server.write(data)
        except OSError as error:
            raise _ServerGone from error

    async def _end_server(self) -> None:
        try:
            await self._server.end()
        except OSError as error:
            raise _ServerGone from error

    async def _tunnel(self, rest: bytes) -> None:
        """After 101: bytes as they are. Nothing is held."""
        scan = self._here.body_scan() if self._here is not None else None
        data = rest or await self._client.read()
        while data:
            await self._to_server(scan.feed(data) if scan is not None else data)
            data = await self._client.read()
        await self._end_server()

    # -- the server's side -------------------------------------------------------------

    async def _responses(self) -> None:
        rest = b""
        while True:
            found = await self._response_head(rest)
            if found is None:
                return
            response, rest = found
            if response.status == 101:
                await self._switch(response, rest)
                return
            if response.status < 200:
                if not self._pending or self._pending[0].minor == 1:
                    await self._client.write(self._shown(response).encode())
                continue
            more, rest = await self._response(response, rest)
            if not more:
                return

    async def _response_head(self, rest: bytes) -> tuple[Response, bytes] | None:
        reader = HeadReader()
        lines = reader.feed(rest)
        while lines is None:
            try:
                data = await self._server.read()
            except TlsTruncated:
                if not reader.empty:
                    raise
                data = b""
            if not data:
                if reader.empty:
                    return None
                raise Cut("a response that ended in its head")
            lines = reader.feed(data)
        return http1.parse_response(lines), reader.rest

    def _shown(self, response: Response) -> Response:
        response = http1.clean_response(response)
        return self._here.scrub_head(response) if self._here is not None else response

    async def _response(self, response: Response, rest: bytes) -> tuple[bool, bytes]:
        """Forwards a final one. Whether another may come, and what followed."""
        sent = self._pending[0] if self._pending else None
        early = len(self._pending) == 1 and self._sending is not None and not self._sending.whole
        if early:  # the rest of its request may be read as another one: nothing follows it
            response = http1.closing(response)
        length = http1.response_length(response, sent.method if sent else b"GET")
        scrub = None
        if self._here is not None and length:
            scrub = self._here.scrub_body(response, same_length=length > 0)
        copy = Copy(httpbody.body(length), None, scrub, length == CHUNKED, trailers=scrub is None)
        self._responding = True
        rest = await copy.run(self._shown(response).encode(), rest, self._server.read, self._client.write)
        self._responding = False
        if sent is not None:
            self._pending.popleft()
            sent.switched.set_result(False)
        self._changed.set()
        return sent is not None and length != UNTIL_CLOSE and not early, rest

    async def _switch(self, response: Response, rest: bytes) -> None:
        sent = self._pending[0] if self._pending else None
        if sent is None or not sent.websocket or response.tokens(b"upgrade") != [b"websocket"]:
            raise Malformed("the server switched to a protocol that it was not asked for")
        self._responding = self._switched = True
        await self._client.write(self._shown(response).encode())
        sent.switched.set_result(True)
        data = rest or await self._server.read()
        while data:
            await self._client.write(data)
            data = await self._server.read()


def _chunked(request: Request) -> Request:
    """The same with a body whose length is not known before its end."""
    if request.minor == 0:
        raise Refused("a body of HTTP/1.0 that is too long for a secret to be swapped in; use HTTP/1.1")
    fields = http1.without(request.fields, b"content-length")
    return replace(request, fields=(*fields, (b"Transfer-Encoding", b"chunked")))
