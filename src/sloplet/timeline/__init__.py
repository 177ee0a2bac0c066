"""Through time: saving sandboxes, starting from what was saved, putting one state in place of another.

The part of ``Runtime`` behind pause, resume, snapshot, fork, rollback and undo. Three rules hold it together. What is
saved is published whole before anything depends on it (state/snapshots.py). While a sandbox stands still its gate is
closed, so nothing is asked of it, and whoever comes waits and looks again. A sandbox changes its state one change at
a time (its turn).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..controller import Diff, SandboxInfo, Snapshot
from .branches import Branches
from .chores import Chores
from .origins import Origin, image_of

if TYPE_CHECKING:
    from ..archive.work import Work

__all__ = ["Origin", "Timeline"]


class Timeline(Branches, Chores):
    """See ``Controller`` for what each method promises."""

    async def diff(self, sandbox_id: str, against: str | None, *, text: bool) -> Diff:
        from .views import diff

        snapshot = None if against is None else await self._own(sandbox_id, against)
        return await diff(self._runtime, await self._runtime.find(sandbox_id), snapshot, text=text)

    async def export(self, sandbox_id: str, path: str, *, image: bool) -> Snapshot:
        from ..archive import moving

        work = moving.progress(self._runtime, "export", sandbox_id)
        try:
            return await self._whole(self._export(sandbox_id, path, image, work))
        except asyncio.CancelledError:
            work.give_up()
            raise

    async def _export(self, sandbox_id: str, path: str, image: bool, work: Work) -> Snapshot:
        from ..archive.write import Target, write

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
                    root = image_of(opened, runtime.home)
                    try:
                        write(target, opened, root, runtime.home, work, include=image)
                    finally:
                        root.close()

            await runtime.off_loop(pack)
        finally:
            await asyncio.shield(runtime.off_loop(target.close))
            await asyncio.shield(self._drop(passing))
        runtime.bus.emit(sandbox_id, "exported", path=path, kind=snapshot.kind)
        return snapshot

    async def load(self, path: str, *, name: str | None) -> SandboxInfo:
        from ..archive import moving

        work = moving.progress(self._runtime, "import", "", path=path)
        try:
            return await self._whole(moving.load(self._runtime, path, name, work))
        except asyncio.CancelledError:
            work.give_up()
            raise
