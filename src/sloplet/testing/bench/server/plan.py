"""How much a run does, and the server it measures: ``sloplet serve`` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import ServerError
from ..memory import MIB
from ..stats import Report

LOCAL, REMOTE, HTTP = "local", "remote", "http"


@dataclass(frozen=True)
class ServerPlan:
    """How much of everything."""

    only: tuple[str, ...] = ()
    quick: bool = False
    engine: str = "container"
    rounds: int = 40  #: of create to first result
    execs: int = 400
    clients: int = 200  #: at once
    each: int = 20  #: commands that each of them runs
    bytes: int = 512 * MIB  #: of an upload and a download
    transfers: int = 5
    survivors: int = 20  #: sandboxes that the server's death must not take along


def quick_plan(**changes: Any) -> ServerPlan:
    few = {
        "rounds": 8, "execs": 60, "clients": 20, "each": 5, "bytes": 64 * MIB, "transfers": 2, "survivors": 5,
        "quick": True,
    }  # fmt: skip
    return ServerPlan(**{**few, **changes})


class Serving:
    """The server under test. It can be killed and started anew on the same port."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._arguments: list[str] = []
        self.url = self.key = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        port = self.url.rpartition(":")[2] or "0"
        command = [sys.executable, "-m", "sloplet.cli", "serve", "--port", port, "--json", *self._arguments]
        with open(self._home / "serve.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        text = b""
        while (line := self.process.stdout.readline()) and line.rstrip() != b"}":
            text += line
        try:
            told = json.loads(text + line)
        except ValueError:
            self.kill()
            raise ServerError("the server did not start", hint=f"its log is {self._home / 'serve.log'}") from None
        self.url, self.key = str(told["url"]), str(told.get("key") or self.key)

    def restart(self, arguments: list[str]) -> None:
        """With other arguments, at the same place."""
        self.kill(signal.SIGTERM)
        self._arguments = arguments
        self.start()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def serving(home: Path) -> Iterator[Serving]:
    """For a block; its keeper and every sandbox are gone afterwards."""
    server = Serving(home)
    server.start()
    try:
        yield server
    finally:
        server.kill(signal.SIGTERM)
        _end_keeper(home)


def _end_keeper(home: Path) -> None:
    import asyncio
    import select

    from ....keeper.client import KeeperClient
    from ....state.home import Home

    async def pid() -> int | None:
        client = KeeperClient(Home(home), start=False)
        try:
            status = await client.status()
        finally:
            client.close()
        return None if status is None else int(status["pid"])

    found = asyncio.run(pid())
    if found is not None:
        fd = os.pidfd_open(found)
        try:
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            select.select([fd], [], [], 60)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class Bench:
    """What a suite works with."""

    plan: ServerPlan
    report: Report
    server: Serving
    home: Path
    users_home: str  #: where whoever measures has his images
