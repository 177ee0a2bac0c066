"""Real keepers for tests: a home of its own, programs as subprocesses, everything ended by pid."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import sloplet
from sloplet.keeper.connection import peer_of

T = TypeVar("T")
SOURCE = str(Path(sloplet.__file__).parent.parent)
#: A program that makes a sandbox with a name, and says its id.
CREATE = "from sloplet import Sandbox; b = Sandbox('dev', engine='fake'); b.start(); print(b.id)"


class Keeping:
    """A SLOPLET_HOME and the programs of a test."""

    def __init__(self, home: Path, idle: float) -> None:
        self.home = home
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SLOPLET_")},
            "SLOPLET_HOME": str(home),
            "SLOPLET_KEEPER_IDLE": str(idle),
            "PYTHONPATH": SOURCE,
        }
        self.programs: list[subprocess.Popen[str]] = []

    def begin(self, code: str, *args: str) -> subprocess.Popen[str]:
        """Start a Python program that uses sloplet."""
        program = subprocess.Popen(
            [sys.executable, "-c", code, *args],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.programs.append(program)
        return program

    def run(self, code: str, *args: str) -> str:
        """What a program printed; its failure fails the test."""
        program = self.begin(code, *args)
        out, err = program.communicate(timeout=40)
        assert program.returncode == 0, err
        return out.strip()

    def keeper(self) -> int | None:
        """The pid of the keeper that listens now."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.home / "run" / "keeper.sock"))
            except OSError:
                return None
            return peer_of(probe)[0]

    def here(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in this process, with this home."""
        before = os.environ.get("SLOPLET_HOME"), os.environ.get("SLOPLET_KEEPER_IDLE")
        os.environ["SLOPLET_HOME"] = str(self.home)
        os.environ["SLOPLET_KEEPER_IDLE"] = self.env["SLOPLET_KEEPER_IDLE"]

        async def limited() -> T:
            from sloplet.keeper.client import keeper_controller

            async with asyncio.timeout(40):
                try:
                    return await work()
                finally:
                    await (await keeper_controller()).aclose()

        try:
            return asyncio.run(limited())
        finally:
            for key, value in zip(("SLOPLET_HOME", "SLOPLET_KEEPER_IDLE"), before, strict=True):
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value

    def log(self) -> str:
        path = self.home / "run" / "keeper.log"
        return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], T], seconds: float = 15) -> T:
    """Poll with a deadline; the condition's value once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether that process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def end(pid: int, number: int = signal.SIGTERM) -> None:
    """End a keeper and wait until it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    wait_for(lambda: not alive(pid))


@contextmanager
def keeping(idle: float = 1.0) -> Iterator[Keeping]:
    folder = Path(tempfile.mkdtemp(prefix="sk-"))
    world = Keeping(folder / "home", idle)
    try:
        yield world
    finally:
        for program in world.programs:
            if program.poll() is None:
                program.kill()
            program.communicate()
        wait_for(lambda: _removed(world, folder))


def _with_home(home: Path) -> list[int]:
    """Processes, not this one, that were started with this home."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            mine = f"SLOPLET_HOME={home}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if mine and pid != os.getpid():
                found.append(pid)
    return found


def _removed(world: Keeping, folder: Path) -> bool:
    """A keeper that a program began to start before it was killed may come up now, and make files in there."""
    pid = world.keeper()
    if pid is not None and pid != os.getpid():
        end(pid)
    for late in _with_home(world.home):
        end(late, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
