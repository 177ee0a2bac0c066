"""What a file of bytes is packed with, told by its first bytes, and unpacked as a bounded stream.

Counts both sides, so that a bomb is stopped by its ratio, and hashes what is read of the file.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from typing import Any, BinaryIO

from ..errors import ImageInvalid

_XZ_MEMORY = 256 * 2**20  # `xz -9` needs 65 MiB; a header may claim 4 GiB
_ZSTD_WINDOW = 128 * 2**20


class HashedFile(io.RawIOBase):
    """Reads a file, counting and hashing every byte of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._hash.update(data)
        self.count += len(data)
        return len(data)

    def finish(self) -> str:
        """Read what nobody asked for and return the digest of the whole file, as hex."""
        while data := self._file.read(1 << 20):
            self._hash.update(data)
            self.count += len(data)
        return self._hash.hexdigest()


class Unpacked:
    """The uncompressed bytes of a file, with ``count`` of them so far; stops above ``most`` bytes or ``ratio``."""

    def __init__(self, file: HashedFile, *, most: int, ratio: int, ratio_from: int) -> None:
        buffered: Any = io.BufferedReader(file, 1 << 18)
        self.packing, self._stream = _stream(buffered)
        self._file = file
        self._most, self._ratio, self._ratio_from = most, ratio, ratio_from
        self.count = 0

    def read(self, size: int, /) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except EOFError:
            raise ImageInvalid(f"the {self.packing} data is cut short") from None
        except (OSError, zlib.error, ValueError) as error:  # BadGzipFile is an OSError without a number
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
        return data


def _stream(file: Any) -> tuple[str, Any]:
    head = file.peek(6)[:6]
    if head.startswith(b"\x1f\x8b"):
        import gzip

        return "gzip", gzip.GzipFile(fileobj=file, mode="rb")
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
