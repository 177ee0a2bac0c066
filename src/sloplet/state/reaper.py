"""Cleaning up after processes that died: everything whose owner's lock can be taken.

Called on every start, by any number of processes at once. Whoever takes a dead owner's lock does the
work, the others pass by. Every step can be cut short and done again: the engine's leftovers first,
then the place, the record last. With nothing to do it costs four queries and a look into six folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import SlopletError, StateUnwritable
from .home import ID_RE, Home, names_in, remove_below, remove_log
from .locks import FileLock, image_lock_path, owner_lock_path, take_from_dead
from .store import Record, Store
from .sweep import sweep

#: Ends what is left of a sandbox: (engine name, sandbox id). The name is "" where no record tells it: ask every engine.
EngineReap = Callable[[str, str], None]

KEEPER_DIED = (
    "its keeper ended unexpectedly (killed, out of memory, or the machine restarted), and all its processes with it"
)
PROGRAM_DIED = "the program that ran it ended without closing it, and all its processes with it"
_BAD_OWNER = "its record is damaged: it names no owner"


@dataclass
class Report:
    """What a reap did."""

    removed: list[str] = field(default_factory=list)  #: sandboxes of dead programs: gone
    dead: list[str] = field(default_factory=list)  #: sandboxes of a dead keeper: on record as dead
    orphans: list[str] = field(default_factory=list)  #: places without a record: gone
    expired: list[str] = field(default_factory=list)  #: paused or recoverable ones whose time was up: gone
    snapshots: list[str] = field(default_factory=list)  #: saved states that were left over, or half there: gone
    files: int = 0  #: stale locks and half-written images that went
    errors: list[str] = field(default_factory=list)  #: what could not be cleaned up; the next reap tries again

    def __bool__(self) -> bool:
        gone = self.removed or self.dead or self.orphans or self.expired or self.snapshots
        return bool(gone or self.files or self.errors)


def reap(home: Home, store: Store, engines_reap: EngineReap, *, thorough: bool = False) -> Report:
    """Clean up after every dead owner. Raises StateError if the state cannot be read at all; else see ``errors``.
    ``thorough``: also what lies in images/ and no record names."""
    home.open()
    report = Report()
    tokens = set(names_in(home.sandboxes)) | {name.removesuffix(".lock") for name in names_in(home.owners)}
    for token in tokens | store.owners():
        if not ID_RE.match(token):
            for record in store.records(token):
                if store.mark_dead(record.info.id, _BAD_OWNER, disown=True):
                    report.dead.append(record.info.id)
            continue
        lock = take_from_dead(owner_lock_path(home, token))
        if lock is None:
            continue  # it lives, or somebody else is at it
        try:
            _reap_owner(home, store, engines_reap, token, report)
        finally:
            lock.release()
    for sandbox_id in store.asleep_expired():
        if store.remove_expired(sandbox_id):
            report.expired.append(sandbox_id)
    locks = names_in(home.run)
    # Last: it also removes the snapshots of those that went just now.
    report.snapshots += sweep(home, store, names_in(home.snapshots), locks, report.errors.append)
    _reap_files(home, locks, report)
    _reap_volumes(home, store, locks, report)
    if thorough:
        _reap_images(home, store, report)
    _reap_logs(home, store)
    return report


def _reap_owner(home: Home, store: Store, engines_reap: EngineReap, token: str, report: Report) -> None:
    """The owner's lock is held: nobody else touches what is its."""
    known = set()
    work = 0
    for record in store.records(token):  # read under the lock: an earlier look may be out of date
        known.add(record.info.id)
        work += 1
        if _clear(home, engines_reap, record.info.engine, token, record.info.id, report):
            _settle(store, record, report)
    for sandbox_id in names_in(home.sandboxes / token):
        work += 1
        if sandbox_id not in known and _clear(home, engines_reap, "", token, sandbox_id, report):
            report.orphans.append(sandbox_id)
    with suppress(OSError):
        os.rmdir(home.sandboxes / token)
    if not work:
        report.files += 1


def _clear(home: Home, engines_reap: EngineReap, engine: str, token: str, sandbox_id: str, report: Report) -> bool:
    """End and remove what is left of a sandbox. False if something resisted."""
    try:
        if ID_RE.match(sandbox_id):  # anything else was never a sandbox
            engines_reap(engine, sandbox_id)
        remove_below(home.sandboxes / token, sandbox_id)
    except (SlopletError, OSError, ValueError) as error:
        report.errors.append(f"{sandbox_id}: {error}")
        return False
    return True


def _settle(store: Store, record: Record, report: Report) -> None:
    """The record of a sandbox that is gone. One that a keeper ran for somebody, or that can be recovered, is never
    dropped silently; one that was about to go on is what it was before."""
    info = record.info
    reason = KEEPER_DIED if info.holder == "keeper" else PROGRAM_DIED
    if info.state == "starting" and record.claimed_from is not None:
        store.unclaim(info.id, record.claimed_from, reason if record.claimed_from == "dead" else "")
    elif info.state == "dead" or info.saved is not None or (info.holder == "keeper" and info.state == "running"):
        if store.mark_dead(info.id, reason, disown=True):
            report.dead.append(info.id)
    elif store.remove(info.id):
        report.removed.append(info.id)


def _reap_logs(home: Home, store: Store) -> None:
    """What was written of the connections of sandboxes that are gone."""
    left = {name.partition(".")[0] for name in names_in(home.network)}
    if left:
        for sandbox_id in filter(ID_RE.match, left - {record.info.id for record in store.records()}):
            remove_log(home, sandbox_id)


def _reap_files(home: Home, locks: list[str], report: Report) -> None:
    """Half-written images (``images/.tmp-KEY``) whose writer (lock ``run/image-KEY.lock``) is dead; stale locks."""
    keys = {name.removeprefix(".tmp-") for name in names_in(home.images) if name.startswith(".tmp-")}
    for name in locks:
        if name.startswith("image-") and name.endswith(".lock"):
            keys.add(name.removeprefix("image-").removesuffix(".lock"))
        elif name == "create.lock" and (lock := FileLock.take(home.run / name)):
            lock.release()
            report.files += 1
    for key in filter(ID_RE.match, keys):
        lock = FileLock.take(image_lock_path(home, key))
        if lock is None:
            continue
        try:
            _remove_staged(home, f".tmp-{key}")
            report.files += 1
        except SlopletError as error:
            report.errors.append(str(error))
        finally:
            lock.release()


def _remove_staged(home: Home, name: str) -> None:
    """Its files may belong to subordinate ids of an ordinary user."""
    try:
        remove_below(home.images, name)
    except StateUnwritable:
        from ..images import userns

        userns.remove(home.images, name)


def _reap_images(home: Home, store: Store, report: Report) -> None:
    from ..images.cleaning import sweep

    try:
        swept = sweep(home, store)
        report.files += swept.blobs + swept.layers + swept.trees
    except SlopletError as error:
        report.errors.append(str(error))


def _reap_volumes(home: Home, store: Store, locks: list[str], report: Report) -> None:
    names = names_in(home.volumes)
    if any(name.startswith(".") for name in names) or any(name.startswith("volume-") for name in locks):
        from ..volumes.cleaning import sweep

        report.files += sweep(home, store, names, locks, report.errors)
