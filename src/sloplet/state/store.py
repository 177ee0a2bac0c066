"""The record of every sandbox of this SLOPLET_HOME, shared by all its processes.

Intent comes before action: ``reserve`` before anything is made, ``mark_running`` once it answers,
``remove`` after everything of it is gone. So a row without a sandbox is normal after a crash (the
reaper deals with it), and a sandbox without a row is not. Each of these is one transaction.

A Store may be used from any thread, one call at a time, and goes on working after a fork.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..controller import SandboxInfo
from ..errors import SandboxDead, SandboxError, SandboxExists, SandboxNotFound
from ..spec import NAME_RE, SandboxSpec
from .connection import raw as _raw
from .home import ID_RE, check_id
from .snapshot_rows import SnapshotRows

if TYPE_CHECKING:
    import sqlite3

_SELECT = (
    "SELECT id, name, state, engine, rung, holder, created_at, expires_at, workdir, spec, reason, saved, saved_at, "
    "head, recovered_from, owner, claimed_from FROM sandboxes "
)
_INSERT = (
    "INSERT INTO sandboxes (id, name, state, engine, rung, holder, created_at, expires_at, workdir, spec, owner, head) "
    "VALUES (?, ?, 'starting', ?, ?, ?, ?, ?, CAST(? AS TEXT), ?, ?, ?)"
)
_RUNNING = "UPDATE sandboxes SET state = 'running', claimed_from = NULL, workdir = coalesce(CAST(? AS TEXT), workdir)"
#: Ended by nobody, waiting for somebody: paused, or dead with something to recover from.
_ASLEEP_EXPIRED = (
    "WHERE expires_at <= ?1 AND owner = '' AND (state = 'paused' OR (state = 'dead' AND saved IS NOT NULL)) "
)


@dataclass(frozen=True)
class Record:
    """A row: what users see of a sandbox, and the token of the process that holds it ('' if none does)."""

    info: SandboxInfo
    owner: str
    claimed_from: str | None = None  #: of a starting one that goes on from a saved state: what it was, paused or dead


_Infos = list[SandboxInfo]  # spelled here: inside Store, `list` is its method
_Records = list[Record]
_Ids = list[str]


class Store(SnapshotRows):
    """``state.db``. Constructing does no I/O; every method raises from the StateError branch only, and those named."""

    # Writing

    def reserve(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        *,
        engine: str,
        rung: str,
        holder: str,
        owner: str,
        created_at: float | None = None,
        head: str | None = None,
    ) -> SandboxInfo:
        """Record the intent to make a sandbox. SandboxExists if its name is taken, by a dead one too. ``head``: the
        snapshot that it starts from."""
        check_id(sandbox_id)
        check_id(owner)
        created = _now(created_at)
        expires = None if spec.ttl is None else created + spec.ttl
        info = SandboxInfo(
            sandbox_id, spec.name, "starting", engine, rung, holder, created, expires, spec.run_workdir, spec, head=head
        )
        text = json.dumps(spec.to_dict())
        with self._write() as db:
            if spec.name is not None:
                taken = db.execute(
                    "SELECT id, name, state, holder FROM sandboxes WHERE name = ? COLLATE NOCASE", (spec.name,)
                ).fetchone()
                if taken is not None:
                    raise _name_taken(spec.name, *taken)
            if db.execute("SELECT 1 FROM sandboxes WHERE id = ?", (sandbox_id,)).fetchone():
                raise SandboxExists(f"there already is a sandbox with the id {sandbox_id}")
            workdir = _raw(spec.run_workdir)
            values = (sandbox_id, spec.name, engine, rung, holder, created, expires, workdir, text, owner, head)
            db.execute(_INSERT, values)
        return info

    def mark_running(self, sandbox_id: str, *, workdir: str | None = None, expires_at: float | None = None) -> None:
        """It answers. ``workdir``: where it really is, if not where the spec said; ``expires_at``: when its time is up,
        which begins now."""
        where = ", expires_at = coalesce(?, expires_at) WHERE id = ? AND state = 'starting'"
        values = (None if workdir is None else _raw(workdir), expires_at, sandbox_id)
        with self._write() as db:
            changed = db.execute(_RUNNING + where, values).rowcount
        if not changed:
            raise SandboxNotFound(f"the sandbox {sandbox_id} was removed while it was starting")

    def mark_dead(self, sandbox_id: str, reason: str, *, disown: bool = False) -> bool:
        """It failed; it stays on record, dead, with its name, until ``remove``. The first reason is kept, and so is
        ``saved``: a dead one that has it can be recovered.

        ``disown``: nobody holds it any more. Returns False if there is no such sandbox or it was dead.
        """
        with self._write() as db:
            changed = db.execute(
                "UPDATE sandboxes SET state = 'dead', claimed_from = NULL, reason = CAST(? AS TEXT) "
                "WHERE id = ? AND state != 'dead'",
                (_raw(reason), sandbox_id),
            ).rowcount
            if disown:
                db.execute("UPDATE sandboxes SET owner = '' WHERE id = ?", (sandbox_id,))
        return bool(changed)

    def remove(self, sandbox_id: str) -> bool:
        """Forget it, and free its name: everything of it is gone. Idempotent; False if there was none.

        Its snapshots are not touched: ``SnapshotStore.delete_of_sandbox`` comes before it. What is left of them
        after a crash is the reaper's.
        """
        with self._write() as db:
            return bool(db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,)).rowcount)

    def remove_expired(self, sandbox_id: str, now: float | None = None) -> bool:
        """``remove`` one that sleeps (``asleep_expired``), unless somebody has claimed it meanwhile."""
        with self._write() as db:
            row = db.execute(_SELECT + _ASLEEP_EXPIRED + "AND id = ?2", (_now(now), sandbox_id)).fetchone()
            if row is None or not _ends(row):
                return False
            return bool(db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,)).rowcount)

    # Sleeping and going on

    def mark_paused(
        self,
        sandbox_id: str,
        saved: str,
        saved_at: float,
        *,
        expires_at: float | None = None,
        for_good: bool = False,
    ) -> None:
        """A running one was saved as ``saved`` and has ended; nobody holds it. Survives a power loss. ``expires_at``:
        when its time is up, put right by its holder's clock, which did not jump. ``for_good``: never."""
        with self._write(durable=True) as db:
            changed = db.execute(
                "UPDATE sandboxes SET state = 'paused', owner = '', reason = '', saved = ?, saved_at = ?, "
                "expires_at = CASE WHEN ? THEN NULL ELSE coalesce(?, expires_at) END "
                "WHERE id = ? AND state = 'running'",
                (saved, saved_at, for_good, expires_at, sandbox_id),
            ).rowcount
            if not changed:
                raise _not_in_state(db, sandbox_id, "running")

    def claim(self, sandbox_id: str, owner: str, holder: str) -> SandboxInfo:
        """Take a paused one, or a dead one that can be recovered, to go on with it: it is ``starting``, and the
        caller's. One of many callers gets it; the others get a SandboxError that says its state. SandboxDead if
        there is nothing to recover from."""
        check_id(owner)
        with self._write() as db:
            row = db.execute(_SELECT + "WHERE id = ?", (sandbox_id,)).fetchone()
            if row is None:
                raise _gone(sandbox_id)
            info, state = _record(row).info, str(row[2])
            if state in ("starting", "running"):
                raise SandboxError(
                    f"the sandbox {info.name or sandbox_id} is {state}: somebody else has woken it",
                    hint="open it by its name",
                )
            if info.saved is None or info.state != state:  # the latter: its record is damaged
                raise SandboxDead(
                    f"the sandbox {info.name or sandbox_id} is dead: {info.reason or 'it has no saved state'}",
                    hint=f"`sloplet rm {info.name or sandbox_id}` removes it",
                )
            db.execute(
                "UPDATE sandboxes SET claimed_from = state, state = 'starting', owner = ?, holder = ?, reason = '' "
                "WHERE id = ?",
                (owner, holder, sandbox_id),
            )
            return _record(db.execute(_SELECT + "WHERE id = ?", (sandbox_id,)).fetchone()).info

    def unclaim(self, sandbox_id: str, state: str, reason: str = "") -> bool:
        """Going on failed: it is ``paused`` or ``dead`` again, nobody's, with its saved state. False if it was not
        starting."""
        with self._write() as db:
            return bool(
                db.execute(
                    "UPDATE sandboxes SET state = ?, owner = '', claimed_from = NULL, reason = CAST(? AS TEXT) "
                    "WHERE id = ? AND state = 'starting'",
                    (state, _raw(reason), sandbox_id),
                ).rowcount
            )

    def mark_resumed(
        self, sandbox_id: str, *, keep_saved: bool, workdir: str | None = None, recovered_from: float | None = None
    ) -> None:
        """A claimed one answers. ``keep_saved``: the saved state still serves for recovery; otherwise the record lets
        go of it, and the caller deletes it. ``recovered_from`` None leaves what an earlier recovery noted."""
        saved = "" if keep_saved else ", saved = NULL, saved_at = NULL"
        query = _RUNNING + saved + ", recovered_from = coalesce(?, recovered_from) WHERE id = ? AND state = 'starting'"
        values = (None if workdir is None else _raw(workdir), recovered_from, sandbox_id)
        with self._write() as db:
            if not db.execute(query, values).rowcount:
                raise _not_in_state(db, sandbox_id, "starting")

    def replace_saved(self, sandbox_id: str, saved: str | None, saved_at: float | None) -> str | None:
        """What a running one would be recovered from; returns the id that it took the place of, for the caller to
        delete. Survives a power loss, so that afterwards one of the two is there. SandboxError if it is not running."""
        with self._write(durable=True) as db:
            row = db.execute("SELECT saved FROM sandboxes WHERE id = ? AND state = 'running'", (sandbox_id,)).fetchone()
            if row is None:
                raise _not_in_state(db, sandbox_id, "running")
            db.execute("UPDATE sandboxes SET saved = ?, saved_at = ? WHERE id = ?", (saved, saved_at, sandbox_id))
            return None if row[0] is None else str(row[0])

    def set_expiry(self, sandbox_id: str, expires_at: float | None) -> None:
        """When its time is up from now on; None: never."""
        with self._write() as db:
            if not db.execute("UPDATE sandboxes SET expires_at = ? WHERE id = ?", (expires_at, sandbox_id)).rowcount:
                raise _gone(sandbox_id)

    def set_head(self, sandbox_id: str, head: str | None) -> None:
        """The snapshot it last made, or was rolled back to."""
        with self._write() as db:
            if not db.execute("UPDATE sandboxes SET head = ? WHERE id = ?", (head, sandbox_id)).rowcount:
                raise _gone(sandbox_id)

    def set_network(self, sandbox_id: str, network: str) -> bool:
        """What it may reach from now on, as JSON; survives a power loss, so that what was closed stays closed. False
        if there is no such sandbox."""
        with self._write(durable=True) as db:
            return bool(db.execute("UPDATE sandboxes SET network = ? WHERE id = ?", (network, sandbox_id)).rowcount)

    # Reading

    def network(self, sandbox_id: str) -> str | None:
        """What ``set_network`` was last told; None: what its spec says."""
        rows = self._read("SELECT network FROM sandboxes WHERE id = ?", (sandbox_id,))
        return None if not rows or rows[0][0] is None else str(rows[0][0])

    def find(self, ref: str) -> SandboxInfo:
        """By id, else by name (case does not count). SandboxNotFound if there is none."""
        return self.record(ref).info

    def record(self, ref: str) -> Record:
        """Like ``find``, with the owner."""
        known = isinstance(ref, str) and (ID_RE.match(ref) or NAME_RE.match(ref))
        rows = known and self._read(
            _SELECT + "WHERE id = ?1 OR name = ?1 COLLATE NOCASE ORDER BY id != ?1 LIMIT 1",
            (ref,),
        )
        if not rows:
            shown = repr(ref) if len(str(ref)) <= 80 else repr(str(ref)[:77] + "...")
            raise SandboxNotFound(f"there is no sandbox {shown}", hint="see `sloplet ls`")
        return _record(rows[0])

    def list(self) -> _Infos:
        """All of them, oldest first."""
        return [record.info for record in self.records()]

    def records(self, owner: str | None = None) -> _Records:
        """All of them, or those of one owner, oldest first."""
        if owner is not None:
            return [_record(row) for row in self._read(_SELECT + "WHERE owner = ? ORDER BY created_at, id", (owner,))]
        return [_record(row) for row in self._read(_SELECT + "ORDER BY created_at, id", ())]

    def expired(self, now: float | None = None) -> _Infos:
        """Live ones whose time is up by the wall clock. A holder that has been up all along goes by its own
        monotonic clock instead, so that a clock that jumps ends nothing early."""
        rows = self._read(
            _SELECT + "WHERE expires_at <= ? AND state != 'dead' ORDER BY expires_at",
            (_now(now),),
        )
        return [_record(row).info for row in rows]

    def asleep_expired(self, now: float | None = None) -> _Ids:
        """Ids of those that nobody holds, that could go on (paused, recoverable), and whose time is up. Those that are
        to sleep then do so already."""
        return [str(row[0]) for row in self._read(_SELECT + _ASLEEP_EXPIRED, (_now(now),)) if _ends(row)]

    def ends(self, sandbox_id: str) -> bool:
        """Whether it is known that it ends when its time is up."""
        return any(_ends(row) for row in self._read(_SELECT + "WHERE id = ?", (sandbox_id,)))

    def unspoken(self, words: Iterable[str]) -> set[str]:
        """Those that no sandbox's settings hold, and no saved state's."""
        spoken = "SELECT 1 FROM {} WHERE instr(spec, ?1)"
        query = f"{spoken.format('sandboxes')} UNION ALL {spoken.format('snapshots')} LIMIT 1"
        return {word for word in words if not self._read(query, (word,))}

    def owners(self) -> set[str]:
        """The tokens that rows name as their owner."""
        return {str(row[0]) for row in self._read("SELECT DISTINCT owner FROM sandboxes WHERE owner != ''", ())}


def _name_taken(wanted: str, sandbox_id: str, name: str, state: str, holder: str) -> SandboxExists:
    what = f"there already is a sandbox named {name!r} ({sandbox_id}, {state})"
    if name != wanted:
        what += f", and {wanted!r} differs only in case"
    if state == "paused":
        return SandboxExists(what, hint=f"open it by its name to go on with it, or `sloplet rm {name}` first")
    if state == "dead":
        return SandboxExists(what, hint=f"`sloplet rm {name}` removes it and frees the name")
    if holder == "embedded":
        return SandboxExists(what, hint="it belongs to a running program: use another name or wait for its end")
    return SandboxExists(what, hint=f"open it by its name, or `sloplet rm {name}` first")


def _now(now: float | None) -> float:
    return time.time() if now is None else now


def _gone(sandbox_id: str) -> SandboxNotFound:
    return SandboxNotFound(f"there is no sandbox {sandbox_id!r}: it was removed", hint="see `sloplet ls`")


def _not_in_state(db: sqlite3.Connection, sandbox_id: str, wanted: str) -> SandboxError:
    row = db.execute("SELECT state FROM sandboxes WHERE id = ?", (sandbox_id,)).fetchone()
    return _gone(sandbox_id) if row is None else SandboxError(f"the sandbox {sandbox_id} is {row[0]}, not {wanted}")


def _ends(row: tuple[Any, ...]) -> bool:
    """Whether it ends when its time is up. One whose settings cannot be read may have been meant to sleep: it stays,
    shown dead with the reason, until somebody removes it."""
    try:
        return _spec(row[9]).on_ttl == "end"
    except _UNREADABLE:
        return False


_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)


def _spec(text: str) -> SandboxSpec:
    return SandboxSpec.from_dict(json.loads(text))


def _record(row: tuple[Any, ...]) -> Record:
    """A row as a value. One whose spec cannot be read is shown dead with the reason: it must not hide the others."""
    sandbox_id, name, state, engine, rung, holder, created_at, expires_at, workdir, spec_text, reason, *more = row
    *live, owner, claimed_from = more
    try:
        spec = _spec(spec_text)
    except _UNREADABLE as error:
        spec, state = SandboxSpec(name=name), "dead"
        reason = f"its record is damaged ({type(error).__name__}: {error}); `sloplet rm {sandbox_id}` removes it"
    known = (sandbox_id, name, state, engine, rung, holder, created_at, expires_at, workdir, spec, reason)
    return Record(SandboxInfo(*known, *live), owner, claimed_from)
