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


class _Held:
    """A lock with as many users as there are open leases on it."""

    def __init__(self, lock: FileLock) -> None:
        self.file = lock
        self.users = 0
        self.users_lock = threading.Lock()


class Lease:
    """The lock goes with the last of those that share it."""

    def __init__(self, lock: FileLock | _Held) -> None:
        self._held = lock if isinstance(lock, _Held) else _Held(lock)
        self._open = True
        with self._held.users_lock:
            self._held.users += 1

    def share(self) -> Lease:
        """One more, for another user. This one is open."""
        return Lease(self._held)

    def close(self) -> None:
        """Idempotent."""
        with self._held.users_lock:
            if self._open:
                self._open = False
                self._held.users -= 1
                if not self._held.users:
                    self._held.file.release(remove=False)


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
