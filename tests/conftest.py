"""For all tests: a SLOPLET_HOME of their own, and a look at what they leave running."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_home = tempfile.TemporaryDirectory(prefix="sloplet-tests-")
os.environ["SLOPLET_HOME"] = str(Path(_home.name) / "home")  # before anything of ours is imported


def _children() -> dict[int, str]:
    """The living children of this process, by name."""
    found: dict[int, str] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return _children()  # that thread has ended: its children are another's now
        for pid in children:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """No test leaves a child process behind."""
    before = _children()
    yield
    left = {pid: command for pid, command in _children().items() if pid not in before}
    assert not left, f"child processes left by the tests: {left}"


@pytest.fixture(scope="session", autouse=True)
def images_can_be_removed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An ordinary user's images belong to his subordinate ids: what removes temporary folders could not."""
    yield
    from layer_kit import empty

    for folder in (Path(_home.name), tmp_path_factory.getbasetemp()):
        empty(folder)
