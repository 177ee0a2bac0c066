"""How much a run does, and the two sides it works with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....netspec import Network
from ....sync import Sandbox
from ..measures import must
from ..stats import Report

LOOPBACK, RELAY = "loopback", "python relay"
HOST = "host.sloplet"  #: the host's own loopback, as sandboxes see it
CLIENT = Path(__file__).with_name("near.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class NetPlan:
    """How much of everything. ``QUICK`` is for looking."""

    engines: tuple[str, ...] = ("container", "gvisor")
    only: tuple[str, ...] = ()
    quick: bool = False
    rounds: int = 5
    download: int = 2**29
    connects: int = 300
    together: int = 200
    dawdlers: int = 20
    dawdle_seconds: int = 5


def quick_plan(**changes: Any) -> NetPlan:
    few = {"rounds": 1, "download": 2**26, "connects": 30, "dawdlers": 5, "dawdle_seconds": 1, "quick": True}
    return NetPlan(**{**few, **changes})


@contextmanager
def far(*arguments: str) -> Iterator[dict[str, int]]:
    """The far side's ports, while it runs."""
    command = [sys.executable, "-m", f"{__package__}.far", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.communicate()


@dataclass(frozen=True)
class Subject:
    """Who connects: a sandbox, or a bare process (``box`` None)."""

    name: str
    box: Sandbox | None
    host: str
    ports: dict[str, int]

    def ask(self, what: str, server: str, *numbers: int) -> dict[str, Any]:
        """One run of the client; its answer."""
        words = [what, self.host, str(self.ports[server]), *map(str, numbers)]
        if self.box is None:
            done = subprocess.run([sys.executable, "-c", CLIENT, *words], capture_output=True, text=True, check=True)
            return _last(done.stdout)
        result = self.box.run(["python3", "-c", CLIENT, *words], timeout=300)
        denied = "; ".join(result.denied)
        must(result.exit_code == 0, f"{self.name}: {what}: {denied or result.stderr.strip() or result.describe()}")
        return _last(result.stdout)


def _last(output: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return answer


@dataclass(frozen=True)
class Bench:
    """What a suite works with."""

    plan: NetPlan
    report: Report
    bare: Subject
    relay: Subject
    boxes: tuple[Subject, ...]


def network(ports: dict[str, int]) -> Network:
    return Network(allow=[f"{HOST}:{port}" for port in ports.values()])
