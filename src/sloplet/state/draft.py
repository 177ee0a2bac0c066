"""A saved state in the making: a folder that an engine writes into, and what turns it into a whole one."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..controller import Snapshot
from ..engines.base import StateFormat
from ..errors import SaveFailed, SlopletError
from ..fs import FILE, FOLDER, NEW_FILE, write_all
from .digests import digests
from .home import Home
from .layout import MANIFEST, NAME_RE, OBJECT_RE, VERSION, remove_files
from .locks import FileLock

_FICLONE = 0x40049409


class Draft:
    """A state that is being written: an empty folder of ours, below one that only we can enter.

    ``fd`` is for the engine, which may give the folder to another user while it writes. Flat: regular
    files only, named by letters, digits, '.', '_' and '-'. A context manager: leaving it without
    ``publish`` removes everything.
    """

    def __init__(self, home: Home, snapshot_id: str, lock: FileLock) -> None:
        self.id = snapshot_id
        self.path = home.snapshots / f".tmp-{snapshot_id}"
        self.created_at = time.time()
        self.guard = threading.RLock()  #: held by publish: a caller that gives up meanwhile waits for its end
        self._home = home
        self._lock: FileLock | None = lock
        self.fd = -1
        try:
            os.mkdir(self.path, 0o700)
            self.fd = os.open(self.path, FOLDER)
        except OSError:
            self.abandon()
            raise

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Remove all of it. Idempotent, and nothing after ``publish``; what resists is left to the reaper."""
        if self._lock is None or not self._lock.held:  # a forked child has a copy of what is its parent's
            return
        with self.guard:
            lock = self.detach()
            if lock is None:
                return
            with suppress(SlopletError, OSError):
                remove_files(self._home, self.id)
            lock.release()

    def detach(self) -> FileLock | None:
        """Close the folder; returns the lock, the first time."""
        lock, self._lock = self._lock, None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        return lock


def adopt(draft: Draft, *, durable: bool) -> dict[str, dict[str, Any]]:
    """Check that the draft holds plain files and nothing else, make them ours, and hash them: the manifest's files.
    ``durable``: write them out meanwhile."""
    if draft.fd < 0:
        raise SaveFailed("the draft was abandoned or published already")
    _own(draft.fd, 0o755)
    sizes: dict[str, int] = {}
    for name in sorted(_names(draft.fd)):
        if not NAME_RE.match(name) or name == MANIFEST:
            raise SaveFailed(f"a saved state cannot hold a file named {name!r}")
        fd = _open_regular(draft.fd, name)
        try:
            _own(fd, 0o644)
            sizes[name] = os.fstat(fd).st_size
        finally:
            os.close(fd)
    unknown = {name: size for name, size in sizes.items() if not OBJECT_RE.match(name)}
    with _written_out(draft.fd, list(sizes) if durable else []):
        hashed = digests(unknown, lambda name: _open_regular(draft.fd, name))
    known = {name: found[1] for name in sizes if (found := OBJECT_RE.match(name))}
    return {name: {"bytes": size, "sha256": (hashed | known)[name]} for name, size in sizes.items()}


def _names(folder: int) -> list[str]:
    """By a descriptor of our own: the engine's copies share this one's position in the listing."""
    fd = os.open(".", FOLDER, dir_fd=folder)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _open_regular(folder: int, name: str) -> int:
    """Open a file that an engine wrote. SaveFailed unless it is a plain one."""
    if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        fd = os.open(name, FILE, dir_fd=folder)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise SaveFailed(f"a saved state may hold plain files only, and {name!r} is none")


def _own(fd: int, mode: int) -> None:
    """Ours, and readable for all: a restoring engine may be another user, who gets only a descriptor of the folder."""
    info = os.fstat(fd)
    if (info.st_uid, info.st_gid) != (os.geteuid(), os.getegid()) and os.geteuid() == 0:
        os.fchown(fd, os.geteuid(), os.getegid())
    if stat.S_IMODE(info.st_mode) != mode:
        os.fchmod(fd, mode)


def describe(
    snapshot: Snapshot,
    format: StateFormat,
    image: Mapping[str, Any],
    files: dict[str, dict[str, Any]],
    extra: Mapping[str, Any],
    store: str,
) -> dict[str, Any]:
    from .. import __version__

    fields = snapshot.to_dict()
    del fields["parent"]  # it changes when a parent is deleted; the row knows
    return {
        "version": VERSION, "sloplet": __version__, **fields, "format": format.to_dict(), "image": dict(image),
        "files": files, "extra": dict(extra), "store": store,
    }  # fmt: skip


def write_manifest(draft: Draft, manifest: dict[str, Any]) -> str:
    import hashlib
    import json

    data = json.dumps(manifest, indent=1).encode("ascii")
    fd = os.open(MANIFEST, NEW_FILE, 0o644, dir_fd=draft.fd)
    try:
        os.fchmod(fd, 0o644)
        write_all(fd, data)
    finally:
        os.close(fd)
    return hashlib.sha256(data).hexdigest()


@contextmanager
def _written_out(folder: int, names: list[str]) -> Iterator[None]:
    """The files are on the disk when the block has ended: the disk works while the block computes."""
    if not names:
        yield
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        done = pool.map(lambda name: sync_file(folder, name), names)
        yield
        list(done)


def sync_file(folder: int, name: str) -> None:
    fd = os.open(name, FILE, dir_fd=folder)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    fd = os.open(path, FOLDER)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def share(source: int, target: int, name: str) -> None:
    """The file ``name`` of one folder in another, without copying its bytes. Raises OSError."""
    if not _clone(source, target, name):
        os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)


def _clone(source: int, target: int, name: str) -> bool:
    """Share the blocks (btrfs, xfs): two files of their own."""
    import fcntl

    fd = os.open(name, FILE, dir_fd=source)
    copy = -1
    try:
        copy = os.open(name, NEW_FILE, 0o644, dir_fd=target)
        fcntl.ioctl(copy, _FICLONE, fd)
        return True
    except OSError:
        if copy >= 0:
            os.unlink(name, dir_fd=target)
        return False
    finally:
        os.close(fd)
        if copy >= 0:
            os.close(copy)
