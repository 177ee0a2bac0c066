"""Standing still, and saving: the ground of everything that ``Timeline`` does."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from .. import disk
from ..controller import SandboxInfo, Snapshot
from ..engines import registry
from ..engines.base import format_of
from ..errors import (
    EngineUnavailable,
    SandboxDead,
    SaveFailed,
    SnapshotError,
    SpecError,
    UnsupportedOperation,
)
from ..live import Live, freeze, thaw
from ..segments import Share
from ..spec import SandboxSpec
from ..state.opened import Opened, image_facts
from .origins import Origin, can_live, check_saves, image_of, merged, saves, settled

if TYPE_CHECKING:
    from ..engines.base import StateFormat
    from ..runtime import Runtime
    from ..state.draft import Draft

T = TypeVar("T")


class _Still:
    """A sandbox that stands still. ``stays``: it is not to go on afterwards."""

    stays = False


class Saving:
    """See ``Controller`` for what its public methods promise."""

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
            can_live(engine, spec)
            image = await self._runtime.resolve(spec)
            try:
                yield Origin(engine, image, settled(spec, image, engine))
            finally:
                image.close()
            return
        template = await self._runtime.find_snapshot(spec.template)
        async with self.saved(template.id) as origin:
            can_live(origin.engine, spec)
            yield replace(origin, spec=merged(origin.spec, spec, template))

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
        opened = await self._open(snapshot_id, format_of(engine, snapshot.kind))
        image = None
        try:
            image = image_of(opened, runtime.home)
            yield Origin(engine, image, snapshot.spec, opened, snapshot_id)
        finally:
            opened.close()  # here and now: who deletes it may wait for this in every thread there is
            if image is not None:
                image.close()

    async def _open(self, snapshot_id: str, format: StateFormat) -> Opened:
        """Its bytes are read by a thread, to the end: for a caller who gives up meanwhile it is closed again."""
        runtime = self._runtime
        opening = runtime.background(runtime.off_loop(lambda: runtime.saved.open(snapshot_id, format)))
        try:
            opened: Opened = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close)
            raise
        return opened

    # -- standing still, and saving ------------------------------------------------------

    def turn(self, sandbox_id: str) -> asyncio.Lock:
        """Held while a sandbox changes from one state to another."""
        lock = self._turns.get(sandbox_id)
        if lock is None:
            lock = self._turns[sandbox_id] = asyncio.Lock()
        return lock

    @asynccontextmanager
    async def _standing_still(self, live: Live, *, silent: bool = True) -> AsyncIterator[_Still]:
        """Everything in it is stopped, and nothing is asked of it by others. The caller has its turn. ``silent``: its
        agent says nothing either."""
        still = _Still()
        live.gate = asyncio.Event()
        try:
            try:
                await freeze(live, silent=silent)
                yield still
            finally:
                if not still.stays and not live.ending:
                    going_on = self._runtime.background(thaw(live))
                    if not silent:  # else nobody can see the difference: all goes over the wire, and comes after it
                        await asyncio.shield(going_on)
        finally:
            if not still.stays:
                gate, live.gate = live.gate, None
                gate.set()

    async def _write(self, live: Live, draft: Draft, share: Share | None) -> None:
        """Fill the draft: with the files (``share``: what is had of them already), or by the engine, with everything.
        Of one that ended meanwhile that is told, not that its state could not be saved."""
        if share is not None:
            await disk.pack(live, draft, share)
            return
        try:
            await live.instance.save(draft.fd)
        except SaveFailed:
            if live.ending or live.mux.error is not None:
                raise self._runtime.not_held(live.info.id) from None
            raise

    async def _save(
        self, live: Live, role: str, *, name: str | None = None, note: str = "", memory: bool = True
    ) -> Snapshot:
        """Save a running sandbox, which then goes on: while what was saved is hashed and put on record."""
        draft = await self._runtime.off_loop(self._runtime.saved.begin)
        publishing: asyncio.Task[Snapshot] | None = None

        def publish(kind: str) -> asyncio.Task[Snapshot]:
            return asyncio.ensure_future(self._publish(draft, live, role, kind, name=name, note=note))

        try:
            memory = memory and saves(live.engine)
            check_saves(live.engine, memory=memory)
            share = None if memory else await self._shares(live, draft)
            async with self._standing_still(live, silent=memory):
                await self._write(live, draft, share)
                publishing = publish("live" if memory else "disk")
            return await publishing
        except BaseException:
            await asyncio.shield(self._take_back(draft, publishing))
            raise

    async def _take_back(self, draft: Draft, publishing: asyncio.Task[Snapshot] | None) -> None:
        """What was to be saved is not wanted any more, however far it has come."""
        if publishing is not None:
            await asyncio.wait({publishing})
            if not publishing.cancelled() and publishing.exception() is None:
                await self._drop(publishing.result().id)
        await self._runtime.off_loop(lambda: self._runtime.saved.abandon(draft))

    async def _shares(self, live: Live, draft: Draft) -> Share:
        """Takes over what the newest snapshot of the sandbox, or the one it came from, has already."""
        runtime = self._runtime
        older = await runtime.on_state(lambda: runtime.store.list_snapshots(live.info.id))
        known = [item.id for item in older[-1:]] + [live.info.head] * (live.info.head is not None)

        def share(name: str, size: int) -> bool:
            return any(runtime.saved.share(draft, name, each, size=size) for each in known if each is not None)

        return share

    async def _publish(
        self, draft: Draft, live: Live, role: str, kind: str, *, name: str | None = None, note: str = ""
    ) -> Snapshot:
        runtime = self._runtime
        spec = await self._kept(live.info.id, live.spec, role)
        return await runtime.off_loop(
            lambda: runtime.saved.publish(
                draft,
                live.info,
                role=role,
                kind=kind,
                format=format_of(live.engine, kind),
                image=image_facts(live.image),
                name=name,
                parent=runtime.store.find(live.info.id).head,  # what it descended from may be deleted
                note=note,
                spec=spec,
            )
        )

    async def _kept(self, sandbox_id: str, spec: SandboxSpec, role: str) -> SandboxSpec:
        """What is saved of its settings. Sandboxes of a template may reach what it may now, not what it once could; the
        sandbox's own states leave that to its record."""
        if role != "template" or spec.network.mode == "none":
            return spec
        return replace(spec, network=await self._runtime.networks.current(sandbox_id))

    async def snapshot(
        self, sandbox_id: str, name: str | None, *, role: str, note: str = "", memory: bool = True
    ) -> Snapshot:
        if role not in ("snapshot", "template", "undo"):
            raise SpecError(f"role={role[:40]!r} is not one that can be asked for", hint="snapshot or template")
        runtime = self._runtime
        await runtime.on_state(lambda: runtime.store.check_snapshot_free(name, role, sandbox_id))
        return await self._whole(self._snapshot(sandbox_id, name, role, note, memory))

    async def _snapshot(self, sandbox_id: str, name: str | None, role: str, note: str, memory: bool) -> Snapshot:
        async with self.turn(sandbox_id):
            live = self._runtime.held_live(sandbox_id)
            if live is None:
                snapshot = await self._copy_saved(sandbox_id, name, role, note, memory=memory)
            else:
                snapshot = await self._save(live, role, name=name, note=note, memory=memory)
            if role == "snapshot":
                await self._set_head(sandbox_id, live, snapshot.id)
            elif role == "undo":
                kept = snapshot.spec.undo
                await self._runtime.off_loop(lambda: self._runtime.saved.prune_undo(sandbox_id, kept))
        self._runtime.bus.emit(sandbox_id, "snapshot", id=snapshot.id, name=name, kind=snapshot.kind, role=role)
        return snapshot

    async def _copy_saved(
        self, sandbox_id: str, name: str | None, role: str, note: str, *, memory: bool = True
    ) -> Snapshot:
        """A paused sandbox's snapshot is what was saved of it, under another name; it goes on sleeping."""
        info = await self._record(sandbox_id)
        if self._runtime.holds(sandbox_id):
            raise self._runtime.not_held(sandbox_id)  # it is on its way out
        if info.saved is None or info.state != "paused":
            raise SandboxDead(
                f"the sandbox {info.name or info.id} is {info.state}: there is nothing to save",
                hint=info.reason or None,
            )
        saved_id, store = info.saved, self._runtime.saved
        saved = await self._runtime.on_state(lambda: self._runtime.store.snapshot(saved_id))
        if saved.kind == "live" and not memory:
            raise UnsupportedOperation(
                f"{info.name or info.id} sleeps with its memory: its files alone cannot be told from it",
                hint="resume() it first, or save it with its memory",
            )
        spec = await self._kept(sandbox_id, saved.spec, role)

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
                    spec=spec,
                )

        return await self._runtime.off_loop(copy)

    async def _set_head(self, sandbox_id: str, live: Live | None, head: str | None) -> None:
        await self._runtime.on_state(lambda: self._runtime.store.set_head(sandbox_id, head))
        if live is not None:
            live.info = replace(live.info, head=head)

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


def _close(opening: asyncio.Task[Opened]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
