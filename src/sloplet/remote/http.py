"""Requests to a server's routes: over connections that stay, errors of the one tree, careful retries.

What may be asked twice is asked again when a connection breaks; what makes something carries an ``Idempotency-Key``, so
that asking again never makes two; the rest is asked again only if nothing was sent. Where the server says that it is
busy, it is waited for, within bounds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from ..errors import RateLimited, ServerBusy, ServerError, ServerUnreachable, SlopletError
from .lines import KEEP_ALIVE, MOST_BODY, Answer, Lines, Lost
from .place import Place
from .problems import error_of
from .websocket import unreachable

if TYPE_CHECKING:
    import httpx

Params = Mapping[str, Any] | Sequence[tuple[str, Any]]
_CONNECT = 10.0
_LOOK = 60.0  # seconds of silence in which a question must be answered; what makes something may take longer
_FIRST_PAUSE = 0.05
_PATIENCE = 10.0  # in all, for a server that was there before and is not now
_DOUBT = 2.0  # in all, for one that takes connections and has never answered: it may be another kind of server
_MOST_WAITING = 30.0  # in all, for one that is busy
_MOST_PROBLEM = 1 << 18  # bytes of an answer that says what went wrong
_SAFE = frozenset({"GET", "HEAD", "PUT", "DELETE"})


class Http:
    """Belongs to the loop that it is first used in. ``headers``: those of every request."""

    def __init__(self, place: Place, headers: Mapping[str, str]) -> None:
        self.place = place
        self._headers = dict(headers)
        self._lines: Lines | None = None
        self._direct: bool | None = None  # whether no proxy is in between
        self._client: httpx.AsyncClient | None = None
        self._been = False  # whether it ever answered

    async def get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        return await self.ask("GET", path, params=params, timeout=_LOOK)

    async def post(self, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> Any:
        return await self.ask("POST", path, body=body, headers=headers)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """The answer's JSON; None if it has none. ``timeout``: seconds without a word, None: however long it takes."""
        content = None if body is None else json.dumps(body).encode()
        sent = {} if content is None else {"Content-Type": "application/json"}
        sent.update(headers or {})
        repeatable = method in _SAFE or "Idempotency-Key" in sent
        loop = asyncio.get_running_loop()
        began, pause = loop.time(), _FIRST_PAUSE
        while True:
            try:
                response = await self._send(method, path, content, params, sent, timeout)
            except _Broken as broken:
                again = repeatable or not broken.sent
                # One that never answered is most likely not there: that is said at once.
                patience = _PATIENCE if self._been else _DOUBT
                if not again or not (self._been or broken.sent) or loop.time() - began > patience or broken.foreign:
                    raise self._told(broken, method) from broken.__cause__
                await asyncio.sleep(pause)
                pause = min(1.0, pause * 2)
                continue
            self._been = True
            if response.status_code < 300:
                return _decoded(response)
            error = failure(response)
            wait = _wait(response, error)
            if wait is None or loop.time() - began + wait > _MOST_WAITING:
                raise error
            await asyncio.sleep(wait)

    def _told(self, broken: _Broken, method: str) -> SlopletError:
        """What is said of it. A server that hangs up on the very first request most likely speaks something else."""
        error = broken.error
        if broken.cut and method in ("GET", "HEAD"):
            error.hint = "try again"
        if broken.cut and not self._been and self.place.url.startswith("http:"):
            error.hint = f"is it https://, not http://? if not: {error.hint}"
        return error

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        content: AsyncIterator[bytes] | bytes | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """An answer (or a body) that comes in pieces. Asked once; broken in the middle it is ServerUnreachable."""
        import httpx

        client = self.client()
        request = client.build_request(
            method, path, params=_params(params), headers=headers, content=content, timeout=_timeout(timeout)
        )
        try:
            response = await client.send(request, stream=True)
            try:
                if response.status_code >= 300:
                    raise await _failed(response)
                self._been = True
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPError as problem:
            raise _broken(self.place, problem).error from problem

    def client(self) -> httpx.AsyncClient:
        """httpx's own, with key and trust, for what needs all of it."""
        if self._client is None:
            import httpx

            place = self.place
            limits = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=60.0)
            transport = httpx.AsyncHTTPTransport(
                verify=place.context() or False,
                limits=limits,
                proxy=place.proxy(),
                socket_options=KEEP_ALIVE,
                retries=0,
            )
            self._client = httpx.AsyncClient(
                base_url=place.url,
                headers={**self._headers, "Accept-Encoding": "identity"},  # nothing small becomes large here
                transport=transport,
                trust_env=False,
                timeout=_timeout(None),
            )
        return self._client

    async def aclose(self) -> None:
        if self._lines is not None:
            self._lines.close()
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def forget(self) -> None:
        """In a forked child: the connections are the parent's, and are neither used nor closed here."""
        if self._lines is not None:
            self._lines.forget()
        if self._client is not None:
            _graveyard.append(self._client)
            self._client = None

    async def _send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        params: Params | None,
        headers: Mapping[str, str],
        timeout: float | None,
    ) -> Answer | httpx.Response:
        if self._direct is None:
            self._direct = self.place.proxy() is None
        if not self._direct:
            return await self._send_by_proxy(method, path, content, params, headers, timeout)
        if self._lines is None:
            self._lines = Lines(self.place, self._headers)
        target = f"{path}?{urlencode(_params(params))}" if params else path
        try:
            async with asyncio.timeout(timeout):
                return await self._lines.ask(method, target, headers, content or b"", _CONNECT)
        except Lost as lost:
            raise _lost(self.place, lost) from lost
        except TimeoutError:
            error = ServerUnreachable(f"the server {self.place.url} did not answer in time", hint="is it busy?")
            raise _Broken(error, True) from None

    async def _send_by_proxy(
        self,
        method: str,
        path: str,
        content: bytes | None,
        params: Params | None,
        headers: Mapping[str, str],
        timeout: float | None,
    ) -> httpx.Response:
        import httpx

        try:
            return await self.client().request(
                method, path, content=content, params=_params(params), headers=headers, timeout=_timeout(timeout)
            )
        except httpx.HTTPError as problem:
            raise _broken(self.place, problem) from problem


_graveyard: list[object] = []


class _Broken(Exception):
    """A request without an answer. ``sent``: it may have reached the server; ``cut``: and the connection ended then;
    ``foreign``: what came is not HTTP."""

    def __init__(self, error: SlopletError, sent: bool, *, cut: bool = False, foreign: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.sent = sent
        self.cut = cut
        self.foreign = foreign


def _lost(place: Place, lost: Lost) -> _Broken:
    if lost.foreign:
        error = ServerUnreachable(f"what answers at {place.url} is not HTTP", hint="is the URL right, with its port?")
        return _Broken(error, True, foreign=True)
    if lost.sent:
        return _Broken(_no_answer(place), True, cut=True)
    if isinstance(lost.why, TimeoutError):
        return _Broken(ServerUnreachable(f"the server {place.url} does not answer", hint="is it up?"), False)
    why = lost.why if isinstance(lost.why, BaseException) else lost
    return _Broken(unreachable(place, why), False)


def _no_answer(place: Place) -> ServerUnreachable:
    return ServerUnreachable(
        f"the connection to {place.url} was lost before the answer came", hint="look whether it was done"
    )


def _broken(place: Place, problem: httpx.HTTPError) -> _Broken:
    import httpx

    if isinstance(problem, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)):
        cause: BaseException = problem
        while cause.__cause__ is not None or cause.__context__ is not None:
            cause = cause.__cause__ or cause.__context__ or cause
            if isinstance(cause, OSError):
                break
        if isinstance(problem, httpx.ConnectTimeout):
            return _Broken(ServerUnreachable(f"the server {place.url} does not answer", hint="is it up?"), False)
        return _Broken(unreachable(place, cause if isinstance(cause, OSError) else problem), False)
    if isinstance(problem, httpx.TimeoutException):
        error: SlopletError = ServerUnreachable(f"the server {place.url} did not answer in time", hint="is it busy?")
    elif isinstance(problem, (httpx.NetworkError, httpx.RemoteProtocolError)):
        return _Broken(_no_answer(place), True, cut=True)
    else:
        error = ServerError(f"the server {place.url} was not understood: {problem}", hint="is it a Sloplet server?")
    return _Broken(error, True)


async def _failed(response: httpx.Response) -> SlopletError:
    """What it stands for; of its body no more is read than a problem document has."""
    return failure(Answer(response.status_code, dict(response.headers), await _read(response, _MOST_PROBLEM)))


async def json_of(response: httpx.Response) -> Any:
    """What a streamed answer's body says. ServerError."""
    return _decoded(Answer(response.status_code, {}, await _read(response, MOST_BODY)))


async def _read(response: httpx.Response, most: int) -> bytes:
    """Its body; cut off where it is longer, so it is nothing that makes sense any more."""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > most:
            break
    return bytes(body[:most])


def failure(response: Answer | httpx.Response) -> SlopletError:
    """What an answer of 300 and above stands for (nobody is followed elsewhere). Its body has been read."""
    try:
        document = response.json()
    except (ValueError, RecursionError):
        document = None
    return error_of(document, response.status_code)


def _wait(response: Answer | httpx.Response, error: SlopletError) -> float | None:
    """How long to wait before asking again; None: not at all. Such an answer means that nothing was done."""
    if not isinstance(error, (ServerBusy, RateLimited)) or response.status_code not in (429, 503):
        return None
    try:
        return min(10.0, max(0.05, float(response.headers.get("retry-after", "1"))))
    except ValueError:
        return None


def _decoded(response: Answer | httpx.Response) -> Any:
    if not response.content:
        return None
    try:
        return response.json()
    except (ValueError, RecursionError):
        raise ServerError("the server's answer is not JSON", hint="is it a Sloplet server?") from None


def _timeout(seconds: float | None) -> httpx.Timeout:
    import httpx

    return httpx.Timeout(_CONNECT, read=seconds, write=_LOOK, pool=_LOOK)


def _params(given: Params | None) -> Any:
    return dict(given) if isinstance(given, Mapping) else None if given is None else list(given)
