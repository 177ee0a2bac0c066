"""From the host into a sandbox."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .. import fs
from ..errors import FileError
from ..files import AsyncFiles
from ..results import Progress
from .common import DIR, Meter, OnProgress, host_errors, host_path, in_parallel, opened, stays_inside

if TYPE_CHECKING:
    from ..s3.settings import S3

_PIECE = 65536


async def upload(
    files: AsyncFiles,
    source: str | os.PathLike[str],
    target: str,
    on_progress: OnProgress | None = None,
    *,
    s3: S3 | None = None,
) -> Progress:
    """Copy a host's file or directory in, or what is at an ``s3://`` URL. A file goes to ``target``, or into it if that
    is a directory; of a directory the content goes into ``target``, which is made if missing."""
    if isinstance(source, str) and source.startswith("s3://"):
        from ..s3.get import get

        return await get(files, source, target, s3, on_progress)
    path = host_path(source, s3)
    with host_errors(path), opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode):
            meter = Meter(on_progress, 1, info.st_size)
            where = await inside(files, target, os.path.basename(os.path.realpath(path)))
            await files.write(where, _read(fd, path, meter), mode=stat.S_IMODE(info.st_mode) & 0o777)
            return meter.done(path, last=True)
        if not stat.S_ISDIR(info.st_mode):
            raise FileError(f"{path} is neither a file nor a directory", errno=errno.EINVAL)
        return await upload_tree(files, fd, target, on_progress)


@dataclass
class _Plan:
    """What a host's tree holds."""

    folders: list[tuple[str, int]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    size: int = 0


def _survey(root: int, any_link: bool) -> _Plan:
    """Look through a tree without following anything. FileError for a link that would lead out of it, unless
    ``any_link``."""
    plan = _Plan()
    todo = [""]
    while todo:
        here = todo.pop()
        fd = fs.open_in(root, here or ".", DIR | os.O_NOFOLLOW)
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    name = f"{here}/{entry.name}" if here else entry.name
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(info.st_mode):
                        plan.folders.append((name, stat.S_IMODE(info.st_mode) & 0o777))
                        todo.append(name)
                    elif stat.S_ISREG(info.st_mode):
                        plan.files.append(name)
                        plan.size += info.st_size
                    elif stat.S_ISLNK(info.st_mode):
                        text = os.readlink(entry.name, dir_fd=fd)
                        if not any_link and not stays_inside(name, text):
                            raise FileError(
                                f"the link {name!r} leads out of the directory, to {text!r}",
                                hint="remove it, or copy what it points to by itself",
                                errno=errno.ELOOP,
                            )
                        plan.links.append((name, text))
                    else:
                        plan.skipped.append(name)
        finally:
            os.close(fd)
    plan.folders.sort()
    return plan


async def upload_tree(
    files: AsyncFiles, root: int, target: str, on_progress: OnProgress | None = None, *, any_link: bool = False
) -> Progress:
    """What is in an open folder of the host's. ``any_link``: links are text, wherever they would lead inside."""
    plan = await asyncio.to_thread(_survey, root, any_link)
    meter = Meter(on_progress, len(plan.files), plan.size, plan.skipped)
    base = target.rstrip("/") or "/"
    await files.mkdir(base)
    for name, mode in plan.folders:
        await files.mkdir(f"{base}/{name}", mode=mode | 0o700)

    async def one(name: str) -> None:
        try:
            fd = fs.open_in(root, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            meter.skip(name)
            return
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                meter.skip(name)
                return
            mode = stat.S_IMODE(info.st_mode) & 0o777
            await files.write(f"{base}/{name}", _read(fd, name, meter), mode=mode)
        finally:
            os.close(fd)
        meter.done(name)

    await in_parallel(plan.files, one)
    for name, text in plan.links:
        where = f"{base}/{name}"
        try:
            await files.symlink(where, text)
        except FileExistsError:
            old = await files.stat(where, follow=False)
            if old.type != "symlink":
                raise
            await files.remove(where, missing_ok=True)
            await files.symlink(where, text)
    for name, mode in reversed(plan.folders):
        if mode & 0o700 != 0o700:
            await files.chmod(f"{base}/{name}", mode)
    return meter.done(base, last=True, count=False)


async def inside(files: AsyncFiles, target: str, name: str) -> str:
    """``target``, or ``target/name`` if that is a directory."""
    try:
        if target.endswith("/") or (await files.stat(target)).is_dir:
            return f"{target.rstrip('/')}/{name}"
    except FileNotFoundError:
        pass
    return target


async def _read(fd: int, name: str, meter: Meter) -> AsyncIterator[bytes]:
    while piece := os.read(fd, _PIECE):
        yield piece
        meter.moved(name, len(piece))
