"""The volumes of the sandboxes that a runtime holds: had when one starts, let go when all of it is gone; and the
folders that are copied into them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import SlopletError, StartFailed
from .spec import SandboxSpec
from .wire.fields import Fields
from .wire.mux import request
from .wire.schema import Op, Tag

if TYPE_CHECKING:
    from .controller import SandboxInfo, Stream
    from .holder import Holder
    from .live import Live
    from .state.home import Home
    from .timeline import Origin
    from .volumes.opening import Opened

_AT_ONCE = 64


async def open_for(holder: Holder, info: SandboxInfo, spec: SandboxSpec, *, alone: bool) -> Opened | None:
    """What ``spec`` asks to be mounted, opened for the sandbox; None for nothing. VolumeError and what is below it."""
    if not any(volume.mounted for volume in spec.volumes):
        return None
    from .volumes.opening import open_volumes

    job = holder.off_loop(lambda: open_volumes(holder.home, info.id, info.name, spec.volumes, alone=alone))
    opening = holder.background(job)
    try:
        opened: Opened = await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_let_go)
        raise
    return opened


def _let_go(opening: asyncio.Task[Opened]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def with_bases(spec: SandboxSpec) -> SandboxSpec:
    """With a place for each folder that is to be copied in, as it is then."""
    if all(volume.mounted for volume in spec.volumes):
        return spec
    from .volumes import copies

    return replace(spec, volumes=copies.with_bases(spec.volumes))


def copies_of(home: Home, spec: SandboxSpec) -> dict[str, Path]:
    """Path inside -> the folder as it was when it was copied there."""
    if all(volume.mounted for volume in spec.volumes):
        return {}
    from .volumes import copies

    kept = {volume.path: copies.kept(home, volume.base) for volume in spec.volumes if volume.base}
    return {path: folder for path, folder in kept.items() if folder.is_dir()}


def note_applied(home: Home, sandbox_id: str, spec: SandboxSpec, marks: Mapping[str, str]) -> None:
    """By path inside."""
    from .volumes import copies

    for volume in spec.volumes:
        if volume.base:
            start = volume.path + "/"
            mine = {path.removeprefix(start): mark for path, mark in marks.items() if path.startswith(start)}
            copies.note_applied(home, volume.base, sandbox_id, mine)


def applied_of(home: Home, sandbox_id: str, spec: SandboxSpec) -> dict[str, str]:
    """What was noted, by path inside."""
    from .volumes import copies

    return {
        f"{volume.path}/{name}": mark
        for volume in spec.volumes
        if volume.base
        for name, mark in copies.applied(home, volume.base, sandbox_id).items()
    }


async def give_back(live: Live, origin: Origin) -> None:
    """What the image gives to the sandbox's user is his, also where volumes have exchanged him with root."""
    facts = getattr(live.engine, "machine", None)
    if origin.opened is not None or facts is None or all(not volume.mounted for volume in origin.spec.volumes):
        return
    from .volumes.swapped import users_own

    paths = await asyncio.to_thread(users_own, live.image, origin.spec, facts)
    for first in range(0, len(paths), _AT_ONCE):
        streams = [live.mux.open(_chown(path, origin.spec.run_user)) for path in paths[first : first + _AT_ONCE]]
        for stream in streams:
            try:
                await stream.result()
            except SlopletError:
                live.mux.check()  # what cannot be given stays root's


def _chown(path: str, owner: str) -> Fields:
    return request(Op.CHOWN, (Tag.PATH, path), (Tag.OWNER, owner), (Tag.USER, "0"))


async def bring_copies(holder: Holder, live: Live, origin: Origin) -> None:
    """Copy folders into a sandbox that has just started, unless they came with what it started from. VolumeError,
    StartFailed."""
    if all(volume.mounted for volume in origin.spec.volumes):
        return
    from .volumes import copies

    known = copies.bases(origin.opened.snapshot.spec.volumes) if origin.opened is not None else set()
    for volume in origin.spec.volumes:
        if volume.base and volume.base not in known:
            folder = await holder.off_loop(lambda volume=volume: copies.keep(holder.home, volume))  # type: ignore[misc]
            try:
                await _bring(live, folder, volume.path)
            except SlopletError as error:
                raise StartFailed(
                    f"the folder {volume.source} could not be copied to {volume.path}: {error.message}", hint=error.hint
                ) from error


async def _bring(live: Live, folder: Path, path: str) -> None:
    from .files import AsyncFiles
    from .transfer.upload import upload_tree

    async def ask(fields: Fields) -> Stream:
        return live.mux.open(fields)

    hello = live.instance.hello
    files, root = AsyncFiles(ask), None if hello.no_users else "0:0"
    await files.remove(path, recursive=True, missing_ok=True, user=root)
    await files.mkdir(path, user=root)
    if root is not None:
        await files.chown(path, hello.user, user=root)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        await upload_tree(files, fd, path, any_link=True)
    finally:
        os.close(fd)


async def drop_copies(holder: Holder) -> None:
    """Remove what no sandbox and no saved state speaks of any more."""
    from .volumes import copies

    home, store = holder.home, holder.store
    if kept := copies.all_kept(home):
        for base in await holder.on_state(lambda: store.unspoken(kept)):
            await holder.off_loop(lambda base=base: copies.forget(home, base))  # type: ignore[misc]
