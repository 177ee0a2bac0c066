"""The reaper's work on saved states: what a crash left of them goes, and what is listed is there.

A state's lock (``run/snapshot-ID.lock``) is held by whoever writes, publishes or removes it, and for
as long as a fork or an export needs one of its own. So what has a free lock and no row is nobody's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from ..errors import SlopletError
from .home import ID_RE, Home
from .layout import MANIFEST, remove_files
from .locks import FileLock, snapshot_lock_path
from .store import Store

#: What ``new_id`` makes. Anything else in the folder is not ours.
_MADE_RE = re.compile(r"[a-km-np-z2-9]{12}\Z")


def sweep(home: Home, store: Store, folders: list[str], locks: list[str], failed: Callable[[str], None]) -> list[str]:
    """Remove what is left over; returns the ids. ``folders``, ``locks``: what lies in snapshots/ and in run/."""
    removed = []
    rows = store.snapshots_in_use()
    garbage = {snapshot_id for snapshot_id, used in rows.items() if not used}
    stale = {name.removeprefix(".tmp-") for name in folders if name.startswith(".tmp-")}
    stale |= {name for name in folders if name not in rows and _MADE_RE.match(name)}
    stale |= {
        name.removeprefix("snapshot-").removesuffix(".lock")
        for name in locks
        if name.startswith("snapshot-") and name.endswith(".lock")
    }
    for snapshot_id in sorted(garbage | stale):
        if not ID_RE.match(snapshot_id):
            continue
        try:
            if _clear(home, store, snapshot_id, drop_row=snapshot_id in garbage):
                removed.append(snapshot_id)
        except SlopletError as error:
            failed(f"snapshot {snapshot_id}: {error}")
    for snapshot_id in rows.keys() - set(folders) - garbage:
        if _lost(home, store, snapshot_id):
            removed.append(snapshot_id)
    return removed


def _clear(home: Home, store: Store, snapshot_id: str, *, drop_row: bool) -> bool:
    """Whether something went: a row that is garbage, files without a row, or only a lock that nobody holds."""
    lock = FileLock.take(snapshot_lock_path(home, snapshot_id))
    if lock is None:
        return False  # it is being written, published, used or removed
    try:
        if drop_row:
            store.remove_snapshot(snapshot_id)
        elif store.has_snapshot(snapshot_id):
            return False  # published since
        elif _is_another_databases(home, store, snapshot_id):
            return False
        return remove_files(home, snapshot_id)
    finally:
        lock.release()


def _is_another_databases(home: Home, store: Store, snapshot_id: str) -> bool:
    """state.db was lost or moved away, and this was published in it: whoever brings it back wants this too."""
    import json

    try:
        manifest = json.loads((home.snapshots / snapshot_id / MANIFEST).read_bytes())
        return bool(manifest["store"] != store.identity())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _lost(home: Home, store: Store, snapshot_id: str) -> bool:
    """A row whose files are gone: it would be listed, and could not be used. The row comes after the files and goes
    before them, so this is no moment of somebody's work: the disk lost it, or somebody deleted the folder."""
    if os.path.lexists(home.snapshots / snapshot_id) or not store.has_snapshot(snapshot_id):
        return False
    return store.remove_snapshot(snapshot_id)
