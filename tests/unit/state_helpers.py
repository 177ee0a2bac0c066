"""Helpers for tests of state and images: run it in a child, as another user, on a small disk, or killed half way."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sqlite3
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sloplet.state.home import remove_below

T = TypeVar("T")
NOBODY = 65534
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 1, 32, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)
assert sqlite3  # imported here so that a child that may not read the interpreter's files has it


def start(function: Callable[[], Any]) -> tuple[int, int]:
    """Fork; the child runs ``function`` and sends back what it returned or raised. Returns (pid, pipe)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    os.close(read)
    status = 1
    try:
        try:
            answer: tuple[str, Any] = ("ok", function())
        except BaseException as error:
            answer = ("error", error)
            if not hasattr(error, "message"):
                traceback.print_exc()
        try:
            data = pickle.dumps(answer)
        except Exception:
            data = pickle.dumps(("error", RuntimeError(repr(answer))))
        with os.fdopen(write, "wb") as pipe:
            pipe.write(data)
        status = 0
    finally:
        os._exit(status)


def finish(pid: int, read: int) -> Any:
    """What the child of ``start`` returned; raises what it raised."""
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not data:
        raise AssertionError(f"the child ended with status {status} and said nothing")
    kind, value = pickle.loads(data)
    if kind == "error":
        raise value
    return value


def in_child(function: Callable[[], Any]) -> Any:
    return finish(*start(function))


def on_two_cores(points: Callable[[], Iterator[T]], work: Callable[[str, Iterator[T]], Any]) -> list[Any]:
    """Two children at once, each with every second of the points and a name of its own; what they return."""
    one, two = (start(partial(work, f"home{at}", islice(points(), at, None, 2))) for at in (0, 1))
    try:
        said = finish(*one)
    finally:
        also = finish(*two)
    return [said, also]


def fewer_and_fewer(after: int) -> Iterator[int]:
    """1, 2, 3 ... and then some: code repeats itself."""
    line = 1
    while True:
        yield line
        line += 1 + line // after


def as_nobody(function: Callable[[], Any]) -> Any:
    """Run it as an ordinary user: as ourselves if we are one."""

    def run() -> Any:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return function()

    return in_child(run)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that the user of ``as_nobody`` owns and can reach (pytest's own are root's alone)."""
    path = Path(tempfile.mkdtemp(prefix="sloplet-test-"))
    try:
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        yield path
    finally:
        remove_below(path.parent, path.name)  # copes with what tests leave, mode-000 folders too


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory: a kill loses nothing that a disk would keep, and hundreds of crashes need no fsync."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="sloplet-test-", dir=base))
    try:
        yield path
    finally:
        remove_below(path.parent, path.name)


def on_small_disk(path: Path, size: str, function: Callable[[], Any]) -> Any:
    """Run it in a mount namespace where ``path`` is a tmpfs of that size. Skips where that is not allowed."""

    def run() -> Any:
        uid, gid = os.geteuid(), os.getegid()
        if _libc.unshare(_CLONE_NEWNS if uid == 0 else _CLONE_NEWNS | _CLONE_NEWUSER):
            return "skip"
        if uid:
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        _libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        if _libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, f"size={size},mode=0700".encode()):
            return "skip"
        return function()

    result = in_child(run)
    if result == "skip":
        pytest.skip("no mount namespace can be made here")
    return result


def remount_read_only(path: Path) -> None:
    if _libc.mount(b"none", os.fsencode(path), None, _MS_REMOUNT | _MS_RDONLY, None):
        raise OSError(ctypes.get_errno(), "remount")


def killed_at_line(number: int, function: Callable[[], Any]) -> bool:
    """Run it in a child that SIGKILLs itself at the ``number``-th line of sloplet's code. False if it ended before."""

    def ours(path: str) -> bool:
        return "sloplet" in path and "tests" not in path

    return _killed(number, function, lambda: None, ours, each_once=False)


def killed_at_new_line(
    number: int, function: Callable[[], Any], *, prepare: Callable[[], Any], files: frozenset[str]
) -> bool:
    """The same at the ``number``-th line of ``files`` (their names) that it comes to for the first time. ``prepare``
    is run in the child before it."""
    return _killed(number, function, prepare, lambda path: os.path.basename(path) in files, each_once=True)


def _killed(
    number: int,
    function: Callable[[], Any],
    prepare: Callable[[], Any],
    traced: Callable[[str], bool],
    *,
    each_once: bool,
) -> bool:
    pid = os.fork()
    if pid == 0:
        left = number
        seen = set()
        is_traced = cache(traced)

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if not is_traced(frame.f_code.co_filename):
                return None
            if event == "line" and not (each_once and (frame.f_code, frame.f_lineno) in seen):
                seen.add((frame.f_code, frame.f_lineno))
                left -= 1
                if left <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            prepare()
            sys.settrace(trace)
            function()
        except BaseException:
            sys.settrace(None)
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the child failed"
    return False
