"""The sha256 of files, each read once per process for as long as it does not change.

A file is known by its device, inode, size and both times. One whose times are too fresh is read
again: a change within the same tick of the kernel's clock would not show in them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_BLOCK = 1 << 20
_BIG = 4 << 20  # below it a thread of its own is not worth it
_THREADS = 4
_FRESH_NS = 20_000_000  # longer than a tick of any kernel (CONFIG_HZ=100: 10 ms)
_MOST = 20_000

_Key = tuple[int, int, int, int, int]


class _Digests:
    """What is known, and what is being read just now: many that ask for one file at once wait for one reader."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._known: dict[_Key, str] = {}
        self._reading: dict[_Key, threading.Event] = {}

    def of(self, fd: int) -> str:
        while True:
            key = _key(fd)
            with self._guard:
                if (known := self._known.get(key)) is not None:
                    return known
                other = self._reading.get(key)
                if other is None:
                    self._reading[key] = done = threading.Event()
                    break
            other.wait()
        digest = ""
        try:
            digest = _read(fd)
            return digest
        finally:
            with self._guard:
                del self._reading[key]
                if digest and _key(fd) == key and time.time_ns() - max(key[3:]) > _FRESH_NS:
                    if len(self._known) >= _MOST:
                        self._known.clear()
                    self._known[key] = digest
            done.set()


_digests = _Digests()


def _forget() -> None:
    """A forked child: a thread that does not exist here may have held the guard, or been reading."""
    global _digests
    _digests = _Digests()


os.register_at_fork(after_in_child=_forget)


def digest(fd: int) -> str:
    """The sha256 of an open regular file, in hex, from its beginning and whatever its position. Raises OSError."""
    return _digests.of(fd)


def digests(files: dict[str, int], use: Callable[[str], int]) -> dict[str, str]:
    """The digests of many files: ``files`` is name -> size, ``use`` opens one. Big ones are read side by side."""

    def one(name: str) -> str:
        fd = use(name)
        try:
            return digest(fd)
        finally:
            os.close(fd)

    big = [name for name, size in files.items() if size >= _BIG]
    found = {name: one(name) for name in files if name not in set(big)}
    if len(big) < 2:
        return found | {name: one(name) for name in big}
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(_THREADS, len(big))) as pool:
        return found | dict(zip(big, pool.map(one, big), strict=True))


def _key(fd: int) -> _Key:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _read(fd: int) -> str:
    import hashlib

    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    hashed = hashlib.sha256()
    block = bytearray(_BLOCK)
    view = memoryview(block)
    offset = 0
    while count := os.preadv(fd, [block], offset):
        hashed.update(view[:count])
        offset += count
    return hashed.hexdigest()
