"""Looking at what a sandbox's files have become: the runtime's side of ``diff``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import disk
from ..changes.compare import diff_of, state_of
from ..changes.reading import OldState
from ..changes.stored import read_stored
from ..controller import Diff, SandboxInfo, Snapshot, Stream
from ..files import AsyncFiles
from ..live import Live
from ..segments import Joined
from ..state.home import new_id
from ..volumed import applied_of, copies_of
from ..wire.fields import Fields
from ..wire.schema import Op, Tag

if TYPE_CHECKING:
    from ..runtime import Runtime


async def diff(runtime: Runtime, info: SandboxInfo, against: Snapshot | None, *, text: bool) -> Diff:
    """What its files are now, against its image or a snapshot. One that sleeps is woken for it, and sleeps again."""
    slept = None
    if runtime.held_live(info.id) is None and info.state == "paused" and info.saved is not None:
        slept = await runtime.find_snapshot(info.saved)
    live = await runtime.timeline.awake(info.id)
    try:
        async with _old(runtime, live, against) as old:
            stream = await runtime.open(info.id, _request(live))
            files = AsyncFiles(lambda fields: runtime.open(info.id, fields))
            image = live.image if disk.folder(live) is None else None
            folders = (
                live.info.workdir,
                live.instance.hello.home or "/home/agent",
                *(volume.path for volume in live.spec.volumes),
            )
            copies = copies_of(runtime.home, live.spec) if image is not None else {}
            applied = applied_of(runtime.home, info.id, live.spec) if copies else {}
            prefix = disk.folder(live) or "/"
            changes = await diff_of(
                stream,
                files,
                image,
                old,
                text=text,
                folders=folders,
                prefix=prefix,
                copies=copies,
                applied=applied,
            )
    finally:
        if slept is not None:
            await runtime.pause(info.id, memory=slept.kind == "live")
    return Diff("image" if against is None else against.id, changes)


def _request(live: Live) -> Fields:
    return disk.asked(Op.CHANGES, live, (Tag.FLAGS, 0))


@asynccontextmanager
async def _old(runtime: Runtime, live: Live, against: Snapshot | None) -> AsyncIterator[OldState | None]:
    if against is None:
        yield None
        return
    async with runtime.timeline.saved(against.id) as origin:
        assert origin.opened is not None
        if against.kind == "disk":
            with Joined(origin.opened.fd) as file:
                yield await read_stored(file, prefix=disk.folder(live) or "/")
            return
        # What was saved with its memory can only be read by the engine: a copy that nobody else sees is started.
        place = new_id()
        try:
            await runtime.on_state(lambda: runtime.home.make_place(live.owner, place))
            copy = await runtime.bring_up(
                replace(live.info, id=place, name=None), live.owner, origin, place, alone=True
            )
        except BaseException:
            await asyncio.shield(runtime.on_state(lambda: runtime.home.remove_place(live.owner, place)))
            raise
        try:

            async def ask(fields: Fields) -> Stream:
                return copy.mux.open(fields)

            yield await state_of(await ask(_request(copy)), AsyncFiles(ask))
        finally:
            await asyncio.shield(runtime.background(runtime.discard(copy)))
