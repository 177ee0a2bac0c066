"""HTTP by hand, for requests that no client would send: bytes to a server, and the answers that came back."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from select import select
from typing import Any
from urllib.parse import urlsplit

QUIET = 5.0  #: seconds in which an answer has to come, or it will not


_addresses = count()


def strangers() -> str:
    """An address of this machine's that nobody has come from before: wrong keys from one are answered slower."""
    number = next(_addresses)
    return f"127.77.{number // 250 % 250 + 1}.{number % 250 + 1}"


@dataclass
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class Raw:
    """One connection. A server that closes it is no error: what it sent before is what counts."""

    def __init__(self, url: str, timeout: float = QUIET, source: str | None = None) -> None:
        where = urlsplit(url)
        assert where.hostname is not None
        self.host = where.netloc
        came = (source or strangers(), 0)
        self._socket = socket.create_connection((where.hostname, where.port), timeout=timeout, source_address=came)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> bool:
        """Whether all of it was taken."""
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def send_end(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def pour(self, piece: bytes, most: int) -> int:
        """Send it again and again until the server says something, or closes; how many bytes that took."""
        sent = 0
        while sent < most and not select([self._socket], [], [], 0)[0] and self.send(piece):
            sent += len(piece)
        return sent

    def rest(self, stop: bytes | None = None) -> bytes:
        """All that comes until the server closes, says nothing for a while, or has said ``stop``."""
        found = b""
        with suppress(OSError):
            while stop is None or stop not in found:
                piece = self._socket.recv(1 << 16)
                if not piece:
                    break
                found += piece
        return found

    def closed(self) -> bool:
        """Whether the server has closed, or does so in time."""
        with suppress(ConnectionError):
            try:
                while self._socket.recv(1 << 16):
                    pass
            except TimeoutError:
                return False
        return True

    def answers(self) -> list[Answer]:
        """Every answer on this connection until it is quiet."""
        return parse(self.rest())

    def answer(self, *, head: bool = False) -> Answer | None:
        """The next one. None: the server closed without a word. ``head``: it was asked for without its body."""
        reader = self._socket.makefile("rb")
        with suppress(OSError):
            lines = b""
            while not lines.endswith(b"\r\n\r\n"):
                line = reader.readline(1 << 16)
                if not line:
                    return None
                lines += line
            found = _head(lines)
            if not head:
                found.body = reader.read(int(found.headers.get("content-length", "0")))
            return found
        return None


def request(
    method: str,
    target: str,
    host: str,
    headers: Iterable[tuple[str, str]] = (),
    body: bytes | None = None,
    *,
    key: str = "",
) -> bytes:
    """A plain request; ``body``: with its Content-Length, unless a header says something else."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    given = list(headers)
    lines += [f"{name}: {value}" for name, value in given]
    said = {name.casefold() for name, _ in given}
    if body is not None and not said & {"content-length", "transfer-encoding"}:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + (body or b"")


def parse(data: bytes) -> list[Answer]:
    """Answers with a Content-Length, or in chunks, one after the other."""
    found = []
    while data.startswith(b"HTTP/"):
        head, mark, data = data.partition(b"\r\n\r\n")
        if not mark:
            break
        answer = _head(head)
        if answer.headers.get("transfer-encoding") == "chunked":
            answer.body, data = _chunks(data)
        else:
            length = int(answer.headers.get("content-length", "0"))
            answer.body, data = data[:length], data[length:]
        found.append(answer)
    return found


def _head(data: bytes) -> Answer:
    first, *lines = data.decode("latin-1").strip().split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return Answer(int(first.split()[1]), {name.lower(): value.strip() for name, value in pairs})


def _chunks(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, mark, data = data.partition(b"\r\n")
        if not mark or not size or int(size, 16) == 0:
            return body, data.partition(b"\r\n")[2]
        length = int(size, 16)
        body, data = body + data[:length], data[length + 2 :]
