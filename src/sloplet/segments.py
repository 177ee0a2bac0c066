"""A long stream of records, kept in pieces that snapshots share.

It is cut where its content says (at some file names, and before large files), so that what is the same in the next
snapshot is cut the same way and comes out as the same pieces: a hard link, or a clone, instead of a copy. An index
lists the pieces by digest and length.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress

from .errors import ProtocolError, SnapshotDamaged
from .fs import write_all
from .wire.fields import MAX_RECORD, decode_fields
from .wire.schema import Tag

INDEX = "changes"
_LENGTH = struct.Struct("<I")
_TAG = struct.Struct("<H")
_LEAST = 128 << 10  # a piece that is not the last has at least this,
_MOST = 2 << 20  # and at most this and one record
_OFTEN = 8  # one name in so many may end a piece
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW

#: Puts the file ``o-SHA256`` of that many bytes into the folder without writing it; False if it cannot.
Share = Callable[[str, int], bool]


class Writer:
    """Takes the stream as it comes and fills a folder, given as a descriptor. Raises OSError, ProtocolError."""

    def __init__(self, folder: int, share: Share) -> None:
        self._folder = folder
        self._share = share
        self._rest = bytearray()  # less than a record
        self._piece = bytearray()
        self._index: list[str] = []
        self._known: set[str] = set()
        self.shared = 0  #: bytes that needed no writing

    def feed(self, data: bytes) -> None:
        self._rest += data
        at = 0
        while len(self._rest) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest, at)
            if length > MAX_RECORD:
                raise ProtocolError(f"a record of {length} bytes is over the limit")
            end = at + _LENGTH.size + length
            if len(self._rest) < end:
                break
            if self._ends_before(bytes(self._rest[at + _LENGTH.size : end])):
                self._cut()
            self._piece += self._rest[at:end]
            at = end
        del self._rest[:at]

    def finish(self) -> None:
        if self._rest:
            raise ProtocolError("a record is cut off")
        self._cut()
        fd = os.open(INDEX, _WRITE, 0o600, dir_fd=self._folder)
        try:
            write_all(fd, "".join(self._index).encode())
        finally:
            os.close(fd)

    def _ends_before(self, record: bytes) -> bool:
        size = len(self._piece)
        if size >= _MOST:
            return True
        if not record or len(record) < _TAG.size or _TAG.unpack_from(record)[0] == Tag.OFFSET:
            return False  # content goes on
        entry = decode_fields(record)
        if entry.integer(Tag.SIZE, 0) >= _MOST:
            return True  # a large file is cut from its beginning: wherever it stands, in the same places
        return size >= _LEAST and zlib.crc32(entry.raw(Tag.NAME, b"")) % _OFTEN == 0

    def _cut(self) -> None:
        if not self._piece:
            return
        name, size = f"o-{hashlib.sha256(self._piece).hexdigest()}", len(self._piece)
        if name in self._known or self._share(name, size):
            self.shared += size
        else:
            fd = os.open(name, _WRITE, 0o600, dir_fd=self._folder)
            try:
                write_all(fd, bytes(self._piece))
            finally:
                os.close(fd)
        self._known.add(name)
        self._index.append(f"{name} {size}\n")
        self._piece = bytearray()


class Joined:
    """The stream again, as one read-only file. Raises SnapshotDamaged where the index makes no sense."""

    def __init__(self, folder: int) -> None:
        self._fds: dict[str, int] = {}
        self._pieces: list[tuple[int, int, int]] = []  # start, end, descriptor
        self._at = self._size = 0
        self._last = 0  # the piece that was read last
        try:
            for line in _read_small(folder, INDEX).decode("ascii").splitlines():
                name, _, length = line.partition(" ")
                self._add(folder, name, int(length))
        except (OSError, ValueError) as error:
            self.close()
            raise SnapshotDamaged(f"the snapshot's files cannot be read: {error}") from error

    def _add(self, folder: int, name: str, length: int) -> None:
        if name not in self._fds:
            self._fds[name] = os.open(name, _READ, dir_fd=folder)
        if length <= 0 or os.fstat(self._fds[name]).st_size != length:
            raise ValueError(f"{name} is not of {length} bytes")
        self._pieces.append((self._size, self._size + length, self._fds[name]))
        self._size += length

    @property
    def size(self) -> int:
        return self._size

    def pread(self, count: int, position: int) -> bytes:
        """Up to ``count`` bytes; fewer where a piece ends, none at the end."""
        if not 0 <= position < self.size:
            return b""
        start, end, fd = self._piece(position)
        return os.pread(fd, min(count, end - position), position - start)

    def _piece(self, position: int) -> tuple[int, int, int]:
        low, high = 0, len(self._pieces) - 1
        if self._pieces[self._last][0] <= position:
            low = self._last
        while low < high:
            middle = (low + high + 1) // 2
            if self._pieces[middle][0] <= position:
                low = middle
            else:
                high = middle - 1
        self._last = low
        return self._pieces[low]

    def read(self, count: int) -> bytes:
        parts = []
        while count > 0 and (data := self.pread(count, self._at)):
            parts.append(data)
            self._at += len(data)
            count -= len(data)
        return b"".join(parts)

    def skip(self, count: int) -> None:
        self._at += count

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        for fd in self._fds.values():
            with suppress(OSError):
                os.close(fd)
        self._fds = {}

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_small(folder: int, name: str) -> bytes:
    fd = os.open(name, _READ, dir_fd=folder)
    try:
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read()
    finally:
        os.close(fd)
