"""E2B's own clients, pinned, and a server for them.

The clients come from PyPI, and the image of E2B's base template is built, the first time that a test needs them; they
are kept in a folder (SLOPLET_TEST_CACHE, else one that scripts/test shares, else one of the user's). Where that cannot
be, for want of a network, the test is skipped and says so.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server_kit import Served, environment
from server_kit import served as serving
from sloplet.server.e2b.keys import to_e2b
from sloplet.state.database import connect
from sloplet.state.home import Home

#: By what tests call them.
PYTHON = {
    "old": ("e2b==2.45.1", "e2b-code-interpreter==2.10.0"),
    "new": ("e2b==2.63.0", "e2b-code-interpreter==2.11.5"),
}
BASE = "sloplet/e2b-base"
_SHARED = Path("/var/lib/sloplet-test")


def cache() -> Path:
    """Where what takes long is kept."""
    if given := os.environ.get("SLOPLET_TEST_CACHE"):
        path = Path(given)
    else:
        path = _SHARED / "e2b" if os.geteuid() == 0 else Path.home() / ".cache" / "sloplet-test" / "e2b"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _once(name: str, make: Callable[[Path], str]) -> Path:
    """A folder of the cache, made whole by one process. ``make`` says what failed, if anything: that skips."""
    folder = cache() / name
    with open(cache() / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / ".done"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            if failed := make(folder):
                shutil.rmtree(folder, ignore_errors=True)
                pytest.skip(f"{name} cannot be had here: {failed[-600:]}")
            done.touch()
    return folder


def _run(*command: str, env: dict[str, str] | None = None) -> str:
    """What it said, if it failed."""
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout or f"exit {done.returncode}"


def python(version: str) -> Path:
    """The interpreter that has the client of ``version``: a key of PYTHON."""

    def make(folder: Path) -> str:
        failed = _run(sys.executable, "-m", "venv", str(folder))
        return failed or _run(str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *PYTHON[version])

    pins = "-".join(word.partition("==")[2] for word in PYTHON[version])
    return _once(f"python-{pins}-{sys.version_info[1]}", make) / "bin" / "python"


def furnish(home: Path) -> None:
    """Make a home that has the base image."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)

    def make(folder: Path) -> str:
        return _run(sys.executable, "-m", "sloplet.cli", "image", "build", BASE, env=environment(folder))

    made = _once("home-e2b-base", make)
    # A layer is never written to again: links are as good as copies.
    subprocess.run(["cp", "-al", str(made / "images"), str(home)], check=True)
    connect(Home(home)).close()
    with sqlite3.connect(home / "state.db") as db:
        db.execute("ATTACH ? AS old", (str(made / "state.db"),))
        for table in ("images", "image_layers", "image_tags"):
            db.execute(f"INSERT OR IGNORE INTO {table} SELECT * FROM old.{table}")


@dataclass
class Doors:
    """A server that E2B's clients can use."""

    server: Served

    @property
    def home(self) -> Path:
        return self.server.home

    def environment(self, way: str = "url", key: str | None = None) -> dict[str, str]:
        """Of a client: nothing else of E2B's, and no proxy."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("E2B_", "SLOPLET_", "SSL_")) and not name.lower().endswith("_proxy")
        }
        assert way == "url"
        where = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL"), self.server.url)
        return {**kept, **where, "E2B_API_KEY": to_e2b(key or self.server.key)}

    def run_python(self, version: str, script: str, way: str = "url", timeout: float = 120, **names: Any) -> Any:
        """What the script says last, as JSON. ``names`` are variables of it."""
        head = f"import json\nglobals().update(json.loads({json.dumps(json.dumps(names))}))\n"
        command = [str(python(version)), "-c", head + script]
        done = subprocess.run(command, env=self.environment(way), capture_output=True, timeout=timeout, check=False)
        assert done.returncode == 0, (done.stdout[-3000:] + done.stderr[-6000:]).decode(errors="replace")
        return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def served(home: Path, *arguments: str) -> Iterator[Doors]:
    """A server with E2B's doors open; it and every sandbox of it are gone afterwards."""
    furnish(home)
    with serving(home, *arguments) as server:
        yield Doors(server)
