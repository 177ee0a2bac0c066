"""C-02: the N-th system call fails (no space, an I/O error, no memory, too many files, interrupted), or a process of
the sandbox itself is killed at its N-th call. The program gets an error of Sloplet's own, or what it wanted; it never
hangs, and after one `sloplet gc` nothing is left.

Only calls that can fail that way in life are taken, and those of create, run, files and close together. A sample, the
same in every run; SLOPLET_CRASH_POINTS=all takes every N.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from crash_kit import ALL, ERRORS, TYPED, Pool, choose, pool
from crash_trace import can_fail_calls

from sloplet.engines.machine import machine

pytestmark = [
    pytest.mark.timeout(0 if ALL else 120),
    pytest.mark.skipif(not can_fail_calls(), reason="the tracer can change the results of calls on x86_64 only"),
]

_MAKING = ("openat", "mkdir", "mkdirat", "rename", "renameat", "ftruncate")
_FILES = (*_MAKING, "write", "pwrite64", "fsync", "unlink", "rmdir")
_NEW_FILES = ("openat", "pipe2", "memfd_create", "pidfd_open", "socketpair", "epoll_create1", "eventfd2")
FAULTS = {
    "ENOSPC": (*_MAKING, "write", "pwrite64", "fsync"),
    "EIO": (*_FILES, "read", "pread64", "newfstatat", "getdents64", "chmod", "chown"),
    "ENOMEM": (*_MAKING, "write", "pipe2", "memfd_create", "epoll_ctl", "vfork", "clone", "clone3", "execve"),
    "EMFILE": _NEW_FILES,
    "EINTR": ("openat", "read", "write", "flock", "wait4", "waitid", "epoll_wait", "pread64", "pwrite64", "fsync"),
}
POINTS = {"whole": 22, "unpack": 8, "first": 14, "process-rung": 14}


@pytest.fixture(scope="module")
def warm() -> Iterator[Pool]:
    with pool(warm=True) as made:
        yield made


@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("op", POINTS)
def test_c02_failing_calls(op: str, error: str, warm: Pool) -> None:
    _need(warm, "process" if "process-rung" in op else "container")
    more = {"calls": FAULTS[error], "errno": ERRORS[error]}
    whole = warm.point(op, **more)
    assert whole["broken"] == []
    assert whole["exit"] == 0
    points = list(warm.points(op, choose(op, whole["count"], POINTS[op], error), **more))
    _report(f"{op} with {error}", whole["count"], points)


@pytest.mark.parametrize("op", ["whole", "process-rung"])
def test_c02_processes_of_the_sandbox_killed(op: str, warm: Pool) -> None:
    """Launcher, supervisor, agent, the command: whichever makes the N-th call."""
    _need(warm, "process" if "process-rung" in op else "container")
    whole = warm.point(op, children=True)
    if whole["exit"] == TYPED and machine().helpers:
        pytest.skip("newuidmap has no rights while it is traced")
    assert whole["exit"] == 0
    points = list(warm.points(op, choose(op, whole["count"], 30, "children"), children=True))
    _report(f"{op}, a process of the sandbox killed", whole["count"], points)


def _need(nurseries: Pool, engine: str) -> None:
    if "failed" in nurseries.hello:
        pytest.skip(nurseries.hello["failed"])
    if engine not in nurseries.hello["engines"]:
        pytest.skip(f"engine {engine!r} cannot run here")


def _report(what: str, total: int, points: list[dict[str, object]]) -> None:
    typed = sum(1 for point in points if point["exit"] == TYPED)
    bad = [point for point in points if point["broken"] or point["exit"] not in (0, TYPED)]
    print(f"{what}: {total} calls, {len(points)} points, {typed} typed errors, {len(bad)} broken")
    assert bad == []
    assert any(point["hit"] for point in points), "positive control: no call was failed"
