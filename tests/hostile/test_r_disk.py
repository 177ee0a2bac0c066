"""R-03 and output without end: disks fill up inside, the holder's memory and the host's disk do not."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from hostile_kit import Target, install, rss

from sloplet import Sandbox


def _state_works() -> bool:
    path = Path(os.environ["SLOPLET_HOME"], "canary")
    path.write_text("x")
    path.unlink()
    return True


@pytest.mark.parametrize("kind", ["file", "files"])
def test_r03_disk_full(target: Target, neighbour: Sandbox, kind: str) -> None:
    target.need_controls("disk")
    with target.box(disk="32m", **target.some(memory="256m")) as box:
        result = box.run([install(box, "bombs"), kind, box.workdir], timeout=30)
        assert result.stdout.startswith("stopped 28 after "), result.stdout  # ENOSPC
        assert 16 <= int(result.stdout.split()[-1]) <= 32
        assert box.run("echo alive").stdout == "alive\n", "commands still run"
        assert box.run("rm -f bomb*; echo room > again && cat again").stdout == "room\n"
    assert _state_works()
    neighbour.files.write("still", "room")


def test_r03_large_disk(target: Target) -> None:
    """More than fits into memory: a file system of its own where there can be one. Deleting it is quick."""
    target.need_controls("disk")
    with target.box(disk="300m", **target.some(memory="64m")) as box:
        result = box.run([install(box, "bombs"), "files", box.workdir], timeout=60)
        assert not result.ok
        start = time.monotonic()
    assert time.monotonic() - start < 5
    assert _state_works()


def test_r03_inodes(target: Target) -> None:
    target.need_controls("disk")
    with target.box(disk="32m", **target.some(memory="256m")) as box:
        result = box.run([install(box, "bombs"), "inodes", box.workdir], timeout=60)
        assert result.stdout.startswith("stopped 28 after "), result.stdout
        told = next(item.how for item in box.guarantees() if item.control == "disk")
        promised = re.findall(r"(\d+) files", told)
        assert promised, told
        assert int(result.stdout.split()[-1]) <= int(promised[-1])
        start = time.monotonic()
    assert time.monotonic() - start < 5, "deleting is quick"
    assert _state_works()


def test_r03_sparse_files(target: Target, box: Sandbox) -> None:
    before = os.statvfs(os.environ["SLOPLET_HOME"]).f_bavail
    result = box.run([install(box, "bombs"), "sparse", box.workdir], timeout=30)
    assert "fallocate 0" not in result.stdout
    used = (before - os.statvfs(os.environ["SLOPLET_HOME"]).f_bavail) * 4096
    assert used < 512 * 2**20


def test_r03_deep_folders(target: Target) -> None:
    with target.box() as box:
        result = box.run([install(box, "bombs"), "deep", box.workdir], timeout=60)
        assert int(result.stdout.split()[-1]) > 1000
        start = time.monotonic()
    assert time.monotonic() - start < 20, "a tree deeper than any path can name is removed too"
    assert _state_works()


def test_r03_disk_of_the_process_rung(target: Target) -> None:
    """Where there is no quota, each file is bounded at least, and it is not called a limit."""
    if target.enforces("disk"):
        pytest.skip("there is a quota")
    with target.box() as box:
        told = {item.control: item for item in box.guarantees()}
        assert not told["disk"].enforced
        result = box.run("trap '' XFSZ; truncate -s 2g big && echo DONE")
        assert "DONE" not in result.stdout


def test_r03_zeros_to_stdout(target: Target, box: Sandbox, neighbour: Sandbox) -> None:
    before = rss()
    result = box.run(["cat", "/dev/zero"], timeout=2)
    assert result.timed_out
    assert result.truncated
    assert len(result.stdout_raw) == 4 * 2**20
    assert result.stdout_size > 100 * 2**20, "positive control: much more was written than kept"
    assert rss() - before < 64 * 2**20
    assert neighbour.run("true").ok
    exact = box.run("head -c 300000000 /dev/zero", timeout=30)
    assert (exact.ok, exact.truncated, exact.stdout_size) == (True, True, 300_000_000)


def test_r03_zeros_that_nobody_reads(target: Target, box: Sandbox) -> None:
    """Twenty writers without a reader: each is held up as by a full pipe."""
    before = rss()
    writers = [box.spawn(["cat", "/dev/zero"]) for _ in range(20)]
    assert box.run("echo served").stdout == "served\n"
    assert rss() - before < 64 * 2**20
    for writer in writers:
        writer.kill()


def test_r03_zeros_to_disk(target: Target) -> None:
    target.need_controls("disk")
    with target.box(disk="32m", **target.some(memory="256m")) as box:
        result = box.run("cat /dev/zero > filled", timeout=30)
        assert result.exit_code != 0
        assert "No space left" in result.stderr
        assert box.files.stat("filled").size <= 32 * 2**20
