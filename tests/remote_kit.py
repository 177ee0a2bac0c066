"""What the tests of remote sandboxes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cutting_kit import Cutter
from server_kit import Served
from sloplet import Sandbox, SandboxInfo
from sloplet.portal import portal
from sloplet.remote.controller import RemoteController
from sloplet.remote.place import parse


def goodbye(url: str, key: str, ca: str | None = None) -> None:
    """Close this program's connections to a server, while it is there."""
    portal().call(RemoteController(parse(url, key, ca)).aclose())


@contextmanager
def through(server: Served, *, seed: int = 0) -> Iterator[Cutter]:
    """A way to the server that can be cut."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with Cutter(host, int(port), seed=seed) as cutter:
        yield cutter
        cutter.every = None
        goodbye(cutter.url, server.key)


def until(wanted: Callable[[], bool], seconds: float = 30) -> None:
    """Ask again and again; the condition is somebody else's to make true."""
    deadline = time.monotonic() + seconds
    while not wanted():
        assert time.monotonic() < deadline, "it did not come to pass"


def listed(server: Served) -> dict[str, SandboxInfo]:
    return {info.id: info for info in Sandbox.list(server=server.url, key=server.key)}
