"""Work on the files of images, done by whoever may: this process, or a child in a user namespace.

An ordinary user with subordinate ids gives the files of an image to those ids, which only a process in a user namespace
with the map that sandboxes get can do (``engines.jail.id_maps``): unpacking, composing and removing are jobs for a
child there (``worker``). It inherits three pipes and the descriptors of the job, keeps the three capabilities that it
needs, and dies with its parent. Root, and who has no subordinate ids, does the same jobs here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..engines import jail
from ..engines.machine import Machine, machine
from ..engines.plan import Set
from ..errors import EngineError, StateUnwritable, from_dict
from ..fs import FOLDER, remove_tree
from .jobs import JOBS

Tell = Callable[[int], None]
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
_MOST_SAID = 64 * 2**20


def owners_tag() -> str:
    """What the owners of files on disk depend on: trees with another tag are not for us."""
    here = machine()
    kind = jail.mode(here)
    return f"{kind} {here.uid}:{here.gid} {here.subuid} {here.subgid}" if kind == "range" else kind


def run(job: str, arguments: dict[str, Any], fds: Sequence[int], tell: Tell = lambda done: None) -> dict[str, Any]:
    """Do a job of ``jobs`` on open descriptors; blocking. Raises what the job raises, OSErrors among it."""
    here = machine()
    kind = jail.mode(here)
    if kind == "range":
        return _run_mapped(here, job, arguments, fds, tell)
    return JOBS[job]({**arguments, "owners": "kept" if kind == "root" else "recorded"}, fds, tell)


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


def _run_mapped(here: Machine, job: str, arguments: dict[str, Any], fds: Sequence[int], tell: Tell) -> dict[str, Any]:
    child = _spawn(fds)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        _expect(child, "unshared")
        _map(here, child.pid)
        order = {"job": job, "arguments": {**arguments, "owners": "kept"}, "fds": list(fds), "parent": os.getpid()}
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(order).encode("ascii") + b"\n")
            child.stdin.flush()
        while True:
            said = _hear(child)
            if "done" in said:
                tell(int(said["done"]))
            elif "result" in said:
                result: dict[str, Any] = said["result"]
                return result
            else:
                raise _told(said)
    finally:
        child.kill()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        child.wait()


def _spawn(fds: Sequence[int]) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise EngineError("images cannot be unpacked: this program does not know its Python interpreter")
    program = Path(__file__).with_name("worker.py")
    try:
        return subprocess.Popen(
            [sys.executable, "-P", os.fspath(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={key: os.environ[key] for key in _ENVIRONMENT if key in os.environ},
            close_fds=True,
            pass_fds=tuple(fds),
        )
    except OSError as error:
        raise EngineError(f"the process that unpacks images cannot be started: {error}") from error


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


def _expect(child: subprocess.Popen[bytes], word: str) -> None:
    said = _hear(child)
    if word not in said:
        raise _told(said)


def _hear(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    out: IO[bytes] | None = child.stdout
    assert out is not None
    line = out.readline(_MOST_SAID)
    if not line.endswith(b"\n"):
        raise EngineError(
            f"the process that unpacks images ended unexpectedly (status {child.wait()})",
            hint="it may have been killed, or out of memory: try again",
        )
    said: dict[str, Any] = json.loads(line)
    return said


def _told(said: dict[str, Any]) -> Exception:
    if "errno" in said.get("error", {}) and said["error"]["error"] == "OSError":
        return OSError(int(said["error"]["errno"]), str(said["error"]["message"]))
    return from_dict(said.get("error", {}))
