"""A disk snapshot: the records of CHANGES with contents, one after the other. Contents are found, not loaded."""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import AsyncGenerator, Iterator
from typing import Protocol

from ..errors import FileMissing, ProtocolError, SnapshotDamaged
from ..wire.fields import MAX_RECORD, decode_fields
from ..wire.schema import Tag
from .read import Collector, Listing
from .reading import OldState

_LENGTH = struct.Struct("<I")
_CONTENT = struct.Struct("<HIqHI")  # OFFSET and its value, the head of BODY: what a content record begins with
_ZEROS = bytes(65536)


class Source(Protocol):
    """Where the records are (``segments.Joined``)."""

    @property
    def size(self) -> int: ...

    def read(self, count: int, /) -> bytes: ...

    def skip(self, count: int, /) -> None: ...

    def tell(self) -> int: ...

    def pread(self, count: int, position: int, /) -> bytes: ...


class Contents:
    """Where in a snapshot's file the bytes of each file are: three numbers a piece (offset, position, length)."""

    def __init__(self, file: Source, listing: Listing, places: dict[str, array[int]]) -> None:
        self._file = file
        self._listing = listing
        self._places = places

    def _pieces(self, path: str, most: int) -> Iterator[tuple[int, int, int]]:
        """What to give out: (-1, offset, length) for zeros, (position, offset, length) for bytes."""
        entry = self._listing.entries.get(path)
        if entry is not None and entry.link is not None:
            path, entry = entry.link, self._listing.entries.get(entry.link)
        if entry is None or entry.type != "file":
            raise FileMissing(f"{path}: the snapshot holds no such file")
        end, at = min(entry.size, most), 0
        numbers = iter(self._places.get(path, ()))
        for offset, position, length in zip(numbers, numbers, numbers, strict=True):
            if offset >= end:
                break
            if offset > at:
                yield -1, at, offset - at
            at = min(offset + length, end)
            yield position, offset, at - offset
        if at < end:
            yield -1, at, end - at

    def read_now(self, path: str, most: int) -> Iterator[bytes]:
        """Blocking: for threads."""
        for position, _, length in self._pieces(path, most):
            while length > 0:
                data = _ZEROS[:length] if position < 0 else self._file.pread(min(length, 1 << 18), position)
                if not data:
                    raise _damaged("it ends amid a file")
                position += len(data) if position >= 0 else 0
                yield data
                length -= len(data)

    async def read(self, path: str, most: int) -> AsyncGenerator[bytes, None]:
        for position, _, length in self._pieces(path, most):
            while length > 0:
                count = min(length, len(_ZEROS))
                data = _ZEROS[:count]
                if position >= 0:
                    data = await asyncio.to_thread(self._file.pread, count, position)
                    if not data:
                        raise _damaged("it ends amid a file")
                    position += len(data)
                yield data
                length -= len(data)


async def read_stored(file: Source, *, complete: bool = True, prefix: str = "/") -> OldState:
    """What a snapshot's file tells; it must stay open until the comparison is done. SnapshotDamaged.

    ``file`` is at the first record; ``complete`` and ``prefix`` as when the records were made.
    """
    listing, contents = await asyncio.to_thread(scan, file, complete, prefix)
    return OldState(listing, contents.read)


def scan(file: Source, complete: bool, prefix: str) -> tuple[Listing, Contents]:
    """Blocking. SnapshotDamaged."""
    collector = Collector(complete, prefix)
    places: dict[str, array[int]] = {}
    last: str | None = None
    try:
        while head := file.read(_LENGTH.size):
            if len(head) < _LENGTH.size:
                raise ProtocolError("a record is cut off")
            (length,) = _LENGTH.unpack(head)
            if length > MAX_RECORD:
                raise ProtocolError(f"a record of {length} bytes is over the limit")
            body = file.read(min(length, _CONTENT.size))
            content = _content(body, length)
            if content is not None:
                if last is None:
                    raise ProtocolError("content of no file")
                _place(places.setdefault(last, array("q")), content[0], file.tell(), content[1])
                file.skip(content[1])
                continue
            body += file.read(length - len(body))
            if len(body) < length:
                raise ProtocolError("a record is cut off")
            path = collector.add(decode_fields(body))
            places.pop(path, None)
            last = path if collector.listing.entries[path].type == "file" else None
    except ProtocolError as error:
        raise _damaged(error.message) from error
    if file.tell() > file.size:
        raise _damaged("it ends amid a file")
    return collector.listing, Contents(file, collector.listing, places)


def _content(head: bytes, length: int) -> tuple[int, int] | None:
    """Offset and number of bytes of a content record; None if it is another one."""
    if len(head) < _CONTENT.size:
        return None
    tag, size, offset, body_tag, count = _CONTENT.unpack(head)
    if (tag, size, body_tag) != (Tag.OFFSET, 8, Tag.BODY):
        return None
    if count != length - _CONTENT.size or offset < 0:
        raise ProtocolError("a content record is not what it should be")
    return offset, count


def _place(numbers: array[int], offset: int, position: int, length: int) -> None:
    if numbers and offset < numbers[-3] + numbers[-1]:
        raise ProtocolError("a file's contents are not in order")
    numbers.extend((offset, position, length))


def _damaged(why: str) -> SnapshotDamaged:
    return SnapshotDamaged(f"the snapshot's files cannot be read: {why}", hint="delete it and make another")
