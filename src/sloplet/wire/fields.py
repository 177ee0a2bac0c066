"""Fields: the tagged values inside frames (docs/wire.md). Pure; every input is taken as hostile."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ..errors import ProtocolError, SpecError
from .schema import INTEGER_TAGS, Tag

_HEAD = struct.Struct("<HI")
_INT = struct.Struct("<q")
_LEN = struct.Struct("<I")

Value = int | bytes | str


class Fields:
    """An ordered multimap of tag to int or bytes. ``Fields((Tag.OP, 1), (Tag.ARGV, b"ls"))``."""

    __slots__ = ("_items",)

    def __init__(self, *items: tuple[Tag, Value]) -> None:
        self._items: list[tuple[Tag, int | bytes]] = []
        for tag, value in items:
            self.add(tag, value)

    def add(self, tag: Tag, value: Value) -> Fields:
        if isinstance(value, str):
            try:
                value = value.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:
                raise SpecError(f"{value[:80]!r} is not text that can be written as UTF-8") from None
        if isinstance(value, int) != (tag in INTEGER_TAGS):
            raise TypeError(f"{tag!r} does not take {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise SpecError(f"{tag.name.lower()}={value} is out of range")
        self._items.append((tag, value))
        return self

    def __iter__(self) -> Iterator[tuple[Tag, int | bytes]]:
        return iter(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fields) and self._items == other._items

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Fields(" + ", ".join(f"{tag.name}={value!r}" for tag, value in self._items) + ")"

    def __contains__(self, tag: Tag) -> bool:
        return any(t is tag for t, _ in self._items)

    def integer(self, tag: Tag, default: int | None = None) -> int:
        """The first value of an integer tag. Missing without a default is the peer's fault."""
        for t, value in self._items:
            if t is tag and isinstance(value, int):
                return value
        if default is None:
            raise ProtocolError(f"the answer lacks its field {tag.name}")
        return default

    def raw(self, tag: Tag, default: bytes | None = None) -> bytes:
        for t, value in self._items:
            if t is tag and isinstance(value, bytes):
                return value
        if default is None:
            raise ProtocolError(f"the answer lacks its field {tag.name}")
        return default

    def text(self, tag: Tag, default: str | None = None) -> str:
        return self.raw(tag, None if default is None else default.encode()).decode("utf-8", "surrogateescape")

    def all(self, tag: Tag) -> list[bytes]:
        return [value for t, value in self._items if t is tag and isinstance(value, bytes)]

    def encode(self) -> bytes:
        parts: list[bytes] = []
        for tag, value in self._items:
            body = _INT.pack(value) if isinstance(value, int) else value
            parts.append(_HEAD.pack(tag, len(body)))
            parts.append(body)
        return b"".join(parts)


def decode_fields(payload: bytes | memoryview) -> Fields:
    """Parse a payload. ProtocolError on anything that is not exactly a sequence of known fields."""
    fields = Fields()
    view = memoryview(payload)
    at, end = 0, len(view)
    while at < end:
        if end - at < _HEAD.size:
            raise ProtocolError("a field header is cut off")
        number, length = _HEAD.unpack_from(view, at)
        at += _HEAD.size
        if length > end - at:
            raise ProtocolError("a field is longer than its frame")
        body = bytes(view[at : at + length])
        at += length
        try:
            tag = Tag(number)
        except ValueError:
            raise ProtocolError(f"unknown field tag {number}") from None
        if tag in INTEGER_TAGS:
            if length != _INT.size:
                raise ProtocolError(f"field {tag.name} is not an integer")
            fields._items.append((tag, _INT.unpack(body)[0]))
        else:
            fields._items.append((tag, body))
    return fields


MAX_RECORD = 65532


class RecordDecoder:
    """Turns the bytes of a list answer into its records; holds at most one unfinished record."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Fields]:
        self._buffer += data
        records: list[Fields] = []
        at = 0
        while len(self._buffer) - at >= _LEN.size:
            (length,) = _LEN.unpack_from(self._buffer, at)
            if length > MAX_RECORD:
                raise ProtocolError(f"a record of {length} bytes is over the limit")
            if len(self._buffer) - at - _LEN.size < length:
                break
            start = at + _LEN.size
            records.append(decode_fields(bytes(self._buffer[start : start + length])))
            at = start + length
        del self._buffer[:at]
        return records

    def finish(self) -> None:
        if self._buffer:
            raise ProtocolError("a record is cut off")


def encode_record(fields: Fields) -> bytes:
    body = fields.encode()
    return _LEN.pack(len(body)) + body
