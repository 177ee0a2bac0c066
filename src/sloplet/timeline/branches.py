"""Back and sideways: rollback, undo, fork."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from ..controller import SandboxInfo, Snapshot
from ..errors import (
    SandboxPaused,
    SnapshotNotFound,
    UnsupportedOperation,
    VolumeInUse,
)
from ..live import Live
from ..spec import check_fork
from ..state.home import new_id
from ..wire.fields import Fields
from ..wire.schema import Tag
from .origins import Origin, saves
from .sleeping import Sleeping, head_at

_AT_ONCE = 16  # restores side by side: more would only take memory from each other
_NOTE = 200


class Branches(Sleeping):
    """See ``Controller``."""

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        return await self._whole(self._rollback(sandbox_id, snapshot_id))

    async def _rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        runtime = self._runtime
        snapshot = await self._own(sandbox_id, snapshot_id)
        head = head_at(snapshot)
        async with self.turn(sandbox_id):
            live = runtime.held_live(sandbox_id)
            if live is None:
                return await self._wake(sandbox_id, snapshot)
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
        sandbox_id = live.info.id
        while not await self._whole(self._undo_point(sandbox_id, note)):
            await self.awake(sandbox_id)  # somebody was quicker
        return await self.awake(sandbox_id)

    async def _undo_point(self, sandbox_id: str, note: str) -> bool:
        """False: it does not run."""
        runtime = self._runtime
        async with self.turn(sandbox_id):
            live = runtime.held_live(sandbox_id)
            if live is None:
                return False
            await self._save(live, "undo", note=note)
            await runtime.off_loop(lambda: runtime.saved.prune_undo(sandbox_id, live.spec.undo))
        return True

    async def undo(self, sandbox_id: str, steps: int) -> Snapshot:
        runtime = self._runtime
        points = await runtime.snapshots(sandbox_id, role="undo")
        if len(points) < steps:
            info = await self._record(sandbox_id)
            kept = f"{len(points)} kept" if points else "none is kept"
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
        self,
        sandbox_id: str,
        count: int,
        *,
        names: Sequence[str] | None = None,
        snapshot: str | None = None,
        ttl: float | None = None,
    ) -> list[SandboxInfo]:
        check_fork(count)
        return await self._whole(self._fork(sandbox_id, count, names, snapshot, ttl))

    async def _fork(
        self, sandbox_id: str, count: int, names: Sequence[str] | None, snapshot_id: str | None, ttl: float | None
    ) -> list[SandboxInfo]:
        runtime = self._runtime
        head: str | None
        _check_volumes(await runtime.find(sandbox_id))
        async with AsyncExitStack() as held:
            if snapshot_id is not None:
                info = await runtime.find(sandbox_id)
                await self._own(sandbox_id, snapshot_id)
                origin, head = await held.enter_async_context(self.saved(snapshot_id)), snapshot_id
            else:
                async with self.turn(sandbox_id):  # until we have it open: who wakes a sleeper deletes what it slept in
                    info, source = await self._to_fork(sandbox_id, held)
                    origin, head = await held.enter_async_context(self.saved(source)), info.head
            if ttl is not None:
                info = replace(info, spec=replace(info.spec, ttl=ttl))
            made = await self._make_many(info, replace(origin, head=head), count, names)
        runtime.bus.emit(sandbox_id, "forked", children=[child.id for child in made])
        return made

    async def _to_fork(self, sandbox_id: str, held: AsyncExitStack) -> tuple[SandboxInfo, str]:
        """The sandbox and its state now: what it sleeps in, or one that is saved for as long as ``held``."""
        runtime = self._runtime
        live = runtime.held_live(sandbox_id)
        if live is None:
            info = await self._record(sandbox_id)
            if info.state != "paused" or info.saved is None:
                raise runtime.not_held(sandbox_id, info)
            return info, info.saved
        if not saves(live.engine):
            raise UnsupportedOperation(
                f"engine {live.engine.name!r} cannot copy running processes",
                hint="engine='gvisor' can; from a disk snapshot, fork(snapshot=...) copies the files",
            )
        passing = (await self._save(live, "fork")).id
        held.push_async_callback(self._drop, passing)
        return live.info, passing

    async def _make_many(
        self, parent: SandboxInfo, origin: Origin, count: int, names: Sequence[str] | None
    ) -> list[SandboxInfo]:
        """All of them, or none."""
        runtime = self._runtime
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str | None) -> SandboxInfo:
            async with room:
                ports = tuple(port._replace(outside=0) for port in parent.spec.ports)  # the parent has those
                spec = replace(parent.spec, name=name, ports=ports)
                return (
                    await runtime.make(spec, replace(origin, spec=replace(origin.spec, name=name)), parent=parent.id)
                ).info

        tasks = [asyncio.ensure_future(one(name)) for name in (names or itertools.repeat(None, count))]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(runtime.kill(item.id) for item in done if isinstance(item, SandboxInfo)))
            raise


def _check_volumes(info: SandboxInfo) -> None:
    """A copy would write what only its parent may."""
    for volume in info.spec.volumes:
        if volume.exclusive:
            raise VolumeInUse(
                f"{info.name or info.id} cannot be forked: it has the volume {volume.source!r} for itself",
                hint="make it with Volume(..., shared=True) or read-only; `sloplet volume clone` copies a volume",
            )


def _rolled_back(info: SandboxInfo) -> SandboxPaused:
    return SandboxPaused(
        f"the sandbox {info.name or info.id} was rolled back", hint="processes() lists what runs in it now"
    )
