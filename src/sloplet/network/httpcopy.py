"""One HTTP body on its way from one side to the other: searched, swapped, framed anew; held whole only if short."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from . import httpbody
from .needles import Replacer, Scanner

Read = Callable[[], Awaitable[bytes]]
Write = Callable[[bytes], Awaitable[None]]


class Cut(OSError):
    """A message that ended before its end."""


async def whole(length: int, rest: bytes, read: Read) -> tuple[bytes, bytes]:
    """A body of that many bytes, and what came after it."""
    body = httpbody.body(length)
    pieces = [body.feed(rest)]
    while not body.done:
        data = await read()
        if not data:
            raise Cut("a message that ended in its body")
        pieces.append(body.feed(data))
    return b"".join(pieces), body.rest


class Copy:
    """Takes one body from one side to the other."""

    def __init__(
        self, body: httpbody.Body, scan: Scanner | None, swap: Replacer | None, chunked: bool, *, trailers: bool
    ) -> None:
        """``trailers``: whether they go along. A request's do not: a server may take them for headers, which were
        judged before anybody knew them."""
        self.whole = False  #: all of it has been read, and its end is on its way
        self._trailers = trailers
        self._body = body
        self._scan = scan
        self._swap = swap
        self._chunked = chunked

    async def run(self, head: bytes, rest: bytes, read: Read, write: Write) -> bytes:
        """Writes the head and all of the body; gives what came after it. The head goes with what is there of the body,
        and without waiting for more."""
        body = self._body
        if body.done:
            self.whole = True
            await write(head)
            return rest
        out = head + self._passed(body.feed(rest)) if rest else head
        while not body.done:
            if out:
                await write(out)
            data = await read()
            if not data:
                if not body.ended():
                    raise Cut("a message that ended in its body")
                out = b""
                break
            out = self._passed(body.feed(data))
        self.whole = True
        await write(out + self._last())
        return body.rest

    def _passed(self, piece: bytes) -> bytes:
        if self._scan is not None:
            piece = self._scan.feed(piece)
        if self._swap is not None:
            piece = self._swap.feed(piece)
        return httpbody.chunk(piece) if self._chunked else piece

    def _last(self) -> bytes:
        piece = self._swap.finish() if self._swap is not None else b""
        if not self._chunked:
            return piece
        return httpbody.chunk(piece) + httpbody.last_chunk(self._body.trailers if self._trailers else ())
