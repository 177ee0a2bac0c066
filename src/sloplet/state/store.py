"""The record of every sandbox of this SLOPLET_HOME, shared by all its processes.

Intent comes before action: ``reserve`` before anything is made, ``mark_running`` once it answers,
``remove`` after everything of it is gone. So a row without a sandbox is normal after a crash (the
reaper deals with it), and a sandbox without a row is not. Each of these is one transaction.

A Store may be used from any thread, one call at a time, and goes on working after a fork.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..controller import SandboxInfo
from ..errors import SandboxExists, SandboxNotFound, StateError
from ..spec import NAME_RE, SandboxSpec
from .home import ID_RE, Home, check_id

if TYPE_CHECKING:
    import sqlite3

_SELECT = (
    "SELECT id, name, state, engine, rung, holder, created_at, expires_at, workdir, spec, reason, owner FROM sandboxes "
)
_INSERT = (
    "INSERT INTO sandboxes (id, name, state, engine, rung, holder, created_at, expires_at, workdir, spec, owner) "
    "VALUES (?, ?, 'starting', ?, ?, ?, ?, ?, CAST(? AS TEXT), ?, ?)"
)
_RUNNING = (
    "UPDATE sandboxes SET state = 'running', workdir = coalesce(CAST(? AS TEXT), workdir) "
    "WHERE id = ? AND state = 'starting'"
)


@dataclass(frozen=True)
class Record:
    """A row: what users see of a sandbox, and the token of the process that holds it ('' if none does)."""

    info: SandboxInfo
    owner: str


_Rows = list[tuple[Any, ...]]  # spelled here: inside Store, `list` is its method
_Infos = list[SandboxInfo]
_Records = list[Record]
_Texts = list[str]


class Store:
    """``state.db``. Constructing does no I/O; every method raises from the StateError branch only, and those named."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._connection: sqlite3.Connection | None = None
        self._pid = os.getpid()
        self._connection_lock = threading.Lock()
        _stores.add(self)

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
    ) -> SandboxInfo:
        """Record the intent to make a sandbox. SandboxExists if its name is taken, by a dead one too."""
        check_id(sandbox_id)
        check_id(owner)
        created = time.time() if created_at is None else created_at
        expires = None if spec.ttl is None else created + spec.ttl
        info = SandboxInfo(
            sandbox_id, spec.name, "starting", engine, rung, holder, created, expires, spec.workdir, spec
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
            values = (sandbox_id, spec.name, engine, rung, holder, created, expires, _raw(spec.workdir), text, owner)
            db.execute(_INSERT, values)
        return info

    def mark_running(self, sandbox_id: str, *, workdir: str | None = None) -> None:
        """It answers. ``workdir``: where it really is, if not where the spec said."""
        with self._write() as db:
            changed = db.execute(_RUNNING, (None if workdir is None else _raw(workdir), sandbox_id)).rowcount
        if not changed:
            raise SandboxNotFound(f"the sandbox {sandbox_id} was removed while it was starting")

    def mark_dead(self, sandbox_id: str, reason: str, *, disown: bool = False) -> bool:
        """It failed; it stays on record, dead, with its name, until ``remove``. The first reason is kept.

        ``disown``: nobody holds it any more. Returns False if there is no such sandbox or it was dead.
        """
        with self._write() as db:
            changed = db.execute(
                "UPDATE sandboxes SET state = 'dead', reason = CAST(? AS TEXT) WHERE id = ? AND state != 'dead'",
                (_raw(reason), sandbox_id),
            ).rowcount
            if disown:
                db.execute("UPDATE sandboxes SET owner = '' WHERE id = ?", (sandbox_id,))
        return bool(changed)

    def remove(self, sandbox_id: str) -> bool:
        """Forget it, and free its name: everything of it is gone. Idempotent; False if there was none."""
        with self._write() as db:
            return bool(db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,)).rowcount)

    # Reading

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
            (time.time() if now is None else now,),
        )
        return [_record(row).info for row in rows]

    def owners(self) -> set[str]:
        """The tokens that rows name as their owner."""
        return {str(row[0]) for row in self._read("SELECT DISTINCT owner FROM sandboxes WHERE owner != ''", ())}

    def check(self) -> _Texts:
        """SQLite's own full check, for `sloplet doctor`: what is wrong, or nothing."""
        return [str(row[0]) for row in self._read("PRAGMA integrity_check", ()) if row[0] != "ok"]

    def close(self) -> None:
        """Idempotent; the next call opens again."""
        if self._pid != os.getpid():
            self._after_fork()
        with self._connection_lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    # The connection

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of the block, or on any exception nothing of it."""
        with self._connected() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                # A full disk may have rolled back already.
                with suppress(Exception):
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                raise

    def _read(self, query: str, values: tuple[Any, ...]) -> _Rows:
        with self._connected() as db:
            return db.execute(query, values).fetchall()

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        if self._pid != os.getpid():
            self._after_fork()
        with self._connection_lock:
            # Under the lock, because a fork waits for it: a child that was forked in the middle of a thread's import
            # would wait for ever for that module.
            import sqlite3

            from . import database

            if self._connection is None:
                self._connection = database.connect(self.home)
            try:
                yield self._connection
            except sqlite3.Error as error:
                failure: StateError = database.translate(self.home, error)
                raise failure from error

    def _after_fork(self) -> None:
        """SQLite must neither use nor close a connection that came through a fork: leave it open for good.

        The lock is new too: a thread that does not exist here may have held the old one.
        """
        connection, self._connection = self._connection, None
        if connection is not None:
            import ctypes

            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        self._connection_lock = threading.Lock()
        self._pid = os.getpid()


#: SQLite remembers per process which locks it holds on a file. A child forked in the middle of a transaction would
#: believe for ever that its own process holds the write lock. So a fork waits for the calls that are under way.
_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_held_for_fork: list[threading.Lock] = []
_FORK_PATIENCE = 10.0


def _before_fork() -> None:
    for store in list(_stores):
        lock = store._connection_lock
        if lock.acquire(timeout=_FORK_PATIENCE):
            _held_for_fork.append(lock)


def _after_fork() -> None:
    while _held_for_fork:
        _held_for_fork.pop().release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def _name_taken(wanted: str, sandbox_id: str, name: str, state: str, holder: str) -> SandboxExists:
    what = f"there already is a sandbox named {name!r} ({sandbox_id}, {state})"
    if name != wanted:
        what += f", and {wanted!r} differs only in case"
    if state == "dead":
        return SandboxExists(what, hint=f"`sloplet rm {name}` removes it and frees the name")
    if holder == "embedded":
        return SandboxExists(what, hint="it belongs to a running program: use another name or wait for its end")
    return SandboxExists(what, hint=f"open it by its name, or `sloplet rm {name}` first")


def _raw(text: str) -> bytes:
    """Text for a CAST(? AS TEXT): paths need not be UTF-8. The connection's text_factory is the way back."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def _record(row: tuple[Any, ...]) -> Record:
    """A row as a value. One whose spec cannot be read is shown dead with the reason: it must not hide the others."""
    sandbox_id, name, state, engine, rung, holder, created_at, expires_at, workdir, spec_text, reason, owner = row
    try:
        spec = SandboxSpec.from_dict(json.loads(spec_text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        spec, state = SandboxSpec(name=name), "dead"
        reason = f"its record is damaged ({type(error).__name__}: {error}); `sloplet rm {sandbox_id}` removes it"
    info = SandboxInfo(sandbox_id, name, state, engine, rung, holder, created_at, expires_at, workdir, spec, reason)
    return Record(info, owner)
