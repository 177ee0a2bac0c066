"""The lock of the image store: shared by who adds, exclusive for who removes what no record names."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ..state.home import Home, unwritable
from ..state.locks import FileLock

_NAME = "lock"
_STEP = 0.01


class StoreLock:
    """On ``images/blobs/lock``, which stays."""

    @staticmethod
    def shared(home: Home) -> FileLock:
        """Waits for who just removes something. In a thread, where that matters: files may be large."""
        path, fd = _open(home)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise unwritable(path, error) from error
            raise
        return FileLock(path, fd)

    @staticmethod
    def exclusive(home: Home, patience: float = 0.0) -> FileLock | None:
        """None: somebody adds an image just now (and goes on for longer than ``patience`` seconds)."""
        path, fd = _open(home)
        until = time.monotonic() + patience
        try:
            while (lock := FileLock.hold_open(path, fd, shared=False)) is None and time.monotonic() < until:
                time.sleep(_STEP)
        except BaseException:
            os.close(fd)
            raise
        if lock is None:
            os.close(fd)
        return lock


def _open(home: Home) -> tuple[Path, int]:
    folder = home.images / "blobs"
    path = folder / _NAME
    home.open()
    try:
        for each in (home.images, folder):
            each.mkdir(0o700, exist_ok=True)
        return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unwritable(path, error) from error
