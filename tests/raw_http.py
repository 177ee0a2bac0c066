"""Requests as no library would send them: bytes in, the status and the body out."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit


class Answer:
    def __init__(self, head: bytes, body: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.body = body

    def json(self) -> Any:
        return json.loads(self.body)


def connected(url: str, timeout: float = 20.0) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), timeout)


def exchange(url: str, data: bytes, timeout: float = 20.0) -> Answer:
    """Send these bytes on a connection of their own; the first answer. ConnectionError if there is none."""
    with connected(url, timeout) as link:
        link.sendall(data)
        return answer_on(link)


def answer_on(link: socket.socket) -> Answer:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = link.recv(65536)
        if not piece:
            raise ConnectionError(f"no answer: {data!r}")
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    found = Answer(head, b"")
    length = int(found.headers.get("content-length", "0"))
    while len(body) < length:
        piece = link.recv(65536)
        if not piece:
            break
        body += piece
    found.body = body
    return found


def request(
    path: str = "/v1/me",
    method: str = "GET",
    headers: dict[str, str] | None = None,
    *,
    key: str = "",
    body: bytes = b"",
) -> bytes:
    """One, with a Host that is right unless ``headers`` has another."""
    lines = {"Host": "localhost", **({"Authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
    if body and "Content-Length" not in lines and "Transfer-Encoding" not in lines:
        lines["Content-Length"] = str(len(body))
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode("latin-1") + b"\r\n" + body
