"""All tunnels of a server: who may have one, how many, how long one is kept for a client that comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from starlette.websockets import WebSocket

from ..errors import ProtocolError, RequestInvalid, ServerBusy, SlopletError
from ..wire.fields import Fields
from ..wire.schema import Op, Tag
from ..wire.session import WINDOW
from .audit import first_word
from .wire import POLICY, RESTART, Session

if TYPE_CHECKING:
    from .caller import Caller
    from .state import ServerState

MOST_OF_A_KEY = 512
MOST = 4096
#: What all sessions of a key may keep together, roughly: the more there are, the smaller is each one's window.
_TOGETHER = 64 << 20
_LEAST_WINDOW = 1 << 17
_LOOK = 1.0
#: What is looked at all the time, and changes nothing.
_UNTOLD = frozenset({Op.PS, Op.FORGET, Op.STAT, Op.LIST, Op.GETXATTRS, Op.METRICS})
_IDLE = 30.0  # seconds after which a session in which nothing is open lets go of its keeper


class Tunnels:
    """All in the server's loop."""

    def __init__(self, server: ServerState, grace: float) -> None:
        self.server = server
        self.grace = grace
        self._sessions: dict[str, Session] = {}
        self._of_key: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._watch())

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for session in list(self._sessions.values()):
            session.end(RESTART, "the server is going down")

    def __len__(self) -> int:
        return len(self._sessions)

    async def serve(
        self, websocket: WebSocket, caller: Caller, session_id: str | None, received: int, attempt: int
    ) -> None:
        """One WebSocket, from its beginning to its end. A session that is not known (any more), or is another's, is a
        new one: its id tells."""
        session, attached = self._sessions.get(session_id or ""), None
        if session is not None and (session.key.id, session.tenant) == (caller.key.id, caller.tenant):
            try:
                attached = session.attach(websocket, received, attempt)
            except ProtocolError as error:
                raise RequestInvalid(error.message) from None
        if session is None or attached is None:
            session = self._make(caller)
            attached = session.attach(websocket, 0, attempt)
        try:
            await websocket.accept()
        except BaseException:
            session.detach(attached, ended=False)
            raise
        await session.serve(websocket, attached)

    def _make(self, caller: Caller) -> Session:
        if self._of_key[caller.key.id] >= MOST_OF_A_KEY:
            self._end_silent(caller.key.id)
        count = self._of_key[caller.key.id]
        if count >= MOST_OF_A_KEY or len(self._sessions) >= MOST:
            raise ServerBusy(
                f"there are {count} connections of this key already", hint="close some, or try again in a minute"
            )
        window = max(_LEAST_WINDOW, min(WINDOW, _TOGETHER // (count + 1)))
        session = Session(self, caller, window)
        self._sessions[session.id] = session
        self._of_key[caller.key.id] += 1
        self.server.uses.came(caller.tenant.name, caller.client)
        return session

    def _end_silent(self, key: str) -> None:
        """Those whose client has never said a word and is not there: it may not even know that it has them."""
        for session in list(self._sessions.values()):
            if session.key.id == key and session.detached_at is not None and not session.greeted:
                session.end(POLICY)

    def ended(self, session: Session, *, ended: bool) -> None:
        """By the session itself. ``ended``: the client said goodbye."""
        if self._sessions.pop(session.id, None) is None:
            return
        self._of_key[session.key.id] -= 1
        if not self._of_key[session.key.id]:
            del self._of_key[session.key.id]
        self.server.uses.went(session.tenant.name, session.client, ended=ended)
        if ended:
            self.server.leases.look_soon()

    async def check_open(self, session: Session, op: Op, sandbox: str, request: Fields) -> None:
        """Whether a session may open a stream to this sandbox: which wakes it, unless it is not to. QuotaExceeded."""
        error = ""
        try:
            if Tag.STATE not in request:
                await self.server.quotas.may_wake(session.tenant, session.key, sandbox)
        except SlopletError as refused:
            error = type(refused).__name__
            raise
        finally:
            if error or op not in _UNTOLD:
                argv = request.all(Tag.ARGV)[:1]
                self.server.audit.record(
                    f"wire.{op.name.lower()}", key=session.key, tenant=session.tenant.name, address=session.address,
                    sandbox=sandbox, verdict="refused" if error else "allowed", error=error,
                    detail=first_word([argv[0].decode("utf-8", "replace")] if argv else ""),
                )  # fmt: skip

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK)
            now = loop.time()
            for session in list(self._sessions.values()):
                if self.server.keys.current(session.key.id) is None:
                    session.end(POLICY, "this key is not valid any more")
                elif session.detached_at is not None and now - session.detached_at > self.grace:
                    session.end(POLICY)
                elif session.idle_since is not None and now - session.idle_since > _IDLE:
                    session.let_go()
