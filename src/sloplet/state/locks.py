"""Locks that tell whether somebody lives: owners hold a lock, not a pid.

A process that holds sandboxes (an embedded runtime, the keeper) keeps ``run/owners/TOKEN.lock``
flock-ed for its life; the kernel lets go of it however the process ends. An owner is dead if and
only if its lock can be taken. Pids are reused, wrong in other pid namespaces, and prove nothing.

An flock belongs to the open file, which a fork shares: a child would keep its parent's lock alive.
So every lock here is close-on-exec (no sandbox and no command inherits it), a forked Python
process closes its copies at once, and releasing is always an explicit LOCK_UN.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path

from .home import Home, check_id, new_id, unwritable

_EXEC_SECONDS = 1.0
_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """A lock (exclusive, unless said) on a file that exists only as long as it is of use.

    Whoever removes the file does so while holding the lock, and whoever takes the lock makes sure
    that the file it locked is still the one of that name: so removal and taking cannot cross.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._pid = os.getpid()
        _held.add(self)

    @staticmethod
    def take(path: Path, *, wait: bool = False) -> FileLock | None:
        """Lock ``path``, making it if missing; None if somebody else has it and ``wait`` is False."""
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                try:
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                except OSError as error:
                    raise unwritable(path.parent, error) from error
                continue
            except OSError as error:
                raise unwritable(path, error) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same_file(fd, path):
                    return FileLock(path, fd)
            except BlockingIOError:
                os.close(fd)
                return None
            except OSError as error:  # ENOLCK: a network filesystem without locks
                os.close(fd)
                raise unwritable(path, error) from error
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # it was removed between our open and our lock: begin again

    @staticmethod
    def hold_open(path: Path, fd: int, *, shared: bool) -> FileLock | None:
        """Lock a file that is open already, which the caller knows to be the right one; None if somebody holds it
        against that. On success the lock owns ``fd``. Release it with ``remove=False``."""
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError as error:
            raise unwritable(path, error) from error
        return FileLock(path, fd)

    @property
    def held(self) -> bool:
        """Whether this process holds it (a forked child does not)."""
        return self._fd >= 0 and self._pid == os.getpid()

    def fileno(self) -> int:
        """Its descriptor: whoever has a copy of it keeps the lock alive."""
        return self._fd

    def sign(self) -> None:
        """Note in the file who holds it: see ``take_from_dead``."""
        with suppress(OSError):
            os.write(self._fd, _signature())

    def release(self, *, remove: bool = True) -> None:
        """Let go, and remove the file unless told otherwise. Idempotent; does nothing in a forked child."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._pid == os.getpid():
            if remove:
                with suppress(OSError):
                    os.unlink(self.path)
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def _abandon(self) -> None:
        """In a forked child: close the copy, which leaves the parent's lock as it is."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    ours = os.fstat(fd)
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _after_fork_in_child() -> None:
    for lock in list(_held):
        lock._abandon()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def is_held(path: Path) -> bool:
    """Whether some process holds the lock on ``path`` now. Makes nothing, and never waits."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)
        return False
    finally:
        os.close(fd)


def take_from_dead(path: Path) -> FileLock | None:
    """The lock of an owner, if it is dead; None if it lives. A process that is killed while it starts another leaves a
    copy of the lock in that one until its exec, milliseconds later: that is waited for."""
    lock = FileLock.take(path)
    if lock is not None or not _taker_is_gone(path):
        return lock
    until = time.monotonic() + _EXEC_SECONDS
    while (lock := FileLock.take(path)) is None and time.monotonic() < until:
        time.sleep(0.001)
    return lock


def _signature() -> bytes:
    """Who takes an owner's lock. Only ever a reason to wait a moment: what counts is the lock."""
    try:
        return f"{os.getpid()} {os.readlink('/proc/self/ns/pid')}".encode("ascii")
    except OSError:
        return b""


def _taker_is_gone(path: Path) -> bool:
    try:
        pid, _, namespace = path.read_bytes()[:100].decode("ascii").partition(" ")
        if namespace != os.readlink("/proc/self/ns/pid"):
            return False
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        pass
    return False


def owner_lock_path(home: Home, token: str) -> Path:
    return home.owners / f"{check_id(token)}.lock"


def image_lock_path(home: Home, key: str) -> Path:
    """The lock that the writer of ``images/.tmp-KEY`` holds."""
    return home.run / f"image-{check_id(key)}.lock"


def snapshot_lock_path(home: Home, snapshot_id: str) -> Path:
    """The lock that whoever writes, publishes or removes ``snapshots/ID`` holds."""
    return home.run / f"snapshot-{check_id(snapshot_id)}.lock"


class Owner:
    """This process's claim to its sandboxes. ``token`` takes the lock on first use.

    After a fork the child is nobody's owner: the sandboxes stay the parent's, and the child gets a
    token of its own when it asks for one.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._token = ""
        self._lock: FileLock | None = None

    @property
    def token(self) -> str:
        if self._lock is None or not self._lock.held:
            self._home.open()
            token = new_id()
            self._lock = FileLock.take(owner_lock_path(self._home, token), wait=True)
            assert self._lock is not None
            self._lock.sign()
            self._token = token
        return self._token

    @property
    def held(self) -> bool:
        return self._lock is not None and self._lock.held

    def release(self) -> None:
        """Give up the claim: whatever still names this owner may be reaped. Idempotent; nothing in a forked child."""
        lock, self._lock = self._lock, None
        if lock is None or not lock.held:
            return
        with suppress(OSError):
            os.rmdir(self._home.sandboxes / self._token)
        # What was not ended properly still names us, and the lock file with it; the reaper removes both.
        lock.release(remove=not os.path.exists(self._home.sandboxes / self._token))
