"""Who comes in: every request and every WebSocket passes here before any route sees it.

Pure ASGI, so that streams pass untouched. In this order: a request id; the Host must be ours (names of sandboxes' own
servers go elsewhere); no web page of another origin; a key (but for /healthz and /readyz); how fast and how much at
once; what kind of body, how long, and whether its JSON is sound. What came of it goes to the audit log and the metrics
when the answer begins.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import KeyRefused, NotAllowed, RequestInvalid, ServerBusy, ServerError, SlopletError
from . import cors, incoming
from .audit import REFUSED, first_word
from .caller import BODY_KEY, SCOPE_KEY, Caller
from .e2b.answers import SPEAKING, STRANGER, Speaker, Told
from .e2b.guests import OWN_PORTS
from .e2b.keys import from_e2b
from .e2b.settings import domain_of
from .limits import Ticket
from .logs import log
from .outputs import let_go
from .problems import MEDIA_TYPE, error_for, headers_of, problem, status_of
from .served import ACTING, FACTS, NOBODY, PROGRAM, Program
from .settings import MAX_JSON
from .state import ServerState
from .tls import own_name

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
ERROR_KEY = "sloplet.error"  #: in the scope: the class of the error that is answered
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})  # not in the audit log: asked all the time, by machines
_STREAMS = (b"text/event-stream", b"application/connect+json", b"application/x-ndjson")


class Guard:
    def __init__(self, app: ASGIApp, server: ServerState) -> None:
        self._app = app
        self._server = server
        settings = server.settings
        ours = {"localhost", "127.0.0.1", "::1", settings.host, settings.domain, *settings.names}
        if settings.e2b is not None:
            ours |= {domain_of(settings.domain), f"api.{domain_of(settings.domain)}"}
        self._ours = frozenset(ours if settings.loopback else {*ours, own_name()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        ACTING.set(None)
        PROGRAM.set(NOBODY)
        passing = Passing(self._server, scope, receive, send)
        FACTS.set(passing.facts)
        try:
            headers = incoming.headers_of(scope["headers"])
            named, facade = self._server.names.match(headers.get("host", "")), self._server.e2b
            if named is None:
                self._check_host(incoming.host_name(headers.get("host")), scope)
            place = None if facade is None else facade.place(named, scope, headers)
            if named is not None and place is None:  # no route is ever reached by such a name
                await self._server.names(scope, receive, send)
                return
            if (origin := headers.get("origin")) is not None:
                if facade is not None and facade.welcomes(place, scope, headers):
                    passing.origin = cors.ANYONE
                else:
                    self._check_origin(origin)
                    passing.origin = origin.encode("latin-1")
                if cors.is_preflight(scope.get("method", ""), headers):
                    await passing.preflight(headers)
                    return
            app = self._app
            if place is not None and place.port not in OWN_PORTS:
                await self._server.names(scope, receive, send, place)
                return
            if place is not None and facade is not None:
                self._admit_visitor(
                    passing, lambda: facade.admit(place, scope, headers, passing.request_id, passing.address)
                )
                app = facade.serving(place, headers)
            elif facade is not None and facade.owns(scope):
                app = facade.api
                if (door := facade.door_of(scope)) is not None:
                    self._admit_visitor(
                        passing, lambda: door.admit(scope, headers, passing.request_id, passing.address)
                    )
                else:
                    self._admit(passing, headers)
            elif scope["path"] not in OPEN_PATHS:
                self._admit(passing, headers)
            if incoming.has_body(headers) and scope["type"] == "http":
                await passing.take_body(headers, streamed=place is not None)
        except Exception as error:
            passing.leave()
            await passing.refuse(passing.known(error))
            return
        await passing.run(app)

    def _check_host(self, name: str, scope: Scope) -> None:
        """An address of this machine that was connected to is its name, too; no web page can make up one of those."""
        if name in self._ours or (scope.get("server") and name == scope["server"][0]):
            return
        raise NotAllowed(f"this server does not answer to the name {name[:80]!r}", hint="`sloplet serve --name`")

    def _check_origin(self, origin: str) -> None:
        """A browser sends it; nothing else does. So web pages cannot call, whatever key they have come by."""
        if origin not in self._server.settings.origins:
            raise NotAllowed("web pages of other origins may not call this server", hint="`sloplet serve --origin`")

    def _admit(self, passing: Passing, headers: dict[str, str]) -> None:
        server, scope = self._server, passing.scope
        try:
            caller = self._caller(scope, headers, passing.request_id)
        except KeyRefused:
            server.limits.failed(passing.address)
            raise
        passing.enter(caller)
        PROGRAM.set(Program(caller.client, headers.get("sloplet-lease") == "true"))
        server.uses.heard(caller.tenant.name, caller.client)

    def _admit_visitor(self, passing: Passing, admitted: Callable[[], Caller]) -> None:
        """Who has the token of an E2B sandbox, of a volume, or to send a file acts for the key that it was given to."""
        try:
            passing.enter(admitted(), passing.scope.get(STRANGER, ""))
        except RequestInvalid as error:
            if error.status == 401:
                self._server.limits.failed(passing.address)
            raise

    def _caller(self, scope: Scope, headers: dict[str, str], request_id: str) -> Caller:
        kind, _, text = headers.get("authorization", "").partition(" ")
        text = text.strip() if kind.casefold() == "bearer" else headers.get("x-api-key", "")
        text = from_e2b(text) if text.startswith("e2b_") else text
        if not text:
            raise KeyRefused("this needs a key", hint="send it as `Authorization: Bearer slp_...`")
        key = self._server.keys.verify(text)
        tenant = self._server.tenants.get(key.tenant)
        if (named := headers.get("sloplet-tenant")) and named != key.tenant:
            if not key.admin:
                raise NotAllowed("only an admin's key may name a tenant")
            tenant = self._server.tenants.find(named)
        client = headers.get("sloplet-client", "")
        if len(client) > 64 or not client.isascii() or not client.isprintable():
            raise RequestInvalid("Sloplet-Client is not a short printable word")
        return Caller(key, tenant, request_id, client, scope["client"][0] if scope.get("client") else "")


class Passing:
    """One request or WebSocket on its way in, and its answer on its way out."""

    __slots__ = (
        "_began", "_body", "_count", "_most", "_receive", "_send", "_server", "_status", "address", "begun", "caller",
        "cut", "facts", "origin", "request_id", "scope", "ticket",
    )  # fmt: skip

    def __init__(self, server: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        self._server, self.scope, self._receive, self._send = server, scope, receive, send
        self._began = time.perf_counter()
        self._body: bytes | None = None  # read already
        self._count, self._most = 0, 0
        self._status = 0  # of an answer that has begun, and is not in the books yet
        self.request_id = secrets.token_hex(8)
        self.address: str = scope["client"][0] if scope.get("client") else ""
        self.origin: bytes | None = None
        self.caller: Caller | None = None
        self.ticket: Ticket | None = None
        self.facts: dict[str, str] = {}
        self.begun = False  # whether the answer has
        self.cut = False  # its key is no key any more

    def enter(self, caller: Caller, stranger_at: str = "") -> None:
        """It is known who asks: as much as he may have at a time is his. ``stranger_at``: where somebody who has shown
        nothing asks for what is anybody's."""
        self.caller = caller
        stream = self.scope["type"] == "websocket"
        if stranger_at:
            self._server.limits.stranger(stranger_at)
        else:
            self.ticket = self._server.limits.enter(caller.key, caller.tenant.name, stream=stream)
        self.scope[SCOPE_KEY] = caller
        ACTING.set(caller.key)

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self.cut and not self._server.stopping:
                raise
            await self._end_stream()
        except ClientDisconnect:
            pass
        except Exception as error:
            known = self.known(error)
            if not self.begun:
                await self.refuse(known)
        finally:
            if not self.begun or self._status:
                self._tell(self._status or 499)  # 499: whoever asked has gone
            self.leave()

    def known(self, error: Exception) -> SlopletError:
        """What is answered of it; the log has the rest."""
        if isinstance(error, SlopletError):
            return error
        log.error("a request failed", exc_info=error, extra={"request_id": self.request_id})
        return error_for(error) or ServerError("the server failed", hint="its log tells more, by the request's id")

    def leave(self) -> None:
        if self.ticket is not None:
            self.ticket.leave()
            self.ticket = None
        let_go(self.scope)
        self._server.sessions.pop(self, None)

    # -- in ----------------------------------------------------------------------------

    async def take_body(self, headers: dict[str, str], *, streamed: bool = False) -> None:
        """Bound what comes; JSON is read here, so that what a route gets is sound. RequestInvalid."""
        streamed = streamed or incoming.is_streamed(self.scope["method"], self.scope["path"])
        self._most = self._server.settings.max_upload if streamed else MAX_JSON
        if (incoming.content_length(headers) or 0) > self._most:
            raise incoming.too_large(self._most)
        if streamed:
            return
        incoming.check_type(headers)
        parts: list[bytes] = []
        while True:
            message = await self.receive()
            if message["type"] != "http.request":
                raise RequestInvalid("the body has broken off")
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        self._body = b"".join(parts)
        if not self._body:
            return
        asked = self.scope[BODY_KEY] = incoming.parse_json(self._body, self.scope["path"])
        if isinstance(asked, dict) and "command" in asked:
            self.facts["detail"] = first_word(asked["command"])

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._server.metrics.received += size
            self._count += size
            if self._count > self._most:
                raise incoming.too_large(self._most)
        return message

    # -- out ---------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.body":
            self._server.metrics.sent += len(message.get("body", b""))
            if self._status:
                try:
                    await self._send(message)
                finally:
                    self._tell(self._status)
                return
        elif kind == "http.response.start" or kind == "websocket.http.response.start":
            message["headers"] = self._headers(message.get("headers", ()))
            if kind == "http.response.start" and self._is_whole(message):
                self.begun, self._status = True, message["status"]
            else:
                self._tell(message["status"])
        elif kind == "websocket.accept":
            message["headers"] = [*message.get("headers", ()), (b"sloplet-request-id", self.request_id.encode())]
            self._tell(101)
            self._lasts()
        elif kind == "websocket.close" and not self.begun:
            self._tell(403)
        await self._send(message)

    @staticmethod
    def _is_whole(message: Message) -> bool:
        """Whether all of the answer comes at once: then the books can wait until it is on its way."""
        return any(name == b"content-length" and len(value) < 6 for name, value in message["headers"])

    def _headers(self, given: Any) -> list[tuple[bytes, bytes]]:
        headers = [
            *given, (b"sloplet-request-id", self.request_id.encode()), (b"x-content-type-options", b"nosniff"),
        ]  # fmt: skip
        names = {name.lower(): value for name, value in given}
        if b"cache-control" not in names:
            headers.append((b"cache-control", b"no-store"))
        if self.origin is not None:
            headers += cors.answered(self.origin)
        if names.get(b"content-type", b"").startswith(_STREAMS):
            if self.ticket is not None:
                self.ticket.streams()
            self._lasts()
        return headers

    def _lasts(self) -> None:
        """It goes on until somebody ends it."""
        task = asyncio.current_task()
        if task is not None:
            self._server.sessions[self] = task

    async def _end_stream(self) -> None:
        """The server stops, or the key was revoked: what streams ends, as it would at its end."""
        if not self.begun:
            await self.refuse(ServerBusy("the server is being restarted", hint="try again", retry_after=2))
        elif SPEAKING in self.scope and "sloplet.abort" in self.scope:
            self.scope["sloplet.abort"]()  # E2B's clients take an end for the end of what they had asked for
        elif self.scope["type"] == "http":
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        elif self.cut:
            await self._send({"type": "websocket.close", "code": 1008, "reason": "the key is not valid any more"})

    def _tell(self, status: int) -> None:
        """The answer begins: who asked, for what, and what came of it."""
        if self.begun and not self._status:
            return
        self.begun, self._status = True, 0
        server, scope = self._server, self.scope
        seconds = time.perf_counter() - self._began
        route, action = _route_of(scope)
        if scope["type"] == "websocket":
            if status == 101:
                server.metrics.sockets[route] = server.metrics.sockets.get(route, 0) + 1
        else:
            server.metrics.answered(scope["method"], route, status, seconds)
        error = scope.get(ERROR_KEY, "")
        if error and status in REFUSED:
            server.metrics.refuse(error)
        if route in _QUIET or (self.caller is None and not server.limits.worth_telling()):
            return
        caller = self.caller
        server.audit.record(
            action, key=caller.key if caller else None, tenant=caller.tenant.name if caller else "",
            address=self.address, request=self.request_id, status=status, error=error, ms=seconds * 1000,
            sandbox=self.facts.get("sandbox") or str(scope.get("path_params", {}).get("box", "")),
            verdict="refused" if status in REFUSED else "allowed", detail=self.facts.get("detail", ""),
        )  # fmt: skip

    async def preflight(self, headers: dict[str, str]) -> None:
        """A page that may call asks what it may send."""
        allowed = cors.allowed(self.origin or b"", headers)
        await self.send({"type": "http.response.start", "status": 204, "headers": allowed})
        await self.send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: SlopletError) -> None:
        await refuse(self.scope, self._receive, self.send, error, self.request_id)


async def refuse(scope: Scope, receive: Receive, send: Send, error: SlopletError, request_id: str) -> None:
    """Answer with a problem document. A WebSocket is refused before it is one."""
    scope[ERROR_KEY] = type(error).__name__
    speak: Speaker = scope.get(SPEAKING, _problem)
    status, said, body = speak(error) if speak is not _problem else _problem(error, request_id)
    headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in said.items()]
    headers.append((b"content-length", str(len(body)).encode()))
    kind = "http.response"
    if scope["type"] == "websocket":
        kind = "websocket.http.response"
        await receive()
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})


def _problem(error: SlopletError, request_id: str = "") -> Told:
    body = json.dumps(problem(error, request_id)).encode()
    return status_of(error), {"content-type": MEDIA_TYPE, **headers_of(error)}, body


_ACTIONS: dict[object, str] = {}


def _route_of(scope: Scope) -> tuple[str, str]:
    """The route's path with its variables' names, and what doing it is called: "sandboxes.create"."""
    route, endpoint = scope.get("route"), scope.get("endpoint")
    if endpoint is None:
        return "-", "-"
    action = _ACTIONS.get(endpoint)
    if action is None:
        name = getattr(endpoint, "__name__", type(endpoint).__name__.lower())
        action = f"{str(getattr(endpoint, '__module__', '')).rpartition('.')[2]}.{name}"
        if len(_ACTIONS) < 1000:
            _ACTIONS[endpoint] = action
    return getattr(route, "path", None) or "-", action
