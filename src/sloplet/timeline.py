"""Through time: saving sandboxes, starting from what was saved, putting one state in place of another.

The part of ``Runtime`` behind pause, resume, snapshot, fork, rollback and undo. Three rules hold it together. What is
saved is published whole before anything depends on it (state/snapshots.py). While a sandbox stands still its gate is
closed, so nothing is asked of it, and whoever comes waits and looks again. A sandbox changes its state one change at
a time (its turn).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import disk
from .controller import Diff, SandboxInfo, Snapshot
from .engines import registry
from .engines.base import Engine, ResolvedImage, cannot_save
from .errors import (
    EngineUnavailable,
    SandboxDead,
    SandboxNotFound,
    SandboxPaused,
    SlopletError,
    SnapshotError,
    SnapshotIncompatible,
    SnapshotNotFound,
    SpecError,
    UnsupportedOperation,
)
from .live import Live, freeze, thaw, within
from .spec import SandboxSpec, check_fork
from .state.home import new_id
from .state.opened import Opened
from .wire.fields import Fields
from .wire.schema import Op, Tag

if TYPE_CHECKING:
    from .archive.work import Work
    from .runtime import Runtime

T = TypeVar("T")
_AT_ONCE = max(4, 2 * (os.cpu_count() or 1))  # restores side by side: they need the processor
_NOTE = 200
_LAST_PAUSE = 30.0  # for each of those that a leaving keeper pauses
_LOOK = 2.0  # how long a sandbox's processors are watched before it is called idle
_BUSY = 0.02  # of one processor
_LOOKING = 20_000  # microseconds that the look itself may cost


@dataclass(frozen=True)
class Origin:
    """What a sandbox starts from: an image, or a state that was saved."""

    engine: Engine
    image: ResolvedImage
    spec: SandboxSpec  #: what it runs as
    opened: Opened | None = None
    head: str | None = None

    @property
    def restore(self) -> int | None:
        """The folder that the engine goes on from; None where it starts afresh."""
        return self.opened.fd if self.opened is not None and self.opened.snapshot.kind == "live" else None

    async def lay_out(self, live: Live) -> None:
        """Bring the files of a disk snapshot into a computer that has just started."""
        if self.opened is not None and self.opened.snapshot.kind == "disk":
            await disk.unpack(live, self.opened)


class _Still:
    """A sandbox that stands still. ``stays``: it is not to go on afterwards."""

    stays = False


class Timeline:
    """See ``Controller`` for what each method promises."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.at_work = 0  #: changes of state under way
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    # -- where a sandbox starts from -----------------------------------------------------

    @asynccontextmanager
    async def origin(self, spec: SandboxSpec) -> AsyncIterator[Origin]:
        """What a new sandbox of these settings starts from."""
        if spec.template is None:
            engine = registry.choose(spec)
            _can_live(engine, spec)
            yield Origin(engine, await self._runtime.resolve(spec), spec)
            return
        template = await self._runtime.find_snapshot(spec.template)
        async with self.saved(template.id) as origin:
            yield replace(origin, spec=_merged(origin.spec, spec, template))

    @asynccontextmanager
    async def saved(self, snapshot_id: str) -> AsyncIterator[Origin]:
        """A saved state, every byte of it checked."""
        runtime = self._runtime
        snapshot = await runtime.on_state(lambda: runtime.store.snapshot(snapshot_id))
        engine = registry.load(snapshot.engine)
        probe = engine.probe()
        if not probe.available:
            raise EngineUnavailable(
                f"this state needs the engine {engine.name!r}, which cannot run here: {probe.reason}",
                hint=probe.fix or None,
            )
        opened = await runtime.off_loop(lambda: runtime.saved.open(snapshot_id, engine.state_format()))
        try:
            yield Origin(engine, _image(opened), snapshot.spec, opened, snapshot_id)
        finally:
            await runtime.off_loop(opened.close)

    # -- standing still, and saving ------------------------------------------------------

    def turn(self, sandbox_id: str) -> asyncio.Lock:
        """Held while a sandbox changes from one state to another."""
        lock = self._turns.get(sandbox_id)
        if lock is None:
            lock = self._turns[sandbox_id] = asyncio.Lock()
        return lock

    @asynccontextmanager
    async def _standing_still(self, live: Live) -> AsyncIterator[_Still]:
        """Everything in it is stopped, and nothing is asked of it. The caller has its turn."""
        still = _Still()
        live.gate = asyncio.Event()
        try:
            try:
                await freeze(live)
                yield still
            finally:
                if not still.stays and not live.ending:
                    await asyncio.shield(thaw(live))
        finally:
            if not still.stays:
                gate, live.gate = live.gate, None
                gate.set()

    async def _save(self, live: Live, role: str, *, name: str | None = None, note: str = "") -> Snapshot:
        """Save a running sandbox, which then goes on."""
        draft = await self._runtime.off_loop(self._runtime.saved.begin)
        try:
            if _saves(live.engine):
                async with self._standing_still(live):
                    await live.instance.save(draft.fd, stop=False)
                kind = "live"
            elif live.engine.probe().capabilities.disk_snapshots:
                await disk.pack(live, draft)
                kind = "disk"
            else:
                raise UnsupportedOperation(f"engine {live.engine.name!r} cannot save anything of a sandbox")
            return await self._publish(draft, live, role, kind, name=name, note=note)
        except BaseException:
            await asyncio.shield(self._runtime.off_loop(lambda: self._runtime.saved.abandon(draft)))
            raise

    async def _publish(
        self, draft: Any, live: Live, role: str, kind: str, *, name: str | None = None, note: str = ""
    ) -> Snapshot:
        runtime = self._runtime
        return await runtime.off_loop(
            lambda: runtime.saved.publish(
                draft,
                live.info,
                role=role,
                kind=kind,
                format=live.engine.state_format(),
                image=_image_facts(live.image),
                name=name,
                parent=live.info.head,
                note=note,
                spec=live.spec,
            )
        )

    async def snapshot(self, sandbox_id: str, name: str | None, *, role: str, note: str = "") -> Snapshot:
        if role not in ("snapshot", "template"):
            raise SpecError(f"role={role[:40]!r} is not one that can be asked for", hint="snapshot or template")
        runtime = self._runtime
        await runtime.on_state(lambda: runtime.store.check_snapshot_free(name, role, sandbox_id))
        return await self._whole(self._snapshot(sandbox_id, name, role, note))

    async def _snapshot(self, sandbox_id: str, name: str | None, role: str, note: str) -> Snapshot:
        async with self.turn(sandbox_id):
            live = self._runtime.held_live(sandbox_id)
            if live is None:
                snapshot = await self._copy_saved(sandbox_id, name, role, note)
            else:
                snapshot = await self._save(live, role, name=name, note=note)
            if role == "snapshot":
                await self._set_head(sandbox_id, live, snapshot.id)
        self._runtime.bus.emit(sandbox_id, "snapshot", id=snapshot.id, name=name, kind=snapshot.kind, role=role)
        return snapshot

    async def _copy_saved(self, sandbox_id: str, name: str | None, role: str, note: str) -> Snapshot:
        """A paused sandbox's snapshot is what was saved of it, under another name; it goes on sleeping."""
        info = await self._record(sandbox_id)
        if info.saved is None or info.state != "paused":
            raise SandboxDead(
                f"the sandbox {info.name or info.id} is {info.state}: there is nothing to save",
                hint=info.reason or None,
            )
        saved_id, store = info.saved, self._runtime.saved

        def copy() -> Snapshot:
            with store.open(saved_id) as source, store.begin() as draft:
                for file in source.manifest["files"]:
                    os.link(file, file, src_dir_fd=source.fd, dst_dir_fd=draft.fd, follow_symlinks=False)
                return store.publish(
                    draft,
                    info,
                    role=role,
                    kind=source.snapshot.kind,
                    format=source.format,
                    image=source.image,
                    name=name,
                    parent=info.head,
                    note=note,
                    spec=source.snapshot.spec,
                )

        return await self._runtime.off_loop(copy)

    async def _set_head(self, sandbox_id: str, live: Live | None, head: str | None) -> None:
        await self._runtime.on_state(lambda: self._runtime.store.set_head(sandbox_id, head))
        if live is not None:
            live.info = replace(live.info, head=head)

    # -- pause and resume ----------------------------------------------------------------

    async def pause(self, sandbox_id: str) -> SandboxInfo:
        return await self._whole(self._pause(sandbox_id))

    async def _pause(self, sandbox_id: str) -> SandboxInfo:
        runtime = self._runtime
        async with self.turn(sandbox_id):
            live = runtime.held_live(sandbox_id)
            if live is None:
                info = await self._record(sandbox_id)
                if info.state == "paused":
                    return info
                raise runtime.not_held(sandbox_id)
            if not _saves(live.engine):
                raise cannot_save(live.engine.name)
            draft = await runtime.off_loop(runtime.saved.begin)
            try:
                async with self._standing_still(live) as still:
                    await live.instance.save(draft.fd, stop=False)
                    snapshot = await self._publish(draft, live, "pause", "live")
                    await runtime.on_state(lambda: self._mark_paused(live, snapshot))
                    still.stays = True
            except BaseException:
                await asyncio.shield(runtime.off_loop(lambda: runtime.saved.abandon(draft)))
                raise
            await runtime.put_away(live, _paused(live.info))
            runtime.background(self._drop(live.info.saved))
            info = await self._record(sandbox_id)
        runtime.bus.emit(sandbox_id, "paused", bytes=snapshot.bytes)
        return info

    def _mark_paused(self, live: Live, snapshot: Snapshot) -> None:
        """Its time to live is put on record by the clock that did not jump while it ran."""
        expires = None if live.expires is None else time.time() + live.expires - time.monotonic()
        self._runtime.store.mark_paused(live.info.id, snapshot.id, snapshot.created_at, expires_at=expires)

    async def pause_all(self) -> None:
        """What can be saved and was meant to stay (it has a name), before its holder goes."""
        lives = [live for live in self._runtime.lives() if live.info.name and _saves(live.engine)]

        async def one(live: Live) -> None:
            try:
                await within(self.pause(live.info.id), _LAST_PAUSE)
            except SlopletError:
                pass  # it ends like those that cannot be saved

        await asyncio.gather(*(one(live) for live in lives))

    async def release(self, sandbox_id: str) -> None:
        live = self._runtime.held_live(sandbox_id)
        if live is not None and live.info.name is not None and _saves(live.engine):
            try:
                await self.pause(sandbox_id)
            except (SandboxDead, SandboxNotFound):
                pass

    async def awake(self, sandbox_id: str) -> Live:
        """The sandbox, running: one that changes its state is waited for, one that sleeps is woken."""
        runtime = self._runtime
        while True:
            live = runtime.find_live(sandbox_id)
            if live is not None and live.gate is not None:
                await live.gate.wait()
            elif live is not None and not live.ending:
                return live
            elif live is not None or not await self._asleep(sandbox_id):
                raise runtime.not_held(sandbox_id)
            else:
                await self.resume(sandbox_id)

    async def _asleep(self, sandbox_id: str) -> bool:
        """Whether it can go on from something that was saved (or somebody is about to make it)."""
        try:
            info = await self._record(sandbox_id)
        except SandboxNotFound:
            return False
        return info.state == "paused" or (info.saved is not None and info.state in ("dead", "starting"))

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        return await self._whole(self._resume(sandbox_id, None))

    async def _resume(self, sandbox_id: str, snapshot_id: str | None) -> SandboxInfo:
        """From what was saved of it, or from another of its snapshots."""
        async with self.turn(sandbox_id):
            live = self._runtime.held_live(sandbox_id)
            if live is not None:
                return live.info
            return await self._wake(sandbox_id, snapshot_id)

    async def _wake(self, sandbox_id: str, snapshot_id: str | None) -> SandboxInfo:
        runtime = self._runtime
        before = await self._record(sandbox_id)
        if before.state not in ("paused", "dead") or before.saved is None:
            raise runtime.not_held(sandbox_id, before)
        if before.expires_at is not None and before.expires_at <= time.time():
            await runtime.kill(sandbox_id)
            raise SandboxNotFound(f"the sandbox {before.name or before.id} is gone: its time to live was over")

        def claim() -> tuple[str, SandboxInfo]:
            owner = runtime.owner()
            info = runtime.store.claim(sandbox_id, owner, runtime.holder)
            try:
                runtime.home.make_place(owner, sandbox_id)
            except BaseException:
                runtime.store.unclaim(sandbox_id, before.state, before.reason)
                raise
            return owner, info

        owner, info = await runtime.on_state(claim)
        try:
            async with self.saved(snapshot_id or before.saved) as origin:
                live = await runtime.bring_up(info, owner, origin, sandbox_id)
        except BaseException:

            def give_back() -> None:
                runtime.home.remove_place(owner, sandbox_id)
                runtime.store.unclaim(sandbox_id, before.state, before.reason)

            await asyncio.shield(runtime.on_state(give_back))
            raise
        recovered = before.saved_at if before.state == "dead" and snapshot_id is None else None
        keep = live.spec.checkpoint_every is not None
        live.info = replace(
            live.info,
            reason="",
            saved=before.saved if keep else None,
            saved_at=before.saved_at if keep else None,
            head=snapshot_id or before.head,
            recovered_from=recovered,
        )
        runtime.install(live)
        await runtime.on_state(
            lambda: runtime.store.mark_resumed(
                sandbox_id, workdir=live.info.workdir, recovered_from=recovered, keep_saved=keep
            )
        )
        if snapshot_id is not None:
            await self._set_head(sandbox_id, live, snapshot_id)
        if not keep:
            runtime.background(self._drop(before.saved))
        if before.expires_at is not None:
            runtime.set_expiry(live, before.expires_at - time.time())
        if recovered is not None:
            runtime.bus.emit(sandbox_id, "recovered", saved_at=recovered, reason=before.reason)
        else:
            runtime.bus.emit(sandbox_id, "resumed")
        return live.info

    # -- back and sideways -----------------------------------------------------------------

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        return await self._whole(self._rollback(sandbox_id, snapshot_id))

    async def _rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        runtime = self._runtime
        snapshot = await self._own(sandbox_id, snapshot_id)
        head = snapshot.id if snapshot.role == "snapshot" else snapshot.parent
        async with self.turn(sandbox_id):
            live = runtime.held_live(sandbox_id)
            if live is None:
                return await self._wake(sandbox_id, snapshot_id)
            place = new_id()
            await runtime.on_state(lambda: runtime.home.make_place(live.owner, place))
            try:
                async with self.saved(snapshot_id) as origin, self._standing_still(live) as still:
                    after = await runtime.bring_up(replace(live.info, head=head), live.owner, origin, place)
                    if live.ending:  # killed, or died, meanwhile
                        await runtime.discard(after)
                        raise runtime.not_held(sandbox_id)
                    runtime.install(after)
                    still.stays = True
            except BaseException:
                await asyncio.shield(runtime.on_state(lambda: runtime.home.remove_place(live.owner, place)))
                raise
            if live.expires is not None:
                runtime.set_expiry(after, live.expires - asyncio.get_running_loop().time())
            await runtime.put_away(live, _rolled_back(live.info), after=after)
            await self._set_head(sandbox_id, after, head)
        runtime.bus.emit(sandbox_id, "rolled_back", snapshot=snapshot.id, name=snapshot.name)
        return after.info

    async def _own(self, sandbox_id: str, snapshot_id: str) -> Snapshot:
        """One of its own snapshots."""
        snapshot = await self._runtime.on_state(lambda: self._runtime.store.snapshot(snapshot_id))
        if snapshot.sandbox != sandbox_id or snapshot.role == "template":
            raise SnapshotNotFound(
                f"{snapshot.name or snapshot.id} is a {snapshot.role} of {snapshot.sandbox_name or snapshot.sandbox}, "
                "not a snapshot of this sandbox",
                hint="fork that one from it, or start a new sandbox with template=",
            )
        return snapshot

    async def before_command(self, live: Live, request: Fields) -> Live:
        """Keep a point to go back to, where the settings ask for it."""
        argv = [part.decode("utf-8", "replace") for part in request.all(Tag.ARGV)]
        note = (argv[2] if len(argv) == 3 and argv[1] == "-c" else " ".join(argv))[:_NOTE]
        return await self._whole(self._undo_point(live.info.id, note))

    async def _undo_point(self, sandbox_id: str, note: str) -> Live:
        runtime = self._runtime
        async with self.turn(sandbox_id):
            live = runtime.held_live(sandbox_id)
            if live is None:
                raise runtime.not_held(sandbox_id)
            await self._save(live, "undo", note=note)
            await runtime.off_loop(lambda: runtime.saved.prune_undo(sandbox_id, live.spec.undo))
        return live

    async def undo(self, sandbox_id: str, steps: int) -> Snapshot:
        runtime = self._runtime
        points = await runtime.snapshots(sandbox_id, role="undo")
        if len(points) < steps:
            info = await self._record(sandbox_id)
            kept = f"only {len(points)} are kept" if points else "none is kept"
            raise SnapshotNotFound(
                f"there is no state from {steps} command{'s' if steps > 1 else ''} ago: {kept}",
                hint=f"it keeps the last {info.spec.undo}" if info.spec.undo else "make the sandbox with undo=N",
            )
        target = points[-steps]
        await self.rollback(sandbox_id, target.id)
        for point in points[-steps:]:
            await self._drop(point.id)
        return target

    async def fork(
        self, sandbox_id: str, count: int, *, names: Sequence[str] | None = None, snapshot: str | None = None
    ) -> list[SandboxInfo]:
        check_fork(count)
        return await self._whole(self._fork(sandbox_id, count, names, snapshot))

    async def _fork(
        self, sandbox_id: str, count: int, names: Sequence[str] | None, snapshot_id: str | None
    ) -> list[SandboxInfo]:
        runtime = self._runtime
        info = await runtime.find(sandbox_id)
        passing: str | None = None  # a state that serves this fork only
        head: str | None
        if snapshot_id is not None:
            await self._own(sandbox_id, snapshot_id)
            source = head = snapshot_id
        else:
            async with self.turn(sandbox_id):
                live = runtime.held_live(sandbox_id)
                if live is None:
                    info = await self._record(sandbox_id)
                    if info.state != "paused" or info.saved is None:
                        raise runtime.not_held(sandbox_id, info)
                    source = info.saved
                elif not _saves(live.engine):
                    raise UnsupportedOperation(
                        f"engine {live.engine.name!r} cannot copy running processes",
                        hint="engine='gvisor' can; from a disk snapshot, fork(snapshot=...) copies the files",
                    )
                else:
                    source = passing = (await self._save(live, "fork")).id
                head = info.head
        try:
            async with self.saved(source) as origin:
                made = await self._make_many(info, replace(origin, head=head), count, names)
        finally:
            if passing is not None:
                await asyncio.shield(self._drop(passing))
        runtime.bus.emit(sandbox_id, "forked", children=[child.id for child in made])
        return made

    async def _make_many(
        self, parent: SandboxInfo, origin: Origin, count: int, names: Sequence[str] | None
    ) -> list[SandboxInfo]:
        """All of them, or none."""
        runtime = self._runtime
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str | None) -> SandboxInfo:
            async with room:
                spec = replace(parent.spec, name=name)
                return (await runtime.make(spec, replace(origin, spec=replace(origin.spec, name=name)))).info

        tasks = [asyncio.ensure_future(one(name)) for name in (names or itertools.repeat(None, count))]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(runtime.kill(item.id) for item in done if isinstance(item, SandboxInfo)))
            raise

    # -- files, archives -------------------------------------------------------------------

    async def diff(self, sandbox_id: str, against: str | None, *, text: bool) -> Diff:
        from .views import diff

        snapshot = None if against is None else await self._own(sandbox_id, against)
        return await diff(self._runtime, await self._runtime.find(sandbox_id), snapshot, text=text)

    async def export(self, sandbox_id: str, path: str, *, image: bool) -> Snapshot:
        from .archive import moving

        work = moving.progress(self._runtime, "export", sandbox_id)
        try:
            return await self._whole(self._export(sandbox_id, path, image, work))
        except asyncio.CancelledError:
            work.give_up()
            raise

    async def _export(self, sandbox_id: str, path: str, image: bool, work: Work) -> Snapshot:
        from .archive.write import Target, write

        runtime = self._runtime
        target = await runtime.off_loop(lambda: Target(path, runtime.home))
        passing: str | None = None  # a state that serves this export only
        try:
            async with self.turn(sandbox_id):
                live = runtime.held_live(sandbox_id)
                if live is None:
                    snapshot = await self._copy_saved(sandbox_id, None, "export", "")
                else:
                    snapshot = await self._save(live, "export")
                passing = snapshot.id

            def pack() -> None:
                with runtime.saved.open(snapshot.id, verify=False) as opened:
                    write(target, opened, _image(opened), runtime.home, work, include=image)

            await runtime.off_loop(pack)
        finally:
            await asyncio.shield(runtime.off_loop(target.close))
            await asyncio.shield(self._drop(passing))
        runtime.bus.emit(sandbox_id, "exported", path=path, kind=snapshot.kind)
        return snapshot

    async def load(self, path: str, *, name: str | None) -> SandboxInfo:
        from .archive import moving

        work = moving.progress(self._runtime, "import", "", path=path)
        try:
            return await self._whole(moving.load(self._runtime, path, name, work))
        except asyncio.CancelledError:
            work.give_up()
            raise

    # -- chores ----------------------------------------------------------------------------

    def tend(self, live: Live) -> None:
        """What a sandbox's settings ask to be done now and then."""
        if live.spec.idle is not None:
            live.chores.append(self._runtime.background(self._sleep_when_idle(live, live.spec.idle)))
        if live.spec.checkpoint_every is not None:
            live.chores.append(self._runtime.background(self._checkpoints(live, live.spec.checkpoint_every)))

    async def _checkpoints(self, live: Live, every: float) -> None:
        while not live.ending:
            await asyncio.sleep(every)
            try:
                await self._whole(self._checkpoint(live))
            except SlopletError as error:
                self._runtime.bus.emit(live.info.id, "checkpoint.failed", reason=str(error))

    async def _checkpoint(self, live: Live) -> None:
        """What it would be recovered from, written anew."""
        runtime = self._runtime
        async with self.turn(live.info.id):
            if live.ending:
                return
            snapshot = await self._save(live, "checkpoint")
            await runtime.off_loop(lambda: runtime.saved.replace_saved(live.info.id, snapshot))
            live.info = replace(live.info, saved=snapshot.id, saved_at=snapshot.created_at)

    async def _sleep_when_idle(self, live: Live, idle: float) -> None:
        loop = asyncio.get_running_loop()
        while not live.ending:
            left = live.used + idle - loop.time()
            if live.mux.waiting or live.gate is not None:
                await asyncio.sleep(idle)
            elif left > 0:
                await asyncio.sleep(left)
            elif await self._busy(live, min(idle, _LOOK)):
                live.used = loop.time()
            elif live.used + idle <= loop.time() and not live.mux.waiting:
                try:
                    await self.pause(live.info.id)
                except SlopletError as error:
                    self._runtime.bus.emit(live.info.id, "sleep.failed", reason=str(error))
                    live.used = loop.time()

    async def _busy(self, live: Live, seconds: float) -> bool:
        """Whether its processes compute, though nobody follows them."""
        try:
            before = await _cpu_us(live)
            await asyncio.sleep(seconds)
            return await _cpu_us(live) - before > _BUSY * seconds * 1e6 + _LOOKING
        except SlopletError:
            return True

    # -- small things ------------------------------------------------------------------------

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """A change of state runs to its end, or is undone by itself, whether or not its caller waits."""

        async def counted() -> T:
            self.at_work += 1
            try:
                return await work
            finally:
                self.at_work -= 1
                if self._runtime.on_gone is not None:
                    self._runtime.on_gone()

        done: T = await asyncio.shield(self._runtime.background(counted()))
        return done

    async def _record(self, sandbox_id: str) -> SandboxInfo:
        return await self._runtime.on_state(lambda: self._runtime.store.find(sandbox_id))

    async def _drop(self, snapshot_id: str | None) -> None:
        """Delete what nothing depends on any more; what resists is left to the reaper."""
        if snapshot_id is None:
            return
        try:
            await self._runtime.off_loop(lambda: self._runtime.saved.delete(snapshot_id, force=True))
        except SnapshotError:
            pass


def _saves(engine: Engine) -> bool:
    return engine.probe().capabilities.live_snapshots


def _can_live(engine: Engine, spec: SandboxSpec) -> None:
    if spec.idle is not None and not _saves(engine):
        raise UnsupportedOperation(
            f"idle={spec.idle:g} s needs an engine that can save processes, and {engine.name!r} cannot",
            hint="engine='gvisor' can; `sloplet setup gvisor` installs it",
        )


def _merged(base: SandboxSpec, asked: SandboxSpec, template: Snapshot) -> SandboxSpec:
    """What a sandbox of a template runs as. What is fixed in the template cannot be asked for differently."""
    default = SandboxSpec()
    for what in ("image", "workdir", "user", "network"):
        wanted = getattr(asked, what)
        if wanted not in (getattr(default, what), getattr(base, what)):
            raise SpecError(
                f"{what}={wanted!r} is not what the template {template.name or template.id} was made with: "
                f"{getattr(base, what)!r}",
                hint=f"leave {what} out, or make another template",
            )
    if asked.engine not in ("auto", template.engine):
        raise SpecError(
            f"engine={asked.engine!r} cannot start the template {template.name or template.id}: "
            f"it was made by {template.engine!r}",
            hint="leave engine out",
        )
    registry.choose(replace(asked, engine=template.engine))  # at_least
    limits = {name: getattr(asked.limits, name) for name in asked.limits.explicit}
    if limits.get("disk", base.limits.disk) != base.limits.disk:
        raise SpecError(
            f"disk={limits['disk']} is not the size of the template's disk", hint=f"it has {base.limits.disk} bytes"
        )
    return replace(
        asked,
        image=base.image,
        engine=template.engine,
        workdir=base.workdir,
        user=base.user,
        env=tuple(sorted({**dict(base.env), **dict(asked.env)}.items())),
        limits=replace(base.limits, **limits, explicit=base.limits.explicit | asked.limits.explicit),
    )


def _image_facts(image: ResolvedImage) -> dict[str, Any]:
    return {"kind": image.kind, "path": None if image.path is None else str(image.path), "owners": image.owners_kept}


def _image(opened: Opened) -> ResolvedImage:
    facts = opened.image
    if facts["path"] is None:
        return ResolvedImage(facts["kind"])
    path = Path(facts["path"])
    if not path.is_dir():
        raise SnapshotIncompatible(
            f"the image that this state was made with is gone: {path}", hint="bring it back, or use an export"
        )
    return ResolvedImage(facts["kind"], path, facts["owners"])


async def _cpu_us(live: Live) -> int:
    return (await live.mux.open(Fields((Tag.OP, int(Op.METRICS)))).result()).integer(Tag.CPU_US, 0)


def _paused(info: SandboxInfo) -> SandboxPaused:
    return SandboxPaused(
        f"the sandbox {info.name or info.id} was paused", hint="resume() it; its processes can then be attached to"
    )


def _rolled_back(info: SandboxInfo) -> SandboxPaused:
    return SandboxPaused(
        f"the sandbox {info.name or info.id} was rolled back", hint="processes() lists what runs in it now"
    )
