"""Answers that are held in memory before they are sent: how much of that there may be at a time.

A command's output is kept until its end and then waits for a client who may never read it. Each request says how much
it wants kept at most (``max_output``); so much is set aside while it is under way, and who would take too much is told
before anything runs. Large outputs become JSON piece by piece, as they are sent: it can be six times as long.
"""

from __future__ import annotations

import base64
import codecs
import json
import os
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import RateLimited
from .streams import ClientGone, while_connected

HELD_KEY = "sloplet.held"  #: in the scope: what the guard gives back when the request is over
_LEAST, _MOST = 512 << 20, 4 << 30  # bytes
_PIECE = 48 << 10  # of three: base64 in pieces is base64 of the whole
_SMALL = 64 << 10


def room_here() -> int:
    """A quarter of this machine's memory, within reason."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return _LEAST
    return max(_LEAST, min(_MOST, memory // 4))


class Outputs:
    """One per server, in its loop. ``most`` bytes in all, and half of that for one tenant."""

    def __init__(self, most: int | None = None) -> None:
        self.most = room_here() if most is None else most
        self.held: dict[str, int] = {}

    def hold(self, scope: Scope, tenant: str, size: int) -> None:
        """Set aside until the request is over. RateLimited."""
        mine, all_ = self.held.get(tenant, 0), sum(self.held.values())
        if size > _SMALL and (mine + size > self.most // 2 or all_ + size > self.most):
            raise RateLimited(
                f"answers that are under way may hold {mine >> 20} MiB already, and this one {size >> 20} MiB more",
                hint="ask for less (max_output), read answers sooner, or use .../exec/stream, which holds nothing",
                retry_after=1,
            )
        self.held[tenant] = mine + size
        scope.setdefault(HELD_KEY, []).append((self, tenant, size))

    def give_back(self, tenant: str, size: int) -> None:
        left = self.held.get(tenant, 0) - size
        if left > 0:
            self.held[tenant] = left
        else:
            self.held.pop(tenant, None)


def let_go(scope: Scope) -> None:
    """The request is over."""
    for outputs, tenant, size in scope.pop(HELD_KEY, ()):
        outputs.give_back(tenant, size)


class WrittenAnswer(Response):
    """A JSON object some of whose texts are long: they are written as they are sent."""

    def __init__(self, document: dict[str, Any], texts: dict[str, bytes], *, as_base64: bool) -> None:
        self.status_code, self.background = 200, None
        self.raw_headers = [(b"content-type", b"application/json")]
        self._document, self._texts, self._as_base64 = document, texts, as_base64

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await while_connected(receive, self._pour(send))
        except ClientGone:
            pass

    async def _pour(self, send: Send) -> None:
        for piece in self._pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _pieces(self) -> Iterator[bytes]:
        yield json.dumps(self._document, separators=(",", ":")).encode()[:-1]
        for name, data in self._texts.items():
            yield b"," * bool(self._document) + json.dumps(name).encode() + b':"'
            yield from in_base64(data) if self._as_base64 else in_text(data)
            yield b'"'
        yield b"}"


def in_base64(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), _PIECE):
        yield base64.b64encode(data[at : at + _PIECE])


def in_text(data: bytes) -> Iterator[bytes]:
    """As JSON has it between quotes; what is no UTF-8 is U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for at in range(0, len(data), _PIECE):
        text = decoder.decode(data[at : at + _PIECE], at + _PIECE >= len(data))
        yield json.dumps(text, ensure_ascii=False)[1:-1].encode()
