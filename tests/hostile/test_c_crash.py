"""C-01: `kill -9` at the N-th system call, of the program, of the CLI, of the keeper. One `sloplet gc` later nothing is
left: no process, mount, cgroup, loop device, file or record, and a named sandbox runs or is reported dead.

A sample of all N, the same in every run; SLOPLET_CRASH_POINTS=all takes every N, and at least 1,000 points for each
operation (SLOPLET_CRASH_LEAST).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_kit import ALL, Machine, Pool, choose, left_over, pool

from sloplet.testing.leaks import adopted_orphans, bury_orphans

pytestmark = pytest.mark.timeout(0 if ALL else 120)

#: operation -> (from a program that has run before, how many points in the sample)
OPERATIONS = {
    "first": (False, 40),
    "first-process-rung": (False, 25),
    "create": (True, 40),
    "exec": (True, 25),
    "spawn": (True, 15),
    "close": (True, 30),
    "unpack": (True, 40),
    "image-add": (True, 25),
    "image-unpack": (True, 50),
    "image-rm": (True, 40),
    "image-prune": (True, 20),
    "image-build": (True, 30),
    "process-rung": (True, 30),
    "cli-run": (False, 40),
    "cli-create": (True, 16),
    "cli-create-kept": (True, 20),
    "cli-rm": (True, 25),
    "keeper-create": (True, 25),
    "keeper-exec": (True, 15),
    "keeper-rm": (True, 25),
}


@pytest.fixture(scope="module")
def warm() -> Iterator[Pool]:
    with pool(warm=True) as made:
        yield made


@pytest.fixture(scope="module")
def cold() -> Iterator[Pool]:
    with pool(warm=False) as made:
        yield made


@pytest.mark.parametrize("op", OPERATIONS)
def test_c01_killed_at_any_call(op: str, request: pytest.FixtureRequest) -> None:
    is_warm, wanted = OPERATIONS[op]
    nurseries: Pool = request.getfixturevalue("warm" if is_warm else "cold")
    if "failed" in nurseries.hello:
        pytest.skip(nurseries.hello["failed"])
    if ("process" if "process-rung" in op else "container") not in nurseries.hello["engines"]:
        pytest.skip("that engine cannot run here")
    whole = nurseries.whole(op)
    assert whole["broken"] == [], "not even without a crash"
    total = whole["count"]
    assert total > 15, "positive control: the calls of the operation are seen"
    points = list(nurseries.points(op, choose(op, total, wanted)))
    broken = [point for point in points if point["broken"]]
    killed = sum(1 for point in points if point["hit"])
    print(f"{op}: {total} calls, {len(points)} points, {killed} killed, {len(broken)} broken")
    for point in broken[:20]:
        print(point)
    assert broken == []
    assert killed > len(points) // 2


LEAVE = """
import os, subprocess, sys, time
home, group = sys.argv[1:]
os.makedirs(home + "/sandboxes/aaaaaaaaaaaa/bbbbbbbbbbbb")
open(home + "/cache/.half-made", "w").close() if os.path.isdir(home + "/cache") else None
if group:
    os.mkdir(group)
subprocess.Popen(["sleep", "1000"])
"""


def test_positive_control_the_detector_sees_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crash_kit._SETTLE", 0.3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "home/cache").mkdir(parents=True)
    folder = _writable_group()
    group = f"{folder}/sloplet-positive-control" if folder else ""
    with adopted_orphans():
        bury_orphans()
        before = Machine.look()
        assert not left_over(before, tmp_path / "home")
        try:
            subprocess.run([sys.executable, "-c", LEAVE, str(tmp_path / "home"), group], check=True)
            (tmp_path / "tmp/sloplet-left").mkdir()
            found = left_over(before, tmp_path / "home")
            sleeper = next(line for line in found if line.endswith("sleep 1000"))
            os.kill(int(sleeper.split()[1].rstrip(":")), 9)
        finally:
            if group:
                os.rmdir(group)
    assert "file sandboxes/aaaaaaaaaaaa/bbbbbbbbbbbb" in found
    assert "file cache/.half-made" in found
    assert "temporary file sloplet-left" in found
    if group:
        assert f"cgroup {group}" in found


def _writable_group() -> str:
    from sloplet.engines.machine import machine

    return next(iter(machine().cgroup.bases.values()), "")
