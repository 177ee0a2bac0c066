"""Helpers of the agent's tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from agentclient import AGENT, PATIENCE, AgentClient
from sloplet.wire.schema import HelloFlag, Tag

if not AGENT.exists() and shutil.which("make"):
    subprocess.run(["make", "-s", "-C", str(Path(__file__).parents[3] / "agent")], check=True)

SANITIZED = "sanitize" in str(AGENT)
INIT = ["unshare", "-Urpf", "--mount-proc"]


def can(command: list[str]) -> bool:
    return (
        shutil.which(command[0]) is not None and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    )


def eventually(done: Callable[[], object], what: str = "it") -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.005)  # between polls of other processes' state; no result depends on its length


class Marker:
    """A text in commands' arguments by which their processes can be found from outside."""

    def __init__(self) -> None:
        self.text = f"mark-{uuid.uuid4().hex}"

    def pids(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self.text.encode() in words and state not in "ZX":
                found.append(int(entry.name))
        return found

    def gone(self) -> None:
        eventually(lambda: not self.pids(), "the end of all processes")


def connect(prefix: list[str], work: Path) -> AgentClient:
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return AgentClient(
        [*prefix, str(AGENT), "agent"],
        [
            (Tag.USER, "root" if prefix or os.getuid() == 0 else str(os.getuid())),
            (Tag.WORKDIR, str(work)),
            (Tag.HOME, str(work / "home")),
            (Tag.FLAGS, HelloFlag.NO_USERS),
            (Tag.ENV, "FROM_HELLO=1"),
        ],
        env=env,
    )


def anonymous_kib(pid: int) -> int:
    found = re.search(r"^RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def daemon(text: str) -> str:
    """A double-forked process in a session of its own, and a child of it in another."""
    return (
        f"(setsid sh -c '(setsid sh -c \"sleep 1000; : {text}\") & sleep 1000; : {text}' >/dev/null 2>&1 </dev/null &)"
    )
