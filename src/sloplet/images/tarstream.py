"""Reading a tar as a stream of entries: ustar, GNU long names, PAX, sparse files. Pure parsing, every length bounded.

Own code because the standard library's reader takes a header's word for how much memory to use, and
decodes names. Here names stay the bytes they are. What a tar of files has no need of (multi-volume archives) is
refused by name, never reinterpreted.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import ImageInvalid
from . import sparse

BLOCK = 512
MAX_PATH = 4096
_MAX_LONG_NAME = 64 * 1024
_MAX_PAX = 2**20
_MAX_EXTENSIONS = 16  # extension headers in front of one entry
_ZEROS = bytes(BLOCK)
_TIME_RE = re.compile(rb"(-?)(\d{1,19})(?:\.(\d{0,40}))?\Z")
_XATTR = b"SCHILY.xattr."
_SPARSE = b"GNU.sparse."

_KINDS = {
    b"0": "file", b"\0": "file", b"7": "file", b"S": "file", b"1": "hardlink", b"2": "symlink", b"3": "device",
    b"4": "device", b"5": "folder", b"6": "fifo", b"D": "folder",
}  # fmt: skip
_PLAIN_KINDS = {ord(letter): kind for letter, kind in _KINDS.items() if letter not in (b"7", b"S", b"D")}
_NO_XATTRS: Mapping[bytes, bytes] = {}


class Source(Protocol):
    """Where the (uncompressed) bytes come from: up to ``size`` of them, none only at the end."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(slots=True)
class Entry:
    """One member. ``name`` and ``link`` are bytes as they stand in the archive."""

    name: bytes
    kind: str  #: file, folder, symlink, hardlink, device, fifo
    mode: int
    uid: int
    gid: int
    size: int  #: bytes of data that follow
    mtime_ns: int  #: since the epoch, exactly: a saved state knows the files below it by their times
    link: bytes
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)  #: extended attributes, by full name
    sparse: sparse.Map | None = None  #: where the data belongs; None: it is the file


class TarReader:
    """Entries in order; after each, ``data()`` may be used once, what is not read is skipped.

    ``may_end``: it may end behind any member's data, without padding and without the blocks of zeros that mark the end
    (layers of ``umoci insert`` do). For tars whose digest is known: of others it would hide that they were cut.
    """

    def __init__(self, source: Source, *, may_end: bool = False) -> None:
        self._source = source
        self._may_end = may_end
        self._left = 0  # bytes of the current member's data not yet read
        self._padding = 0

    def __iter__(self) -> Iterator[Entry]:
        while True:
            block = self._exactly(BLOCK, may_end=self._may_end)
            entry = self._plain(block)
            if entry is None:
                if not self._begins(block):
                    return
                entry = self._entry(block)
            if entry is not None:
                yield entry
            if self._left or self._padding:
                for _ in self.data():
                    pass

    def data(self, chunk: int = 1 << 20) -> Iterator[bytes]:
        """The current member's data in pieces."""
        while self._left:
            piece = self._source.read(min(chunk, self._left))
            if not piece:
                raise ImageInvalid("the tar is cut short: it ends inside of a file")
            self._left -= len(piece)
            yield piece
        if self._padding:
            padding, self._padding = self._padding, 0
            self._exactly(padding, may_end=self._may_end)

    def _plain(self, block: bytes) -> Entry | None:
        """A member that needs no second look, as nearly all are; None for all others, and what is wrong."""
        kind = _PLAIN_KINDS.get(block[156]) if block else None
        if kind is None:
            return None
        # the bytes behind the numbers are NUL or space, each of them
        ends = block[107] | block[115] | block[123] | block[135] | block[147]
        digits = block[100:107] + block[108:115] + block[116:123] + block[124:135] + block[136:147] + block[148:154]
        if ends & ~0x20 or not digits.isdigit() or (block[345] and block[257:263] == b"ustar\0"):
            return None
        try:
            # Adler-32's lower half is one more than the sum of the bytes modulo 65521: fifty times faster than a sum.
            wanted = int(digits[43:], 8) - 8 * 32 + sum(block[148:156]) + 1
            if wanted % 65521 != zlib.adler32(block) & 0xFFFF:
                return None
            size = int(digits[21:32], 8)
            mode, uid, gid = int(digits[:7], 8) & 0o7777, int(digits[7:14], 8), int(digits[14:21], 8)
            moment = int(digits[32:43], 8) * 10**9
        except ValueError:  # 8 and 9 are digits, too
            return None
        name = block[:100].partition(b"\0")[0]
        if kind == "file" and name[-1:] == b"/":
            return None
        link = block[157:257].partition(b"\0")[0] if kind in ("symlink", "hardlink") else b""
        self._left, self._padding = size, -size % BLOCK
        return Entry(name, kind, mode, uid, gid, size, moment, link, _NO_XATTRS)

    def _header(self) -> bytes | None:
        block = self._exactly(BLOCK, may_end=self._may_end)
        return block if self._begins(block) else None

    def _begins(self, block: bytes) -> bool:
        """False at the end: a second block of zeros follows, or should."""
        if not block or block == _ZEROS:
            return False
        stored = _number(block[148:156], "checksum")
        if stored != sum(block) - sum(block[148:156]) + 8 * 32:
            raise ImageInvalid("the tar is damaged, or not a tar at all: a header's checksum is wrong")
        self._begin_data(_number(block[124:136], "size"))
        return True

    def _begin_data(self, size: int) -> None:
        self._left = size
        self._padding = -size % BLOCK

    def _exactly(self, count: int, *, may_end: bool = False) -> bytes:
        """``may_end``: or nothing."""
        piece = self._source.read(count)
        if len(piece) == count:
            return piece
        if may_end and not piece:
            return b""
        parts = []
        while True:
            if not piece:
                raise ImageInvalid("the tar is cut short: its end is missing")
            parts.append(piece)
            count -= len(piece)
            if not count:
                return b"".join(parts)
            piece = self._source.read(count)

    def _whole(self, most: int, what: str) -> bytes:
        if self._left > most:
            raise ImageInvalid(f"the tar has {what} of {self._left} bytes; at most {most} are allowed")
        return b"".join(self.data())

    def _entry(self, block: bytes) -> Entry | None:
        """The member that begins with ``block``, its extension headers read and applied. None for volume labels."""
        name: bytes | None = None
        link: bytes | None = None
        pax: dict[bytes, bytes] = {}
        for _ in range(_MAX_EXTENSIONS):
            kind = block[156:157]
            if kind == b"L":
                name = self._whole(_MAX_LONG_NAME, "a name").rstrip(b"\0")
            elif kind == b"K":
                link = self._whole(_MAX_LONG_NAME, "a link").rstrip(b"\0")
            elif kind in (b"x", b"X"):
                pax.update(_pax_records(self._whole(_MAX_PAX, "a PAX header")))
            elif kind == b"g":
                self._whole(_MAX_PAX, "a global PAX header")  # comments; per-file facts do not belong there
            else:
                break
            following = self._header()
            if following is None:
                raise ImageInvalid("the tar ends after an extension header")
            block = following
        else:
            raise ImageInvalid(f"the tar has more than {_MAX_EXTENSIONS} extension headers in a row")
        return self._member(block, name, link, pax)

    def _member(self, block: bytes, name: bytes | None, link: bytes | None, pax: dict[bytes, bytes]) -> Entry | None:
        if name is None:
            name = _text(block[:100])
            if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):
                name = prefix + b"/" + name
        letter = block[156:157]
        if letter == b"V":
            return None
        if pax:
            name = pax.get(sparse.NAME, pax.get(b"path", name))
            link = pax.get(b"linkpath", link)
            if b"size" in pax:
                self._begin_data(_decimal(pax[b"size"], "size"))
        kind = _KINDS.get(letter)
        if kind is None:
            what = "a part of a multi-volume archive" if letter == b"M" else f"of an unknown type {letter!r}"
            raise ImageInvalid(f"{show(name)} in the tar is {what}")
        if letter in (b"\0", b"0") and name.endswith(b"/"):
            kind = "folder"  # as tars older than ustar wrote it
        return Entry(
            name,
            kind,
            _number(block[100:108], "mode") & 0o7777,
            _decimal(pax[b"uid"], "uid") if b"uid" in pax else _number(block[108:116], "uid"),
            _decimal(pax[b"gid"], "gid") if b"gid" in pax else _number(block[116:124], "gid"),
            self._left,
            _nanoseconds(pax[b"mtime"]) if b"mtime" in pax else _number(block[136:148], "mtime", signed=True) * 10**9,
            _text(block[157:257]) if link is None else link,
            {key[len(_XATTR) :]: value for key, value in pax.items() if key.startswith(_XATTR)} if pax else _NO_XATTRS,
            self._sparse(block, letter, kind, pax, name),
        )

    def _sparse(
        self, block: bytes, letter: bytes, kind: str, pax: Mapping[bytes, bytes], name: bytes
    ) -> sparse.Map | None:
        if letter != b"S" and not any(key.startswith(_SPARSE) for key in pax):
            return None
        try:
            if kind != "file":
                raise ValueError("only a file can be")
            if letter == b"S":
                found = sparse.old_gnu(block, lambda: self._exactly(BLOCK))
            elif sparse.is_in_data(pax):
                found = sparse.in_data(pax, self._block_of_data)
            else:
                found = sparse.in_header(pax)
            return found.checked(self._left)
        except ValueError as error:
            raise ImageInvalid(
                f"{show(name)} in the tar says that it is sparse, which makes no sense: {error}"
            ) from None

    def _block_of_data(self) -> bytes:
        if self._left < BLOCK:
            raise ValueError("its map is cut short")
        self._left -= BLOCK
        return self._exactly(BLOCK)


def show(name: bytes) -> str:
    """A name from the archive, fit for a message."""
    text = name.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 120 else text[:117] + "...")


def _text(raw: bytes) -> bytes:
    end = raw.find(b"\0")
    return raw if end < 0 else raw[:end]


def _number(raw: bytes, what: str, *, signed: bool = False) -> int:
    """Octal text, or GNU's base-256 where the first bit is set."""
    digits = raw.rstrip(b"\0 ")
    if digits.isdigit() and b"8" not in digits and b"9" not in digits:  # as nearly all are
        return int(digits, 8)
    if raw[0] & 0x80:
        value = int.from_bytes(raw, "big", signed=False) & ((1 << (8 * len(raw) - 1)) - 1)
        if raw[0] & 0x40:
            value -= 1 << (8 * len(raw) - 1)
    else:
        digits = raw.split(b"\0", 1)[0].strip(b" ")
        if digits.strip(b"01234567"):
            raise ImageInvalid(f"the tar is damaged, or not a tar at all: a header's {what} is no number")
        value = int(digits or b"0", 8)
    if value < 0 and not signed:
        raise ImageInvalid(f"the tar has a header with a negative {what}")
    return value


def _decimal(raw: bytes, what: str) -> int:
    if not raw.isdigit() or len(raw) > 20:
        raise ImageInvalid(f"the tar has a PAX header with {what}={raw[:40]!r}")
    return int(raw)


def _nanoseconds(raw: bytes) -> int:
    """PAX writes decimals; what is finer than a nanosecond is cut off."""
    match = _TIME_RE.match(raw)
    if match is None:
        raise ImageInvalid(f"the tar has a PAX header with mtime={raw[:40]!r}")
    sign, seconds, fraction = match.groups()
    value = int(seconds) * 10**9 + int((fraction or b"")[:9].ljust(9, b"0"))
    return -value if sign else value


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """``LENGTH KEY=VALUE\\n`` records; LENGTH counts the whole record. The last of several of a key counts, but for the
    extents of a sparse file, which come as a record each and are all of them needed."""
    records: dict[bytes, bytes] = {}
    extents: list[bytes] = []
    at = 0
    while at < len(data) and data[at : at + 1] != b"\0":
        space = data.find(b" ", at, at + 12)
        length = int(data[at:space]) if space > at and data[at:space].isdigit() else 0
        record = data[space + 1 : at + length]
        if length < space - at + 4 or at + length > len(data) or not record.endswith(b"\n") or b"=" not in record:
            raise ImageInvalid("the tar has a damaged PAX header")
        key, value = record[:-1].split(b"=", 1)
        if key in sparse.EXTENT_KEYS:
            extents.append(value)
        records[key] = value
        at += length
    if extents:
        records[sparse.MAP] = b",".join(extents)
    return records
