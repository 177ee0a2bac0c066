"""The parts of a form, one after the other, as their bytes come: nothing is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from .answers import Refused, refused

_MOST_HEAD = 16 << 10  # bytes of one part's headers


@dataclass
class Part:
    name: str
    filename: str
    data: AsyncIterator[bytes]  #: to be read before the next part is asked for; what is not read is passed over


async def parts_of(body: AsyncIterator[bytes], content_type: str) -> AsyncIterator[Part]:
    reader = _Reader(body, content_type)
    while (headers := await reader.next_part()) is not None:
        name, filename = _named(headers)
        yield Part(name, filename, reader.data())
        async for _ in reader.data():
            pass


class _Reader:
    def __init__(self, body: AsyncIterator[bytes], content_type: str) -> None:
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise refused(400, "error parsing multipart form: no boundary")
        self._body = body
        self._events: deque[tuple[str, Any]] = deque()
        self._ended = False
        self._size = 0
        self._name = b""
        self._value = b""
        self._headers: dict[str, bytes] = {}
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_begin,
                "on_header_field": self._on_field,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header,
                "on_headers_finished": self._on_headers,
                "on_part_data": lambda data, start, end: self._events.append(("data", data[start:end])),
                "on_part_end": lambda: self._events.append(("end", None)),
                "on_end": self._on_end,
            },
        )

    async def next_part(self) -> dict[str, bytes] | None:
        """Its headers; None: there is no more."""
        while True:
            while self._events:
                kind, value = self._events.popleft()
                if kind == "part":
                    return dict(value)
            if not await self._more():
                if not self._ended:
                    raise refused(400, "error parsing multipart form: unexpected EOF")
                return None

    async def data(self) -> AsyncIterator[bytes]:
        """What is left of this part."""
        while True:
            while self._events:
                if self._events[0][0] == "part":
                    return
                kind, value = self._events.popleft()
                if kind == "end":
                    self._events.appendleft(("over", None))
                    return
                if kind == "over":
                    self._events.appendleft(("over", None))
                    return
                yield value
            if not await self._more():
                raise refused(400, "error parsing multipart form: unexpected EOF")

    async def _more(self) -> bool:
        try:
            piece = await anext(self._body)
        except StopAsyncIteration:
            return False
        try:
            self._parser.write(piece)
        except MultipartParseError as error:
            raise refused(400, f"error parsing multipart form: {error}") from None
        return True

    # -- the parser's --------------------------------------------------------------------

    def _on_begin(self) -> None:
        self._headers, self._size = {}, 0

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._check(end - start)

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check(end - start)

    def _check(self, size: int) -> None:
        self._size += size
        if self._size > _MOST_HEAD:
            raise refused(400, "error parsing multipart form: headers are too long")

    def _on_header(self) -> None:
        self._headers[self._name.decode("latin-1").lower()] = self._value
        self._name = self._value = b""

    def _on_headers(self) -> None:
        self._events.append(("part", self._headers))

    def _on_end(self) -> None:
        self._ended = True


def _named(headers: dict[str, bytes]) -> tuple[str, str]:
    """The name of a part, and that of its file, as it was given: with all folders."""
    kind, options = parse_options_header(headers.get("content-disposition", b""))
    if kind != b"form-data":
        raise _unreadable()
    # Browsers and httpx write a quote as %22 and line ends as %0D and %0A, and nothing else so.
    raw = options.get(b"filename", b"")
    for code in (b"%22", b"%0D", b"%0A"):
        raw = raw.replace(code, unquote_to_bytes(code))
    try:
        return options.get(b"name", b"").decode(), raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _unreadable() from None


def _unreadable() -> Refused:
    return refused(400, "error parsing multipart form: a part without a name")
