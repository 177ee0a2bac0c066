"""What a file of bytes is packed with, told by its first bytes, and unpacked as a bounded stream.

Counts both sides, so that a bomb is stopped by its ratio; hashes what is read of the file, and what comes out of it if
asked to. ``Ahead`` does that in a thread of its own, so that it costs whoever writes files no time: reading,
decompressing and hashing all let other threads run.
"""

from __future__ import annotations

import hashlib
import io
import queue
import threading
import zlib
from contextlib import suppress
from typing import Any, BinaryIO

from ..errors import ImageInvalid

_XZ_MEMORY = 256 * 2**20  # `xz -9` needs 65 MiB; a header may claim 4 GiB
_ZSTD_WINDOW = 128 * 2**20
_PACKED_PIECE = 1 << 18
_GZIP_PIECE = 1 << 15
_PIECE = 1 << 20
_PIECES_AHEAD = 4


class HashedFile(io.RawIOBase):
    """Reads a file, counting every byte of it, and hashing it unless told otherwise."""

    def __init__(self, file: BinaryIO, *, hashing: bool = True) -> None:
        self._file = file
        self._readinto = getattr(file, "readinto", None)
        self._hash = hashlib.sha256() if hashing else None
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._readinto is None:
            data = self._file.read(len(buffer))
            buffer[: len(data)] = data
            self._seen(data)
            return len(data)
        count = self._readinto(buffer)
        if count:
            self._seen(memoryview(buffer)[:count])
        return count or 0

    def finish(self) -> str:
        """Read what nobody asked for and return the digest of the whole file, as hex ("" without hashing)."""
        while data := self._file.read(1 << 20):
            self._seen(data)
        return "" if self._hash is None else self._hash.hexdigest()

    def _seen(self, data: bytes | memoryview) -> None:
        if self._hash is not None:
            self._hash.update(data)
        self.count += len(data)


class Unpacked:
    """The uncompressed bytes of a file, with ``count`` of them so far; stops above ``most`` bytes or ``ratio``."""

    def __init__(self, file: HashedFile, *, most: int, ratio: int, ratio_from: int, hashing: bool = False) -> None:
        buffered: Any = io.BufferedReader(file, _PACKED_PIECE)
        self.packing, self._stream = _stream(buffered)
        self._file = file
        self._most, self._ratio, self._ratio_from = most, ratio, ratio_from
        self._hash = hashlib.sha256() if hashing else None
        self.count = 0

    @property
    def digest(self) -> str:
        """Of what came out so far, as hex."""
        return "" if self._hash is None else self._hash.hexdigest()

    def read(self, size: int, /) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except EOFError:
            raise ImageInvalid(f"the {self.packing} data is cut short") from None
        except (OSError, zlib.error, ValueError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            raise ImageInvalid(f"the {self.packing} data is damaged: {error}") from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] in ("_lzma", "lzma", "zstd", "zstandard"):
                raise ImageInvalid(f"the {self.packing} data is damaged: {error}") from error
            raise
        self.count += len(data)
        if self.count > self._most:
            raise ImageInvalid(f"it unpacks to more than {self._most} bytes, the limit for an image")
        if self.count > self._ratio_from and self.count > self._ratio * self._file.count:
            raise ImageInvalid(f"it unpacks to more than {self._ratio} times its size, the limit: a bomb, it seems")
        if self._hash is not None:
            self._hash.update(data)
        return data


class Ahead:
    """Reads ``source`` ahead in a thread. A context manager: the thread has ended when it has been left."""

    def __init__(self, source: Unpacked) -> None:
        self._source = source
        self._pieces: queue.Queue[bytes | BaseException] = queue.Queue(_PIECES_AHEAD)
        self._piece, self._at = b"", 0
        self._over = False
        self._thread = threading.Thread(target=self._work, name="sloplet-unpack", daemon=True)

    def __enter__(self) -> Ahead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._pieces.get_nowait()
            self._thread.join(0.001)

    def _work(self) -> None:
        try:
            while not self._over:
                piece = self._source.read(_PIECE)
                self._pieces.put(piece)
                if not piece:
                    return
        except BaseException as error:
            self._pieces.put(error)

    def read(self, size: int, /) -> bytes:
        """Up to ``size`` bytes, none only at the end."""
        at, piece = self._at, self._piece
        if at >= len(piece):
            if self._over:
                return b""
            found = self._pieces.get()
            if isinstance(found, BaseException):
                self._over = True
                raise found
            self._over = not found
            self._piece = piece = found
            at = 0
        self._at = at + size
        return piece[at : at + size]


def _stream(file: Any) -> tuple[str, Any]:
    head = file.peek(6)[:6]
    if head.startswith(b"\x1f\x8b"):
        return "gzip", _Gzip(file)
    if head.startswith(b"\xfd7zXZ\0"):
        import lzma

        return "xz", _Streams(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY))
    if head.startswith(b"BZh"):
        import bz2

        return "bzip2", _Streams(file, bz2.BZ2Decompressor)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        import zstandard

        unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        return "zstd", unpacker.stream_reader(file, read_across_frames=True)
    return "tar", file


class _Gzip:
    """One or more gzip members in a row; zlib checks their sums. In small pieces: what follows a member is copied, and
    a layer may be thousands of members."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._unpacker = zlib.decompressobj(31)
        self._packed = b""

    def read(self, size: int) -> bytes:
        while True:
            if self._unpacker.eof:
                rest = self._unpacker.unused_data.lstrip(b"\0") or self._file.read1(_GZIP_PIECE).lstrip(b"\0")
                if not rest:
                    return b""
                self._unpacker, self._packed = zlib.decompressobj(31), rest
            over = False
            if not self._packed:
                self._packed = self._file.read1(_GZIP_PIECE)
                over = not self._packed
            data = self._unpacker.decompress(self._packed, size)
            self._packed = self._unpacker.unconsumed_tail
            if data:
                return data
            if over and not self._unpacker.eof:
                raise EOFError


class _Streams:
    """One or more xz or bzip2 streams in a row, of which at most what was asked for is in memory."""

    def __init__(self, file: Any, make: Any) -> None:
        self._file, self._make = file, make
        self._unpacker = make()

    def read(self, size: int) -> bytes:
        while True:
            if self._unpacker.eof:
                rest = self._unpacker.unused_data.lstrip(b"\0") or self._file.read1(1 << 16).lstrip(b"\0")
                if not rest:
                    return b""
                self._unpacker = self._make()
                data: bytes = self._unpacker.decompress(rest, size)
            else:
                packed = self._file.read1(1 << 16) if self._unpacker.needs_input else b""
                if not packed and self._unpacker.needs_input:
                    raise EOFError
                data = self._unpacker.decompress(packed, size)
            if data:
                return data
