"""What tests hold of the fake internet: the names in it, what it saw, and the upstream that the library dials with."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: Where names live unless a test says otherwise: really public addresses, which nobody here can reach.
PUBLIC, PUBLIC_TOO, PUBLIC_V6 = "5.5.5.5", "5.5.5.6", "2a00:1450:4001:81b::200e"
PRIVATE = "10.1.2.3"
METADATA = "169.254.169.254"


class Internet:
    """A context manager. One is enough for many tests: ``forget()`` between them."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sl-net-"))
        self._control = str(self._folder / "control")
        self.ca_file = self._folder / "ca.pem"
        self.upstream = Upstream(self)

    def __enter__(self) -> Internet:
        if shutil.which("unshare") is None:
            pytest.skip("capability: no unshare(1) here for a namespace of the fake internet's own")
        command = ["unshare", "-Urn", sys.executable, "-m", "netkit.world", str(self._folder)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == b"ready\n", "the fake internet did not start"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()
        self.upstream.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- what is in it -------------------------------------------------------------------

    def name(self, name: str, *answers: list[str] | str, code: int = 0) -> str:
        """A name and its addresses; several answers: one for each question, the last for all further ones."""
        lists = [[answer] if isinstance(answer, str) else answer for answer in answers or (PUBLIC,)]
        self.ask("name", name=name, answers=lists, code=code)
        return name

    def site(self, host: str, folder: Path, *, git: bool = False) -> str:
        """That host's web pages are the files of a folder."""
        self.ask("site", host=host, folder=str(folder.resolve()), git=git)
        return self.name(host)

    def command(self, *argv: str) -> list[str]:
        """What runs a program in there; it is not root there either, which some servers insist on."""
        enter = ["nsenter", "-t", str(self._child.pid), "-U", "-n", "--preserve-credentials"]
        return [*enter, "unshare", "-U", "--map-user=1000", "--map-group=1000", *argv]

    def leaf(self, name: str) -> Path:
        """A certificate of the test CA's with its key, in one file."""
        return Path(self.ask("leaf", name=name))

    @contextmanager
    def serves(self, runtime: Any) -> Iterator[None]:
        """Sandboxes with a network that a runtime makes in here reach this internet, and no other."""
        networks = runtime.networks
        before = networks._upstream, networks._context
        networks._upstream, networks._context = self.upstream, None
        try:
            yield
        finally:
            networks._upstream, networks._context = before

    # -- what it saw ---------------------------------------------------------------------

    def seen(self, kind: str) -> list[dict[str, Any]]:
        """What its servers were asked: "dns", "tls", "http", "tcp" or "mail"."""
        return [event for event in self.ask("seen") if event["kind"] == kind]

    def packets(self, **wanted: Any) -> list[dict[str, Any]]:
        """Every packet that was sent in it: protocol, address, port, size ..."""
        return [each for each in self.ask("packets") if all(each[key] == value for key, value in wanted.items())]

    def dialled(self) -> set[str]:
        """The addresses that were sent anything that was not an answer and not a question for a name."""
        return {each["address"] for each in self.packets() if 0 < each["port"] < 32768 and each["port"] != 53}

    def heard(self, canary: str) -> list[Any]:
        """Where a text went through it: packets, and what servers read inside TLS."""
        found = self.ask("find", text=canary)
        assert not found["lost"], f"{found['lost']} packets were not looked at"
        return [*found["packets"], *found["events"]]

    def forget(self) -> None:
        self.ask("forget")

    def ask(self, do: str, **facts: Any) -> Any:
        return self._exchange(do, facts)[0]

    def _exchange(self, do: str, facts: dict[str, Any]) -> tuple[Any, list[int]]:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(self._control)
            line.sendall(json.dumps({"do": do, **facts}).encode() + b"\n")
            text, descriptors = b"", []
            while not text.endswith(b"\n"):
                data, more, _, _ = socket.recv_fds(line, 2**20, 4)
                descriptors += more
                if not data:
                    raise ConnectionError("the fake internet is gone")
                text += data
        told = json.loads(text)
        if "name_error" in told:
            raise socket.gaierror(told["name_error"], told["text"])
        if "errno" in told:
            raise OSError(told["errno"], told["text"])
        return told["answer"], descriptors

    def connect(self, address: str, port: int) -> socket.socket:
        """A connection made in there; it is non-blocking."""
        made = socket.socket(fileno=self._exchange("connect", {"address": address, "port": port})[1][0])
        made.setblocking(False)
        return made


class Upstream:
    """What ``sloplet.network.upstream`` asks of the outside, done in there."""

    def __init__(self, internet: Internet) -> None:
        self._internet = internet
        self._threads = ThreadPoolExecutor(32, "fake-internet")
        self.ca_file: str | None = str(internet.ca_file)

    async def resolve(self, name: str) -> list[str]:
        try:
            return list(await self._in_thread(lambda: self._internet.ask("resolve", name=name)))
        except socket.gaierror as error:
            if error.errno == socket.EAI_NONAME:
                return []
            raise OSError(errno.EAGAIN, str(error)) from error

    async def connect(self, address: str, port: int) -> socket.socket:
        made: socket.socket = await self._in_thread(lambda: self._internet.connect(address, port))
        return made

    def is_own(self, address: str) -> bool:
        return False  # who dials in there is nobody's host

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
