"""Single steps in a folder of the host's that may hold anything: by descriptors, never through a link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..controller import Change
from ..fs import FILE, open_in
from ..transfer.common import DIR
from .copied import file_digest, link_digest

_PIECE = 2**20


def remove_content(folder: int, change: Change, *, checked: bool = False) -> list[str]:
    """Remove from a folder what the change says was in it; what else is there stays. Returns what went. ``checked``:
    only what still is what it was (``Change.below_before``)."""
    gone = []
    before = dict(zip(change.below, change.below_before, strict=False)) if checked else {}
    for name in sorted(change.below, reverse=True):  # what is deeper first
        with suppress(OSError):  # what stays keeps its folder, and that is told
            _remove_one(folder, name, before.get(name, ""))
            gone.append(name)
    return gone


def _remove_one(root: int, name: str, before: str) -> None:
    """A file, a link, or an empty folder. ``before``: only if it still is that."""
    above, _, last = name.rpartition("/")
    with opened_in(root, above or ".") as fd:
        info = os.lstat(last, dir_fd=fd)
        if stat.S_ISDIR(info.st_mode):
            os.rmdir(last, dir_fd=fd)
        elif before and digest_at(fd, last, info) not in before.split():
            raise OSError(errno.EEXIST, "it has changed here since it was copied")
        else:
            os.unlink(last, dir_fd=fd)


def digest_at(fd: int, last: str, info: os.stat_result) -> str:
    """Of the file or link that is at a place now; "" of anything else."""
    if stat.S_ISLNK(info.st_mode):
        return link_digest(os.readlink(last, dir_fd=fd))
    if not stat.S_ISREG(info.st_mode):
        return ""
    with opened_in(fd, last, FILE) as file:
        return file_digest(file)


def same_file(fd: int, name: str, other: str) -> bool:
    """Whether both are regular files of the same mode and bytes."""
    try:
        with opened_in(fd, name, FILE) as one, opened_in(fd, other, FILE) as two:
            first, second = os.fstat(one), os.fstat(two)
            if (first.st_mode, first.st_size) != (second.st_mode, second.st_size):
                return False
            while piece := os.read(one, _PIECE):
                if piece != os.read(two, _PIECE):
                    return False
            return True
    except OSError:
        return False


@contextmanager
def opened_in(root: int, name: str, flags: int = DIR | os.O_NOFOLLOW) -> Iterator[int]:
    fd = open_in(root, name, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def temporary() -> str:
    return f".sloplet-{os.urandom(8).hex()}.part"


def umask() -> int:
    """Without setting it, which other threads would notice."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
    except (OSError, StopIteration, ValueError):
        return 0o077
