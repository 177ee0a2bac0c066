"""What the hostile tests of live state share: programs that notice what happens to them, and a look at what is left.

``SLOPLET_SOAK=1`` kills at far more points.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hostile_kit import runtime

from sloplet import Sandbox
from sloplet.engines import registry
from sloplet.errors import SlopletError
from sloplet.portal import portal
from sloplet.state.home import Home
from sloplet.state.snapshots import SnapshotStore
from sloplet.state.store import Store
from sloplet.sync import Process
from sloplet.testing import leaks

SOAK = os.environ.get("SLOPLET_SOAK", "") not in ("", "0")
RUNSC = "SLOPLET_TEST_RUNSC"


@contextmanager
def gvisor_in_use() -> Iterator[None]:
    """In here engine="gvisor" runs, or the test is skipped with the reason. Outside, "auto" is what it was."""
    with pytest.MonkeyPatch.context() as patch:
        if RUNSC in os.environ:
            patch.setenv("SLOPLET_RUNSC", os.environ[RUNSC])
        probe = registry.load("gvisor").probe()
        if not probe.available:
            pytest.skip(f"capability: gvisor cannot run here: {probe.reason} ({RUNSC} names a runsc for tests)")
        yield


@contextmanager
def box(**settings: Any) -> Iterator[Sandbox]:
    """A sandbox of this process."""
    made = Sandbox(**{"engine": "gvisor", **settings})
    made.start()
    try:
        yield made
    finally:
        made.kill()


@contextmanager
def all_ended(boxes: list[Sandbox]) -> Iterator[list[Sandbox]]:
    try:
        yield boxes
    finally:
        for each in boxes:
            each.kill()


# -- talking to a program that is inside -----------------------------------------------------------------


class Talk:
    """A program in a sandbox that answers each line with one."""

    def __init__(self, process: Process, *, text: str = "") -> None:
        self.process = process
        self.pid: int = process.pid
        self._pieces = iter(process)
        self._rest = text

    def ask(self, line: str) -> str:
        self.process.send(line + "\n")
        return self.line()

    def line(self) -> str:
        while "\n" not in self._rest:
            self._rest += next(self._pieces)[1]
        line, _, self._rest = self._rest.partition("\n")
        return line

    def until(self, wanted: str) -> str:
        """All up to and with that text."""
        while wanted not in self._rest:
            self._rest += next(self._pieces)[1]
        before, _, self._rest = self._rest.partition(wanted)
        return before + wanted


def talk(made: Sandbox, program: str) -> Talk:
    """Start a Python program that goes on when nobody follows it."""
    return Talk(made.spawn(["python3", "-uc", program], stdin=True, detached=True))


def talk_on(made: Sandbox, pid: int) -> Talk:
    """Go on with one that runs in there, from here on."""
    return Talk(made.attach(pid, replay=False))


#: A state in memory that grows: each line is hashed onto all lines before it.
CHAIN = """
import hashlib, sys
state, count = b"", 0
for line in sys.stdin.buffer:
    state, count = hashlib.sha256(state + line.strip()).digest(), count + 1
    print(count, state.hex(), flush=True)
"""


class Chain:
    """The same state, here."""

    def __init__(self) -> None:
        self.state, self.count = b"", 0

    def add(self, line: str) -> str:
        self.state, self.count = hashlib.sha256(self.state + line.encode()).digest(), self.count + 1
        return f"{self.count} {self.state.hex()}"


# -- what is left ----------------------------------------------------------------------------------------


def home() -> Home:
    return runtime().home


class Traces:
    """All that this process, its descendants and a SLOPLET_HOME have, before and after."""

    def __init__(self, path: Path | None = None, *, bury: bool = False) -> None:
        self._home = home().path if path is None else path
        self._bury = bury
        self._before = leaks.snapshot(self._home)

    def left(self, within: float = 20.0) -> list[str]:
        """What is there and was not, once the kernel had its moment. ``bury``: wait for orphans, as init would."""
        until = time.monotonic() + within
        while True:
            if self._bury:
                leaks.bury_orphans()
            now = leaks.snapshot(self._home)
            found = [line for line in leaks.diff(self._before, now) if not self._noise(line)]
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.02)

    def _noise(self, line: str) -> bool:
        """asyncio's threads come when needed and stay."""
        return line.startswith("threads: +") and "asyncio" in line


def saved_states(path: Path | None = None) -> list[str]:
    """What is listed, by id, once each was opened and every byte of it compared. Of another SLOPLET_HOME: asked by
    another process, a second connection here would leave SQLite a descriptor of ours open."""
    if path is None:
        return _checked(runtime().store, runtime().saved)
    asked = subprocess.run([sys.executable, __file__, str(path)], check=True, capture_output=True, text=True)
    return asked.stdout.split()


def _checked(store: Store, snapshots: SnapshotStore) -> list[str]:
    listed = [snapshot.id for snapshot in store.list_snapshots()]
    for snapshot_id in listed:
        snapshots.open(snapshot_id).close()
    return listed


def call(work: Any) -> Any:
    """Run a coroutine of the embedded runtime."""
    return portal().call(work)


def outcome(job: Callable[[], Any]) -> Any:
    """What it returns, or the typed error it raises; anything else is a failure of the test."""
    try:
        return job()
    except SlopletError as error:
        return error


@contextmanager
def folder_of_its_own() -> Iterator[Path]:
    """Short (socket paths), on a disk, entered by anybody as /tmp is."""
    path = Path(tempfile.mkdtemp(prefix="sl-"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        with suppress(OSError):
            shutil.rmtree(path)


def json_line(line: str) -> dict[str, Any]:
    return dict(json.loads(line))


if __name__ == "__main__":
    _place = Home(sys.argv[1])
    _store = Store(_place)
    print(*_checked(_store, SnapshotStore(_place, _store)))
