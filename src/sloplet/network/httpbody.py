"""Bodies of HTTP/1 messages, taken out of a stream piece by piece and written into another. Pure."""

from __future__ import annotations

import re

from .http1 import CHUNKED, UNTIL_CLOSE, Fields, Malformed, parse_fields

_MAX_LINE = 4096
_MAX_TRAILERS = 16 * 1024
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
#: What a trailer may not say: it would come too late for whoever decided by the head.
_NOT_IN_TRAILERS = frozenset(
    b"host content-length transfer-encoding connection upgrade authorization cookie set-cookie te trailer expect "
    b"content-type content-encoding content-range proxy-authorization keep-alive".split()
)


class Body:
    """One message's body. ``feed`` gives what of it is in these bytes; once ``done``, ``rest`` is what came after."""

    def __init__(self) -> None:
        self.done = False
        self.rest = b""
        self.trailers: Fields = ()

    def feed(self, data: bytes) -> bytes:
        raise NotImplementedError

    def ended(self) -> bool:
        """The stream is over: whether the body is whole."""
        return self.done


class _Counted(Body):
    def __init__(self, length: int) -> None:
        super().__init__()
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes) -> bytes:
        if len(data) < self._left:
            self._left -= len(data)
            return data
        piece, self.rest = data[: self._left], data[self._left :]
        self._left = 0
        self.done = True
        return piece


class _UntilClose(Body):
    def feed(self, data: bytes) -> bytes:
        return data

    def ended(self) -> bool:
        self.done = True
        return True


class _Chunked(Body):
    def __init__(self) -> None:
        super().__init__()
        self._data = b""  # of a line that is not whole
        self._left = 0  # of the current chunk, its CR LF included; 0: a size line is next
        self._trailer_lines: list[bytes] | None = None
        self._trailer_size = 0

    def feed(self, data: bytes) -> bytes:
        data = self._data + data if self._data else data
        at = 0
        pieces: list[bytes] = []
        while not self.done:
            if self._left:
                at = self._chunk(data, at, pieces)
                if self._left:
                    break
            line_end = self._line_end(data, at)
            if line_end < 0:
                break
            self._line(data[at:line_end])
            at = line_end + 2
        self._data = b"" if self.done else data[at:]
        if self.done:
            self.rest = data[at:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _chunk(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Takes of the current chunk what is there."""
        if self._left > 2:
            piece = data[at : at + self._left - 2]
            if piece:
                pieces.append(piece)
            at += len(piece)
            self._left -= len(piece)
        if self._left == 2:
            end = data[at : at + 2]
            if not b"\r\n".startswith(end):
                raise Malformed("a chunk that is longer than it says")
            if len(end) == 2:
                self._left = 0
                at += 2
        return at

    def _line_end(self, data: bytes, at: int) -> int:
        end = data.find(b"\r\n", at, at + _MAX_LINE + 2)
        if b"\n" in (data[at:end] if end >= 0 else data[at : at + _MAX_LINE]):
            raise Malformed("a chunked body with a line that does not end with CR LF")
        if end < 0 and len(data) - at > _MAX_LINE:
            raise Malformed("a chunked body with a line that is too long")
        return end

    def _line(self, line: bytes) -> None:
        if self._trailer_lines is None:
            match = _SIZE.fullmatch(line)
            if match is None:
                raise Malformed("a chunk without a size")
            size = int(match[1], 16)
            if size:
                self._left = size + 2
            else:
                self._trailer_lines = []
        elif line:
            self._trailer_lines.append(line)
            self._trailer_size += len(line)
            if self._trailer_size > _MAX_TRAILERS:
                raise Malformed("trailers that are too long")
        else:
            self.trailers = parse_fields(self._trailer_lines)
            if any(name.lower() in _NOT_IN_TRAILERS for name, _ in self.trailers):
                raise Malformed("a trailer that belongs into the head")
            self.done = True


def body(length: int) -> Body:
    """For a length as ``request_length`` and ``response_length`` give it."""
    if length == CHUNKED:
        return _Chunked()
    return _UntilClose() if length == UNTIL_CLOSE else _Counted(length)


def chunk(data: bytes) -> bytes:
    """As one chunk; nothing for nothing, since an empty chunk is the end."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def last_chunk(trailers: Fields = ()) -> bytes:
    return b"\r\n".join([b"0", *(name + b": " + value for name, value in trailers), b"", b""])
