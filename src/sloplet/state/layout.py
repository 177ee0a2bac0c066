"""How a saved state lies on disk, and how it goes: ``snapshots/ID/`` with flat files and ``manifest.json``."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from ..fs import FILE, FOLDER, remove_tree
from .home import Home, check_id, unwritable
from .locks import FileLock

VERSION = 1  #: of the manifest and of the layout
MANIFEST = "manifest.json"
NAME_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
#: A file whose name says its content: it is not hashed again, and a later snapshot may share it.
OBJECT_RE = re.compile(r"o-([0-9a-f]{64})\Z")


def remove_files(home: Home, snapshot_id: str, *, patience: float = 0.0) -> bool:
    """Remove the files of a state that has no row; the caller holds its lock. Idempotent. False if somebody has it
    open. Raises StateUnwritable."""
    folder = home.snapshots / check_id(snapshot_id)
    try:
        parent = os.open(home.snapshots, FOLDER)
    except OSError as error:
        raise unwritable(home.snapshots, error) from error
    try:
        with suppress(FileNotFoundError):
            reader = _wait_for_readers(folder, patience)
            if reader is None:
                return False
            try:
                os.rename(folder.name, f".tmp-{snapshot_id}", src_dir_fd=parent, dst_dir_fd=parent)
            finally:
                reader.release(remove=False)
        remove_tree(parent, f".tmp-{snapshot_id}")
        return True
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        os.close(parent)


def _wait_for_readers(folder: Path, patience: float) -> FileLock | None:
    """The exclusive lock on a published state, against ``Opened``. FileNotFoundError if it is not there."""
    until = time.monotonic() + patience
    while True:
        try:
            fd = os.open(folder / MANIFEST, FILE)
        except OSError:
            fd = os.open(folder, FOLDER)  # without a manifest nobody can have it open
        lock = FileLock.hold_open(folder, fd, shared=False)
        if lock is not None:
            return lock
        os.close(fd)
        if time.monotonic() >= until:
            return None
        time.sleep(0.005)
