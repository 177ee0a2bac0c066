"""Bounds on connections: heads that never end, idle ones, too many, bodies that nobody wants. uvicorn in this process,
with times that tests can wait for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from raw_http import answer_on
from sloplet.server import protocol
from sloplet.server.metrics import Metrics, Text
from sloplet.server.protocol import Door

pytestmark = pytest.mark.anyone


class Running:
    """A server that answers 200 to /, and refuses to read the body of /refused."""

    def __init__(self, most: int) -> None:
        self.metrics = Metrics()
        self.door = Door(most, self.metrics)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        http: Any = self.door.protocol
        config = uvicorn.Config(
            self.app, http=http, interface="asgi3", lifespan="off", log_config=None, access_log=False
        )
        self.server = uvicorn.Server(config)
        self.release = threading.Event()
        self.links: list[socket.socket] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([listener])))
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/wait":
            while not self.release.is_set():
                await asyncio.sleep(0.01)
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    def connect(self) -> socket.socket:
        self.links.append(socket.create_connection(("127.0.0.1", self.port), 10))
        return self.links[-1]

    def get(self, path: str = "/") -> int:
        with self.connect() as link:
            link.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            return answer_on(link).status

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.release.set()
        self.server.should_exit = True
        self._thread.join(20)


@contextlib.contextmanager
def running(most: int = 100) -> Iterator[Running]:
    found = Running(most)
    try:
        yield found
    finally:
        found.close()


def closes(link: socket.socket, seconds: float = 10) -> float:
    """How long it took until the other side had enough."""
    began = time.monotonic()
    link.settimeout(seconds)
    try:
        while link.recv(65536):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - began


def test_a_connection_that_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with running() as server, server.connect() as link:
        assert closes(link) < 5
        assert server.metrics.timed_out == 1
        assert server.get() == 200


def test_a_head_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slowloris: a byte now and then keeps nothing open."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    with running() as server, server.connect() as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 10:
                link.sendall(b"a: b\r\n")
                time.sleep(0.05)
        assert time.monotonic() - began < 5


def test_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 0.6)
    with running() as server, server.connect() as link:
        for _ in range(3):
            link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer_on(link).status == 200
            time.sleep(0.4)  # longer than for a head, shorter than between two
        assert closes(link) < 5


def test_what_is_being_answered_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 0.2)
    with running() as server, server.connect() as link:
        link.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.6)
        server.release.set()
        assert answer_on(link).status == 200


def test_pipelined_requests_are_all_answered() -> None:
    with running() as server, server.connect() as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        data = b""
        while data.count(b"HTTP/1.1 200") < 3:
            piece = link.recv(65536)
            assert piece
            data += piece
        deadline = time.monotonic() + 10
        while len(server.door.idle) != 1:  # it rests, as after a single one
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_longest_idle_makes_room() -> None:
    with running(most=3) as server:
        idle = [server.connect() for _ in range(3)]
        while len(server.door.idle) < 3:
            time.sleep(0.01)
        assert server.get() == 200
        assert closes(idle[0]) < 5
        for link in idle[1:]:
            link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer_on(link).status == 200
            link.close()
        idle[0].close()


def test_when_all_are_busy_the_next_is_told() -> None:
    with running(most=2) as server:
        busy = [server.connect() for _ in range(2)]
        for link in busy:
            link.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        deadline = time.monotonic() + 10
        while server.metrics.connections < 2 or server.door.idle:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with server.connect() as link:
            refused = answer_on(link)
        assert refused.status == 503
        assert refused.headers["retry-after"] == "2"
        assert refused.json()["error"] == "ServerBusy"
        server.release.set()
        for link in busy:
            assert answer_on(link).status == 200
            link.close()
        while server.get() != 200:  # until the two are gone
            assert time.monotonic() < deadline


def test_a_body_that_nobody_wants_is_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.5)
    with running() as server:
        with server.connect() as link:  # it ends in time: the connection can be used again
            link.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n")
            assert answer_on(link).status == 200
            link.sendall(b"a" * 4_000_000)
            link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer_on(link).status == 200
        with server.connect() as link:  # it does not
            link.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n")
            assert answer_on(link).status == 200
            assert closes(link) < 5


def test_targets_that_are_no_path() -> None:
    with running() as server:
        for target in (b"http://evil/", b"*", b"evil:80", b"//evil"):
            with server.connect() as link:
                link.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                assert answer_on(link).status == (200 if target == b"//evil" else 400)


def test_prometheus_text() -> None:
    text = Text()
    text.add("x", "gauge", "Help.", [({"a": 'b"c\\d\ne'}, 1.0), ({}, 0.5)])
    metrics = Metrics()
    for seconds in (0.0005, 0.003, 100):
        metrics.answered("GET", "/r", 200, seconds)
    text.histogram("h", "Help.", metrics.seconds)
    lines = str(text).splitlines()
    assert 'x{a="b\\"c\\\\d\\ne"} 1' in lines
    assert "x 0.5" in lines
    assert 'h_bucket{route="/r",le="0.001"} 1' in lines
    assert 'h_bucket{route="/r",le="0.005"} 2' in lines
    assert 'h_bucket{route="/r",le="30.0"} 2' in lines
    assert 'h_bucket{route="/r",le="+Inf"} 3' in lines
    assert 'h_count{route="/r"} 3' in lines
    assert 'h_sum{route="/r"} 100.0035' in lines
