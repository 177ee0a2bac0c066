"""Warm pools: sandboxes that have already started, for the next one who asks for the same.

An entry has its place and its processes but no record: nobody sees it, and a crash leaves what the reaper finds as an
orphan. Being claimed gives it a record, and from then on it is like any other. It is handed out once: taken out of its
pool before anything else is done with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .controller import SandboxInfo
from .errors import SlopletError, SpecError, StartFailed
from .live import Live, close_fds
from .spec import SandboxSpec
from .state.home import new_id
from .timeline import Origin
from .wire.mux import request
from .wire.schema import Op, Tag

if TYPE_CHECKING:
    from .runtime import Runtime

MOST = 64  # ready or being made, in all pools of a process
UNUSED = 300.0  # seconds after which a pool that nobody claims from is given up
_RETRY = 5.0  # after a start that failed
_REHEARSAL = 10.0  # seconds for a command that does nothing
_BREATH = 0.1  # after a claim: whoever claimed has a first command, and starting another takes the processor from it


@dataclass
class _Entry:
    live: Live
    origin: tuple[object, ...]  #: what it was started from: of another it is not the same any more


@dataclass
class _Pool:
    wanted: int
    ready: deque[_Entry] = field(default_factory=deque)
    filler: asyncio.Task[None] | None = None
    giving_up: asyncio.TimerHandle | None = None


class Pools:
    """One per runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pools: dict[SandboxSpec, _Pool] = {}
        self._making = 0
        self._places: set[tuple[str, str]] = set()  # of those being made
        self._closed = False

    async def claim(self, spec: SandboxSpec) -> Live | None:
        """One that is ready, with these settings, on record and held. None if there is none: start one. Either way the
        pool is filled up again in the background."""
        key = _key(spec)
        pool = self._pools.get(key)
        entry = None
        if pool is not None and pool.ready:
            async with self._runtime.timeline.origin(key) as origin:
                known = _identity(origin)
            entry = self._take(pool, known)
        if entry is None:
            return None
        try:
            return await self._runtime.adopt(entry.live, spec)
        except BaseException:
            await asyncio.shield(self._discard(entry.live))
            raise

    def _take(self, pool: _Pool, known: tuple[object, ...]) -> _Entry | None:
        while pool.ready:
            entry = pool.ready.popleft()
            if entry.origin == known and entry.live.mux.error is None:
                return entry
            self._runtime.background(self._discard(entry.live))  # its image or its template has changed, or it died
        return None

    def fill(self, spec: SandboxSpec) -> None:
        """See to it that ``spec.pool`` of these are ready. Returns at once."""
        if self._closed:
            return
        key = _key(spec)
        pool = self._pools.setdefault(key, _Pool(spec.pool))
        pool.wanted = spec.pool
        if pool.giving_up is not None:
            pool.giving_up.cancel()
        pool.giving_up = asyncio.get_running_loop().call_later(UNUSED, self._give_up, key)
        if pool.filler is None or pool.filler.done():
            pool.filler = self._runtime.background(self._fill(key, pool))

    async def _fill(self, key: SandboxSpec, pool: _Pool) -> None:
        if pool.ready:
            await asyncio.sleep(_BREATH)
        while not self._closed and self._pools.get(key) is pool and len(pool.ready) < pool.wanted:
            if self.ready + self._making >= MOST:
                return
            self._making += 1
            try:
                entry = await self._start(key)
            except SpecError as error:  # it will be no other way
                self._runtime.bus.emit("", "pool.failed", reason=str(error))
                self._give_up(key)
                return
            except SlopletError as error:
                self._runtime.bus.emit("", "pool.failed", reason=str(error))
                await asyncio.sleep(_RETRY)
                continue
            finally:
                self._making -= 1
            if self._closed or self._pools.get(key) is not pool:
                await self._discard(entry.live)
                return
            pool.ready.append(entry)

    async def _start(self, key: SandboxSpec) -> _Entry:
        runtime, sandbox_id = self._runtime, new_id()
        async with runtime.timeline.origin(key) as origin:
            if origin.spec.volumes:  # a template's
                raise SpecError("what is started ahead cannot have volumes")
            owner = await runtime.on_state(lambda: _place(runtime, sandbox_id))
            self._places.add((owner, sandbox_id))
            try:
                live = await runtime.bring_up(
                    _nobody(sandbox_id, key, origin, runtime.holder), owner, origin, sandbox_id
                )
            except BaseException:
                await asyncio.shield(runtime.on_state(lambda: runtime.home.remove_place(owner, sandbox_id)))
                runtime.networks.drop(sandbox_id)
                raise
            finally:
                self._places.discard((owner, sandbox_id))
            entry = _Entry(live, _identity(origin))
        try:
            await _rehearse(live)
        except BaseException:
            await asyncio.shield(self._discard(live))
            raise
        return entry

    @property
    def ready(self) -> int:
        """How many there are, in all pools."""
        return sum(len(pool.ready) for pool in self._pools.values())

    def known(self) -> list[dict[str, Any]]:
        """All pools: their settings, how many are wanted and how many are ready."""
        return [
            {"spec": spec.to_dict(), "wanted": pool.wanted, "ready": len(pool.ready)}
            for spec, pool in self._pools.items()
        ]

    def count(self, spec: SandboxSpec) -> int:
        """How many are ready for these settings."""
        pool = self._pools.get(_key(spec))
        return 0 if pool is None else len(pool.ready)

    def _give_up(self, key: SandboxSpec) -> None:
        pool = self._pools.pop(key, None)
        if pool is not None:
            for entry in pool.ready:
                self._runtime.background(self._discard(entry.live))

    async def _discard(self, live: Live) -> None:
        with suppress(SlopletError, OSError):  # what is left is the reaper's
            await self._runtime.discard(live)

    async def close(self) -> None:
        """End all of them."""
        fillers = [pool.filler for pool in self._pools.values() if pool.filler is not None]
        entries = self._forget()
        for filler in fillers:
            filler.cancel()
        await asyncio.gather(*(self._discard(entry.live) for entry in entries))

    def end_now(self) -> None:
        """The same without a loop, at interpreter exit."""
        for entry in self._forget():
            entry.live.instance.kill()
            with suppress(SlopletError, OSError):
                entry.live.instance.cleanup()
                self._runtime.home.remove_place(entry.live.owner, entry.live.place)
        for owner, place in list(self._places):  # those being made end with us
            with suppress(SlopletError, OSError):
                self._runtime.home.remove_place(owner, place)

    def close_in_child(self) -> None:
        """After a fork they are the parent's: drop our copies of their wires."""
        for entry in self._forget():
            close_fds(entry.live.instance)

    def _forget(self) -> list[_Entry]:
        self._closed = True
        entries = [entry for pool in self._pools.values() for entry in pool.ready]
        for pool in self._pools.values():
            pool.ready.clear()
            if pool.giving_up is not None:
                pool.giving_up.cancel()
        self._pools.clear()
        return entries


def _key(spec: SandboxSpec) -> SandboxSpec:
    """What must be the same for one to serve as another: all but its name, and what its holder does with it."""
    spec = replace(spec, ttl=None, on_ttl="end", longest=None, idle=None, undo=0, checkpoint_every=None)
    return replace(spec, name=None, pool=0, ports=(), labels=())


def _identity(origin: Origin) -> tuple[object, ...]:
    return (origin.engine.name, origin.image, origin.head)


async def _rehearse(live: Live) -> None:
    """Run a command that does nothing: whoever claims it finds the ways there warm. An image without a shell is none
    the worse for it."""
    try:
        async with asyncio.timeout(_REHEARSAL):
            arguments = ((Tag.ARGV, word) for word in ("/bin/sh", "-c", ":"))
            stream = live.mux.open(request(Op.EXEC, *arguments, (Tag.TIMEOUT_MS, int(_REHEARSAL * 1000))))
            try:
                pid = (await stream.started()).integer(Tag.PID)
                await stream.result()
                await live.mux.open(request(Op.FORGET, (Tag.PID, pid))).result()
            except SlopletError:
                live.mux.check()
    except TimeoutError:
        raise StartFailed("a sandbox of the pool started, but does not run commands") from None


def _place(runtime: Runtime, sandbox_id: str) -> str:
    owner = runtime.owner()
    runtime.home.make_place(owner, sandbox_id)
    return owner


def _nobody(sandbox_id: str, spec: SandboxSpec, origin: Origin, holder: str) -> SandboxInfo:
    """What is known of one that nobody has claimed."""
    engine = origin.engine
    info = SandboxInfo(
        sandbox_id, None, "starting", engine.name, engine.rung, holder, 0.0, None, spec.run_workdir, spec
    )
    return replace(info, head=origin.head)
