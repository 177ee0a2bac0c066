"""Backups while everything runs: the records of the server and of all tenants, keys (their digests) and certificates.

``state.db`` is copied by SQLite itself, so each copy is the database at one moment. What is large is left to file
tools: images, snapshots, volumes. A backup is a folder that appears under its name when it is whole; ``manifest.json``
lists what is in it, with checksums. docs/server.md says how to restore one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ServerError, SpecError
from ..state.connection import Connected
from ..state.home import TENANT_RE, Home, names_in, unwritable

_PAGES = 2000  # copied at a time: others may write in between
_NOT_KEPT = (".lock", ".sock", ".partial")


class _Database(Connected):
    def copy_to(self, target: Path) -> None:
        """The database as it is at one moment. StateError."""
        with self._connected() as source, closing(sqlite3.connect(target)) as copy:
            source.backup(copy, pages=_PAGES)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file
            if (found := copy.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
                raise ServerError(f"the copy of {self.home.database} is damaged: {found}", hint="`sloplet doctor`")


def make_backup(home: Home, target: Path) -> dict[str, Any]:
    """Write one to the new folder ``target``: what is in its manifest. Blocking. SpecError, StateError."""
    if target.exists():
        raise SpecError(f"{target} is there already", hint="name a new folder")
    made = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made.mkdir(mode=0o700)
        try:
            files = {name: _entry(path) for name, path in sorted(_copied(home.open(), made))}
            manifest = {"version": __version__, "time": round(time.time(), 3), "files": files}
            _write(made / "manifest.json", json.dumps(manifest, indent=2).encode() + b"\n")
            os.rename(made, target)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as error:
        raise unwritable(target, error) from error
    return manifest


def _copied(home: Home, made: Path) -> Iterator[tuple[str, Path]]:
    """What was copied: its name in the backup and where it is now."""
    yield from _home(home, made, "")
    for name in sorted(names_in(home.path / "tenants")):
        if TENANT_RE.match(name) and home.tenant(name).database.exists():
            yield from _home(home.tenant(name), made, f"tenants/{name}/")
    yield from _folder(home.path / "server", made, "server/")


def _home(home: Home, made: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    folder = _private(made / prefix)
    database = _Database(home)
    try:
        database.copy_to(folder / "state.db")
    finally:
        database.close()
    (folder / "state.db").chmod(0o600)
    yield f"{prefix}state.db", folder / "state.db"
    yield from _folder(home.path / "ca", made, f"{prefix}ca/")  # what sandboxes' own certificates are derived from


def _folder(source: Path, made: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    for name in sorted(names_in(source)):
        path = source / name
        if path.is_symlink() or name.endswith(_NOT_KEPT):
            continue
        if path.is_dir():
            yield from _folder(path, made, f"{prefix}{name}/")
        elif path.is_file():
            target = _private(made / prefix) / name
            try:
                shutil.copyfile(path, target)
            except FileNotFoundError:
                continue  # a log that was moved aside just now
            target.chmod(0o600)
            yield f"{prefix}{name}", target


def _private(folder: Path) -> Path:
    """Made with what is above it, for nobody else to read."""
    if not folder.is_dir():
        _private(folder.parent)
        folder.mkdir(mode=0o700)
    return folder


def _entry(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest}


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def check_backup(folder: Path) -> list[str]:
    """What is wrong with a backup: nothing, if it is whole."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        files: dict[str, dict[str, Any]] = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"manifest.json: {error}"]
    wrong = []
    for name, entry in files.items():
        try:
            if _entry(folder / name) != entry:
                wrong.append(f"{name}: it was changed")
        except OSError as error:
            wrong.append(f"{name}: {error.strerror}")
    return wrong
