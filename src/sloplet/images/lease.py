"""Leases: whoever uses the tree of an image holds a shared lock on a file of it, for as long as he lives at most.

Who removes a tree needs the exclusive lock. The kernel lets go of a lease however its process ends.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

from ..fs import FILE
from ..state.home import unwritable
from ..state.locks import FileLock

FACTS = "image.json"  #: what is known of a tree; comes last, so what has it is whole


class Lease:
    """Shared by those who ``share`` it; the lock goes with the last ``close``."""

    def __init__(self, lock: FileLock) -> None:
        self._file = lock
        self._users = 1
        self._users_lock = threading.Lock()

    def share(self) -> Lease:
        """For one more user, who closes it too. The caller's own is open."""
        with self._users_lock:
            if self._users:
                self._users += 1
        return self

    def close(self) -> None:
        """Once for each user."""
        with self._users_lock:
            self._users = max(self._users - 1, 0)
            if not self._users:
                self._file.release(remove=False)


def take(folder: Path, *, shared: bool = True) -> FileLock | None:
    """The lock on a tree (``images/HEX``). None: it is held against us, or just going. FileNotFoundError if there is
    none, or no whole one."""
    path = folder / FACTS
    try:
        fd = os.open(path, FILE)
    except NotADirectoryError as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
    try:
        ours = os.fstat(fd)
        if not stat.S_ISREG(ours.st_mode):
            raise unwritable(path, OSError("it is no plain file"))
        lock = FileLock.hold_open(path, fd, shared=shared)
    except BaseException:
        os.close(fd)
        raise
    if lock is None:
        os.close(fd)
        return None
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        there = None
    if there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
        lock.release(remove=False)
        return None
    return lock
