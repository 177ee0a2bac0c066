"""The Controller over the keeper's socket: what named sandboxes and the CLI use.

One connection per event loop and SLOPLET_HOME, made when first needed, made anew after the keeper was replaced. A
keeper is started for ``create`` only; where none runs, the rest is answered from the records, after cleaning up
what a dead keeper left.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import __version__
from ..controller import Event, SandboxInfo, Stream
from ..engines.base import Guarantee, HostStats
from ..errors import KeeperError, SandboxDead, SandboxNotFound, SlopletError, SpecError
from ..spec import SandboxSpec
from ..state.home import Home
from ..wire.fields import Fields
from ..wire.mux import HostStream
from ..wire.schema import MAX_OPEN, Op, Tag
from . import LEAVING, from_body, to_body
from .connection import HELLO_TIMEOUT, Connection, connect
from .followed import Followed
from .history import KeeperHistory
from .network import KeeperNetwork

if TYPE_CHECKING:
    from ..images.config import ImageConfig
    from ..runtime import Runtime

T = TypeVar("T")
_TRIES = 5
_SETTLE = 8.0
_PATIENCE = 30.0
_ANY_VERSION = ("find", "list", "kill", "status")
_NOBODY = object()  # the answer of a keeper that does not run


class KeeperClient(KeeperHistory, KeeperNetwork):
    """See ``Controller`` for what each method promises. ``start`` False: never start a keeper. ``acting``: for others,
    who say themselves what they use (a server does so)."""

    def __init__(self, home: Home, *, start: bool = True, acting: bool = False) -> None:
        self.home = home
        self._start = start
        self._acting = acting
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()

    # -- Controller --------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        return await self.make(spec)

    async def make(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str | None = None,
        note: Callable[[], Awaitable[None]] | None = None,
        heard: Callable[[SandboxInfo], Awaitable[None]] | None = None,
    ) -> SandboxInfo:
        """The same. An unnamed one is undone if this process ends before it is told of, or fails to note it:
        ``sandbox_id`` is a new id (``new_id``) that it is to have, not for pools, and ``note`` puts that on record
        while it starts: from then on it stays, and whoever gives up ends it by its id. ``heard`` is what is to be done
        where the id is the keeper's choice."""
        request = _request("create", spec=spec.to_dict(), **({} if sandbox_id is None else {"id": sandbox_id}))
        while True:
            connection = await self._ours()
            stream = connection.mux.open(request)
            try:
                # Until END the keeper undoes an unnamed sandbox if we vanish: it is ours from then on.
                if note is not None:
                    await note()
                    await stream.send_end()
                info = SandboxInfo.from_dict(_result(await stream.started()), known=spec.recorded())
                if heard is not None:
                    await heard(info)
                if note is None:
                    await stream.send_end()
                return info
            except BaseException as error:
                stream.reset()
                if _is_leaving(error):
                    connection.close()
                    continue
                if connection.lost and isinstance(error, SlopletError):
                    raise KeeperError(
                        "the keeper ended while it made the sandbox", hint="`sloplet ls` shows what is there; try again"
                    ) from error
                raise

    async def find(self, ref: str) -> SandboxInfo:
        found = await self._ask("find", ref=ref)
        if found is _NOBODY:
            return await self._offline(lambda runtime: runtime.find(ref), lambda: _unknown(ref))
        return SandboxInfo.from_dict(found)

    async def list(self) -> list[SandboxInfo]:
        found = await self._ask("list")
        if found is _NOBODY:
            return await self._offline(lambda runtime: runtime.list(), lambda: [])
        return [SandboxInfo.from_dict(item) for item in found]

    async def open(self, sandbox_id: str, request: Fields, *, wake: bool = True) -> Stream:
        connection = self._connection
        if connection is None or connection.lost:
            connection = await self._connected()
            if connection is None:
                connection = await self._to_wake(sandbox_id)
        return await open_on(connection, sandbox_id, request, wake=wake)

    async def kill(self, sandbox_id: str) -> None:
        if await self._ask("kill", sandbox=sandbox_id) is _NOBODY:
            await self._offline(lambda runtime: _kill_dead(runtime, sandbox_id), lambda: None)

    async def guarantees(self, sandbox_id: str) -> tuple[Guarantee, ...]:
        found = await self._ask("guarantees", sandbox=sandbox_id)
        if found is _NOBODY:
            raise await self._why_not(sandbox_id)
        return tuple(Guarantee(**item) for item in found)

    async def image_config(self, sandbox_id: str) -> ImageConfig | None:
        found = await self._ask("image_config", sandbox=sandbox_id)
        if found is _NOBODY:
            raise await self._why_not(sandbox_id)
        if found is None:
            return None
        from ..images.config import parse_config

        return parse_config(found.encode())

    async def stats(self, sandbox_id: str) -> HostStats:
        found = await self._ask("stats", sandbox=sandbox_id)
        if found is _NOBODY:
            raise await self._why_not(sandbox_id)
        return HostStats(**found)

    def events(self, sandbox_id: str | None = None) -> AsyncIterator[Event]:
        return _events(self._subscribe("events", sandbox_id))

    async def aclose(self) -> None:
        """Let go of the connection. The keeper and its sandboxes go on, and the next call connects again."""
        self.close()

    # -- beyond the protocol -----------------------------------------------------------

    async def follow(self, what: str, sandbox_id: str | None = None) -> Followed:
        """``events`` or ``asks`` once the keeper tells them: why it cannot is raised here, and nothing is missed from
        now on. Without a sandbox a keeper is started if none runs."""
        if sandbox_id is None:
            await self._ours()
        stream = await self._listening(what, sandbox_id)
        try:
            await stream.started()
        except BaseException:
            stream.reset()
            raise
        return Followed(stream)

    async def pools(self) -> Sequence[dict[str, Any]]:
        """What the keeper has ready: the settings, how many are wanted, and how many there are."""
        found = await self._ask("pools")
        return [] if found is _NOBODY else [dict(item) for item in found]

    async def status(self) -> dict[str, Any] | None:
        """The keeper's pid, version, sandboxes and clients; None if none runs."""
        found = await self._ask("status")
        return None if found is _NOBODY else dict(found)

    async def reach(self, sandbox_id: str) -> Path:
        """The socket of a keeper that can be asked about this sandbox, started where it sleeps; for whoever passes
        bytes on to it. Raises why there is nobody to ask."""
        connection = await self._connected() or await self._to_wake(sandbox_id)
        connection.check_version()
        return connection.path

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def forget(self) -> None:
        """Close our end without the loop: it is closed, or (in a forked child) the parent's."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.forget()

    # -- asking ------------------------------------------------------------------------

    async def _ask(self, method: str, **params: Any) -> Any:
        """Ask the keeper what may be asked twice. ``_NOBODY`` if none runs."""
        request = _request(method, **params)
        for attempt in range(_TRIES):
            connection = await self._connected()
            if connection is None and await self._tidy():
                return _NOBODY
            if connection is None:
                continue
            if method not in _ANY_VERSION:
                connection.check_version()
            try:
                return await _call(connection, request)
            except (SandboxDead, KeeperError) as error:
                gone = isinstance(connection.mux.error, SandboxDead) or _is_leaving(error)
                if attempt == _TRIES - 1 or not gone:
                    raise
                connection.close()
        raise KeeperError("keepers come and go, and none stays to answer", hint="try again")

    async def _look(self, method: str, offline: Callable[[Runtime], Awaitable[Any]], **params: Any) -> Any:
        found = await self._ask(method, **params)
        if found is _NOBODY:
            self.home.open()
            try:
                return await self._offline(offline, lambda: None)
            except SandboxNotFound as error:
                raise await self._why_not(params["sandbox"]) if params.get("sandbox") else error from None
        return found

    async def _do(self, method: str, **params: Any) -> Any:
        request = _request(method, **params)
        while True:
            connection = await self._ours()
            try:
                return await _call(connection, request)
            except SlopletError as error:
                if _is_leaving(error):
                    connection.close()
                    continue
                if connection.lost:
                    raise KeeperError(
                        f"the keeper ended in the middle of {method!r}", hint="`sloplet ls` shows what is there"
                    ) from error
                raise

    async def _to_wake(self, sandbox_id: str) -> Connection:
        """No keeper runs. One is started for a sandbox that sleeps; of others it is said why nobody can be asked."""
        info = await self.find(sandbox_id)
        if info.state == "paused" or (info.state == "dead" and info.saved is not None):
            return await self._ours()
        raise await self._why_not(sandbox_id)

    async def _connected(self) -> Connection | None:
        """The connection to the running keeper; None if none runs."""
        connection = self._connection
        if connection is not None and not connection.lost:
            return connection
        async with self._connecting:
            if self._connection is None or self._connection.lost:
                if not _exists(self.home):
                    return None
                self._connection = await connect(self.home.open().socket_path(), acting=self._acting)
            return self._connection

    async def _ours(self) -> Connection:
        """A connection to a keeper of our version, started if there is none."""
        if self._connection is not None and not self._acting:
            # Let the loop see that a keeper has gone while the program was busy with other things.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE
        while loop.time() < deadline:
            connection = await self._connected()
            if connection is not None:
                if connection.same_version:
                    return connection
                await _replace(connection)
                continue
            if not self._start:
                raise KeeperError("no keeper runs", hint="`sloplet create` starts one")
            from .launch import start

            await loop.run_in_executor(None, start, self.home)
        raise KeeperError("the keeper leaves as soon as it has started", hint="see its log in SLOPLET_HOME/run")

    def _subscribe(self, method: str, sandbox_id: str | None) -> AsyncIterator[Any]:
        connection, stream = self._connection, None
        if connection is not None and not connection.lost and connection.same_version:
            # At once, so that nothing which is asked after this call is missed.
            stream = connection.mux.open(_request(method, sandbox=sandbox_id))
        return self._told(method, sandbox_id, stream)

    async def _told(self, method: str, sandbox_id: str | None, stream: HostStream | None) -> AsyncIterator[Any]:
        followed = Followed(stream if stream is not None else await self._listening(method, sandbox_id))
        try:
            async for item in followed:
                yield item
        finally:
            followed.close()

    async def _listening(self, method: str, sandbox_id: str | None) -> HostStream:
        connection = await self._connected()
        if connection is None:
            if sandbox_id is not None:
                raise await self._why_not(sandbox_id)
            raise KeeperError("no keeper runs, so nothing happens", hint="`sloplet create` starts one")
        connection.check_version()
        return connection.mux.open(_request(method, sandbox=sandbox_id))

    # -- without a keeper --------------------------------------------------------------

    async def _offline(self, ask: Callable[[Runtime], Awaitable[T]], nothing: Callable[[], T]) -> T:
        """Ask the records."""
        if not _exists(self.home):
            return nothing()
        from ..runtime import Runtime

        runtime = Runtime(self.home)
        try:
            return await ask(runtime)
        finally:
            await runtime.aclose()

    async def _tidy(self) -> bool:
        """Clean up what a dead keeper left. One that is ending just now is waited for: its socket goes first, its
        sandboxes and locks later. False if another keeper listens meanwhile."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SETTLE

        async def tidy(runtime: Runtime) -> bool:
            from .control import left_over

            while True:
                await loop.run_in_executor(None, runtime.reap)
                if loop.time() > deadline or not any(left_over(info) for info in await runtime.list()):
                    return True
                await asyncio.sleep(0.01)
                if await self._connected() is not None:
                    return False

        return await self._offline(tidy, lambda: True)

    async def _why_not(self, sandbox_id: str) -> SlopletError:
        """Why nobody can be asked about a sandbox: no keeper runs."""
        from .control import not_here

        try:
            return not_here(await self.find(sandbox_id))
        except SandboxNotFound as error:
            return error


async def open_on(connection: Connection, sandbox_id: str, request: Fields, *, wake: bool = True) -> Stream:
    connection.check_version()
    if connection.mux.congested:
        await connection.mux.drained()
    asked = Fields(*request).add(Tag.SANDBOX, sandbox_id)
    return connection.mux.open(asked if wake else asked.add(Tag.STATE, 0))


async def _events(source: AsyncIterator[Any]) -> AsyncIterator[Event]:
    async for item in source:
        yield Event(**item)


async def _call(connection: Connection, request: Fields) -> Any:
    stream = connection.mux.open(request)
    try:
        parts = []
        while (piece := await stream.recv()) is not None:
            parts.append(piece.data)
        close = await stream.result()
    except BaseException:
        stream.reset()
        raise
    return _result(Fields((Tag.BODY, b"".join(parts)))) if parts else _result(close)


async def _replace(connection: Connection) -> None:
    """Ask a keeper of another version to leave. It does if it holds nothing."""
    answer = await _call(connection, _request("leave"))
    if not answer.get("left"):
        held = answer.get("sandboxes")
        raise KeeperError(
            f"the keeper (pid {connection.pid}) is of sloplet {connection.version or '?'} and holds {held} "
            f"sandbox{'' if held == 1 else 'es'}; this is sloplet {__version__}",
            hint="end them with `sloplet rm`, or use the version that made them",
        )
    try:
        async with asyncio.timeout(HELLO_TIMEOUT):
            await connection.mux.open(_request("status")).result()  # answered by its end, at the latest
    except SlopletError:
        pass
    except TimeoutError:
        raise KeeperError(f"the keeper (pid {connection.pid}) was asked to leave and does not") from None
    connection.close()


async def _kill_dead(runtime: Runtime, sandbox_id: str) -> None:
    from .control import held_elsewhere

    await runtime.kill(sandbox_id)
    try:
        info = await runtime.find(sandbox_id)
    except SandboxNotFound:
        return
    raise held_elsewhere(info)


def _request(method: str, **params: Any) -> Fields:
    fields = Fields((Tag.OP, int(Op.CONTROL)), (Tag.BODY, to_body({"method": method, "params": params})))
    if len(fields.raw(Tag.BODY)) > MAX_OPEN - 1024:
        raise SpecError("the settings are too long", hint="is the environment above a megabyte? Write a file instead")
    return fields


def _result(answer: Fields) -> Any:
    body = from_body(answer.raw(Tag.BODY))
    if not isinstance(body, dict) or "result" not in body:
        raise KeeperError("the keeper's answer is not understood", hint="is it of another version?")
    return body["result"]


def _is_leaving(error: BaseException) -> bool:
    """Whether the keeper refused because it is on its way out: it has done nothing of what was asked."""
    return isinstance(error, KeeperError) and error.message == LEAVING


def _exists(home: Home) -> bool:
    try:
        os.stat(home.path)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # there is something, and opening it says what is wrong
    return True


def _unknown(ref: str) -> SandboxInfo:
    raise SandboxNotFound(f"there is no sandbox {ref[:80]!r}", hint="see `sloplet ls`")


_clients: dict[asyncio.AbstractEventLoop, dict[tuple[Path, bool], KeeperClient]] = {}


async def keeper_controller(start: bool = True) -> KeeperClient:
    """The keeper of this SLOPLET_HOME, for this event loop. Nothing is connected or started yet.

    ``start`` False: where no keeper runs, ``create`` fails instead of starting one.
    """
    loop = asyncio.get_running_loop()
    for other in [other for other in _clients if other.is_closed()]:
        for client in _clients.pop(other).values():
            client.forget()
    home = Home()
    clients = _clients.setdefault(loop, {})
    key = (home.path, start)
    if key not in clients:
        clients[key] = KeeperClient(home, start=start)
    return clients[key]


def _forget_in_child() -> None:
    for clients in _clients.values():
        for client in clients.values():
            client.forget()
    _clients.clear()


os.register_at_fork(after_in_child=_forget_in_child)
