"""What the tests of the HTTP data plane share: a sandbox on a real server, and clients that misbehave."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.sync.client import ClientConnection, connect

from server_kit import Served


@dataclass
class Box:
    """A sandbox by its name, and the clients to reach it with."""

    server: Served
    name: str
    http: httpx.Client

    @property
    def path(self) -> str:
        return f"/v1/sandboxes/{self.name}"

    @property
    def curl(self) -> list[str]:
        """The beginning of a command line."""
        return ["curl", "-sS", "-N", "--max-time", "60", "-H", f"Authorization: Bearer {self.server.key}"]

    def url(self, rest: str) -> str:
        return f"{self.server.url}{self.path}{rest}"

    def get(self, rest: str, **options: Any) -> httpx.Response:
        return self.http.get(self.path + rest, **options)

    def post(self, rest: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(self.path + rest, json=body, **options)

    def put(self, path: str, content: Any, **query: Any) -> httpx.Response:
        return self.http.put(f"{self.path}/files", params={"path": path, **query}, content=content)

    def read(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(f"{self.path}/files", params={"path": path}, **options)

    def run(self, command: str | list[str], **more: Any) -> dict[str, Any]:
        answer = self.post("/exec", {"command": command, **more})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    @contextmanager
    def events(self, rest: str, body: Any = None, method: str = "POST") -> Iterator[Iterator[tuple[str, Any]]]:
        """Server-sent events, as they come."""
        with self.http.stream(method, self.path + rest, json=body) as answer:
            if answer.status_code != 200:
                answer.read()
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield parsed(answer.iter_lines())

    @contextmanager
    def websocket(self, rest: str, first: Any = None, **options: Any) -> Iterator[ClientConnection]:
        """A WebSocket of the ``websockets`` library."""
        url = self.url(rest).replace("http", "ws", 1)
        headers = {"Authorization": f"Bearer {self.server.key}"}
        with connect(url, additional_headers=headers, proxy=None, open_timeout=30, **options) as made:
            if first is not None:
                made.send(json.dumps(first))
            yield made

    @contextmanager
    def raw(self) -> Iterator[socket.socket]:
        """A connection that says what it likes."""
        where = urlsplit(self.server.url)
        with socket.create_connection((where.hostname, where.port), timeout=60) as made:
            yield made

    def head(self, method: str, rest: str, *more: str) -> bytes:
        """The head of a request for ``raw``."""
        lines = [f"{method} {self.path}{rest} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {self.server.key}"]
        return "\r\n".join([*lines, *more, "", ""]).encode()

    def wait_for_end(self, pid: int) -> dict[str, Any]:
        """How a process ends, whoever follows it; waits for it."""
        with self.events(f"/processes/{pid}/output", method="GET") as told:
            name, data = list(told)[-1]
        assert name == "exit", (name, data)
        found: dict[str, Any] = data
        return found

    def newest(self) -> dict[str, Any]:
        """The process that was started last."""
        found: dict[str, Any] = self.get("/processes").json()["items"][-1]
        return found


def parsed(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ").rstrip()
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@contextmanager
def made(server: Served, name: str, **settings: Any) -> Iterator[Box]:
    """A sandbox for a block."""
    with server.client() as http:
        answer = http.post("/v1/sandboxes", json={"name": name, "engine": "container", **settings})
        assert answer.status_code == 201, answer.text
        try:
            yield Box(server, name, http)
        finally:
            http.delete(f"/v1/sandboxes/{name}")


def peak_memory(pid: int) -> int:
    """Bytes that a process has held at most."""
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
