"""R-02: memory bombs. The sandbox learns that it ran out of memory; the host and the neighbour do not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hostile_kit import Target, install

from sloplet import Sandbox
from sloplet.errors import SandboxDead


def _available() -> int:
    text = Path("/proc/meminfo").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable"))


@pytest.mark.parametrize("kind", ["memory", "memory-children"])
def test_r02_memory(target: Target, neighbour: Sandbox, kind: str) -> None:
    target.need_controls("memory")
    floor = _available() - 2**30
    with target.box(memory="64m") as box:
        start = time.monotonic()
        result = box.run([install(box, "bombs"), kind], timeout=2)
        assert time.monotonic() - start < 20
        assert result.oom or result.timed_out, result.describe()
        if kind == "memory":
            assert result.oom
            assert result.exit_code == 137
            assert "memory" in result.describe()
        assert box.run("echo alive").stdout == "alive\n", "the agent outlives it"
    assert _available() > floor
    assert neighbour.run("true").ok


def test_r02_positive_control(target: Target) -> None:
    """Within the limit the same program's allocation works: 200 MiB in 512."""
    target.need_controls("memory")
    with target.box(memory="512m") as box:
        assert box.run(["python3", "-c", "x = bytearray(200 << 20); print(len(x))"]).stdout.strip() == str(200 << 20)


@pytest.mark.parametrize("where", ["memfd", "/dev/shm", "/tmp", "/workspace"])
def test_r02_files_in_memory(target: Target, where: str) -> None:
    target.need_controls("memory")
    if where != "memfd":
        target.need("private_filesystem")
    floor = _available() - 2**30
    with target.box(memory="64m") as box:
        arguments = ["memfd"] if where == "memfd" else ["file", where]
        result = box.run([install(box, "bombs"), *arguments], timeout=20)
        assert not result.ok
        assert result.oom or "stopped 28 " in result.stdout, (result.describe(), result.stdout)
        box.run(f"rm -f {where}/bomb" if where != "memfd" else "true")
        assert box.run("echo alive").stdout == "alive\n"
    assert _available() > floor


def test_r02_page_cache(target: Target) -> None:
    """Reading and writing more than the limit is no out-of-memory: the cache is given back."""
    target.need_controls("memory")
    with target.box(memory="64m") as box:
        result = box.run(
            "cat /usr/bin/* > /dev/null 2>&1; find /usr/lib -type f | head -800 | xargs cat | wc -c", timeout=60
        )
        assert not result.oom
        assert int(result.stdout.split()[-1]) > 64 * 2**20


def test_r02_without_a_cgroup(target: Target) -> None:
    """Where there is no limit for all, there is one for each process, and it says so."""
    with target.box() as box:
        told = {item.control: item for item in box.guarantees()}
        if told["memory"].enforced:
            pytest.skip("there is one for all here")
        assert "RLIMIT_DATA" in told["memory"].how
        assert not box.run([install(box, "bombs"), "memory"], timeout=20).ok


def test_r02_the_agent_itself(target: Target) -> None:
    """Should everything go, the sandbox is dead with the reason, not silent."""
    target.need_controls("memory", "pids")
    with target.box(memory="16m", pids=64) as box:
        path = install(box, "bombs")
        try:
            for _ in range(2):
                box.run([path, "memory-children"], timeout=1)
            assert box.run("echo alive", timeout=20).stdout == "alive\n"
        except SandboxDead as error:
            reason = error.message
            assert "memory" in reason or "signal 9" in reason
