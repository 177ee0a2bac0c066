"""A file of a sandbox as an HTTP answer: ranges, validators, bytes as they come.

The bytes pass in the pieces that the wire brings, each written as it is. The next piece is asked for when the client
has taken the last ones, so a client that does not read costs one window of the wire (256 KiB).
"""

from __future__ import annotations

import json
import re
from email.utils import formatdate, parsedate_to_datetime
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..controller import Controller, Stream
from ..errors import FileError, RequestInvalid, SlopletError
from ..files import file_info
from ..wire.fields import Fields
from ..wire.mux import request
from ..wire.schema import Op, Tag
from .problems import MEDIA_TYPE as PROBLEM_TYPE
from .problems import problem
from .streams import ClientGone, broke_off, while_connected

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")
AT_ONCE = 64 << 10  #: a file up to here is read before the answer begins, so what it says of its size need not be true


class Part(NamedTuple):
    """Which bytes: ``start``, and where they end (behind the last). ``whole``: no range was asked for."""

    start: int
    end: int
    whole: bool


class Facts(NamedTuple):
    """What the headers tell."""

    size: int
    mtime_ns: int
    kind: int

    @staticmethod
    def of(fields: Fields) -> Facts:
        file_info(fields, name="")  # ProtocolError if something is missing
        return Facts(max(0, fields.integer(Tag.SIZE)), fields.integer(Tag.MTIME_NS), fields.integer(Tag.TYPE))

    @property
    def etag(self) -> str:
        return f'"{self.mtime_ns & (2**64 - 1):x}-{self.size:x}"'

    @property
    def modified(self) -> str:
        return formatdate(min(max(0, self.mtime_ns // 10**9), 2**36), usegmt=True)

    def headers(self) -> dict[str, str]:
        return {
            "etag": self.etag,
            "last-modified": self.modified,
            "accept-ranges": "bytes",
            "content-type": "application/octet-stream",
            "x-content-type-options": "nosniff",
            "cache-control": "no-cache",
        }


def wanted(headers: Headers, facts: Facts) -> Part | None:
    """The part that a request asks for; None: one that the file does not have (416). Pure. What is no range of bytes,
    or several of them, means the whole file, as HTTP has it."""
    whole = Part(0, facts.size, True)
    match = _RANGE.match(headers.get("range", ""))
    if match is None or not any(match.groups()) or not _still(headers.get("if-range"), facts):
        return whole
    first, last = match.groups()
    if not first:
        length = min(int(last), facts.size)
        return Part(facts.size - length, facts.size, False) if length else None
    start, end = int(first), min(int(last) + 1 if last else facts.size, facts.size)
    if last and int(last) < int(first):
        return whole
    return Part(start, end, False) if start < facts.size else None


def _still(given: str | None, facts: Facts) -> bool:
    """Whether the file is the one that ``If-Range`` means."""
    return given is None or given.strip() in (facts.etag, facts.modified)


def unchanged(headers: Headers, facts: Facts) -> bool:
    """Whether the client has it already (304). Pure."""
    if (known := headers.get("if-none-match")) is not None:
        tags = [tag.strip().removeprefix("W/") for tag in known.split(",")]
        return "*" in tags or facts.etag in tags
    if (since := headers.get("if-modified-since")) is not None:
        try:
            return facts.mtime_ns // 10**9 <= parsedate_to_datetime(since).timestamp()
        except (ValueError, TypeError, OverflowError):
            return False
    return False


def is_conditional(headers: Headers) -> bool:
    return any(name in headers for name in ("range", "if-none-match", "if-modified-since"))


async def answer(controller: Controller, sandbox: str, path: str, user: str | None, headers: Headers) -> Response:
    """The answer to GET. FileError."""
    if not is_conditional(headers):
        stream = await controller.open(sandbox, read_request(path, user))
        try:
            facts = Facts.of(await stream.started())
            return await _FileAnswer.begin(stream, facts, Part(0, facts.size, True))
        except BaseException:
            stream.reset()
            raise
    facts = await look(controller, sandbox, path, user)
    if unchanged(headers, facts):
        kept = facts.headers()
        del kept["content-type"]
        return Response(status_code=304, headers=kept)
    part = wanted(headers, facts)
    if part is None:
        return _not_there(facts)
    stream = await controller.open(sandbox, read_request(path, user, part.start, part.end - part.start))
    try:
        now = Facts.of(await stream.started())
        part = part._replace(end=min(part.end, now.size))
        if not part.whole and part.start >= part.end:  # it has become shorter
            stream.reset()
            return _not_there(now)
        return await _FileAnswer.begin(stream, now, part)
    except BaseException:
        stream.reset()
        raise


def _not_there(facts: Facts) -> Response:
    document = {**problem(RequestInvalid(f"the file has no such part: it has {facts.size} bytes")), "status": 416}
    headers = {"content-range": f"bytes */{facts.size}", "etag": facts.etag}
    return Response(json.dumps(document), 416, headers, PROBLEM_TYPE)


async def look(controller: Controller, sandbox: str, path: str, user: str | None) -> Facts:
    """What GET would tell; the same errors, too."""
    stream = await controller.open(sandbox, read_request(path, user, 0, 0))
    try:
        return Facts.of(await stream.started())
    finally:
        stream.reset()


def read_request(path: str, user: str | None, start: int = 0, length: int | None = None) -> Fields:
    fields = request(Op.READ, (Tag.PATH, path))
    if user is not None:
        fields.add(Tag.USER, user)
    if start:
        fields.add(Tag.OFFSET, start)
    if length is not None:
        fields.add(Tag.LENGTH, length)
    return fields


class _FileAnswer(Response):
    """A part of a file, from a stream that has begun. ``first`` was read already; ``length`` None: until it ends."""

    def __init__(self, stream: Stream, facts: Facts, part: Part, first: bytes, length: int | None) -> None:
        self._stream = stream
        self._first = first
        self._length = length
        headers = facts.headers()
        if length is not None:
            headers["content-length"] = str(length)
            if not part.whole:
                headers["content-range"] = f"bytes {part.start}-{part.start + length - 1}/{facts.size}"
        self.status_code = 200 if part.whole else 206
        self.raw_headers = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
        self.background = None

    @classmethod
    async def begin(cls, stream: Stream, facts: Facts, part: Part) -> _FileAnswer:
        """Reads small files first: the kernel's own (/proc, /sys) are of another size than they say."""
        length = part.end - part.start
        if length > AT_ONCE:
            return cls(stream, facts, part, b"", length)
        data, whole = await beginning(stream)
        return cls(stream, facts, part, data, len(data) if whole else None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._length == len(self._first):
                await send({"type": "http.response.body", "body": self._first, "more_body": False})
            else:
                await while_connected(receive, self._pour(send))
        except ClientGone:
            pass
        except SlopletError as error:
            broke_off(scope, error)
        finally:
            self._stream.reset()

    async def _pour(self, send: Send) -> None:
        """An answer that breaks off is not completed: the client sees that bytes are missing."""
        recv, left = self._stream.recv, 1 << 62 if self._length is None else self._length
        if self._first:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
        while left:
            piece = await recv()
            if piece is None:
                await self._stream.result()
                break
            data = piece.data if len(piece.data) <= left else piece.data[:left]
            left -= len(data)
            await send({"type": "http.response.body", "body": data, "more_body": left > 0})
        if self._length is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif left:
            raise FileError("the file has become shorter while it was read")


async def beginning(stream: Stream) -> tuple[bytes, bool]:
    """All of a small file, or what there is of a larger one by now; whether it is all."""
    parts: list[bytes] = []
    size = 0
    while size <= AT_ONCE:
        piece = await stream.recv()
        if piece is None:
            await stream.result()
            return b"".join(parts), True
        parts.append(piece.data)
        size += len(piece.data)
    return b"".join(parts), False
