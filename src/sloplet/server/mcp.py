"""/mcp: the Model Context Protocol over streamable HTTP, with the keys of the server. See docs/mcp.md.

The SDK speaks the protocol; here is whose session a request is of. A session belongs to the key that opened it, and to
anybody else it is as if it were not there. Its sandboxes are leased to it (``leases.py``): they end with it, also when
the server is killed and somebody else finds out.

The protocol of 2026-07-28 has no sessions over HTTP. Clients that know both are told to open one in the older way. With
``?session=WORD`` the URL names the session; without, sandboxes are named in every call.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mcp_types as types
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from starlette.types import Message, Receive, Scope, Send

from ..errors import QuotaExceeded, SlopletError
from ..mcp.boxes import MAIN, Boxes
from ..mcp.server import Context, Session, make_server
from .audit import first_word
from .caller import SCOPE_KEY, Caller
from .mcpasked import MAX_IDLE, SessionAsked, session_asked
from .mcpground import ServerGround
from .served import ACTING, PROGRAM, Program
from .settings import MAX_JSON

if TYPE_CHECKING:
    from .keys import Key
    from .state import ServerState
    from .tenants import Tenant

PATH = "/mcp"
MAX_SESSIONS = 100  #: of one key, at a time
_LOOK = 1.0  # seconds between looks for sessions that nobody uses
_REFUSALS = frozenset({"NotAllowed", "QuotaExceeded", "RateLimited", "ServerBusy", "KeyRefused"})
_SESSION = b"mcp-session-id"
_VERSION = b"mcp-protocol-version"
_LIVE = "sloplet.mcp"


@dataclass(eq=False)
class Live:
    """An MCP session."""

    key: Key
    tenant: Tenant
    asked: SessionAsked
    explicit: bool = False
    word: str = field(default_factory=lambda: f"mcp-{secrets.token_hex(8)}")  #: who it is to uses and leases
    session: Session = field(init=False)
    id: str = ""  #: of the protocol
    requests: int = 0  #: under way
    used_at: float = field(default_factory=time.monotonic)

    def owned_by(self, caller: Caller) -> bool:
        return caller.key.id == self.key.id and caller.tenant.name == self.tenant.name

    def idle(self, now: float) -> bool:
        return not self.requests and now - self.used_at > self.asked.idle


class McpDoor:
    """The ASGI application at /mcp, behind the guard. One per server."""

    def __init__(self, server: ServerState) -> None:
        self._server = server
        self._live: dict[Any, Live] = {}
        self._opening: Counter[str] = Counter()  # sessions that are about to be, by key
        self.__name__ = "request"  # for the audit log
        mcp = make_server(self._which, called=self._called)
        mcp.add_request_handler("server/discover", types.RequestParams, self._discover)
        self._mcp = mcp
        self._manager = StreamableHTTPSessionManager(
            mcp,
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),  # the guard's
            session_idle_timeout=2 * MAX_IDLE,  # ours is below; this is for what that may miss
            max_request_body_size=MAX_JSON,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While the server is up. Sessions end with it, and so do their sandboxes."""
        async with self._manager.run():
            watching = asyncio.ensure_future(self._watch())
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await asyncio.gather(*(self._close(key) for key in list(self._live)), return_exceptions=True)

    def __len__(self) -> int:
        return len(self._live)

    # -- requests ----------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from .guard import refuse

        caller: Caller = scope[SCOPE_KEY]
        headers = dict(scope["headers"])
        session, version = headers.get(_SESSION), headers.get(_VERSION, b"").decode("latin-1")
        modern = bool(version) and version not in HANDSHAKE_PROTOCOL_VERSIONS
        try:
            if modern:
                await self._serve(self._named(caller, scope), scope, receive, send)
            elif session is None:
                await self._open(caller, scope, receive, send)
            else:
                live = self._live.get(session.decode("latin-1"))
                if live is None or not live.owned_by(caller):
                    await _not_found(send)
                else:
                    await self._serve(live, scope, receive, send)
        except SlopletError as error:
            await refuse(scope, receive, send, error, caller.request_id)

    async def _open(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """A request without a session: if the SDK opens one, it is this caller's from then on."""
        live = self._new(caller, session_asked(scope["query_string"].decode("latin-1")))
        self._opening[live.key.id] += 1

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                found = dict(message.get("headers", ())).get(_SESSION)
                if found is not None:
                    live.id = found.decode("latin-1")
                    self._begin(live.id, live)
                    self._opened(live)
            await send(message)

        try:
            await self._serve(live, scope, receive, watched)
        finally:
            if not live.id:
                self._opened(live)

    def _opened(self, live: Live) -> None:
        """It counts as a session from now on, or has become none."""
        self._opening[live.key.id] -= 1
        if not self._opening[live.key.id]:
            del self._opening[live.key.id]

    def _named(self, caller: Caller, scope: Scope) -> Live:
        """The session of a request of the protocol that has none."""
        query = scope["query_string"].decode("latin-1")
        asked = session_asked(query)
        whose = caller.key.id, caller.tenant.name
        key = (*whose, "session", asked.session) if asked.session is not None else (*whose, "query", query)
        live = self._live.get(key)
        if live is None:
            live = self._new(caller, asked, explicit=asked.session is None)
            self._begin(key, live)
        return live

    def _new(self, caller: Caller, asked: SessionAsked, *, explicit: bool = False) -> Live:
        there = sum(live.key.id == caller.key.id for live in self._live.values())
        if there + self._opening[caller.key.id] >= MAX_SESSIONS:
            raise QuotaExceeded(
                f"this key has {MAX_SESSIONS} MCP sessions", hint="end some; those that nobody uses end by themselves"
            )
        live = Live(caller.key, caller.tenant, asked, explicit)
        live.session = Session(
            Boxes(ServerGround(self._server, caller, asked, live.word), asked.policy.max_sandboxes, explicit=explicit),
            asked.policy,
        )
        return live

    async def _serve(self, live: Live, scope: Scope, receive: Receive, send: Send) -> None:
        live.requests += 1
        live.used_at = time.monotonic()
        ended = scope["method"] == "DELETE" and live.id

        async def watched(message: Message) -> None:
            if ended and message["type"] == "http.response.start" and message["status"] < 400:
                await self._close(live.id)  # before it is answered: who is told that it ended finds nothing left
            await send(message)

        try:
            await self._manager.handle_request({**scope, _LIVE: live}, receive, watched)
        finally:
            live.requests -= 1
            live.used_at = time.monotonic()

    def _which(self, ctx: Context) -> Session:
        """For the SDK's handlers, which run in tasks of the session's, not of the request's."""
        request: Any = ctx.request
        live: Live = request.scope[_LIVE]
        caller: Caller = request.scope[SCOPE_KEY]
        ACTING.set(caller.key)
        PROGRAM.set(Program(live.word, lease=True))
        return live.session

    def _called(self, ctx: Context, tool: str, arguments: dict[str, Any], result: types.CallToolResult) -> None:
        """For the audit log: the tool, where, and what came of it; of a command its first word."""
        request: Any = ctx.request
        live: Live = request.scope[_LIVE]
        caller: Caller = request.scope[SCOPE_KEY]
        ref = arguments.get("sandbox")
        held = live.session.boxes.find(ref if isinstance(ref, str) else MAIN)
        block = result.content[0] if result.is_error and result.content else None
        error = block.text.partition(":")[0] if isinstance(block, types.TextContent) else ""
        self._server.audit.record(
            f"mcp.{tool}", key=caller.key, tenant=caller.tenant.name, address=caller.address,
            request=caller.request_id, sandbox="" if held is None else held.id, error=error,
            verdict="refused" if error in _REFUSALS else "allowed", detail=first_word(arguments.get("command", "")),
        )  # fmt: skip

    async def _discover(self, ctx: Context, params: types.RequestParams) -> types.DiscoverResult:
        """Who knows both kinds of protocol is told to open a session, unless the URL has named one."""
        request: Any = ctx.request
        live: Live = request.scope[_LIVE]
        versions = HANDSHAKE_PROTOCOL_VERSIONS if live.explicit else MODERN_PROTOCOL_VERSIONS
        return types.DiscoverResult(
            supported_versions=list(versions),
            capabilities=self._mcp.get_capabilities(protocol_version=ctx.protocol_version),
            instructions=self._mcp.instructions,
        )

    # -- sessions ----------------------------------------------------------------------

    def _begin(self, key: Any, live: Live) -> None:
        self._live[key] = live
        self._server.uses.came(live.tenant.name, live.word)

    async def _close(self, key: Any) -> None:
        live = self._live.pop(key, None)
        if live is None:
            return
        try:
            await asyncio.shield(live.session.boxes.close())
        finally:
            self._server.uses.went(live.tenant.name, live.word, ended=True)
            self._server.leases.look_soon()  # what could not be ended just now

    async def _watch(self) -> None:
        """End sessions that nobody uses, as their client would."""
        while True:
            await asyncio.sleep(_LOOK)
            now = time.monotonic()
            over = [(key, live) for key, live in self._live.items() if live.idle(now)]
            await asyncio.gather(*(self._end(key, live) for key, live in over), return_exceptions=True)
            loose = [live for live in self._live.values() if live.explicit and not live.requests]
            await asyncio.gather(*(live.session.boxes.expire(live.asked.idle) for live in loose))

    async def _end(self, key: Any, live: Live) -> None:
        await self._close(key)
        if live.id:
            scope = {
                "type": "http", "method": "DELETE", "path": PATH, "raw_path": PATH.encode(), "query_string": b"",
                "headers": [(_SESSION, live.id.encode("latin-1"))], "http_version": "1.1", "scheme": "http",
                "server": None, "client": None, "root_path": "", "asgi": {"version": "3.0"},
            }  # fmt: skip
            await self._manager.handle_request(scope, _nothing, _nowhere)


async def _not_found(send: Send) -> None:
    """As the SDK says it of a session that it does not know."""
    error = {"code": types.INVALID_REQUEST, "message": "Session not found"}
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _nowhere(message: Message) -> None:
    """Nobody waits for this answer."""
