"""The records of saved states. A row is a state's publication: what has one is whole, what has none is not there.

The files are ``snapshots.SnapshotStore``'s, which writes them before the row comes and removes them
after it has gone.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..controller import Snapshot
from ..errors import SandboxNotFound, SnapshotExists, SnapshotInUse, SnapshotNotFound
from ..spec import NAME_RE, SandboxSpec
from .connection import Connected, raw
from .home import ID_RE, check_id

if TYPE_CHECKING:
    import sqlite3

_SELECT = (
    "SELECT id, name, role, kind, sandbox, sandbox_name, parent, engine, created_at, bytes, spec, note FROM snapshots "
)
_INSERT = (
    "INSERT INTO snapshots (id, name, role, kind, sandbox, sandbox_name, parent, engine, created_at, bytes, spec, "
    "note, digest, image) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, CAST(? AS TEXT), ?, ?)"
)
#: The one of that name (?1): a template, or a snapshot of the sandbox (?3). The role is ?2.
_NAMED = "name = ?1 COLLATE NOCASE AND role = ?2 AND (role = 'template' OR (role = 'snapshot' AND sandbox = ?3))"
_BY_AGE = " ORDER BY created_at, id"
STATE_GONE = "what was saved of it is gone: it cannot go on"
_SHOWN = 5  # children that a refusal names


class SnapshotRows(Connected):
    """The part of ``Store`` about snapshots. Each method is one transaction."""

    def identity(self) -> str:
        """Of this database: a state that names another one was not published here."""
        return str(self._read("SELECT id FROM identity", ())[0][0])

    def add_snapshot(self, snapshot: Snapshot, digest: str, *, image: str | None = None, durable: bool = False) -> None:
        """Publish. SnapshotExists if its name is taken (case does not count); SandboxNotFound if its sandbox was
        removed meanwhile (a template needs none). ``digest``: sha256 of its manifest; ``image``: the folder in images/
        that it needs to go on."""
        values = (
            check_id(snapshot.id), snapshot.name, snapshot.role, snapshot.kind, snapshot.sandbox, snapshot.sandbox_name,
            snapshot.parent, snapshot.engine, snapshot.created_at, snapshot.bytes, json.dumps(snapshot.spec.to_dict()),
            raw(snapshot.note), digest, image,
        )  # fmt: skip
        with self._write(durable=durable) as db:
            _check_free(db, snapshot.name, snapshot.role, snapshot.sandbox)
            known = db.execute("SELECT 1 FROM sandboxes WHERE id = ?", (snapshot.sandbox,)).fetchone()
            if not known and snapshot.role != "template":
                raise SandboxNotFound(f"the sandbox {snapshot.sandbox} was removed while it was being saved")
            db.execute(_INSERT, values)

    def check_snapshot_free(self, name: str | None, role: str, sandbox_id: str) -> None:
        """SnapshotExists if ``add_snapshot`` would say so now: to ask before the work."""
        with self._connected() as db:
            _check_free(db, name, role, sandbox_id)

    def snapshot(self, snapshot_id: str) -> Snapshot:
        """By id. SnapshotNotFound."""
        return self.snapshot_and_digest(snapshot_id)[0]

    def snapshot_and_digest(self, snapshot_id: str) -> tuple[Snapshot, str]:
        """By id, with the digest of its manifest."""
        rows = self._read(_SELECT.replace(" FROM", ", digest FROM") + "WHERE id = ?", (snapshot_id,))
        if not rows:
            raise not_found(snapshot_id)
        return _snapshot(rows[0][:-1]), str(rows[0][-1])

    def find_snapshot(self, ref: str, sandbox_id: str | None = None) -> Snapshot:
        """By id; else by name (case does not count) among a sandbox's snapshots or, without one, among templates.
        SnapshotNotFound."""
        rows = []
        if isinstance(ref, str) and (ID_RE.match(ref) or NAME_RE.match(ref)):
            values = (ref, "template" if sandbox_id is None else "snapshot", sandbox_id)
            rows = self._read(_SELECT + f"WHERE id = ?1 OR ({_NAMED}) ORDER BY id != ?1 LIMIT 1", values)
        if not rows:
            raise not_found(ref, "snapshot" if sandbox_id is not None else "template or snapshot")
        return _snapshot(rows[0])

    def list_snapshots(self, sandbox_id: str | None = None, role: str | None = None) -> list[Snapshot]:
        """Those of one sandbox, of one role, or all; oldest first."""
        query = _SELECT + "WHERE (?1 IS NULL OR sandbox = ?1) AND (?2 IS NULL OR role = ?2)" + _BY_AGE
        return [_snapshot(row) for row in self._read(query, (sandbox_id, role))]

    def remove_snapshot(self, snapshot_id: str, *, children: bool = True, saved: bool = True) -> bool:
        """Its children then descend from its parent. False if there was none. SnapshotInUse: it has children and
        ``children`` is False, or a sandbox would go on from it and ``saved`` is False; otherwise that one has nothing
        to go on from any more, and is dead if it was paused."""
        with self._write() as db:
            row = db.execute("SELECT parent FROM snapshots WHERE id = ?", (snapshot_id,)).fetchone()
            if row is None:
                return False
            if not saved:
                _check_not_saved(db, snapshot_id)
            if not children:
                _check_no_children(db, snapshot_id)
            db.execute("UPDATE snapshots SET parent = ? WHERE parent = ?", (row[0], snapshot_id))
            db.execute("UPDATE sandboxes SET head = ? WHERE head = ?", (row[0], snapshot_id))
            db.execute(
                "UPDATE sandboxes SET saved = NULL, saved_at = NULL, reason = CASE state WHEN 'paused' THEN ? "
                "ELSE reason END, state = CASE state WHEN 'paused' THEN 'dead' ELSE state END WHERE saved = ?",
                (STATE_GONE, snapshot_id),
            )
            db.execute("DELETE FROM snapshots WHERE id = ?", (snapshot_id,))
            return True

    # For the reaper

    def has_snapshot(self, snapshot_id: str) -> bool:
        return bool(self._read("SELECT 1 FROM snapshots WHERE id = ?", (snapshot_id,)))

    def snapshots_in_use(self) -> dict[str, bool]:
        """All ids, and whether anybody can still ask for them: not if their sandbox is gone, or if nobody holds it and
        it would go on from another one. Those made for a fork or an export count as unused: that they are not, the
        lock of the process that made them says."""
        query = (
            "SELECT p.id, p.role = 'template' OR (s.id IS NOT NULL AND p.role NOT IN ('fork', 'export') "
            "AND NOT (p.role IN ('pause', 'checkpoint') AND s.owner = '' AND s.saved IS NOT p.id)) "
            "FROM snapshots p LEFT JOIN sandboxes s ON s.id = p.sandbox"
        )
        return {str(row[0]): bool(row[1]) for row in self._read(query, ())}


def not_found(ref: object, what: str = "snapshot") -> SnapshotNotFound:
    shown = repr(ref) if len(str(ref)) <= 80 else repr(str(ref)[:77] + "...")
    return SnapshotNotFound(f"there is no {what} {shown}", hint="see `sloplet snapshots`")


def _check_free(db: sqlite3.Connection, name: str | None, role: str, sandbox_id: str) -> None:
    if name is None or role not in ("snapshot", "template"):
        return
    if taken := db.execute(_SELECT + "WHERE " + _NAMED, (name, role, sandbox_id)).fetchone():
        what = f"there already is a {role} named {taken[1]!r} ({taken[0]})"
        if taken[1] != name:
            what += f", and {name!r} differs only in case"
        raise SnapshotExists(what, hint="use another name, or delete that one first")


def _children(db: sqlite3.Connection, snapshot_id: str) -> tuple[list[Snapshot], list[tuple[str, str | None]]]:
    query = _SELECT + "WHERE parent = ? AND role IN ('snapshot', 'template')" + _BY_AGE
    snapshots = [_snapshot(row) for row in db.execute(query, (snapshot_id,))]
    sandboxes = db.execute(
        "SELECT id, name FROM sandboxes WHERE head = ?1 AND state != 'dead' "
        "AND id IS NOT (SELECT sandbox FROM snapshots WHERE id = ?1) ORDER BY created_at, id",
        (snapshot_id,),
    ).fetchall()
    return snapshots, [(str(row[0]), row[1]) for row in sandboxes]


def _check_not_saved(db: sqlite3.Connection, snapshot_id: str) -> None:
    if row := db.execute("SELECT coalesce(name, id), state FROM sandboxes WHERE saved = ?", (snapshot_id,)).fetchone():
        raise SnapshotInUse(
            f"the sandbox {row[0]} ({row[1]}) goes on from {snapshot_id}",
            hint=f"`sloplet rm {row[0]}` removes the sandbox with all its snapshots",
        )


def _named(db: sqlite3.Connection, snapshot_id: str) -> str:
    row = db.execute("SELECT coalesce(name, id) FROM snapshots WHERE id = ?", (snapshot_id,)).fetchone()
    return str(row[0]) if row else snapshot_id


def _check_no_children(db: sqlite3.Connection, snapshot_id: str) -> None:
    snapshots, sandboxes = _children(db, snapshot_id)
    names = [f"{'template' if each.role == 'template' else 'snapshot'} {each.name or each.id}" for each in snapshots]
    names += [f"sandbox {name or sandbox_id}" for sandbox_id, name in sandboxes]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise SnapshotInUse(
            f"{', '.join(names[:_SHOWN])}{more} descend{'s' if len(names) == 1 else ''} from {_named(db, snapshot_id)}",
            hint="delete those first, or force it: they then descend from its parent",
        )


def _snapshot(row: tuple[Any, ...]) -> Snapshot:
    """A row as a value. One whose spec cannot be read must not hide the others; it is refused when it is opened."""
    *known, spec_text, note = row
    try:
        spec = SandboxSpec.from_dict(json.loads(spec_text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        spec, note = SandboxSpec(), f"its record is damaged ({type(error).__name__}: {error})"
    return Snapshot(*(*known, spec, note))
