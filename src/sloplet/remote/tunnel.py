"""The tunnel to a server: one session over WebSockets that come and go.

A connection that breaks is made again, and the session goes on where it was, for as long as the server keeps it: nobody
notices. After that, or when the server was restarted, whatever was going on fails with ServerUnreachable, and the next
call begins a new session. Nothing is ever sent twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from ..errors import KeyRefused, NotAllowed, ProtocolError, RequestInvalid, ServerUnreachable, SlopletError, SpecError
from ..errors import from_dict as _error_of
from .place import Place
from .session import Session
from .websocket import WebSocket, connect

NORMAL, PROTOCOL, POLICY, RESTART = 1000, 1002, 1008, 1012
_CONNECT = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_PATIENCE = 10.0  # how long a call waits for a server that was there before
_COMEBACK = 60.0  # how long it is tried to be there again: so long the server keeps what is leased to us
_FATAL = (KeyRefused, NotAllowed, SpecError, RequestInvalid)
_ENDED = "what was going on there was ended, and nothing is run twice"
_DETACHED = "commands started with detached=True go on: attach to them"


class Line:
    """One WebSocket of a tunnel, from its first message to its loss. A ``websocket.Handler``."""

    def __init__(self, tunnel: Tunnel, session: Session | None) -> None:
        loop = asyncio.get_running_loop()
        self._tunnel = tunnel
        self.session = session
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[tuple[int, str]] = loop.create_future()
        self.greeted.add_done_callback(_seen)

    def on_text(self, socket: WebSocket, text: str) -> None:
        if self.greeted.done():
            if self.session is not None:
                self.session.on_text(text)
            return
        try:
            self._greet(socket, json.loads(text))
        except (ProtocolError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self.greeted.set_exception(ServerUnreachable("the server's greeting is not understood"))
            socket.abort()
        else:
            self.greeted.set_result(None)

    def _greet(self, socket: WebSocket, hello: dict[str, Any]) -> None:
        if self.session is None or hello["session"] != self.session.id:
            self.session = self._tunnel.begun(Session(hello, self._tunnel.wrong))
        self.session.attach(socket, int(hello["received"]))
        self._tunnel.attached(self.session)

    def on_binary(self, data: bytes) -> None:
        if self.session is not None:
            self.session.on_binary(data)

    def on_lost(self, code: int, reason: str) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(ServerUnreachable("the connection to the server broke"))
        if not self.gone.done():
            self.gone.set_result((code, reason))

    def on_writable(self) -> None:
        if self.session is not None:
            self.session.flush()


class Tunnel:
    """Belongs to the loop that it is first used in. ``headers``: those of every request."""

    def __init__(self, place: Place, headers: Mapping[str, str]) -> None:
        self._place = place
        self._headers = headers
        self._session: Session | None = None
        self._socket: WebSocket | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Session] | None = None
        self._attempts = 0
        self._been = False  # whether there was a session

    async def session(self) -> Session:
        """The one that is there; a new one if there is none. While the connection is being made again it is waited
        for: what is not sent yet can still go to a server that was restarted and knows nothing of the old one."""
        if self._session is not None and self._session.attached:
            return self._session
        self.begin()
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._ready.add_done_callback(_seen)
        ready = self._ready
        patience = self._session.grace if self._session is not None else _PATIENCE
        done, _ = await asyncio.wait({ready}, timeout=patience if self._been else None)
        if not done:
            raise ServerUnreachable(f"the server {self._place.url} does not come back", hint="is it up?")
        error = ready.exception()
        if isinstance(error, SlopletError):
            raise _error_of(error.to_dict())  # a fresh object for each waiter
        return ready.result()

    def begin(self) -> None:
        """Be connected, or on the way to it. Idempotent."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    async def aclose(self) -> None:
        """Say goodbye. What was going on is given up."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        if self._socket is not None:
            self._socket.forget()

    # -- for its lines -----------------------------------------------------------------

    def begun(self, session: Session) -> Session:
        """The server has begun a new session: the one before, if there was one, is not known there any more."""
        self._drop(ServerUnreachable(f"the server does not know us any more: {_ENDED}", hint=_DETACHED))
        self._session = session
        self._been = True
        return session

    def attached(self, session: Session) -> None:
        """It has a connection: those who waited for one go on."""
        ready, self._ready = self._ready, None
        if ready is not None and not ready.done():
            ready.set_result(session)

    def wrong(self, session: Session, error: SlopletError) -> None:
        """The server does not keep to the protocol."""
        if session is self._session:
            self._drop(
                ServerUnreachable(f"the server cannot be understood: {error.message}", hint="which version is it?")
            )
            if self._socket is not None:
                self._socket.abort()

    # -- one after the other -----------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        error: SlopletError = ServerUnreachable("the connection to the server was closed")
        pause, until = _FIRST_PAUSE, loop.time() + (_COMEBACK if self._been else 0.0)
        try:
            while True:
                try:
                    line = await self._connect(min(_CONNECT, max(1.0, until - loop.time())) if self._been else _CONNECT)
                except SlopletError as problem:
                    error = problem
                    if isinstance(problem, _FATAL) or loop.time() >= until:
                        return
                    await asyncio.sleep(pause)
                    pause = min(_LONGEST_PAUSE, pause * 2)
                    continue
                code, reason = await line.gone
                self._socket, pause, until = None, _FIRST_PAUSE, loop.time() + _COMEBACK
                if self._session is not None:
                    self._session.detach()
                    until = loop.time() + self._session.grace
                if code == POLICY:
                    error = KeyRefused(reason or "the server closed the connection", hint="is the key still valid?")
                    return
                if code in (RESTART, PROTOCOL):
                    why = "the server was restarted" if code == RESTART else f"the server did not understand ({reason})"
                    self._drop(ServerUnreachable(f"{why}: {_ENDED}", hint=_DETACHED))
        finally:
            self._end(error)

    async def _connect(self, timeout: float) -> Line:
        session = self._session
        self._attempts += 1
        query = f"attempt={self._attempts}"
        if session is not None:
            query += f"&session={session.id}&received={session.bytes.received}"
        line = Line(self, session)
        self._socket = await connect(self._place, "/v1/wire", query, self._headers, line, timeout)
        try:
            async with asyncio.timeout(timeout):
                await line.greeted
        except TimeoutError:
            self._socket.abort()
            raise ServerUnreachable(f"the server {self._place.url} does not greet us", hint="is it up?") from None
        return line

    def _end(self, error: SlopletError) -> None:
        """No more attempts, until the next call."""
        self._task = None
        if self._socket is not None:
            self._socket.close(NORMAL)
            self._socket = None
        ready, self._ready = self._ready, None
        if ready is not None and not ready.done():
            ready.set_exception(error)
        if isinstance(error, ServerUnreachable):
            error = ServerUnreachable(f"{error.message}: {_ENDED}", hint=_DETACHED)
        self._drop(error)

    def _drop(self, error: SlopletError) -> None:
        """The session is over, and with it all that was going on in it."""
        session, self._session = self._session, None
        if session is not None:
            session.detach()
            session.mux.fail(error)


def _seen(future: asyncio.Future[Any]) -> None:
    """Whoever waited for it may have left: its error is then nobody's."""
    if not future.cancelled():
        future.exception()
