"""A real server for tests: ``sloplet serve`` as a process of its own, in a SLOPLET_HOME of its own, on a free port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from sloplet.engines import registry

_START = 60.0


def need_container() -> None:
    """Skip what calls, where there is no engine with real processes."""
    probe = registry.load("container").probe()
    if not probe.available:
        pytest.skip(f"container: {probe.reason}")


@dataclass
class Served:
    """A running server. ``key`` is the admin's that it made on its first start."""

    process: subprocess.Popen[bytes]
    home: Path
    url: str
    key: str
    arguments: list[str] = field(default_factory=list)
    log: Path | None = None
    told: dict[str, Any] = field(default_factory=dict)  #: all of what it said when it started

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self, key: str | None = None, **options: object) -> httpx.Client:
        """An HTTP client with that key (default: the admin's; "": none)."""
        given = self.key if key is None else key
        headers = {"Authorization": f"Bearer {given}"} if given else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False, **options)  # type: ignore[arg-type]

    def new_key(self, name: str, *options: str) -> str:
        """Another key, by the CLI as an operator makes it."""
        command = [sys.executable, "-m", "sloplet.cli", "key", "create", "--name", name, "--json", *options]
        done = subprocess.run(command, env=environment(self.home), capture_output=True, check=True)
        return str(json.loads(done.stdout)["key"])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the server (not its sandboxes); its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)


def environment(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLOPLET_")}
    runsc = os.environ.get("SLOPLET_TEST_RUNSC")
    return {**kept, "SLOPLET_HOME": str(home), **({"SLOPLET_RUNSC": runsc} if runsc else {})}


def start(home: Path, arguments: Sequence[str] = (), *, key: str = "", port: int = 0, fake: bool = True) -> Served:
    """Start one and wait until it answers. ``key``: that of a server that was here before. ``fake``: its requests may
    use the fake engine."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = home / "serve.log"
    command = [
        sys.executable,
        "-m",
        "sloplet.cli",
        "serve",
        "--port",
        str(port),
        "--json",
        *(["--allow-fake"] if fake else ()),
        *arguments,
    ]
    with open(log, "ab") as errors:
        process = subprocess.Popen(command, env=environment(home), stdout=subprocess.PIPE, stderr=errors)
    assert process.stdout is not None
    text = b""
    while True:  # ends with the document, or with the process
        line = process.stdout.readline()
        text += line
        if not line or line.rstrip() == b"}":
            break
    try:
        told = json.loads(text)
    except ValueError:
        process.kill()
        process.wait()
        process.stdout.close()
        raise AssertionError(f"the server did not start: {text!r} {log.read_text()[-4000:]}") from None
    return Served(process, home, told["url"], told.get("key") or key, list(arguments), log, told)


def end_keepers(home: Path) -> None:
    """End the keepers of a home and of its tenants, and their sandboxes: TERM, by the pid that each tells."""
    import asyncio

    from sloplet.keeper.client import KeeperClient
    from sloplet.state.home import Home

    async def pids() -> list[int]:
        found = []
        folder = home / "tenants"
        for each in [home, *(folder.iterdir() if folder.is_dir() else ())]:
            client = KeeperClient(Home(each), start=False)
            status = await client.status()
            client.close()
            if status is not None:
                found.append(int(status["pid"]))
        return found

    for pid in asyncio.run(pids()):
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            import select

            select.select([fd], [], [], 30)
        finally:
            os.close(fd)


@contextmanager
def served(home: Path, *arguments: str) -> Iterator[Served]:
    """A server for a block; it and every sandbox of it are gone afterwards."""
    server = start(home, arguments)
    try:
        yield server
    finally:
        server.stop()
        if server.process.stdout is not None:
            server.process.stdout.close()
        end_keepers(home)
