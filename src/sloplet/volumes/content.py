"""The files of named volumes, for who works on them from outside while sandboxes may have them: ``operations``, by
threads of its own, and where files belong to subordinate ids by children that act for those."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..fs import write_all
from ..images import userns
from ..state.home import Home
from . import records, sized
from .leases import Lease, locked, take
from .operations import NEW_FOLDER_MODE, OPERATIONS, Made, normal
from .records import Use, VolumeInfo

#: Whose files those of the volume's owner are, inside: the user that images of agents have.
USER = (1000, 1000)
_THREADS, _SLOW_THREADS = 16, 8
_AT_ONCE, _SLOW_AT_ONCE = 4, 2  # of one user's; his others wait
_MOST_FDS = 4

_T = TypeVar("_T")


class Contents:
    """One per process. ``close`` ends its threads and children."""

    def __init__(self, user: tuple[int, int] = USER) -> None:
        self._user = user
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sloplet-volumes")
        self._slow = ThreadPoolExecutor(_SLOW_THREADS, thread_name_prefix="sloplet-volumes-slow")
        self._turns: weakref.WeakValueDictionary[tuple[str, bool], asyncio.Semaphore] = weakref.WeakValueDictionary()
        self._own = threading.local()  # a child belongs to the thread that started it
        self._sessions: list[userns.Session] = []

    async def off_loop(self, work: Callable[[], _T], user: str, *, slow: bool = False) -> _T:
        """In a thread. ``user``: for whom; nobody has so many at once that others would have to wait for him. ``slow``:
        what may take minutes, as a large tree does; quick work never waits for that."""
        loop, turn = asyncio.get_running_loop(), self._turn(user, slow)
        await turn.acquire()

        def done(_: object) -> None:
            """A caller who gives up does not end the work, and has no other turn before it is done."""
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(turn.release)

        try:
            job = (self._slow if slow else self._threads).submit(work)
        except BaseException:
            turn.release()
            raise
        job.add_done_callback(done)
        return await asyncio.wrap_future(job)

    def _turn(self, user: str, slow: bool) -> asyncio.Semaphore:
        turn = self._turns.get((user, slow))
        if turn is None:
            turn = self._turns[user, slow] = asyncio.Semaphore(_SLOW_AT_ONCE if slow else _AT_ONCE)
        return turn

    def close(self) -> None:
        """Idempotent; blocking."""
        self._threads.shutdown()
        self._slow.shutdown()
        while self._sessions:
            self._sessions.pop().__exit__()

    # -- what is done, blocking ----------------------------------------------------------

    def look(self, home: Home, name: str, path: str) -> dict[str, Any]:
        """OSError, as of everything here; VolumeNotFound."""
        return dict(self._read("look", home, name, path))

    def listing(self, home: Home, name: str, path: str, depth: int) -> list[dict[str, Any]]:
        return list(self._read("list", home, name, path, depth=depth))

    def change(self, home: Home, name: str, path: str, **values: int | None) -> dict[str, Any]:
        return dict(self._written("change", home, name, path, **values))

    def make_folder(self, home: Home, name: str, path: str, *, force: bool, **values: int | None) -> dict[str, Any]:
        return dict(self._written("make_folder", home, name, path, force=force, **values))

    def remove(self, home: Home, name: str, path: str) -> None:
        self._written("remove", home, name, path)

    def read(self, home: Home, name: str, path: str) -> tuple[dict[str, Any], int]:
        """A file's facts and its descriptor, which is the caller's."""
        root = open_root(home, name)
        try:
            told, made = self._do("read", {"path": normal(path)}, [root])
            return told, made[0]
        finally:
            os.close(root)

    def write(self, home: Home, name: str, path: str, *, force: bool, **values: int | None) -> Draft:
        """A file that is to be: ``finish`` or ``discard`` it."""
        arguments = {"path": normal(path), "force": force, **values}
        lease = _have(home, name)
        draft = Draft(self, arguments, lease)
        try:
            draft.fds.append(open_root(home, name))
            told, made = self._do("begin", arguments, draft.fds)
        except BaseException:
            draft.close()
            raise
        draft.fds += made
        arguments.update(told)
        return draft

    def _read(self, operation: str, home: Home, name: str, path: str, **arguments: Any) -> Any:
        root = open_root(home, name)
        try:
            return self._do(operation, {"path": normal(path), **arguments}, [root])[0]
        finally:
            os.close(root)

    def _written(self, operation: str, home: Home, name: str, path: str, **arguments: Any) -> Any:
        """VolumeInUse if somebody has it for himself."""
        lease = _have(home, name)
        try:
            return self._read(operation, home, name, path, **arguments)
        finally:
            lease.release()

    def _do(self, operation: str, arguments: dict[str, Any], fds: Sequence[int]) -> Made:
        arguments = {**arguments, "operation": operation, "user": self._user}
        if not userns.acts_for_others():
            kept = "kept" if os.geteuid() == 0 else "recorded"
            return OPERATIONS[operation]({**arguments, "owners": kept}, fds)
        session = getattr(self._own, "session", None)
        if session is None:
            session = self._own.session = userns.Session()
            self._sessions.append(session)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            # as the child has it, the caller is root: whom its map exchanges with the user
            told = session.run("content", {**arguments, "disk": (0, 0)}, [theirs.fileno(), *fds])["told"]
            theirs.close()
            _, made, _, _ = socket.recv_fds(ours, 1, _MOST_FDS)
        return told, made


@dataclass
class Draft:
    """A file that is being written. Blocking."""

    _contents: Contents
    _arguments: dict[str, Any]
    _lease: Lease
    fds: list[int] = field(default_factory=list)
    _closed: bool = False

    def write(self, data: bytes) -> None:
        write_all(self.fds[-1], data)

    def finish(self) -> dict[str, Any]:
        """It is there now."""
        told, _ = self._contents._do("finish", self._arguments, self.fds)
        self.close()
        return dict(told)

    def discard(self) -> None:
        """Idempotent; nothing after ``finish``."""
        if self.fds:
            try:
                self._contents._do("discard", self._arguments, self.fds)
            finally:
                self.close()

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._lease.release()
        while self.fds:
            os.close(self.fds.pop())


def open_root(home: Home, name: str) -> int:
    """A volume's folder, by descriptor. VolumeNotFound, VolumeError."""
    if records.read(home, name).size is None:
        return records.open_data(home, name)
    with locked(home, name):
        return sized.mount(home, name)


def known(home: Home, name: str) -> VolumeInfo:
    """What its record says, and nothing that has to be looked for. VolumeNotFound."""
    return records.read(home, name)


def open_to_all(home: Home, name: str) -> None:
    """Let every user inside write it, not only the sandbox's. On this machine nobody else reaches it."""
    root = open_root(home, name)
    try:
        os.chmod(f"/proc/self/fd/{root}", NEW_FOLDER_MODE)
    finally:
        os.close(root)


def _have(home: Home, name: str) -> Lease:
    """Whoever copies it, or has it alone, is not disturbed."""
    use = Use("somebody who writes from outside", mode="rw", shared=True, since=time.time(), pid=os.getpid())
    return take(home, name, use)
