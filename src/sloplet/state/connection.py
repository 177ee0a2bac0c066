"""The connection to ``state.db``: lazy, for any thread one call at a time, and good after a fork."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import StateError
from .home import Home

if TYPE_CHECKING:
    import sqlite3

Rows = list[tuple[Any, ...]]


class Connected:
    """``state.db``. Constructing does no I/O; every method raises from the StateError branch only, and those named."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._connection: sqlite3.Connection | None = None
        self._pid = os.getpid()
        self._connection_lock = threading.Lock()
        _stores.add(self)

    def check(self) -> list[str]:
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

    @contextmanager
    def _write(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """One transaction: all of the block, or on any exception nothing of it.

        ``durable``: it, and every commit before it, survives a power loss too (one fsync).
        """
        with self._connected() as db:
            if durable:
                db.execute("PRAGMA synchronous=FULL")
            try:
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
            finally:
                if durable:
                    with suppress(Exception):
                        db.execute("PRAGMA synchronous=NORMAL")

    def _read(self, query: str, values: tuple[Any, ...]) -> Rows:
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
_stores: weakref.WeakSet[Connected] = weakref.WeakSet()
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


def raw(text: str) -> bytes:
    """Text for a CAST(? AS TEXT): paths need not be UTF-8. The connection's text_factory is the way back."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")
