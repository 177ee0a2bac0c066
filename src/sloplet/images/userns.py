"""Work on the files of images, done by whoever may: this process, or a child in a user namespace.

An ordinary user with subordinate ids gives the files of an image to those ids, which only a process in a user namespace
with the map that sandboxes get can do (``engines.jail.id_maps``): unpacking, composing and removing are jobs for a
child there (``worker``). It inherits a socket over which jobs and their descriptors come, keeps the three capabilities
that it needs, and dies with its parent. Root, and who has no subordinate ids, does the same jobs here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..engines import jail
from ..engines.machine import Machine, machine
from ..engines.plan import Set
from ..errors import EngineError, StateUnwritable, from_dict
from ..fs import FOLDER, remove_tree
from .jobs import JOBS
from .owners import NOBODY
from .worker import receive, send

Tell = Callable[[int], None]
OwnerMap = Callable[[int, int], tuple[int, int]]
_MAPS = (Set.UID_MAP, Set.GID_MAP)
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")


def owners_tag() -> str:
    """What the owners of files on disk depend on: trees with another tag are not for us."""
    here = machine()
    kind = jail.mode(here)
    return f"{kind} {here.uid}:{here.gid} {here.subuid} {here.subgid}" if kind == "range" else kind


def acts_for_others() -> bool:
    """Whether files of images may belong to subordinate ids, for whom a child can act."""
    return jail.mode(machine()) == "range"


def inside() -> OwnerMap:
    """From owners on disk to owners inside, where the map is that of a user with subordinate ids."""
    maps = {step.kind: str(step.args[0]) for step in jail.id_maps(machine(), 0) if step.kind in _MAPS}
    users, groups = (_ranges(maps[kind]) for kind in _MAPS)
    return lambda uid, gid: (_mapped(users, uid), _mapped(groups, gid))


def _ranges(text: str) -> list[tuple[int, int, int]]:
    return [(int(a), int(b), int(c)) for a, b, c in (line.split() for line in text.splitlines())]


def _mapped(ranges: list[tuple[int, int, int]], number: int) -> int:
    for first, outside, count in ranges:
        if outside <= number < outside + count:
            return first + number - outside
    return NOBODY


def run(job: str, arguments: dict[str, Any], fds: Sequence[int], tell: Tell = lambda done: None) -> dict[str, Any]:
    """Do one job of ``jobs`` on open descriptors; blocking. Raises what the job raises, OSErrors among it."""
    with Session() as session:
        return session.run(job, arguments, fds, tell)


class Session:
    """For several jobs in a row, all of one thread. A context manager: no child is left when it ends."""

    def __init__(self) -> None:
        self._machine = machine()
        self._kind = jail.mode(self._machine)
        self._child: _Child | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def run(
        self, job: str, arguments: dict[str, Any], fds: Sequence[int], tell: Tell = lambda done: None
    ) -> dict[str, Any]:
        """See the function of that name."""
        if self._kind != "range":
            return JOBS[job]({**arguments, "owners": "kept" if self._kind == "root" else "recorded"}, fds, tell)
        if self._child is None:
            self._child = _Child(self._machine)
        return self._child.run(job, {**arguments, "owners": "kept"}, fds, tell)


def remove(parent: Path, name: str) -> int:
    """``fs.remove_tree`` of what may belong to subordinate ids. Raises StateUnwritable."""
    try:
        fd = os.open(parent, FOLDER)
    except FileNotFoundError:
        return 0
    try:
        return remove_in(fd, name)
    finally:
        os.close(fd)


def remove_in(fd: int, name: str) -> int:
    try:
        return remove_tree(fd, name)
    except StateUnwritable:
        if jail.mode(machine()) != "range":
            raise
    return int(run("remove", {"name": name}, [fd])["removed"])


class _Child:
    """A process in a user namespace that does jobs (``worker``), with the socket to it."""

    def __init__(self, here: Machine) -> None:
        if not sys.executable:
            raise EngineError("images cannot be unpacked: this program does not know its Python interpreter")
        program = Path(__file__).with_name("worker.py")
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", os.fspath(program), str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={key: os.environ[key] for key in _ENVIRONMENT if key in os.environ},
                close_fds=True,
            )
        except OSError as error:
            self._socket.close()
            raise EngineError(f"the process that unpacks images cannot be started: {error}") from error
        finally:
            theirs.close()
        try:
            said = self._hear()
            if "unshared" not in said:
                raise _told(said)
            _map(here, self._process.pid)
        except BaseException:
            self.end()
            raise

    def run(self, job: str, arguments: dict[str, Any], fds: Sequence[int], tell: Tell) -> dict[str, Any]:
        try:
            send(self._socket, {"job": job, "arguments": arguments}, fds)
        except OSError as error:
            raise self._gone() from error
        while True:
            said = self._hear()
            if "done" in said:
                tell(int(said["done"]))
            elif "result" in said:
                result: dict[str, Any] = said["result"]
                return result
            else:
                raise _told(said)

    def end(self) -> None:
        self._process.kill()
        self._socket.close()
        self._process.wait()

    def _hear(self) -> dict[str, Any]:
        try:
            heard = receive(self._socket)
        except OSError as error:
            raise self._gone() from error
        if heard is None:
            raise self._gone()
        return heard[0]

    def _gone(self) -> EngineError:
        self._process.kill()
        return EngineError(
            f"the process that unpacks images ended unexpectedly (status {self._process.wait()})",
            hint="it may have been killed, or out of memory: try again",
        )


def _map(here: Machine, pid: int) -> None:
    """The same map that sandboxes get."""
    settings = {step.kind: step.args for step in jail.id_maps(here, 0)}
    for program, kind in ((here.newuidmap, Set.UID_MAP), (here.newgidmap, Set.GID_MAP)):
        argv = [str(program), str(pid), *str(settings[kind][0]).split()]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"{program} did not map the ids of images: {error}") from error
        if done.returncode:
            text = done.stderr.decode("utf-8", "replace").strip()[:500]
            raise EngineError(
                f"{program} did not map the ids of images: {text}", hint="see /etc/subuid and /etc/subgid"
            )


def _told(said: dict[str, Any]) -> Exception:
    if "errno" in said.get("error", {}) and said["error"]["error"] == "OSError":
        return OSError(int(said["error"]["errno"]), str(said["error"]["message"]))
    return from_dict(said.get("error", {}))
