"""Connect's protocol with JSON: one message for a unary call, envelopes for a stream (E2B's clients speak no other).

An envelope is a byte of flags, four of length, and JSON; the last one of an answer has the flag 2 and says how it
ended.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Receive, Send

from ...errors import SlopletError
from ..incoming import parse_json
from ..settings import MAX_JSON
from .answers import connect_error, dump, rpc_error

STREAM = "application/connect+json"
_HEAD = struct.Struct(">BI")
_END = 2


def envelope(document: Any, flags: int = 0) -> bytes:
    body = dump(document)
    return _HEAD.pack(flags, len(body)) + body


def last(error: SlopletError | None = None) -> bytes:
    return envelope({} if error is None else {"error": connect_error(error)}, _END)


async def body_of(receive: Receive) -> AsyncIterator[bytes]:
    """The pieces of a request's body."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise rpc_error("canceled", "the request has broken off")
        if piece := message.get("body", b""):
            yield piece
        if not message.get("more_body", False):
            return


async def unary(receive: Receive) -> dict[str, Any]:
    """The message of a unary call."""
    body = bytearray()
    async for piece in body_of(receive):
        body += piece
        if len(body) > MAX_JSON:
            raise rpc_error("resource_exhausted", "the message is too long")
    return _message(bytes(body))


async def messages(receive: Receive) -> AsyncIterator[dict[str, Any]]:
    """The messages of a client's stream."""
    waiting = bytearray()
    async for piece in body_of(receive):
        waiting += piece
        while len(waiting) >= _HEAD.size:
            flags, length = _HEAD.unpack_from(waiting)
            if length > MAX_JSON:
                raise rpc_error("resource_exhausted", "the message is too long")
            if flags & ~_END:
                raise rpc_error("internal", "compressed messages are not understood")
            if len(waiting) < _HEAD.size + length:
                break
            body = bytes(waiting[_HEAD.size : _HEAD.size + length])
            del waiting[: _HEAD.size + length]
            if not flags & _END:
                yield _message(body)
    if waiting:
        raise rpc_error("invalid_argument", "the stream has broken off in a message")


async def first(receive: Receive) -> dict[str, Any]:
    """The one message that begins a server's stream."""
    found: dict[str, Any] | None = None
    async for message in messages(receive):
        if found is not None:
            raise rpc_error("unimplemented", "a stream of this call has one message")
        found = message
    if found is None:
        raise rpc_error("unimplemented", "the stream has no message")
    return found


def _message(body: bytes) -> dict[str, Any]:
    try:
        found = parse_json(body) if body else {}
    except SlopletError as error:
        raise rpc_error("invalid_argument", error.message) from None
    if not isinstance(found, dict):
        raise rpc_error("invalid_argument", "the message is no object")
    return found


class Out:
    """A server's stream on its way out: begun by its first message."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def tell(self, document: Any) -> None:
        await self._write(envelope(document))

    async def end(self, error: SlopletError | None = None) -> None:
        await self._write(last(error), more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        if not self.begun:
            self.begun = True
            headers = [(b"content-type", STREAM.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def seconds_of(headers: dict[str, str]) -> float | None:
    """How long the call may take (Connect-Timeout-Ms); None: as long as it takes."""
    text = headers.get("connect-timeout-ms", "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise rpc_error("invalid_argument", f"protocol error: invalid timeout {text[:20]!r}")
    return int(text) / 1000


def keepalive_of(headers: dict[str, str]) -> float:
    """Seconds after which a stream that has nothing to tell says so."""
    text = headers.get("keepalive-ping-interval", "")
    if text.isascii() and text.isdecimal() and 0 < len(text) < 6 and int(text):
        return float(text)
    return 90.0


async def until_gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def either(work: asyncio.Task[None], gone: asyncio.Task[None]) -> None:
    """Until the work is done, or nobody is there for whom it is; it is over then."""
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for each in (work, gone):
            each.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
