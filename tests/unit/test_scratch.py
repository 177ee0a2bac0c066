"""The template that each sandbox's disk is a copy of."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sloplet.engines import scratch

SIZE = 256 << 20
MKFS = shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin:/bin")


@pytest.mark.skipif(MKFS is None, reason="no mkfs.ext4 here")
def test_a_template_is_sparse_and_stays_so_when_it_is_read(tmp_path: Path) -> None:
    assert MKFS is not None
    place = tmp_path / "sandboxes/owner/box"
    place.mkdir(parents=True)
    path = scratch.template(place, SIZE, 1 << 16, MKFS)
    assert path == scratch.template(place, SIZE, 1 << 16, MKFS), "made once"
    assert list(place.iterdir()) == []
    Path(path).read_bytes()  # pages of what is allocated but unwritten would count as data from now on
    assert os.stat(path).st_size == SIZE
    assert _data(path) < 1 << 20
    checked = subprocess.run(["/sbin/e2fsck", "-fn", path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _data(path: str) -> int:
    """How many bytes a copy has to move."""
    fd, at, total = os.open(path, os.O_RDONLY), 0, 0
    try:
        while True:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:
                return total
            end = os.lseek(fd, at, os.SEEK_HOLE)
            total, at = total + end - at, end
    finally:
        os.close(fd)
