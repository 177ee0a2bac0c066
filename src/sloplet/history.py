"""A sandbox through time: pause, snapshots, forks, rollback, undo, diff, export. Part of ``AsyncSandbox``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

from .controller import Controller, Diff, SandboxInfo, Snapshot
from .errors import SpecError, UnsupportedOperation
from .files import AsyncFiles
from .spec import check_fork, check_name, check_snapshot_name, check_ttl, parse_duration

if TYPE_CHECKING:
    from .changes.apply import Applied

_list = list


class AsyncHistory:
    """What ``AsyncSandbox`` can do with its own state. See docs/live.md."""

    files: AsyncFiles

    async def _holder(self) -> tuple[Controller, str]:
        """Who holds it, and its id; it has started then."""
        raise NotImplementedError

    def _learn(self, info: SandboxInfo) -> None:
        """What is known of it now."""
        raise NotImplementedError

    @classmethod
    def _adopt(cls, controller: Controller, info: SandboxInfo) -> Self:
        """An object for a sandbox that is already there."""
        raise NotImplementedError

    def _inherit(self, parent: Self) -> None:
        """It is a fork of that one."""

    async def set_ttl(self, ttl: float | str | None) -> SandboxInfo:
        """From now on it has that long to live (seconds, or "10m"); None: for ever; 0: not any more. Then it ends, or
        sleeps where ``on_ttl`` says so. Does not wake one that sleeps; that one is gone then, if it was to end."""
        seconds = check_ttl(ttl)
        controller, sandbox_id = await self._holder()
        info = await controller.set_ttl(sandbox_id, seconds)
        self._learn(info)
        return info

    async def pause(self, *, memory: bool = True) -> SandboxInfo:
        """Write memory and disk to SLOPLET_HOME and free everything else. It wakes when it is used, or by ``resume()``,
        also days later and from another process. Needs an engine that can save processes (gvisor). ``memory=False``:
        only the files are kept, which every engine can; when it wakes nothing runs in it."""
        controller, sandbox_id = await self._holder()
        info = await controller.pause(sandbox_id, memory=memory)
        self._learn(info)
        return info

    async def resume(self) -> SandboxInfo:
        """Go on where it was paused; one that died, from its last checkpoint (``recovered_from``). Idempotent."""
        controller, sandbox_id = await self._holder()
        info = await controller.resume(sandbox_id)
        self._learn(info)
        return info

    async def snapshot(self, name: str | None = None, *, memory: bool = True) -> Snapshot:
        """Save its state now, and run on. ``kind`` says what was saved: "live" (memory, processes, disk), or "disk"
        where the engine can do no more, or ``memory`` is False. A snapshot goes with its sandbox; ``template()`` makes
        one that stays."""
        if name is not None:
            check_snapshot_name(name)
        controller, sandbox_id = await self._holder()
        return await controller.snapshot(sandbox_id, name, memory=memory)

    async def template(self, name: str, *, memory: bool = True) -> Snapshot:
        """Save its state as a template: ``Sandbox(template=name)`` starts from it, warm, also when this one is gone.
        ``memory=False``: of its files only."""
        check_snapshot_name(name, "template")
        controller, sandbox_id = await self._holder()
        return await controller.snapshot(sandbox_id, name, role="template", memory=memory)

    async def snapshots(self) -> _list[Snapshot]:
        """Its snapshots, oldest first; ``parent`` makes them a tree."""
        controller, sandbox_id = await self._holder()
        return await controller.snapshots(sandbox_id)

    async def delete_snapshot(self, snapshot: str | Snapshot, *, force: bool = False) -> None:
        """Delete one of its snapshots, by name, id, or itself. SnapshotInUse if others descend from it, unless
        ``force``: they then descend from its parent."""
        controller, sandbox_id = await self._holder()
        await controller.delete_snapshot(await _id(controller, sandbox_id, snapshot), force=force)

    async def rollback(self, snapshot: str | Snapshot) -> SandboxInfo:
        """Be as it was at one of its snapshots: same id, same name. From a "disk" snapshot the files come back and
        nothing runs."""
        controller, sandbox_id = await self._holder()
        info = await controller.rollback(sandbox_id, await _id(controller, sandbox_id, snapshot))
        self._learn(info)
        return info

    async def undo(self, steps: int = 1) -> Snapshot:
        """Be as before the last command, or the ``steps``-th last. Needs ``undo=N`` in its settings."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise SpecError(f"undo({str(steps)[:80]}) makes no sense", hint="a whole number from 1 on")
        controller, sandbox_id = await self._holder()
        return await controller.undo(sandbox_id, steps)

    async def fork(
        self,
        count: int = 1,
        *,
        names: Sequence[str] | None = None,
        snapshot: str | Snapshot | None = None,
        ttl: float | str | None = None,
    ) -> _list[Self]:
        """``count`` running copies, of how it is now or was at a snapshot, made in parallel. Each has its own id,
        host name and random numbers before anything in it goes on. Copies with ``names`` outlive their objects.
        ``ttl``: what each has to live; None: as this one's settings say, begun anew."""
        check_fork(count)
        seconds = None if ttl is None else parse_duration(ttl, "ttl")
        if names is not None:
            names = [check_name(name) for name in names]
            if len(names) != count or len({name.casefold() for name in names}) != count:
                raise SpecError(f"fork({count}) needs {count} different names, not {len(names)}")
        controller, sandbox_id = await self._holder()
        ref = None if snapshot is None else await _id(controller, sandbox_id, snapshot)
        infos = await controller.fork(sandbox_id, count, names=names, snapshot=ref, ttl=seconds)
        children = [self._adopt(controller, info) for info in infos]
        for child in children:
            child._inherit(self)
        return children

    async def diff(self, against: str | Snapshot | None = None, *, text: bool = True) -> Diff:
        """Files added, changed and removed since its image, or since one of its snapshots; with unified diffs
        (``text``) where a file is text."""
        controller, sandbox_id = await self._holder()
        ref = None if against is None else await _id(controller, sandbox_id, against)
        return await controller.diff(sandbox_id, ref, text=text)

    async def apply(
        self,
        paths: str | Iterable[str] | None = None,
        *,
        to: str | os.PathLike[str] | None = None,
        against: str | Snapshot | None = None,
        delete: bool = False,
    ) -> Applied:
        """Bring chosen changes to a folder of this machine: what ``diff`` lists at or below ``paths`` goes to the same
        relative place below ``to``. Nothing is written outside of it, no link is followed, no setuid bit is kept.
        ``delete``: what was removed inside is removed there too.

        Without ``to`` it goes back to the folders that were copied in (``Volume(..., mode="copy")``), without
        ``paths`` all of it; what has changed in a folder since then is left alone, and told as skipped."""
        from .changes.apply import apply, apply_back

        wanted = None if paths is None else [paths] if isinstance(paths, str) else _list(paths)
        if to is None:
            controller, sandbox_id = await self._holder()
            if getattr(controller, "is_remote", False):  # those folders are the server's, not this machine's
                raise UnsupportedOperation(
                    "the folders that were copied in are on the server's machine", hint="name a folder here: to="
                )
            copies = [each for each in (await controller.find(sandbox_id)).spec.volumes if not each.mounted]
            if against is not None:
                raise SpecError("against= needs to=", hint="what goes back is compared with the folder as it was")
            done = await apply_back(self.files, await self.diff(text=False), copies, wanted, delete=delete)
            if done.marks:
                await controller.applied(sandbox_id, done.marks)
            return done
        if wanted is None:
            raise SpecError("to= needs paths", hint="as diff() lists them, or '/' for everything")
        diff = await self.diff(against, text=False)
        return await apply(self.files, diff, wanted, to, delete=delete)

    async def export(self, path: str | os.PathLike[str], *, image: bool = True) -> Snapshot:
        """Write the sandbox, live or paused, as one archive that ``Sandbox.load`` starts elsewhere. ``image``: with
        its image inside, so that the other machine needs nothing else."""
        controller, sandbox_id = await self._holder()
        return await controller.export(sandbox_id, os.path.abspath(os.fspath(path)), image=image)


async def _id(controller: Controller, sandbox_id: str, snapshot: str | Snapshot) -> str:
    if isinstance(snapshot, Snapshot):
        return snapshot.id
    return (await controller.find_snapshot(snapshot, sandbox_id)).id
