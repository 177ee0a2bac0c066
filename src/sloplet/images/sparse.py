"""Sparse files in tars: which bytes of the file the data in the archive is. GNU's four ways to write that. Pure.

Old GNU headers of type ``S``; in PAX 0.0 and 0.1 the map is in the header, in 1.0 in front of the data. Everything here
raises ValueError with what makes no sense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

NAME = b"GNU.sparse.name"
MAP = b"GNU.sparse.map"
EXTENT_KEYS = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
_MAX_EXTENTS = 100_000
_MAX_SIZE = 2**62


@dataclass(frozen=True)
class Map:
    """``extents``: (offset, length) of what is not a hole, in order. ``size``: of the file."""

    extents: tuple[tuple[int, int], ...]
    size: int

    def checked(self, data: int) -> Map:
        """Itself, if it fits that many bytes of data."""
        at = 0
        for offset, length in self.extents:
            if offset < at:
                raise ValueError("its parts overlap, or are out of order")
            at = offset + length
        if at > self.size:
            raise ValueError(f"a part of it ends at byte {at} of {self.size}")
        if sum(length for _, length in self.extents) != data:
            raise ValueError(f"its parts are not the {data} bytes that are there")
        return self


def old_gnu(header: bytes, more: Callable[[], bytes]) -> Map:
    """From a header of type ``S``; ``more`` gives the block that follows."""
    numbers = _slots(header, 386, 4)
    size, block, flag = _octal(header[483:495]), header, 482
    while block[flag]:
        if len(numbers) > 2 * _MAX_EXTENTS:
            raise ValueError(f"it has more than {_MAX_EXTENTS} parts, the limit")
        block, flag = more(), 504
        numbers += _slots(block, 0, 21)
    return Map(_pairs(numbers), size)


def is_in_data(pax: Mapping[bytes, bytes]) -> bool:
    return pax.get(b"GNU.sparse.major") == b"1"


def in_header(pax: Mapping[bytes, bytes]) -> Map:
    """PAX 0.0 and 0.1."""
    if pax.get(b"GNU.sparse.major", b"0") != b"0":
        raise ValueError("it is of an unknown format")
    size = pax.get(b"GNU.sparse.size", pax.get(b"GNU.sparse.realsize"))
    if size is None:
        raise ValueError("it does not say how large it is")
    words = pax[MAP].split(b",") if pax.get(MAP) else []
    if len(words) > 2 * _MAX_EXTENTS:
        raise ValueError(f"it has more than {_MAX_EXTENTS} parts, the limit")
    numbers = [_decimal(word) for word in words]
    if b"GNU.sparse.numblocks" in pax and len(numbers) != 2 * _decimal(pax[b"GNU.sparse.numblocks"]):
        raise ValueError("it has not as many parts as it says")
    return Map(_pairs(numbers), _decimal(size))


def in_data(pax: Mapping[bytes, bytes], block: Callable[[], bytes]) -> Map:
    """PAX 1.0; ``block`` gives the next 512 bytes of the data."""
    if pax.get(b"GNU.sparse.minor") != b"0":
        raise ValueError("it is of an unknown format")
    if b"GNU.sparse.realsize" not in pax:
        raise ValueError("it does not say how large it is")
    text = _Lines(block)
    count = text.number()
    if count > _MAX_EXTENTS:
        raise ValueError(f"it has more than {_MAX_EXTENTS} parts, the limit")
    numbers = [text.number() for _ in range(2 * count)]
    return Map(_pairs(numbers), _decimal(pax[b"GNU.sparse.realsize"]))


class _Lines:
    """Numbers, one a line."""

    def __init__(self, block: Callable[[], bytes]) -> None:
        self._block = block
        self._text = b""

    def number(self) -> int:
        while b"\n" not in self._text:
            if len(self._text) > 64:
                raise ValueError("its map is no list of numbers")
            self._text += self._block()
        line, _, self._text = self._text.partition(b"\n")
        return _decimal(line)


def _slots(block: bytes, at: int, count: int) -> list[int]:
    found = []
    for start in range(at, at + 24 * count, 24):
        if not block[start + 12 : start + 24].strip(b"\0 "):
            break  # unused
        found += [_octal(block[start : start + 12]), _octal(block[start + 12 : start + 24])]
    return found


def _pairs(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    if len(numbers) % 2:
        raise ValueError("its map has an odd number of numbers")
    return tuple((numbers[at], numbers[at + 1]) for at in range(0, len(numbers), 2))


def _octal(raw: bytes) -> int:
    if raw[0] & 0x80:
        value = int.from_bytes(bytes([raw[0] & 0x7F]) + raw[1:], "big")
    else:
        digits = raw.split(b"\0", 1)[0].strip(b" ")
        if digits.strip(b"01234567"):
            raise ValueError("its map has something that is no number")
        value = int(digits or b"0", 8)
    return _bounded(value)


def _decimal(raw: bytes) -> int:
    if not raw.isdigit() or len(raw) > 20:
        raise ValueError("its map has something that is no number")
    return _bounded(int(raw))


def _bounded(value: int) -> int:
    if value > _MAX_SIZE:
        raise ValueError("it has a number that no file reaches")
    return value
