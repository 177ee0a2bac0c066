"""The local Controller: engines, wire, images and state, wired together. Embedded, and inside the keeper.

``holder`` is the ground it stands on, ``networked`` its networks, ``timeline`` its live state, ``pools`` what is
started ahead.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from .cloudinit.live import check as check_cloud_init
from .cloudinit.live import set_up
from .cloudspec import CloudInitSpec
from .controller import Diff, Event, Port, SandboxInfo, Snapshot, Stream
from .engines.base import Guarantee, HostStats, StartRequest
from .errors import SandboxNotFound, SlopletError, StartFailed
from .holder import NO_ROOM
from .live import (
    Live,
    ask_to_end,
    within,
)
from .network.ports import Ports
from .networked import Networked, check_ports
from .networks import Networks
from .pools import Pools
from .spec import SandboxSpec
from .state.home import Home, check_id, new_id
from .timeline import Origin, Timeline
from .volumed import drop_copies, note_applied, with_bases
from .wire.fields import Fields
from .wire.schema import Op, Tag

if TYPE_CHECKING:
    from .images.config import ImageConfig
    from .network.upstream import Upstream

T = TypeVar("T")
_Infos = list[SandboxInfo]  # spelled here: inside Runtime, `list` is its method
_Snapshots = list[Snapshot]
_Ports = list[Port]
_OVERDUE = 2.0  # a command still there that long after its time: is the agent itself?
#: What its holder does with a sandbox: of one that was started ahead it is known when it is claimed.
_ADOPTED = ("name", "ttl", "on_ttl", "longest", "idle", "undo", "checkpoint_every", "labels")
_COMMAND_OPS = (Op.EXEC, Op.ATTACH)


class Runtime(Networked):
    """Holds sandboxes in this process, on one event loop. See ``Controller`` for what each method promises."""

    def __init__(self, home: Home | None = None, *, holder: str = "embedded", upstream: Upstream | None = None) -> None:
        """``upstream``: the world that sandboxes reach; None: this machine's network."""
        super().__init__(home, holder=holder)
        self.networks = Networks(self, upstream)
        self.timeline = Timeline(self)
        self.pools = Pools(self)
        self.exposed = Ports(self, self.is_awake, listens=self.home.main is None)
        _runtimes.add(self)

    # -- making ----------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        return await self.create_as(None, spec)

    async def create_as(self, sandbox_id: str | None, spec: SandboxSpec) -> SandboxInfo:
        """``sandbox_id``: a new id that whoever asks has chosen; not for pools, whose sandboxes have theirs."""
        try:
            return await self._create(with_bases(spec), sandbox_id)
        except OSError as error:
            if isinstance(error, SlopletError):
                raise
            raise StartFailed(f"the sandbox could not be made: {error}", hint=NO_ROOM) from error

    async def _create(self, spec: SandboxSpec, sandbox_id: str | None) -> SandboxInfo:
        await self.check_links(spec.links)
        try:
            live = await self.pools.claim(spec) if spec.pool else None
            if live is None:
                kept = spec.recorded()
                async with self.timeline.origin(kept) as origin:
                    check_cloud_init(spec.cloud_init, origin.engine)
                    live = await self.make(kept, origin, cloud_init=spec.cloud_init, sandbox_id=sandbox_id)
        finally:
            if spec.pool:
                self.pools.fill(spec)
        return live.info

    async def make(
        self,
        spec: SandboxSpec,
        origin: Origin,
        *,
        parent: str | None = None,
        cloud_init: CloudInitSpec | None = None,
        sandbox_id: str | None = None,
    ) -> Live:
        """A new sandbox of these settings, started from ``origin``. Nothing is left behind on failure. ``parent``: the
        one that it is a fork of; ``cloud_init``: what is applied to it before anybody has it; ``sandbox_id``: a new id,
        if it was chosen already."""
        known = sandbox_id is not None and not (cloud_init or spec.volumes)  # those take longer to be what they are
        sandbox_id = new_id() if sandbox_id is None else check_id(sandbox_id)
        if spec.ports:
            check_ports(origin.engine)
        self.exposed.reserve(sandbox_id, spec.ports)
        try:
            if parent is not None:
                await self.networks.inherit(parent, sandbox_id)
            return await self._make(sandbox_id, spec, origin, cloud_init, known=known)
        except BaseException:
            self.exposed.close(sandbox_id)
            self.networks.drop(sandbox_id)
            raise

    async def _make(
        self, sandbox_id: str, spec: SandboxSpec, origin: Origin, cloud_init: CloudInitSpec | None, *, known: bool
    ) -> Live:
        """``known``: whoever asks for it by its id knows that it is being made (keeper/control.py)."""

        def begin() -> tuple[str, SandboxInfo]:
            owner = self.owner()
            engine = origin.engine
            engine.check(StartRequest(sandbox_id, origin.spec, origin.image, self.home.place(owner, sandbox_id)))
            info = self.store.reserve(
                sandbox_id,
                spec,
                engine=engine.name,
                rung=engine.rung,
                holder=self.holder,
                owner=owner,
                head=origin.head,
            )
            try:
                self.home.make_place(owner, sandbox_id)
            except BaseException:
                self.store.remove(sandbox_id)
                raise
            return owner, info

        # Shielded: a cancelled caller must not leave a record behind that nobody knows of.
        begun = asyncio.ensure_future(self.on_state(begin))
        try:
            owner, info = await asyncio.shield(begun)
        except asyncio.CancelledError:
            owner, _ = await begun
            await self.on_state(lambda: self.forget(owner, sandbox_id))
            raise
        marked: asyncio.Task[None] | None = None
        expires_at: float | None = None

        def started(workdir: str) -> None:
            """It is written down while it wakes up."""
            nonlocal marked, expires_at
            if known:
                expires_at = _end(spec)
                marked = self._mark(sandbox_id, workdir, expires_at)

        try:
            live = await self.bring_up(info, owner, origin, sandbox_id, started=started)
            if cloud_init is not None:
                try:
                    await set_up(live, cloud_init, self.bus)
                except BaseException:
                    await asyncio.shield(self.discard(live))
                    raise
        except BaseException:
            await asyncio.shield(self.on_state(lambda: self.forget(owner, sandbox_id)))
            raise
        await self._begin_life(live, marked, expires_at)
        return live

    async def adopt(self, live: Live, spec: SandboxSpec) -> Live:
        """Give one that was started ahead, and has no record yet, its settings and its record. SandboxExists."""
        if spec.ports:
            check_ports(live.engine)
        self.exposed.reserve(live.place, spec.ports)
        try:
            return await self._adopt(live, spec)
        except BaseException:
            self.exposed.close(live.place)
            raise

    async def _adopt(self, live: Live, spec: SandboxSpec) -> Live:
        sandbox_id, engine, head = live.place, live.engine, live.info.head

        def reserve() -> SandboxInfo:
            return self.store.reserve(
                sandbox_id, spec, engine=engine.name, rung=engine.rung, holder=self.holder, owner=live.owner, head=head
            )

        reserved = asyncio.ensure_future(self.on_state(reserve))
        try:
            info = await asyncio.shield(reserved)
        except asyncio.CancelledError:
            await asyncio.wait({reserved})
            await self.on_state(lambda: self.store.remove(sandbox_id))
            raise
        live.info = replace(info, state="running", workdir=live.info.workdir)
        kept = {what: getattr(spec, what) for what in _ADOPTED}
        live.spec = replace(live.spec, **kept)
        live.used = asyncio.get_running_loop().time()
        await self.networks.adopted(live.info)
        await self._begin_life(live)
        return live

    def _mark(self, sandbox_id: str, workdir: str, expires_at: float | None) -> asyncio.Task[None]:
        def mark() -> None:
            self.store.mark_running(sandbox_id, workdir=workdir, expires_at=expires_at)

        return self.background(self.on_state(mark))

    async def _begin_life(
        self, live: Live, marked: asyncio.Task[None] | None = None, expires_at: float | None = None
    ) -> None:
        """It answers, and is on record as starting, or is being ``marked`` as running, with its end: from now on it is
        held. Its time begins: what it took to start is not counted."""
        sandbox_id, spec = live.info.id, live.info.spec
        live.info = replace(live.info, expires_at=_end(spec) if marked is None else expires_at)
        self.install(live)
        if spec.ttl is not None:
            self.set_expiry(live, spec.ttl)
            live.first = True
        marked = marked or self._mark(sandbox_id, live.info.workdir, live.info.expires_at)
        if self.holder == "keeper":  # one that was acknowledged must be on record if the keeper dies
            try:
                await asyncio.shield(marked)
            except BaseException:
                await asyncio.shield(self.kill(sandbox_id))
                raise
        self.bus.emit(sandbox_id, "started", engine=live.engine.name, name=spec.name)

    # -- finding and asking ----------------------------------------------------------

    async def find(self, ref: str) -> SandboxInfo:
        live = self._live.get(ref) or next((item for item in self._live.values() if _named(item.info, ref)), None)
        if live is not None:
            return live.info
        return await self.on_state(lambda: self.store.find(ref))

    async def list(self) -> list[SandboxInfo]:
        return await self.on_state(self.store.list)

    async def open(self, sandbox_id: str, request: Fields, *, wake: bool = True) -> Stream:
        live = self._live.get(sandbox_id)
        if live is None or live.ending or live.gate is not None:
            live = await self.timeline.awake(sandbox_id, wake=wake)
        if live.spec.undo and request.integer(Tag.OP) == Op.EXEC:
            live = await self.timeline.before_command(live, request)
        if live.mux.congested:
            await live.mux.drained()
        stream = live.mux.open(request)
        if live.quiet is None:
            self._listen(live)
        if request.integer(Tag.OP) in _COMMAND_OPS:
            live.running[stream.id] = live.instance.oom_kills()
            if live.egress is not None:
                live.denials[stream.id] = live.egress.log.denials
            if limit := request.integer(Tag.TIMEOUT_MS, 0):
                live.overdue[stream.id] = asyncio.get_running_loop().call_later(
                    limit / 1000 + _OVERDUE, self._suspect, live, stream.id
                )
            if self.bus.wanted:
                self._announce(sandbox_id, request)
        return stream

    def _announce(self, sandbox_id: str, request: Fields) -> None:
        if request.integer(Tag.OP) == Op.EXEC:
            argv = [part.decode("utf-8", "replace") for part in request.all(Tag.ARGV)]
            self.bus.emit(sandbox_id, "command.started", command=argv)

    async def guarantees(self, sandbox_id: str) -> tuple[Guarantee, ...]:
        live = self._held(sandbox_id)
        known = self.networks.guarantees(live)
        if live.expires is None:
            return known
        left, spec = live.expires - asyncio.get_running_loop().time(), live.info.spec
        value = f"{spec.ttl:g} s" if live.first and not live.word else f"{max(left, 0):.0f} s from now on"
        then = "" if spec.on_ttl == "end" else ", then it is paused"
        return (*known, Guarantee("ttl", True, f"timer of its holder ({self.holder}){then}", value))

    async def image_config(self, sandbox_id: str) -> ImageConfig | None:
        return (self.held_live(sandbox_id) or await self.timeline.awake(sandbox_id)).image.config

    async def stats(self, sandbox_id: str) -> HostStats:
        return self._held(sandbox_id).instance.stats()

    def events(self, sandbox_id: str | None = None) -> AsyncIterator[Event]:
        return self.bus.listen(sandbox_id)

    # -- live state: see timeline ----------------------------------------------------

    async def set_ttl(self, sandbox_id: str, ttl: float | None) -> SandboxInfo:
        return await self.timeline.set_ttl(sandbox_id, ttl)

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> SandboxInfo:
        return await self.timeline.pause(sandbox_id, memory=memory)

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        return await self.timeline.resume(sandbox_id)

    async def release(self, sandbox_id: str) -> None:
        await self.timeline.release(sandbox_id)

    async def snapshot(
        self, sandbox_id: str, name: str | None = None, *, role: str = "snapshot", note: str = "", memory: bool = True
    ) -> Snapshot:
        return await self.timeline.snapshot(sandbox_id, name, role=role, note=note, memory=memory)

    async def snapshots(self, sandbox_id: str | None = None, *, role: str | None = "snapshot") -> _Snapshots:
        return await self.on_state(lambda: self.store.list_snapshots(sandbox_id, role))

    async def find_snapshot(self, ref: str, sandbox_id: str | None = None) -> Snapshot:
        return await self.on_state(lambda: self.store.find_snapshot(ref, sandbox_id))

    async def delete_snapshot(self, snapshot_id: str, *, force: bool = False) -> None:
        await self.off_loop(lambda: self.saved.delete(snapshot_id, force=force))

    async def fork(
        self,
        sandbox_id: str,
        count: int,
        *,
        names: Sequence[str] | None = None,
        snapshot: str | None = None,
        ttl: float | None = None,
    ) -> _Infos:
        return await self.timeline.fork(sandbox_id, count, names=names, snapshot=snapshot, ttl=ttl)

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        return await self.timeline.rollback(sandbox_id, snapshot_id)

    async def undo(self, sandbox_id: str, steps: int = 1) -> Snapshot:
        return await self.timeline.undo(sandbox_id, steps)

    async def diff(self, sandbox_id: str, against: str | None = None, *, text: bool = True) -> Diff:
        return await self.timeline.diff(sandbox_id, against, text=text)

    async def applied(self, sandbox_id: str, marks: Mapping[str, str]) -> None:
        spec = (await self.find(sandbox_id)).spec
        await self.off_loop(lambda: note_applied(self.home, sandbox_id, spec, marks))

    async def export(self, sandbox_id: str, path: str, *, image: bool = True) -> Snapshot:
        return await self.timeline.export(sandbox_id, path, image=image)

    async def load(self, path: str, *, name: str | None = None) -> SandboxInfo:
        return await self.timeline.load(path, name=name)

    # -- ending ----------------------------------------------------------------------

    async def kill(self, sandbox_id: str) -> None:
        live = self._live.get(sandbox_id)
        if live is not None:
            ours = not live.ending
            if ours:
                live.ending = True
                self.background(self._end(live, "killed"))
            await live.gone.wait()
            if ours:
                return
        # It was dead or paused, or just died: its record goes now, and all that was saved of it.
        self.exposed.close(sandbox_id)
        async with self.timeline.turn(sandbox_id):
            if sandbox_id not in self._live:
                record = await self.on_state(lambda: _maybe(lambda: self.store.record(sandbox_id)))
                if record is not None and record.info.state in ("dead", "paused"):
                    await self.delete_saved(sandbox_id)
                    await self.on_state(lambda: self.forget(record.owner, record.info.id))
                    if record.info.spec.volumes:
                        await drop_copies(self)
                self.timeline.drop_alarm(sandbox_id)
                self.networks.drop(sandbox_id)
                return
        await self.kill(sandbox_id)  # somebody has woken it meanwhile

    async def give_up(self, sandbox_id: str, reason: str) -> None:
        """End one that must not go on. It has died of that: one that the keeper holds says so until it is removed."""
        live = self.held_live(sandbox_id)
        if live is not None:
            live.ending = True
            self.background(self._end(live, "died", reason=reason))
            await live.gone.wait()

    async def end_all(self, reason: str, *, grace: float = 2.0) -> None:
        """End every sandbox. A named one whose engine can save it is paused; of the others commands are first asked
        to end, and they stay on record as dead with the reason (what is embedded is forgotten, as ever)."""
        if self.holder == "keeper":
            await self.timeline.pause_all()
        lives = [live for live in self._live.values() if not live.ending]
        for live in lives:
            live.ending = True
        asked = [live.instance.wait() for live in lives if ask_to_end(live, grace)]
        if asked:
            await within(asyncio.gather(*asked), grace + 1)
        for live in lives:
            self.background(self._end(live, "died", reason=reason))
        await asyncio.gather(*(live.gone.wait() for live in list(self._live.values())))

    async def aclose(self) -> None:
        await self.pools.close()
        self.exposed.close_all()
        await asyncio.gather(*(self.kill(sandbox_id) for sandbox_id in list(self._live)))
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        self.networks.close()
        await self.on_state(self._release)
        self._state.shutdown(wait=False)
        _runtimes.discard(self)


def _end(spec: SandboxSpec) -> float | None:
    """Of one whose time begins now."""
    return None if spec.ttl is None else time.time() + spec.ttl


def _named(info: SandboxInfo, ref: str) -> bool:
    return info.name is not None and info.name.casefold() == ref.casefold()


def _maybe(job: Callable[[], T]) -> T | None:
    try:
        return job()
    except SandboxNotFound:
        return None


_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()
_embedded: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Runtime] = weakref.WeakKeyDictionary()


async def embedded_runtime() -> Runtime:
    """The runtime of this event loop; it lives as long as the loop."""
    loop = asyncio.get_running_loop()
    runtime = _embedded.get(loop)
    if runtime is None:
        runtime = _embedded[loop] = Runtime()
    return runtime


def _end_all() -> None:
    for runtime in list(_runtimes):
        runtime.end_now()


def _close_all_in_child() -> None:
    for runtime in list(_runtimes):
        runtime.close_in_child()
    _runtimes.clear()
    _embedded.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_close_all_in_child)
