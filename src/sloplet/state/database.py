"""Opening ``state.db``: made whole or not at all, versioned, and never repaired by guessing.

A new database is built under another name and renamed into place, so ``state.db`` is never seen
empty or half made; a 0-byte one is damage, not a first start. Every SQLite error leaves this
module as a StateError that says what to do.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

from ..errors import StateBusy, StateCorrupt, StateError, StateUnwritable
from .home import Home, unwritable
from .locks import FileLock

APPLICATION_ID = 0x534C4F50  # "SLOP": tells our database from someone else's
BUSY_SECONDS = 30.0

#: Step n turns schema n into n + 1. Steps are only ever added; each runs in one transaction.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE sandboxes (
            id TEXT PRIMARY KEY,
            name TEXT,
            state TEXT NOT NULL CHECK (state IN ('starting', 'running', 'dead')),
            engine TEXT NOT NULL,
            rung TEXT NOT NULL,
            holder TEXT NOT NULL CHECK (holder IN ('embedded', 'keeper')),
            owner TEXT NOT NULL,
            spec TEXT NOT NULL,
            created_at REAL NOT NULL,
            expires_at REAL,
            workdir TEXT NOT NULL,
            reason TEXT NOT NULL DEFAULT ''
        ) WITHOUT ROWID""",
        # `Dev` and `dev` are one name: case must not decide which sandbox a command reaches.
        "CREATE UNIQUE INDEX sandbox_names ON sandboxes (name COLLATE NOCASE) WHERE name IS NOT NULL",
        "CREATE INDEX sandbox_owners ON sandboxes (owner) WHERE owner != ''",
    ),
    (
        # A CHECK cannot be altered: a new table takes the old one's place.
        """CREATE TABLE sandboxes_2 (
            id TEXT PRIMARY KEY,
            name TEXT,
            state TEXT NOT NULL CHECK (state IN ('starting', 'running', 'paused', 'dead')),
            engine TEXT NOT NULL,
            rung TEXT NOT NULL,
            holder TEXT NOT NULL CHECK (holder IN ('embedded', 'keeper')),
            owner TEXT NOT NULL,
            spec TEXT NOT NULL,
            created_at REAL NOT NULL,
            expires_at REAL,
            workdir TEXT NOT NULL,
            reason TEXT NOT NULL DEFAULT '',
            saved TEXT,
            saved_at REAL,
            head TEXT,
            recovered_from REAL,
            claimed_from TEXT CHECK (claimed_from IN ('paused', 'dead'))
        ) WITHOUT ROWID""",
        """INSERT INTO sandboxes_2
            (id, name, state, engine, rung, holder, owner, spec, created_at, expires_at, workdir, reason)
            SELECT id, name, state, engine, rung, holder, owner, spec, created_at, expires_at, workdir, reason
            FROM sandboxes""",
        "DROP TABLE sandboxes",
        "ALTER TABLE sandboxes_2 RENAME TO sandboxes",
        "CREATE UNIQUE INDEX sandbox_names ON sandboxes (name COLLATE NOCASE) WHERE name IS NOT NULL",
        "CREATE INDEX sandbox_owners ON sandboxes (owner) WHERE owner != ''",
        """CREATE TABLE snapshots (
            id TEXT PRIMARY KEY,
            name TEXT,
            role TEXT NOT NULL
                CHECK (role IN ('snapshot', 'template', 'pause', 'checkpoint', 'undo', 'fork', 'export')),
            kind TEXT NOT NULL CHECK (kind IN ('live', 'disk')),
            sandbox TEXT NOT NULL,
            sandbox_name TEXT,
            parent TEXT,
            engine TEXT NOT NULL,
            created_at REAL NOT NULL,
            bytes INTEGER NOT NULL,
            spec TEXT NOT NULL,
            note TEXT NOT NULL DEFAULT '',
            digest TEXT NOT NULL
        ) WITHOUT ROWID""",
        "CREATE INDEX snapshot_sandboxes ON snapshots (sandbox)",
        """CREATE UNIQUE INDEX snapshot_names ON snapshots (sandbox, name COLLATE NOCASE)
            WHERE role = 'snapshot' AND name IS NOT NULL""",
        "CREATE UNIQUE INDEX template_names ON snapshots (name COLLATE NOCASE) WHERE role = 'template'",
    ),
    (
        # Which database this is: what another one's states are must not be taken for leftovers of this one.
        "CREATE TABLE identity (id TEXT NOT NULL)",
        "INSERT INTO identity VALUES (lower(hex(randomblob(16))))",
    ),
    (
        # What a sandbox may reach now, where that is not what its spec asked for.
        "ALTER TABLE sandboxes ADD COLUMN network TEXT",
    ),
    (
        # Images by the digest of their config; ``chain`` names their tree of files (images/trees.py).
        """CREATE TABLE images (
            id TEXT PRIMARY KEY,
            manifest TEXT NOT NULL,
            document BLOB NOT NULL,
            config BLOB NOT NULL,
            chain TEXT NOT NULL,
            size INTEGER NOT NULL,
            created_at REAL NOT NULL,
            used_at REAL NOT NULL
        ) WITHOUT ROWID""",
        """CREATE TABLE image_layers (
            image TEXT NOT NULL,
            position INTEGER NOT NULL,
            blob TEXT NOT NULL,
            diff TEXT NOT NULL,
            PRIMARY KEY (image, position)
        ) WITHOUT ROWID""",
        """CREATE TABLE image_tags (
            reference TEXT PRIMARY KEY,
            image TEXT NOT NULL,
            tagged_at REAL NOT NULL
        ) WITHOUT ROWID""",
        "CREATE INDEX image_tag_images ON image_tags (image)",
        # The tree of files (its folder's name in images/) that a saved state needs to go on.
        "ALTER TABLE snapshots ADD COLUMN image TEXT",
        "CREATE INDEX snapshot_images ON snapshots (image) WHERE image IS NOT NULL",
    ),
    (
        # What `sloplet serve` keeps (server/): only in the server's own home, empty in all others.
        """CREATE TABLE server_keys (
            id TEXT PRIMARY KEY,
            name TEXT NOT NULL,
            tenant TEXT NOT NULL,
            digest BLOB NOT NULL,
            admin INTEGER NOT NULL,
            limits TEXT NOT NULL,
            created_at REAL NOT NULL,
            expires_at REAL,
            revoked_at REAL
        ) WITHOUT ROWID""",
        "CREATE UNIQUE INDEX server_key_names ON server_keys (name COLLATE NOCASE) WHERE revoked_at IS NULL",
        # What a request with an Idempotency-Key has made: asked again, it is answered, not done again.
        """CREATE TABLE server_done (
            tenant TEXT NOT NULL,
            key TEXT NOT NULL,
            request TEXT NOT NULL,
            answer TEXT,
            made_at REAL NOT NULL,
            sandbox TEXT,
            PRIMARY KEY (tenant, key)
        ) WITHOUT ROWID""",
        # Ports of sandboxes that have a name outside, and who may use it.
        """CREATE TABLE server_ports (
            tenant TEXT NOT NULL,
            sandbox TEXT NOT NULL,
            port INTEGER NOT NULL,
            public INTEGER NOT NULL,
            token TEXT NOT NULL,
            made_at REAL NOT NULL,
            PRIMARY KEY (tenant, sandbox, port)
        ) WITHOUT ROWID""",
        """CREATE TABLE server_ssh_keys (
            fingerprint TEXT PRIMARY KEY,
            key TEXT NOT NULL,
            name TEXT NOT NULL,
            public TEXT NOT NULL,
            created_at REAL NOT NULL
        ) WITHOUT ROWID""",
    ),
    (
        # Sandboxes that go with the program that made them (server/leases.py).
        """CREATE TABLE server_leases (
            sandbox TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            client TEXT NOT NULL,
            made_at REAL NOT NULL
        ) WITHOUT ROWID""",
    ),
    (
        # What E2B's model has of a sandbox besides (server/e2b/records.py).
        """CREATE TABLE e2b_sandboxes (
            sandbox TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            key TEXT NOT NULL,
            document TEXT NOT NULL,
            made_at REAL NOT NULL
        ) WITHOUT ROWID""",
        # Secrets of a tenant's E2B programs, encrypted (server/e2b/secrets.py).
        """CREATE TABLE e2b_secrets (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            name TEXT NOT NULL,
            version INTEGER NOT NULL,
            metadata TEXT NOT NULL,
            sealed BLOB NOT NULL,
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL
        ) WITHOUT ROWID""",
        "CREATE UNIQUE INDEX e2b_secret_names ON e2b_secrets (tenant, name)",
        # E2B's templates, their builds and tags (server/e2b/templates/store.py).
        """CREATE TABLE e2b_templates (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            name TEXT,
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL,
            public INTEGER NOT NULL
        ) WITHOUT ROWID""",
        "CREATE UNIQUE INDEX e2b_template_names ON e2b_templates (tenant, name) WHERE name IS NOT NULL",
        """CREATE TABLE e2b_builds (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            template TEXT NOT NULL,
            status TEXT NOT NULL CHECK (status IN ('waiting', 'building', 'ready', 'error')),
            created_at REAL NOT NULL,
            document TEXT NOT NULL
        ) WITHOUT ROWID""",
        """CREATE TABLE e2b_tags (
            template TEXT NOT NULL,
            tag TEXT NOT NULL,
            build TEXT NOT NULL,
            created_at REAL NOT NULL,
            PRIMARY KEY (template, tag)
        ) WITHOUT ROWID""",
    ),
)


def connect(home: Home) -> sqlite3.Connection:
    """A connection to the home's database, made or migrated as needed. Safe in many processes at once."""
    home.open()
    path = home.database
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            _create(home)
            continue
        except OSError as error:
            raise unwritable(path, error) from error
        if size == 0:
            raise _damaged(home, "it is empty")
        try:
            return _open_existing(home)
        except sqlite3.Error as error:
            # Opening while another process closes the last connection and removes the WAL can be refused at once,
            # without SQLite's own waiting.
            failure = translate(home, error)
            if not isinstance(failure, StateBusy) or time.monotonic() > deadline:
                raise failure from error
            time.sleep(0.005)


def _open_existing(home: Home) -> sqlite3.Connection:
    uri = home.database.as_uri() + "?mode=rw"  # never create: see _create
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        # WAL and NORMAL: a commit survives the death of any process without an fsync. After a power loss the last
        # commits may be missing, but so are all processes; the places they made are found by scan (docs/state.md).
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.text_factory = _text
        version = _check_version(home, connection)
        if version < len(MIGRATIONS):
            connection.execute("BEGIN IMMEDIATE")
            _migrate(connection, _check_version(home, connection))  # read again: another process may have been first
            connection.execute("COMMIT")
        return connection
    except BaseException:
        connection.close()
        raise


def _text(raw: bytes) -> str:
    """Paths need not be UTF-8, and one damaged character must not make the whole store unreadable."""
    return raw.decode("utf-8", "surrogateescape")


def _check_version(home: Home, connection: sqlite3.Connection) -> int:
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if application != APPLICATION_ID:
        raise _damaged(home, "it is a database of some other program")
    if version > len(MIGRATIONS):
        raise StateCorrupt(
            f"{home.database} was written by a newer sloplet (schema {version}; this one knows {len(MIGRATIONS)})",
            hint="upgrade sloplet, or set SLOPLET_HOME to another folder",
        )
    return version


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    for step in MIGRATIONS[version:]:
        for statement in step:
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version={len(MIGRATIONS)}")


def _create(home: Home) -> None:
    """Build a new database beside and rename it into place; one process at a time."""
    lock = FileLock.take(home.run / "create.lock", wait=True)
    assert lock is not None
    try:
        if home.database.exists():
            return
        leftover = home.path / "state.db-wal"
        if leftover.exists() and leftover.stat().st_size:
            raise StateCorrupt(
                f"{home.database} is gone, but {leftover.name} with its last changes is there",
                hint=f"put state.db back, or move {leftover} away to begin with an empty state",
            )
        _clear(home, "state.db-wal", "state.db-shm", *_FRESH)  # empty, or of a creation that was cut short
        try:
            _build(home.path / "state.db.new", home)
        finally:
            _clear(home, *_FRESH)
    except sqlite3.Error as error:
        raise translate(home, error) from error
    except OSError as error:
        raise unwritable(home.database, error) from error
    finally:
        lock.release()


_FRESH = ("state.db.new", "state.db.new-wal", "state.db.new-shm")


def _clear(home: Home, *names: str) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(home.path / name)


def _build(fresh: Path, home: Home) -> None:
    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    connection = sqlite3.connect(fresh, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        _migrate(connection, 0)
        connection.execute("COMMIT")
        # Closing does this too, but keeps quiet if it cannot.
        busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    finally:
        connection.close()
    if busy or not _is_whole(fresh):
        raise StateUnwritable(
            f"cannot write {home.database}: the new database could not be completed", hint="try again"
        )
    os.rename(fresh, home.database)
    folder = os.open(home.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _is_whole(path: Path) -> bool:
    """Whether all of a new database is in its one file: WAL mode, our schema, nothing left in a WAL beside it."""
    header = path.read_bytes()[:100]  # https://www.sqlite.org/fileformat.html, section 1.3
    version, application = int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big")
    beside = path.with_name(path.name + "-wal")
    whole = header[18:20] == b"\2\2" and (version, application) == (len(MIGRATIONS), APPLICATION_ID)
    return whole and not (beside.exists() and beside.stat().st_size)


def _damaged(home: Home, what: str) -> StateCorrupt:
    return StateCorrupt(
        f"{home.database} is damaged: {what}",
        hint=(
            f"nothing was changed; restore it from a backup, or move it away (mv '{home.database}' "
            f"'{home.database}.damaged') to begin with an empty state: what is left of old sandboxes is then cleaned up"
        ),
    )


def translate(home: Home, error: sqlite3.Error) -> StateError:
    """The typed form of an SQLite error. ``raise translate(...) from error``."""
    name = str(getattr(error, "sqlite_errorname", "") or "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")):
        return StateBusy(
            f"{home.database} has been in use by another process for {BUSY_SECONDS:.0f} s ({error})",
            hint="a sloplet process may be stopped or hanging: end it and try again",
        )
    if name.startswith("SQLITE_FULL"):
        return StateUnwritable(
            f"cannot write {home.database}: the disk is full",
            hint="free some space or set SLOPLET_HOME to another disk; nothing was lost",
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
        with suppress(OSError):
            if os.statvfs(home.path).f_flag & os.ST_RDONLY:
                return unwritable(home.database, OSError(errno.EROFS, os.strerror(errno.EROFS)))
        return StateUnwritable(
            f"cannot write {home.database}: {error}",
            hint="check that the folder, state.db, state.db-wal and state.db-shm are yours and writable",
        )
    if name.startswith("SQLITE_IOERR"):
        return StateUnwritable(
            f"cannot write {home.database}: {error} ({name})",
            hint="the disk may be full or failing: see `df` and `dmesg`; what was committed before is not lost",
        )
    return _damaged(home, str(error))
