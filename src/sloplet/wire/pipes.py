"""Larger pipes for connections that carry much. Best effort.

A pipe holds 64 KiB, which costs a change of process for every frame. The kernel lets an ordinary user have 64 MiB in
all of his pipes, and makes later ones tiny beyond that: so few are made larger, and only those that have proven busy.
"""

from __future__ import annotations

import fcntl
import os

BUSY = 4 << 20  #: bytes after which a pipe counts as busy
_SIZE = 1 << 20
_MOST = 16

_grown = 0


class Growth:
    """What one connection has made larger."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def grow(self, fd: int) -> None:
        global _grown
        if _grown >= _MOST and os.geteuid() != 0:
            return
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _SIZE)
        except OSError:  # a socket, or too much already
            return
        self._fds.append(fd)
        _grown += 1

    def forget(self) -> None:
        """The pipes are about to be closed. Idempotent."""
        global _grown
        _grown -= len(self._fds)
        self._fds.clear()
