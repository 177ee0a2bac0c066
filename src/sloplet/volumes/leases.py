"""Who has a volume now. Whoever does holds a lock on a file of his own in ``volumes/NAME/users/``.

The descriptor goes to the sandbox's supervisor too (``StartRequest.held``), so the lock is free when the last of
holder and sandbox is gone, however they end, and not before. Who may have it is decided under the volume's own short
lock; a file whose lock is free was left by somebody who died, and goes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import VolumeInUse
from ..fs import write_all
from ..state.home import ID_RE, Home, new_id, unwritable
from ..state.locks import FileLock
from .records import USERS, Use, folder_of, read

_PATIENCE = 5.0  # for the processes of a holder that was killed to be gone
_MOST = 4096


_Key = tuple[str, str, str, str, bool]  # home, volume, who, and how he has it


class Lease:
    """A volume, had for one purpose. Shared by all that one sandbox starts in this process (a rollback has two)."""

    def __init__(self, key: _Key, lock: FileLock) -> None:
        self._key = key
        self._lock = lock
        self.count = 1

    def fileno(self) -> int:
        return self._lock.fileno()

    def release(self) -> None:
        """Once for each ``take``."""
        with _guard:
            self.count -= 1
            if self.count == 0:
                if _leases.get(self._key) is self:
                    del _leases[self._key]
                self._lock.release()


_leases: dict[_Key, Lease] = {}
_guard = threading.Lock()


def take(home: Home, name: str, use: Use) -> Lease:
    """Have the volume ``name``. VolumeInUse tells who else has it; VolumeNotFound. Blocking, for seconds at worst."""
    key = (str(home.path), name, use.sandbox, use.mode, use.shared)
    shares = use.mode in ("rw", "ro")  # of a sandbox; what else there is, is done once at a time
    until = time.monotonic() + _PATIENCE
    while True:
        with _guard:
            held = _leases.get(key) if shares else None
            if held is not None and held._lock.held:
                held.count += 1
                return held
        with locked(home, name):
            read(home, name)
            others = [other for other in _users(home, name) if use.excludes(other)]
            if not others:
                lease = Lease(key, _sign(folder_of(home, name) / USERS / new_id(), use))
                if shares:
                    with _guard:
                        _leases[key] = lease
                return lease
        if time.monotonic() > until or any(_lives(other.pid) for other in others):
            raise VolumeInUse(
                f"the volume {name!r} is in use by {' and '.join(map(str, others[:3]))}",
                hint="end or pause that one first, or let all of them have it with shared=True, or read-only",
            )
        time.sleep(0.02)  # its holder was killed: what is left of it is on its way out


def users(home: Home, name: str) -> list[Use]:
    """Who has it."""
    with locked(home, name):
        return _users(home, name)


def _users(home: Home, name: str) -> list[Use]:
    """What the dead left is removed. The volume is locked: a file that is there has been signed."""
    folder = folder_of(home, name) / USERS
    found = []
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unwritable(folder, error) from error
    for each in filter(ID_RE.match, names):
        stale = FileLock.take(folder / each)
        if stale is not None:
            stale.release()
            continue
        with suppress(FileNotFoundError):
            found.append(_read(folder / each))
    return sorted(found, key=lambda use: use.since)


@contextmanager
def locked(home: Home, name: str) -> Iterator[None]:
    """Nobody else decides about this volume meanwhile."""
    lock = FileLock.take(home.run / f"volume-name-{name}.lock", wait=True)
    assert lock is not None
    try:
        yield
    finally:
        lock.release()


def _sign(path: Path, use: Use) -> FileLock:
    lock = FileLock.take(path)
    assert lock is not None
    try:
        write_all(lock.fileno(), json.dumps(use.to_dict()).encode())
    except OSError as error:
        if use.mode in ("alone", "going"):
            return lock  # a full disk must not keep a volume from going; unsigned it is somebody who is alone
        lock.release()
        raise unwritable(path, error) from error
    return lock


def _read(path: Path) -> Use:
    try:
        return Use(**json.loads(path.read_bytes()[:_MOST]))
    except (ValueError, TypeError, UnicodeDecodeError):
        return Use("somebody", mode="alone", pid=os.getpid())  # it says it in a moment


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
