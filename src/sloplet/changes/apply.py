"""Chosen changes, from a sandbox to a folder of this machine.

The sandbox is hostile while this goes on, and so may be what is in the target folder already. Everything is
done by descriptors below that folder, without following a link (``fs.open_in``). A file gets its name when it is
complete. What cannot be done safely is left out and told with the reason; it does not stop the rest.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field

from .. import fs
from ..controller import Diff
from ..errors import FileError, SpecError
from ..files import AsyncFiles
from ..images.host import below
from ..transfer.common import DIR, host_errors, host_path, in_parallel, opened, stays_inside
from ..transfer.download import MAX_DOWNLOAD
from ..volumespec import VolumeSpec
from .choose import Chosen, choose
from .reading import Reader, sandbox_reader
from .target import digest_at, opened_in, remove_content, same_file, temporary, umask

GROWTH = 64 * 2**20  # how much larger than told a file may have become meanwhile
_QUICK = 2**18  # files that are compared at once: a thread would cost more


@dataclass(frozen=True)
class Applied:
    """What ``apply`` did: paths below ``to``."""

    written: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()  #: path and why
    #: what went back to where it was copied from: path inside, and what is there now (``Change.before``)
    marks: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def joined(self, other: Applied, below: str) -> Applied:
        """With what another did in a folder of its own."""

        def named(path: str) -> str:
            return os.path.join(below, path) if path != "." else below or "."

        return Applied(
            (*self.written, *map(named, other.written)),
            (*self.removed, *map(named, other.removed)),
            (*self.skipped, *((named(path), why) for path, why in other.skipped)),
            {**self.marks, **other.marks},
        )


async def apply(
    files: AsyncFiles,
    diff: Diff,
    paths: list[str],
    to: str | os.PathLike[str],
    *,
    delete: bool = False,
    max_bytes: int = MAX_DOWNLOAD,
    back: bool = False,
    inside: str = "",
) -> Applied:
    """Bring what ``diff`` lists at or below ``paths`` to the folder ``to``, which is made if missing (not ``back``).

    Of a folder that is named the content goes into ``to``; a file that is named goes there under its own name. A file
    is taken as it is now. ``delete``: what was removed inside is removed there too. ``back``: to where it was
    copied from; what is there now and was not then (``Change.before``) is left alone. ``inside``: not to ``to`` itself
    but to a folder below it, on the way to which no link is followed, as everywhere below ``to``. SpecError before
    anything is written if the paths make no sense or two changes would go to one place; FileError if ``to`` cannot be
    used, or more than ``max_bytes`` would be written.
    """
    chosen, idle = choose(diff.changes, paths)
    target = host_path(to)
    with host_errors(target):
        if not back:  # what was copied from may have been moved: half of it must not come into being there
            os.makedirs(target, exist_ok=True)
        with opened(target, DIR) as root:
            job = _Apply(files, root, delete, max_bytes, back)
            job.skipped += [(path, "nothing has changed there") for path in idle]
            return await job.run_in(inside, chosen)


async def apply_back(
    files: AsyncFiles, diff: Diff, copies: Sequence[VolumeSpec], paths: list[str] | None, *, delete: bool = False
) -> Applied:
    """Bring what has changed in folders that were copied in back to where they came from. ``paths`` None: all of it.
    Raises as ``apply`` does, and SpecError where a path lies in no copy."""
    if not copies:
        raise SpecError(
            "nothing was copied into this sandbox that changes could go back to",
            hint="say where to, or make it with volumes={'/workspace': Volume('./repo', mode='copy')}",
        )
    done = Applied()
    for path in [copy.path for copy in copies] if paths is None else paths:
        home = next((copy for copy in copies if below(path, copy.path)), None)
        if home is None:
            raise SpecError(
                f"{path[:80]!r} is in no folder that was copied in",
                hint=f"these are: {', '.join(c.path for c in copies)}",
            )
        single = any(change.path == path and change.type != "dir" for change in diff.changes)
        rest = (path.rpartition("/")[0] if single else path)[len(home.path) :].strip("/")
        one = await apply(files, diff, [path], home.source, delete=delete, back=True, inside=rest)
        done = done.joined(one, rest)
    return done


_Act = Callable[[Chosen], Awaitable[None]]


class _Left(Exception):
    """Something is left out; the text says why."""


class _Apply:
    """One ``apply``. ``root`` is the target folder."""

    def __init__(self, files: AsyncFiles, root: int, delete: bool, max_bytes: int, back: bool) -> None:
        self.files = files
        self.read: Reader = sandbox_reader(files)
        self.root = root
        self.delete = delete
        self.back = back
        self.marks: dict[str, str] = {}
        self.left = self.max_bytes = max_bytes
        self.made: set[tuple[int, int]] = set()  # device and inode of what this apply has put there
        self.written: list[str] = []
        self.removed: list[str] = []
        self.skipped: list[tuple[str, str]] = []

    async def run_in(self, inside: str, chosen: list[Chosen]) -> Applied:
        """``run`` in a folder below the target, which is made if something is to be written there."""
        if not inside or not chosen:
            return await self.run(chosen)
        try:
            self.root = self.open_folder(inside, make=any(one.change.kind != "removed" for one in chosen))
        except (_Left, FileNotFoundError) as why:
            told = str(why) if isinstance(why, _Left) else "there is no such folder here any more"
            return Applied(skipped=(*self.skipped, (".", told)))
        try:
            return await self.run(chosen)
        finally:
            os.close(self.root)

    async def run(self, chosen: list[Chosen]) -> Applied:
        gone = [one for one in chosen if one.change.kind == "removed"]
        here = [one for one in chosen if one.change.kind != "removed"]
        for one in reversed(gone):  # what is deeper first
            await self.attempt(one, self.remove if self.delete else self.keep)
        for one in here:
            if one.change.type == "dir":
                await self.attempt(one, self.folder)
        await in_parallel([one for one in here if one.change.type == "file"], lambda one: self.attempt(one, self.file))
        for one in here:
            if one.change.type == "symlink":
                await self.attempt(one, self.link)
            elif one.change.type not in ("file", "dir"):
                self.skipped.append((one.place, "it is neither a file nor a folder nor a link"))
        for one in reversed(here):
            if one.change.type == "dir" and "mode" in one.change.what:
                await self.attempt(one, self.folder_mode)
        written, removed = tuple(sorted(self.written)), tuple(sorted(self.removed))
        return Applied(written, removed, tuple(sorted(self.skipped)), self.marks)

    async def attempt(self, one: Chosen, act: _Act) -> None:
        try:
            await act(one)
        except _Left as why:
            self.skipped.append((one.place or ".", str(why)))
        except FileError as error:
            if error.errno == errno.EFBIG:
                raise
            self.skipped.append((one.place, f"it cannot be read in the sandbox: {error.message}"))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE):
                raise
            self.skipped.append((one.place, f"on this machine: {error.strerror}"))

    # -- places ----------------------------------------------------------------------

    @contextmanager
    def above(self, place: str, *, make: bool = True) -> Iterator[tuple[int, str]]:
        """The folder that a place is in, made if missing, and the last part of the name."""
        folder, _, last = place.rpartition("/")
        fd = self.open_folder(folder, make)
        try:
            yield fd, last
        finally:
            os.close(fd)

    def open_folder(self, place: str, make: bool) -> int:
        fd = os.dup(self.root)
        for part in place.split("/") if place else ():
            try:
                below = self.step(fd, part, make)
            finally:
                os.close(fd)
            fd = below
        return fd

    def step(self, fd: int, part: str, make: bool) -> int:
        try:
            return fs.open_in(fd, part, DIR | os.O_NOFOLLOW)
        except FileNotFoundError:
            if not make:
                raise
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise _Left(f"{part!r} is a file or a link here, not a folder") from None
        with suppress(FileExistsError):
            os.mkdir(part, 0o777, dir_fd=fd)
        return self.step(fd, part, make=False)

    def note(self, fd: int, name: str) -> None:
        info = os.lstat(name, dir_fd=fd)
        self.made.add((info.st_dev, info.st_ino))

    def there(self, fd: int, last: str) -> os.stat_result | None:
        """What is at a place now. Left if this apply has put it there under another spelling."""
        try:
            info = os.lstat(last, dir_fd=fd)
        except FileNotFoundError:
            return None
        if (info.st_dev, info.st_ino) in self.made and not stat.S_ISDIR(info.st_mode):
            raise _Left("another name of the sandbox is the same on this machine (upper and lower case?)")
        return info

    # -- what is there now -------------------------------------------------------------

    async def folder(self, one: Chosen) -> None:
        if not one.place:
            return  # the target folder itself
        with self.above(one.place) as (fd, last):
            old = self.there(fd, last)
            if old is not None and stat.S_ISDIR(old.st_mode):
                return
            if old is not None:
                if not (self.delete and "type" in one.change.what and stat.S_ISREG(old.st_mode)):
                    raise _Left("it is a folder in the sandbox, and there is a file or a link of that name here")
                os.unlink(last, dir_fd=fd)
            os.mkdir(last, one.change.mode & 0o777 | 0o700, dir_fd=fd)
            self.note(fd, last)
        self.written.append(one.place)

    async def folder_mode(self, one: Chosen) -> None:
        fd = self.open_folder(one.place, make=False)
        try:
            mode = one.change.mode & 0o777 & ~umask() | 0o700
            if one.place and stat.S_IMODE(os.fstat(fd).st_mode) != mode:
                os.fchmod(fd, mode)
                self.written.append(one.place)
        finally:
            os.close(fd)

    async def file(self, one: Chosen) -> None:
        with self.above(one.place) as (fd, last):
            self.replaceable(fd, last)
            part = temporary()
            out = os.open(part, fs.NEW_FILE, one.change.mode & 0o777, dir_fd=fd)  # the umask applies
            with _gone_on_failure(fd, part):
                try:
                    await self.copy(one, out)
                finally:
                    os.close(out)
                old = self.replaceable(fd, last)
                if old is not None and await _same(fd, part, last, old.st_size):
                    await self.mark(one, fd, part)
                    os.unlink(part, dir_fd=fd)
                    return
                await self.refuse_changed(fd, last, old, one)
                await self.mark(one, fd, part)
                _put(fd, part, last, old)
                self.note(fd, last)
        self.written.append(one.place)

    def replaceable(self, fd: int, last: str) -> os.stat_result | None:
        """What is in the way of a file or a link, if that may go: a file, a link, an empty folder."""
        old = self.there(fd, last)
        if old is None or stat.S_ISREG(old.st_mode) or stat.S_ISLNK(old.st_mode):
            return old
        if not stat.S_ISDIR(old.st_mode):
            raise _Left("there is a device, socket or pipe of that name here")
        folder = self.step(fd, last, make=False)
        try:
            if os.listdir(folder):
                raise _Left("there is a folder of that name here, and it is not empty")
        finally:
            os.close(folder)
        return old

    async def copy(self, one: Chosen, out: int) -> None:
        most = one.change.size + GROWTH
        count = 0
        async with aclosing(self.read(one.change.path, min(most, self.max_bytes) + 1)) as pieces:
            async for piece in pieces:
                count += len(piece)
                self.left -= len(piece)
                if self.left < 0:
                    raise FileError(
                        f"the changes are larger than {self.max_bytes} bytes; it stopped at {one.place!r}",
                        hint="apply fewer paths at once", errno=errno.EFBIG,
                    )  # fmt: skip
                if count > most:
                    raise _Left(f"it grows while it is read: {one.change.size} bytes were told")
                fs.write_all(out, piece)

    async def link(self, one: Chosen) -> None:
        info = await self.files.stat(one.change.path, follow=False)
        if info.type != "symlink":
            raise _Left("it is no link any more")
        text = info.target or ""
        if not stays_inside(one.place, text):
            raise _Left(f"it is a link that leads out of the folder, to {text[:200]!r}")
        with self.above(one.place) as (fd, last):
            old = self.replaceable(fd, last)
            if old is not None and stat.S_ISLNK(old.st_mode) and os.readlink(last, dir_fd=fd) == text:
                return
            await self.refuse_changed(fd, last, old, one)
            part = temporary()
            os.symlink(text, part, dir_fd=fd)
            await self.mark(one, fd, part)
            with _gone_on_failure(fd, part):
                _put(fd, part, last, old)
            self.note(fd, last)
        self.written.append(one.place)

    # -- back to where it came from --------------------------------------------------------

    async def refuse_changed(self, fd: int, last: str, old: os.stat_result | None, one: Chosen) -> None:
        """Left if what is there is neither what was copied into the sandbox nor what was brought back before."""
        known = one.change.before.split()
        if not self.back or not known:
            return
        now = "none" if old is None else await asyncio.to_thread(digest_at, fd, last, old)
        if now in known:
            return
        if old is None:
            raise _Left("it was removed here since it was copied")
        if known == ["none"]:
            raise _Left("it was made here since the folder was copied")
        raise _Left("it has changed here since it was copied")

    async def mark(self, one: Chosen, fd: int, part: str) -> None:
        """What is there from now on."""
        if self.back:
            self.marks[one.change.path] = await asyncio.to_thread(digest_at, fd, part, os.lstat(part, dir_fd=fd))

    # -- what is gone --------------------------------------------------------------------

    async def keep(self, one: Chosen) -> None:
        """Removed inside, and not to be removed here."""
        with suppress(FileNotFoundError), self.above(one.place or ".", make=False) as (fd, last):
            os.lstat(last, dir_fd=fd)
            raise _Left("it was removed inside; with delete it is removed here too")

    async def remove(self, one: Chosen) -> None:
        if not one.place:
            self.removed += remove_content(self.root, one.change, checked=self.back)
            return
        try:
            with self.above(one.place, make=False) as (fd, last):
                info = os.lstat(last, dir_fd=fd)
                if stat.S_ISDIR(info.st_mode) != (one.change.type == "dir"):
                    raise _Left(f"it was a {one.change.type} inside, and is something else here")
                if one.change.type == "dir":
                    self.remove_folder(fd, last, one)
                else:
                    await self.refuse_changed(fd, last, info, one)
                    os.unlink(last, dir_fd=fd)
        except FileNotFoundError:
            return
        self.marks[one.change.path] = "none"
        self.removed.append(one.place)

    def remove_folder(self, fd: int, last: str, one: Chosen) -> None:
        """What was in it inside, and then itself, if nothing else is in it."""
        with opened_in(fd, last) as folder:
            gone = remove_content(folder, one.change, checked=self.back)
            self.marks.update((f"{one.change.path}/{name}", "none") for name in gone)
        try:
            os.rmdir(last, dir_fd=fd)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise _Left("it was removed inside, and holds other files here") from None


@contextmanager
def _gone_on_failure(fd: int, part: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.unlink(part, dir_fd=fd)
        raise


def _put(fd: int, part: str, last: str, old: os.stat_result | None) -> None:
    """Give what is complete its name, in the place of what is there."""
    if old is not None and stat.S_ISDIR(old.st_mode):
        os.rmdir(last, dir_fd=fd)
    os.rename(part, last, src_dir_fd=fd, dst_dir_fd=fd)


async def _same(fd: int, part: str, last: str, size: int) -> bool:
    if size <= _QUICK:
        return same_file(fd, part, last)
    return await asyncio.to_thread(same_file, fd, part, last)
