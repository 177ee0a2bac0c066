"""The Controller of a tenant as the server has it: its keeper, and in front of it what the caller's key may have.

Who calls is known from the request's context (``ACTING``): every way to make or to wake a sandbox passes here, by
whichever route, tool or session it came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..controller import SandboxInfo, Snapshot, Stream
from ..errors import SlopletError
from ..images.config import ImageConfig
from ..keeper.client import KeeperClient, open_on
from ..keeper.connection import Connection, connect
from ..netchange import NetworkChange
from ..netspec import NetworkSpec
from ..spec import SandboxSpec
from ..state.home import new_id
from ..wire.fields import Fields
from ..wire.schema import MAX_STREAMS
from .imaging import check_here
from .intent import INTENT
from .quotas import Reservation, Share

if TYPE_CHECKING:
    from .keys import Key
    from .state import ServerState
    from .tenants import Tenant

#: The key that the work of this task is done for. The guard sets it for each request; sessions that are no requests
#: (SSH) set it themselves. None: nobody's, as of visitors of public names.
ACTING: ContextVar[Key | None] = ContextVar("sloplet_acting", default=None)


_MANY = MAX_STREAMS - 128  # the rest is for what is asked of the keeper itself
_WAITING = 2.0  # seconds: what waits is told at once


class Program(NamedTuple):
    """Which program asks: the word that it chose, and whether what it makes without a name is to go with it."""

    client: str
    lease: bool


NOBODY = Program("", False)
PROGRAM: ContextVar[Program] = ContextVar("sloplet_program", default=NOBODY)


#: What the audit log is to tell of this task's request: ``sandbox`` (ids, with commas), ``detail`` (one word).
FACTS: ContextVar[dict[str, str] | None] = ContextVar("sloplet_facts", default=None)


class ServedKeeper(KeeperClient):
    """A connection of its own to the tenant's keeper."""

    def __init__(self, tenant: Tenant, server: ServerState) -> None:
        super().__init__(tenant.home, acting=True)
        self.tenant = tenant
        self.server = server
        self.used_at = time.monotonic()
        self._more: list[Connection] = []  # where one connection cannot take all that is asked at a time

    @property
    def idle(self) -> bool:
        """Whether there is a connection over which nothing is going on."""
        connection = self._connection
        return connection is not None and not any(
            each.lost or each.mux.waiting for each in (connection, *self._lively())
        )

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.lost

    # -- what makes sandboxes ----------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        key = ACTING.get()
        spec = await self.server.permits.create(key, self, spec)
        if spec.template is None:
            await check_here(self.home, key, spec.image)
        pool = replace(spec, name=None, ttl=None, longest=None, ports=()) if spec.pool else None
        async with self._making(Share.of(spec.limits), pool) as kept:
            info = await (super().create(spec) if spec.name is not None else self._create_unnamed(spec))
            await self.server.permits.made(key, self, info)
            return (await self._made(kept, [info]))[0]

    async def _create_unnamed(self, spec: SandboxSpec) -> SandboxInfo:
        """The keeper undoes it unless we say that we know of it. That is said when it is on record whose it is and
        which request it was made for; which is written while it starts, under an id that is chosen here."""
        program, intent, leases = PROGRAM.get(), INTENT.get(), self.server.leases

        def note(sandbox_id: str) -> Awaitable[None]:
            return leases.hold(self.tenant.name, program.client if program.lease else "", [sandbox_id], intent)

        if spec.pool or not (intent or (program.lease and program.client)):  # those of pools have their ids already
            return await self.make(spec, heard=lambda info: note(info.id))
        chosen = new_id()
        noting: set[asyncio.Future[None]] = set()

        def begin() -> Awaitable[None]:
            task = asyncio.ensure_future(note(chosen))
            noting.add(task)
            return asyncio.shield(task)

        try:
            with leases.making(chosen):
                return await self.make(spec, sandbox_id=chosen, note=begin)
        except BaseException as error:
            undone = self.server.background(self._unmake(chosen, noting))
            if isinstance(error, SlopletError):  # whoever asks again does not find what is on its way out
                await asyncio.wait({undone})
            raise

    async def _unmake(self, sandbox_id: str, noting: set[asyncio.Future[None]]) -> None:
        """It failed, or was given up, perhaps after it was made. What cannot be ended now is leased still."""
        if noting:
            await asyncio.wait(noting)
        await super().kill(sandbox_id)
        self.server.leases.gone(sandbox_id)

    async def fork(
        self,
        sandbox_id: str,
        count: int,
        *,
        names: Sequence[str] | None = None,
        snapshot: str | None = None,
        ttl: float | None = None,
    ) -> list[SandboxInfo]:
        await self.server.permits.fork(ACTING.get(), await self.find(sandbox_id), ttl)
        each = await self.server.quotas.share_of(self.tenant, sandbox_id)
        wanted = Share(count, each.memory * count, each.cpus * count, each.disk * count)
        async with self._making(wanted) as kept:
            made = await super().fork(sandbox_id, count, names=names, snapshot=snapshot, ttl=ttl)
            return await self._made(kept, made)

    async def load(self, path: str, *, name: str | None = None) -> SandboxInfo:
        spec = await self.server.permits.load(ACTING.get(), path)
        async with self._making(Share.of(spec.limits)) as kept:
            return (await self._made(kept, [await super().load(path, name=name)]))[0]

    @asynccontextmanager
    async def _making(self, wanted: Share, pool: SandboxSpec | None = None) -> AsyncIterator[Reservation]:
        """Room, then a turn: few are made at a time."""
        self.used_at = time.monotonic()
        async with self.server.quotas.room(self.tenant, ACTING.get(), wanted, pool) as kept:
            async with self.server.limits.creating(self.tenant.name):
                yield kept

    async def _made(self, kept: Reservation, infos: list[SandboxInfo]) -> list[SandboxInfo]:
        program = PROGRAM.get()
        try:
            self.server.quotas.check_made(self.tenant, ACTING.get(), kept, infos)
            if program.lease:
                own = [info.id for info in infos if info.name is None]
                await self.server.leases.hold(self.tenant.name, program.client, own)
        except BaseException:
            await asyncio.shield(asyncio.gather(*(super(ServedKeeper, self).kill(info.id) for info in infos)))
            for info in infos:
                self.server.leases.gone(info.id)
            raise
        kept.made += infos
        self.server.names.made(self.tenant.name, infos)
        if (facts := FACTS.get()) is not None:
            facts["sandbox"] = ",".join(info.id for info in infos[:8])
        self.server.uses.use(self.tenant.name, program.client, *(info.id for info in infos))
        return infos

    # -- what wakes them ---------------------------------------------------------------

    async def open(self, sandbox_id: str, request: Fields, *, wake: bool = True) -> Stream:
        if wake:
            await self._waking(sandbox_id)
        first = self._connection
        if first is None or first.lost or first.mux.asked < _MANY:
            return await super().open(sandbox_id, request, wake=wake)
        connection = next((each for each in self._lively() if each.mux.asked < _MANY), None)
        if connection is None:
            connection = await connect(self.home.socket_path(), acting=True)
            if connection is None:  # the keeper has gone: whoever asks finds out why
                return await super().open(sandbox_id, request, wake=wake)
            self._more.append(connection)
        return await open_on(connection, sandbox_id, request, wake=wake)

    def _lively(self) -> list[Connection]:
        self._more = [each for each in self._more if not each.lost]
        return self._more

    def close(self) -> None:
        super().close()
        while self._more:
            self._more.pop().close()

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        await self._permitted(sandbox_id)
        await self._waking(sandbox_id)
        async with self.server.limits.creating(self.tenant.name):
            return self._ran(await super().resume(sandbox_id))

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        await self._permitted(sandbox_id)
        await self._waking(sandbox_id)
        return self._ran(await super().rollback(sandbox_id, snapshot_id))

    async def undo(self, sandbox_id: str, steps: int = 1) -> Snapshot:
        await self._permitted(sandbox_id)
        await self._waking(sandbox_id)
        return await super().undo(sandbox_id, steps)

    async def image_config(self, sandbox_id: str) -> ImageConfig | None:
        await self._waking(sandbox_id)
        return await super().image_config(sandbox_id)

    async def _permitted(self, sandbox_id: str) -> None:
        key = ACTING.get()
        if key is not None and (key.limits.engines or key.limits.at_least):
            await self.server.permits.wake(key, await self.find(sandbox_id))

    async def _waking(self, sandbox_id: str) -> None:
        self.used_at = time.monotonic()
        await self.server.quotas.may_wake(self.tenant, ACTING.get(), sandbox_id)

    def _ran(self, info: SandboxInfo) -> SandboxInfo:
        self.server.uses.use(self.tenant.name, PROGRAM.get().client, info.id)
        if info.state == "running":
            self.server.quotas.account(self.tenant).ran(info)
        return info

    # -- what they may reach -----------------------------------------------------------

    async def set_network(
        self, sandbox_id: str, network: NetworkSpec, values: Mapping[str, str | None] | None = None
    ) -> None:
        await self.server.permits.network(network)
        await super().set_network(sandbox_id, network, values)

    async def change_network(self, sandbox_id: str, change: NetworkChange) -> NetworkSpec:
        await self.server.permits.network(NetworkSpec("rules", allow=(*(change.allow or ()), *change.add_allow)))
        return await super().change_network(sandbox_id, change)

    async def answer(self, sandbox_id: str, ask_id: int, verdict: str) -> None:
        if verdict == "always":  # that makes a rule
            await self._check_ask(sandbox_id, ask_id)
        await super().answer(sandbox_id, ask_id, verdict)

    async def _check_ask(self, sandbox_id: str, ask_id: int) -> None:
        """NotAllowed if a rule for it is. What does not wait any more is nothing to be answered."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_WAITING), aclosing(self.asks(sandbox_id)) as waiting:  # type: ignore[type-var]
                async for ask in waiting:
                    if ask.id == ask_id:
                        await self.server.permits.target(ask.name, ask.address)
                        return

    # -- what ends them ----------------------------------------------------------------

    async def kill(self, sandbox_id: str) -> None:
        await super().kill(sandbox_id)
        self.server.quotas.account(self.tenant).gone(sandbox_id)
        self.server.leases.gone(sandbox_id)
        self.tenant.forget(sandbox_id)

    async def set_ttl(self, sandbox_id: str, ttl: float | None) -> SandboxInfo:
        ttl = self.server.permits.ttl(ACTING.get(), ttl)
        if ttl != 0:
            return await super().set_ttl(sandbox_id, ttl)
        account = self.server.quotas.account(self.tenant)
        with account.pausing(sandbox_id):
            info = await super().set_ttl(sandbox_id, ttl)
            if info.state == "paused":
                account.slept(info)
        if info.state == "ended":
            account.gone(sandbox_id)
            self.server.leases.gone(sandbox_id)
            self.tenant.forget(sandbox_id)
        return info

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> SandboxInfo:
        account = self.server.quotas.account(self.tenant)
        with account.pausing(sandbox_id):
            info = await super().pause(sandbox_id, memory=memory)
            account.slept(info)
        return info
