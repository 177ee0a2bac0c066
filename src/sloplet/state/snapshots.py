"""Saved states on disk: ``snapshots/ID/`` with what an engine or the runtime wrote, and a manifest.

A state is written into ``snapshots/.tmp-ID`` (``begin``), hashed, described by ``manifest.json``,
renamed, and published by its row in state.db (``publish``); it goes in the opposite order
(``delete``). So what has a row is whole, and whatever a crash leaves has none and a free lock:
the reaper removes it (``sweep.py``). Nothing is used unchecked: the row holds the manifest's
digest, the manifest the digest of each file, and ``open`` compares both.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..controller import SandboxInfo, Snapshot
from ..engines.base import StateFormat
from ..errors import SaveFailed, SlopletError, StateUnwritable
from ..fs import FOLDER
from ..spec import SandboxSpec
from . import draft as drafts
from .draft import Draft
from .home import Home, check_id, new_id
from .layout import MANIFEST, OBJECT_RE, remove_files
from .locks import FileLock, snapshot_lock_path
from .opened import Opened, open_snapshot, tree_of
from .snapshot_rows import not_found
from .store import Store

#: Roles that must survive a power loss: something that runs no longer depends on them.
DURABLE_ROLES = frozenset({"pause", "checkpoint", "template"})
#: Roles that serve one operation of the process that makes them, which deletes them: they end with it.
PASSING_ROLES = frozenset({"fork", "export"})
DELETE_PATIENCE = 10.0


class SnapshotStore:
    """The saved states of a home. Any thread, any number of processes; its methods block (use a thread)."""

    def __init__(self, home: Home, store: Store) -> None:
        self.home = home
        self.store = store
        self._passing: dict[str, FileLock] = {}

    # Writing

    def begin(self) -> Draft:
        """A new, empty draft. SaveFailed."""
        self.home.open()
        snapshot_id = new_id()
        try:
            lock = FileLock.take(snapshot_lock_path(self.home, snapshot_id), wait=True)
            assert lock is not None
            return Draft(self.home, snapshot_id, lock)
        except (OSError, StateUnwritable) as error:
            raise _save_failed(error) from error

    def abandon(self, draft: Draft) -> None:
        draft.abandon()

    def share(self, draft: Draft, name: str, parent_id: str, *, size: int | None = None) -> bool:
        """Put the file ``o-SHA256`` of an earlier snapshot into the draft, without copying its bytes where that is
        possible. False if that snapshot has no such file (of that ``size``): write it."""
        if not OBJECT_RE.match(name):
            raise ValueError(f"{name!r} does not name its content")
        try:
            folder = os.open(self.home.snapshots / check_id(parent_id), FOLDER)
        except OSError:
            return False
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode) or (size is not None and info.st_size != size):
                return False
            drafts.share(folder, draft.fd, name)
            return True
        except OSError:
            return False
        finally:
            os.close(folder)

    def publish(
        self,
        draft: Draft,
        sandbox: SandboxInfo,
        *,
        role: str,
        kind: str,
        format: StateFormat,
        image: Mapping[str, Any],
        name: str | None = None,
        parent: str | None = None,
        note: str = "",
        spec: SandboxSpec | None = None,
        extra: Mapping[str, Any] | None = None,
        durable: bool | None = None,
    ) -> Snapshot:
        """Hash, describe, rename and record what is in the draft: it is there whole, or (on any exception) not at all.

        ``image``: what the sandbox's root was made of; ``extra``: whatever the caller wants to find in
        ``Opened.extra``; ``spec``: if not the sandbox's; ``durable``: survive a power loss (None: as the role
        needs). SaveFailed (also a full disk), SnapshotExists, SandboxNotFound if it was removed meanwhile.
        """
        durable = role in DURABLE_ROLES if durable is None else durable
        spec = sandbox.spec if spec is None else spec
        draft.guard.acquire()
        try:
            files = drafts.adopt(draft, durable=durable)
            snapshot = Snapshot(
                draft.id, name, role, kind, sandbox.id, sandbox.name, parent, sandbox.engine, draft.created_at,
                sum(entry["bytes"] for entry in files.values()), spec, note,
            )  # fmt: skip
            digest = drafts.write_manifest(
                draft, drafts.describe(snapshot, format, image, files, extra or {}, self.store.identity())
            )
            if durable:
                drafts.sync_file(draft.fd, MANIFEST)
                os.fsync(draft.fd)
            os.rename(draft.path, self.home.snapshots / draft.id)
            if durable:
                drafts.sync_folder(self.home.snapshots)
            self.store.add_snapshot(snapshot, digest, image=tree_of(self.home, image), durable=durable)
            self._settle(draft, role)
            return snapshot
        except BaseException as error:
            with suppress(SlopletError):
                self.store.remove_snapshot(draft.id)  # a commit that fails may yet have happened
            draft.abandon()
            if isinstance(error, (OSError, StateUnwritable)) and not isinstance(error, SaveFailed):
                raise _save_failed(error) from error
            raise
        finally:
            draft.guard.release()

    def _settle(self, draft: Draft, role: str) -> None:
        lock = draft.detach()
        if lock is not None and role in PASSING_ROLES:
            self._passing[draft.id] = lock
        elif lock is not None:
            lock.release()

    def replace_saved(self, sandbox_id: str, snapshot: Snapshot) -> None:
        """What a running sandbox would be recovered from is now ``snapshot``; the one before it goes."""
        old = self.store.replace_saved(sandbox_id, snapshot.id, snapshot.created_at)
        if old is not None and old != snapshot.id:
            self._remove(old)

    # Reading

    def open(self, snapshot_id: str, format: StateFormat | None = None, *, verify: bool = True) -> Opened:
        """The state, checked, and kept from being deleted until ``Opened.close`` (a context manager).

        ``format``: of the engine that is to go on from it (None: only to be read). ``verify=False`` leaves the
        contents to ``Opened.verify``, which must come before they are believed; all else is checked here.
        SnapshotNotFound, SnapshotDamaged, SnapshotIncompatible.
        """
        opened = open_snapshot(self.home, self.store, snapshot_id, format)
        if verify:
            try:
                opened.verify()
            except BaseException:
                opened.close()
                raise
        return opened

    def delete(self, snapshot_id: str, *, force: bool = False) -> None:
        """SnapshotNotFound; SnapshotInUse if something descends from it (``force``: that then descends from its
        parent), or, always, if a sandbox would go on from it. Waits a while for those who have it open; then, and
        after a crash, its files are the reaper's."""
        if not self.store.remove_snapshot(snapshot_id, children=force, saved=False):
            raise not_found(snapshot_id)
        self._clear(snapshot_id)

    def delete_of_sandbox(self, sandbox_id: str) -> None:
        """All that was ever saved of it, but the templates: it is being removed. Idempotent."""
        for snapshot in self.store.list_snapshots(sandbox_id):
            if snapshot.role != "template":
                self._remove(snapshot.id)

    def prune_undo(self, sandbox_id: str, keep: int) -> None:
        """Keep the newest ``keep`` undo points."""
        points = self.store.list_snapshots(sandbox_id, "undo")
        for snapshot in points[: max(0, len(points) - keep)]:
            self._remove(snapshot.id)

    def _remove(self, snapshot_id: str) -> None:
        """Whatever descends from it or would go on from it: the caller knows."""
        self.store.remove_snapshot(snapshot_id)
        self._clear(snapshot_id)

    def _clear(self, snapshot_id: str) -> None:
        """The row is gone: so are the files, unless somebody else is at it or has them open for long."""
        lock = self._passing.pop(snapshot_id, None)
        if lock is None or not lock.held:
            lock = FileLock.take(snapshot_lock_path(self.home, snapshot_id))
        if lock is None:
            return
        try:
            with suppress(SlopletError, OSError):
                remove_files(self.home, snapshot_id, patience=DELETE_PATIENCE)
        finally:
            lock.release()


def _save_failed(error: Exception) -> SaveFailed:
    if isinstance(error, SlopletError):
        return SaveFailed(f"the state could not be saved: {error.message}", hint=error.hint)
    number = getattr(error, "errno", None)
    hints = {
        errno.ENOSPC: "the disk is full: free some space (`sloplet gc`, or delete snapshots); the sandbox runs on",
        errno.EDQUOT: "your disk quota is used up: delete snapshots or free some space; the sandbox runs on",
        errno.EFBIG: "a file is larger than this process or its filesystem allows (`ulimit -f`); the sandbox runs on",
    }
    text = getattr(error, "strerror", None) or str(error)
    return SaveFailed(f"the state could not be saved: {text}", hint=hints.get(number or 0))
