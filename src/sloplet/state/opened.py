"""A saved state that is in use: found, checked against its record, and kept from being deleted meanwhile."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..controller import Snapshot
from ..engines.base import ResolvedImage, StateFormat
from ..errors import SnapshotDamaged, SnapshotError, SnapshotIncompatible
from ..fs import FILE, FOLDER
from .digests import digests
from .home import Home, check_id
from .layout import MANIFEST, VERSION
from .locks import FileLock
from .snapshot_rows import not_found
from .store import Store

MOST_MANIFEST = 64 << 20
_HINT = "it cannot be used; delete it, and go back to another one"


class Opened:
    """``fd`` is a descriptor of the folder, for the engine; ``close`` closes it and lets a deletion go on."""

    def __init__(self, snapshot: Snapshot, manifest: dict[str, Any], path: Path, fd: int, lock: FileLock) -> None:
        self.snapshot = snapshot
        self.manifest = manifest
        self.path = path
        self.fd = fd
        self._lock = lock

    @property
    def format(self) -> StateFormat:
        return StateFormat.from_dict(self.manifest["format"])

    @property
    def image(self) -> dict[str, Any]:
        return dict(self.manifest["image"])

    @property
    def extra(self) -> dict[str, Any]:
        """What the caller of ``publish`` gave."""
        return dict(self.manifest["extra"])

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent. Not while ``verify`` runs in another thread."""
        self._lock.release(remove=False)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def verify(self) -> None:
        """Read every file and compare. SnapshotDamaged. Once per process for a file that does not change, however
        many ask at a time; may run in a thread beside other work."""
        expected = self.manifest["files"]
        try:
            found = digests(
                {name: entry["bytes"] for name, entry in expected.items()},
                lambda name: os.open(name, FILE, dir_fd=self.fd),
            )
        except OSError as error:
            raise _unreadable(self.snapshot, error) from error
        for name, entry in expected.items():
            if found[name] != entry["sha256"]:
                raise _damaged(self.snapshot, f"{name} is not what was written")


def image_facts(image: ResolvedImage) -> dict[str, Any]:
    """What a manifest keeps of the image (``Opened.image``)."""
    return {
        "kind": image.kind, "path": None if image.path is None else str(image.path), "owners": image.owners_kept,
        "config": None if image.config is None else image.config.to_json().decode(),
    }  # fmt: skip


def tree_of(home: Home, facts: Mapping[str, Any]) -> str | None:
    """The folder in images/ that an image's files lie in; None if they lie elsewhere."""
    path = facts.get("path")
    if path is None or Path(path).name != "rootfs" or Path(path).parent.parent != home.images:
        return None
    return Path(path).parent.name


def open_snapshot(home: Home, store: Store, snapshot_id: str, format: StateFormat | None) -> Opened:
    """Everything but the contents of its files is checked. See ``SnapshotStore.open``."""
    snapshot, digest = store.snapshot_and_digest(snapshot_id)
    path = home.snapshots / check_id(snapshot_id)
    fd, lock = -1, None
    try:
        fd = os.open(path, FOLDER)
        lock = _hold(snapshot, path, fd)
        store.snapshot(snapshot_id)  # from here on it cannot go
        manifest = _manifest(snapshot, digest, fd)
        _check_format(snapshot, manifest, format)
        _check_files(snapshot, manifest, fd)
        return Opened(snapshot, manifest, path, fd, lock)
    except BaseException as error:
        if lock is not None:
            lock.release(remove=False)
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError):
            store.snapshot(snapshot_id)  # deleted just now: that is what it says then
            raise _unreadable(snapshot, error) from error
        raise


def _hold(snapshot: Snapshot, path: Path, folder: int) -> FileLock:
    """The lock that ``delete`` waits for. On a file of its own: the folder's descriptor goes to other programs."""
    fd = os.open(MANIFEST, FILE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _damaged(snapshot, f"{MANIFEST} is no plain file")
    lock = FileLock.hold_open(path / MANIFEST, fd, shared=True)
    if lock is None:
        os.close(fd)
        raise not_found(snapshot.id)  # only who deletes it holds it against us
    return lock


def _manifest(snapshot: Snapshot, digest: str, folder: int) -> dict[str, Any]:
    import hashlib
    import json

    with os.fdopen(os.open(MANIFEST, FILE, dir_fd=folder), "rb") as file:
        data = file.read(MOST_MANIFEST)
    if hashlib.sha256(data).hexdigest() != digest:
        raise _damaged(snapshot, f"{MANIFEST} is not what was written")
    manifest: dict[str, Any] = json.loads(data)
    if manifest.get("version") != VERSION:
        raise SnapshotIncompatible(
            f"{_shown(snapshot)} has layout {manifest.get('version')}; this sloplet knows {VERSION}",
            hint=f"it was made by sloplet {manifest.get('sloplet')}: use that version",
        )
    row, written = snapshot.to_dict(), manifest
    for field in ("id", "kind", "role", "sandbox", "engine", "spec"):
        if row[field] != _plain(written.get(field), row[field]):
            raise _damaged(snapshot, f"its record and its manifest disagree on {field}")
    return manifest


def _plain(value: Any, like: Any) -> Any:
    """A spec as JSON gives it back, in the terms of this version's ``to_dict``: fields may have been added since."""
    if not isinstance(like, dict) or not isinstance(value, dict):
        return value
    from ..spec import SandboxSpec

    try:
        return SandboxSpec.from_dict(value).to_dict()
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _check_format(snapshot: Snapshot, manifest: dict[str, Any], format: StateFormat | None) -> None:
    if format is None:
        return
    written = StateFormat.from_dict(manifest["format"])
    if reason := format.refuses(written):
        hint = f"it needs engine {written.engine!r}, {written.version}; make a new one here"
        raise SnapshotIncompatible(f"{_shown(snapshot)} cannot be used here: {reason}", hint=hint)


def _check_files(snapshot: Snapshot, manifest: dict[str, Any], folder: int) -> None:
    """Exactly the files that were written, of the sizes that were written."""
    expected = manifest["files"]
    there = set(os.listdir(folder)) - {MANIFEST}
    if missing := sorted(set(expected) - there):
        raise _damaged(snapshot, f"{missing[0]} is missing")
    if unknown := sorted(there - set(expected)):
        raise _damaged(snapshot, f"{unknown[0]!r} was added to it")
    for name, entry in expected.items():
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(info.st_mode):
            raise _damaged(snapshot, f"{name} is no plain file")
        if info.st_size != entry["bytes"]:
            raise _damaged(snapshot, f"{name} has {info.st_size} bytes, and {entry['bytes']} were written")


def _shown(snapshot: Snapshot) -> str:
    return f"the {snapshot.role} {snapshot.name or snapshot.id}"


def _unreadable(snapshot: Snapshot, error: OSError) -> SnapshotError:
    what = f"{error.filename}: {error.strerror}" if isinstance(error.filename, str) else str(error.strerror)
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM):
        return SnapshotError(f"{_shown(snapshot)} cannot be read now: {what}", hint="it may be whole: try again")
    return _damaged(snapshot, what)


def _damaged(snapshot: Snapshot, what: str) -> SnapshotDamaged:
    return SnapshotDamaged(f"{_shown(snapshot)} is damaged: {what}", hint=_HINT)
