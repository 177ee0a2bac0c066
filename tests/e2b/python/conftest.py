"""Programs of E2B's own client, as its users write them. They run with that client's Python, not ours (test_e2b.py
starts them), and know the server by E2B's environment variables only."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from e2b import Sandbox

#: Which engine the key gets: some need one that can save memory.
LIVE = os.environ.get("SLOPLET_TEST_LIVE") == "1"
#: Whether sandboxes have names: in the mode with TLS and a domain.
DOMAIN = "E2B_DOMAIN" in os.environ

needs_live = pytest.mark.skipif(not LIVE, reason="the engine cannot save memory")
needs_domain = pytest.mark.skipif(not DOMAIN, reason="plain HTTP has no names for sandboxes")


@pytest.fixture
def make() -> Iterator[Callable[..., Sandbox]]:
    made: list[Sandbox] = []

    def create(*args: object, **options: object) -> Sandbox:
        options.setdefault("timeout", 120)
        box = Sandbox.create(*args, **options)  # type: ignore[arg-type]
        made.append(box)
        return box

    yield create
    for box in made:
        box.kill()


@pytest.fixture
def box(make: Callable[..., Sandbox]) -> Sandbox:
    return make()


@pytest.fixture(scope="module")
def shared() -> Iterator[Sandbox]:
    """One for tests that leave it as it was."""
    made = Sandbox.create(timeout=600)
    yield made
    made.kill()


@pytest.fixture
def word() -> str:
    return "w" + uuid.uuid4().hex[:12]


def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that comes by itself."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


@pytest.fixture
def resolves() -> None:
    """Names below .localhost: the client resolves them itself, Python's own library does not everywhere."""
    import socket

    real = socket.getaddrinfo

    def getaddrinfo(host: object, *args: object, **options: object) -> object:
        if isinstance(host, str) and host.endswith(".localhost"):
            host = "127.0.0.1"
        return real(host, *args, **options)  # type: ignore[arg-type]

    patch = pytest.MonkeyPatch()
    patch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield  # type: ignore[misc]
    patch.undo()
