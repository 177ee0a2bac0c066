"""Running the CLI as people do: as a program, with pipes or a terminal, in a SLOPLET_HOME of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

SLOPLET = [sys.executable, "-m", "sloplet.cli"]


def sloplet(
    *words: str, input: bytes | None = None, env: dict[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[bytes]:
    """Run to its end. Without ``input`` stdin is empty."""
    return subprocess.run(
        [*SLOPLET, *words],
        input=b"" if input is None else input,
        capture_output=True,
        env={**os.environ, **(env or {})},
        timeout=timeout,
        check=False,
    )


class Terminal:
    """A terminal with the CLI in it."""

    def __init__(self, *words: str, rows: int = 24, cols: int = 80, term: str = "xterm-256color") -> None:
        self.fd, self._slave = pty.openpty()
        self.resize(rows, cols, tell=False)
        self.before = termios.tcgetattr(self._slave)
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LEADER, *SLOPLET, *words],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**os.environ, "TERM": term},
            start_new_session=True,
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.fd)
        os.close(self._slave)

    def send(self, text: str | bytes) -> None:
        os.write(self.fd, text.encode() if isinstance(text, str) else text)

    def expect(self, text: str, timeout: float = 20) -> bytes:
        """Read until ``text`` comes; what came before it is returned, what comes after stays for the next."""
        wanted = text.encode()
        until = time.monotonic() + timeout
        while wanted not in self.seen:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.fd], [], [], left)[0]:
                raise AssertionError(f"{text!r} did not come; instead: {self.seen!r}")
            try:
                self.seen += os.read(self.fd, 65536)
            except OSError as error:
                raise AssertionError(f"{text!r} did not come before the end: {self.seen!r}") from error
        found, _, self.seen = self.seen.partition(wanted)
        return found

    def resize(self, rows: int, cols: int, *, tell: bool = True) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def wait(self, timeout: float = 20) -> int:
        """The exit code; output is read meanwhile, or the CLI would wait for us."""
        until = time.monotonic() + timeout
        while self.process.poll() is None:
            if time.monotonic() > until:
                raise AssertionError(f"it did not end; it printed {self.seen!r}")
            if select.select([self.fd], [], [], 0.02)[0]:
                self.seen += os.read(self.fd, 65536)
        while select.select([self.fd], [], [], 0.05)[0]:
            self.seen += os.read(self.fd, 65536)
        return self.process.returncode

    def modes_restored(self) -> bool:
        return termios.tcgetattr(self._slave) == self.before


#: Takes the terminal on stdin as its own and becomes the program, as a shell's child would be.
_LEADER = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def private_home(path: Path) -> dict[str, str]:
    return {"SLOPLET_HOME": str(path)}


def gvisor_environment() -> dict[str, str]:
    """What a program needs to find runsc in a home of its own; skips the test where there is none.

    CI names its runsc in SLOPLET_TEST_RUNSC."""
    import pytest

    from sloplet.setup import runsc

    named = os.environ.get("SLOPLET_TEST_RUNSC")
    found = runsc.find()
    path = named or (os.fspath(found.path) if found is not None else None)
    if path is None:
        pytest.skip("runsc is not here: SLOPLET_TEST_RUNSC names one")
    return {"SLOPLET_RUNSC": path}
