"""How much a tenant has running, and whether a key may have more.

Every way to make or wake a sandbox goes through the tenant's controller (``served.py``), which asks here: no route can
forget to. What runs is known in memory: what was made through this server is entered at once, the rest by a look at the
keeper's list now and then, and always before somebody is refused. What is being made has its room reserved, so creates
that come at the same time never pass a limit together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..controller import SandboxInfo
from ..errors import QuotaExceeded, SandboxNotFound
from ..spec import Limits, SandboxSpec
from .keys import Key, KeyLimits

if TYPE_CHECKING:
    from .caller import Caller
    from .tenants import Tenant

#: A look at the list that is younger than this is good enough to refuse by.
FRESH = 0.1
#: How long a pool that nobody takes from is kept (pools.py): so long it counts.
POOL_KEPT = 300.0
#: A sandbox that was woken may take so long to be on record as running.
_WAKING = 120.0
_RUNNING = ("running", "starting")


@dataclass(frozen=True)
class Share:
    """What sandboxes may use: their limits, added up."""

    sandboxes: int = 0
    memory: int = 0
    cpus: float = 0.0
    disk: int = 0

    @staticmethod
    def of(limits: Limits, count: int = 1) -> Share:
        return Share(count, limits.memory * count, limits.cpus * count, limits.disk * count)

    def __add__(self, other: Share) -> Share:
        return Share(
            self.sandboxes + other.sandboxes, self.memory + other.memory, self.cpus + other.cpus, self.disk + other.disk
        )


def refusal(limits: KeyLimits, used: Share, wanted: Share) -> QuotaExceeded | None:
    """Why ``wanted`` may not be had besides ``used``; None: it may."""
    for what, most in (
        ("sandboxes", limits.max_sandboxes),
        ("memory", limits.max_memory),
        ("cpus", limits.max_cpus),
        ("disk", limits.max_disk),
    ):
        has, more = getattr(used, what), getattr(wanted, what)
        if most is not None and more and has + more > most + 1e-9:
            told = _size if what in ("memory", "disk") else _count
            return QuotaExceeded(
                f"the limit of this key is {told(most)} of {what} at a time: {told(has)} in use, and {told(more)} more "
                "asked for",
                hint="end or pause some first, or ask the server's operator for more",
            )
    return None


def _count(value: float) -> str:
    return f"{value:g}"


def _size(value: float) -> str:
    """As limits are written: 512m, 1.5g."""
    for unit, power in (("g", 2**30), ("m", 2**20), ("k", 2**10)):
        if value >= power:
            return f"{value / power:.4g}{unit}"
    return f"{value:g}"


class Lister(Protocol):
    async def list(self) -> list[SandboxInfo]: ...


@dataclass(eq=False)
class Reservation:
    """Room that is kept. ``started``: when, as sandboxes' ``created_at`` tells time."""

    share: Share
    started: float = field(default_factory=time.time)
    made: list[SandboxInfo] = field(default_factory=list)


class Account:
    """What one tenant has. All in the server's loop."""

    def __init__(self, controller: Lister) -> None:
        self._controller = controller
        self.running: dict[str, Share] = {}
        self.sleeping: dict[str, Share] = {}  #: paused, or dead with a checkpoint: use wakes them
        self.states: dict[str, int] = {}  #: how many there are of each state, by the last look
        self.reserved: set[Reservation] = set()
        self.pools: dict[SandboxSpec, tuple[Share, float]] = {}
        self.looked_at = -1e9
        self.changed_at = -1e9
        self._waking: dict[str, float] = {}
        self._pausing: dict[str, int] = {}  # being paused: by how many
        self._let_through: set[str] = set()  # of those: somebody was meanwhile, who wakes it again
        self._changed: set[str] | None = None  # by us, while a look is under way
        self._look: asyncio.Task[None] | None = None

    def used(self, without: Reservation | None = None) -> Share:
        now = time.monotonic()
        self.pools = {spec: kept for spec, kept in self.pools.items() if kept[1] > now}
        total = sum(self.running.values(), Share())
        total = sum((share for share, _ in self.pools.values()), total)
        return sum((each.share for each in self.reserved if each is not without), total)

    def ran(self, info: SandboxInfo) -> None:
        """It runs from now on."""
        self._note(info.id)
        self.sleeping.pop(info.id, None)
        self._waking.pop(info.id, None)
        self.running[info.id] = Share.of(info.spec.limits)

    def woke(self, sandbox_id: str) -> None:
        """It is about to: whoever asks is let through."""
        self._note(sandbox_id)
        self._waking[sandbox_id] = time.monotonic() + _WAKING
        self.running[sandbox_id] = self.sleeping.pop(sandbox_id)
        if sandbox_id in self._pausing:
            self._let_through.add(sandbox_id)

    @contextmanager
    def pausing(self, sandbox_id: str) -> Iterator[None]:
        """It is being paused, in this block. Whoever is let through meanwhile wakes it at once: then it runs."""
        self._pausing[sandbox_id] = self._pausing.get(sandbox_id, 0) + 1
        try:
            yield
        finally:
            self._pausing[sandbox_id] -= 1
            if not self._pausing[sandbox_id]:
                del self._pausing[sandbox_id]
                if sandbox_id in self._let_through:
                    self._let_through.discard(sandbox_id)
                    self._waking[sandbox_id] = time.monotonic() + _WAKING
                    self._note(sandbox_id)

    def is_running(self, sandbox_id: str) -> bool:
        """Whether it counts already. Asked by whoever is about to use it."""
        if sandbox_id not in self.running:
            return False
        if sandbox_id in self._pausing:
            self._let_through.add(sandbox_id)
        return True

    def slept(self, info: SandboxInfo) -> None:
        if info.id in self._let_through:
            return
        self.gone(info.id)
        self.sleeping[info.id] = Share.of(info.spec.limits)

    def gone(self, sandbox_id: str) -> None:
        self._note(sandbox_id)
        self._waking.pop(sandbox_id, None)
        self.running.pop(sandbox_id, None)
        self.sleeping.pop(sandbox_id, None)

    def _note(self, sandbox_id: str) -> None:
        self.changed_at = time.monotonic()
        if self._changed is not None:
            self._changed.add(sandbox_id)

    async def look(self, fresh: float = FRESH) -> None:
        """Know what is there, not older than ``fresh`` seconds. Those who ask at once share one look."""
        if time.monotonic() - self.looked_at <= fresh:
            return
        if self._look is None or self._look.done():
            self._look = asyncio.ensure_future(self._look_now())
        await asyncio.shield(self._look)

    async def _look_now(self) -> None:
        changed = self._changed = set()
        began = time.monotonic()
        try:
            infos = await self._controller.list()
        finally:
            self._changed = None
        oldest = min((each.started for each in self.reserved), default=float("inf"))
        states: dict[str, int] = {}
        seen = {info.id for info in infos}
        for info in infos:
            states[info.state] = states.get(info.state, 0) + 1
            if info.id not in changed:
                self._enter(info, oldest, began)
        for sandbox_id in [*self.running, *self.sleeping]:
            if sandbox_id not in seen and sandbox_id not in changed:
                self.gone(sandbox_id)
        self.states = states
        self.looked_at = began

    def _enter(self, info: SandboxInfo, oldest: float, now: float) -> None:
        share = Share.of(info.spec.limits)
        if info.state in _RUNNING:
            # One that is being made through us has its room already; its maker will enter it.
            if info.id in self.running or info.created_at < oldest:
                self.running[info.id] = share
                self.sleeping.pop(info.id, None)
                self._waking.pop(info.id, None)
            return
        if self._waking.get(info.id, 0.0) > now or info.id in self._let_through:
            return
        self.running.pop(info.id, None)
        self._waking.pop(info.id, None)
        if info.state == "paused" or (info.state == "dead" and info.saved is not None):
            self.sleeping[info.id] = share
        else:
            self.sleeping.pop(info.id, None)


#: Room that a caller has reserved itself, around what it does: the controller uses that.
_RESERVED: ContextVar[Reservation | None] = ContextVar("sloplet_reserved", default=None)


class Quotas:
    """One per server. ``keys_of``: the valid keys of a tenant, for what nobody's key is behind: a visitor of a public
    name. Such a one may what any of them may."""

    def __init__(self, keys_of: Callable[[str], Iterable[Key]] = lambda tenant: ()) -> None:
        self._keys_of = keys_of
        self._accounts: dict[str, Account] = {}

    def account(self, tenant: Tenant) -> Account:
        found = self._accounts.get(tenant.name)
        if found is None:
            found = self._accounts[tenant.name] = Account(tenant.controller)
        return found

    def accounts(self) -> dict[str, Account]:
        return self._accounts

    @asynccontextmanager
    async def reserve(self, caller: Caller, spec: SandboxSpec, count: int = 1) -> AsyncIterator[None]:
        """Room for ``count`` sandboxes of this spec for the block, which the controller then uses. Only needed where
        there is work before the controller is asked. QuotaExceeded."""
        async with self.room(caller.tenant, caller.key, Share.of(spec.limits, count)) as kept:
            before = _RESERVED.set(kept)
            try:
                yield
            finally:
                _RESERVED.reset(before)

    @asynccontextmanager
    async def room(self, tenant: Tenant, key: Key | None, wanted: Share, pool: SandboxSpec | None = None) \
            -> AsyncIterator[Reservation]:  # fmt: skip
        """Room for what is made in the block, which says what it was: ``made.append(info)``. QuotaExceeded."""
        around = _RESERVED.get()
        if around is not None and not around.made:
            yield around
            return
        account = self.account(tenant)
        limits = self._limits(tenant.name, key)
        ahead = Share() if pool is None or pool in account.pools else Share.of(pool.limits, pool.pool)
        await self._need(account, limits, wanted + ahead)
        kept = Reservation(wanted)
        account.reserved.add(kept)
        if pool is not None:  # the keeper's time for it begins anew, too
            share = ahead if ahead.sandboxes else Share.of(pool.limits, pool.pool)
            account.pools[pool] = (share, time.monotonic() + POOL_KEPT)
        try:
            yield kept
        finally:
            account.reserved.discard(kept)
            for info in kept.made:
                account.ran(info)

    def check_made(self, tenant: Tenant, key: Key | None, kept: Reservation, infos: list[SandboxInfo]) -> None:
        """What a template or an archive made may be more than was asked for. QuotaExceeded if that is too much."""
        real = sum((Share.of(info.spec.limits) for info in infos), Share())
        if real != kept.share:
            account = self.account(tenant)
            error = _refusal(self._limits(tenant.name, key), account.used(kept), real)
            if error is not None:
                raise error

    async def may_wake(self, tenant: Tenant, key: Key | None, sandbox_id: str) -> None:
        """A use of this sandbox is coming, which wakes it if it sleeps. QuotaExceeded. What is not known here is the
        keeper's to refuse."""
        account = self.account(tenant)
        if account.is_running(sandbox_id):
            return
        limits = self._limits(tenant.name, key)
        if not limits:
            return  # nothing is limited
        if sandbox_id not in account.sleeping:
            await account.look()
            if sandbox_id not in account.sleeping:
                return
        await self._need(account, limits, account.sleeping[sandbox_id])
        if sandbox_id in account.sleeping:
            account.woke(sandbox_id)

    async def share_of(self, tenant: Tenant, sandbox_id: str) -> Share:
        """What one more like it would take. SandboxNotFound."""
        account = self.account(tenant)
        share = account.running.get(sandbox_id) or account.sleeping.get(sandbox_id)
        if share is None:
            await account.look()
            share = account.running.get(sandbox_id) or account.sleeping.get(sandbox_id)
        if share is None:
            info = await tenant.controller.find(sandbox_id)
            if info.id != sandbox_id:
                raise SandboxNotFound(f"there is no sandbox {sandbox_id[:80]!r}", hint="see `sloplet ls`")
            share = Share.of(info.spec.limits)
        return share

    async def _need(self, account: Account, limits: tuple[KeyLimits, ...], wanted: Share) -> None:
        """Returns in the same step in which it was found that there is room."""
        if not limits:
            return
        if account.looked_at < 0:
            await account.look()
        if _refusal(limits, account.used(), wanted) is not None:
            await account.look()
            if (error := _refusal(limits, account.used(), wanted)) is not None:
                raise error

    def _limits(self, tenant: str, key: Key | None) -> tuple[KeyLimits, ...]:
        """One of these must allow it; (): nothing is limited."""
        keys = [key] if key is not None else list(self._keys_of(tenant))
        if any(_unlimited(each.limits) for each in keys):
            return ()
        return tuple(each.limits for each in keys) or (_NOTHING,)


_NOTHING = KeyLimits(max_sandboxes=0)


def _unlimited(limits: KeyLimits) -> bool:
    return limits.max_sandboxes is limits.max_memory is limits.max_cpus is limits.max_disk is None


def _refusal(limits: tuple[KeyLimits, ...], used: Share, wanted: Share) -> QuotaExceeded | None:
    error = None
    for each in limits:
        error = refusal(each, used, wanted)
        if error is None:
            return None
    return error
