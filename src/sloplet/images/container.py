"""What images come in: a folder, or a tar that is read by position. Names and sizes in it are hostile.

A tar is gone through once (``scan``) with our own reader: what it holds is noted, nothing is unpacked.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from ..errors import ImageInvalid
from ..fs import open_in, write_all
from ..state.home import unwritable
from .decompress import HashedFile, Unpacked
from .extract import UnpackLimits, split_name
from .tarstream import Entry, TarReader

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PIECE = 1 << 20
_MOST_NAMES = 20_000
_DEEPEST = 3  # blobs/sha256/HEX, HEX/layer.tar
_MOST_LINKS = 8
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_PROGRAMS = (b"bin", b"sbin", b"usr")


class Container(Protocol):
    """Where the parts of an image are, by the names that they have there."""

    def small(self, name: str, most: int) -> bytes | None:
        """All of a small part; None if there is none. ImageInvalid above ``most`` bytes."""
        ...

    def part(self, name: str) -> tuple[BinaryIO, int]:
        """A part to be read (and closed), and its size. ImageInvalid if there is none."""
        ...


class FolderContainer:
    """A folder; no link in it is followed. A context manager."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> FolderContainer:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def small(self, name: str, most: int) -> bytes | None:
        try:
            file, size = self._open(name)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return None
            raise _missing(name, error.strerror or str(error)) from error
        with file:
            return _small(file, size, most, name)

    def part(self, name: str) -> tuple[BinaryIO, int]:
        try:
            return self._open(name)
        except OSError as error:
            raise _missing(name, error.strerror or str(error)) from error

    def _open(self, name: str) -> tuple[BinaryIO, int]:
        fd = open_in(self._fd, name, _FILE)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise _missing(name, "it is no file")
        return cast(BinaryIO, os.fdopen(fd, "rb", buffering=0)), info.st_size


@dataclass
class Scan:
    """What was seen of a tar."""

    packing: str = "tar"
    diff_id: str = ""  #: digest of all of it, unpacked
    entries: int = 0
    runnable: bool = False  #: there is a bin, sbin, usr or a program at its top
    members: dict[str, tuple[int, int]] = field(default_factory=dict)  #: files near the top: position and size
    links: dict[str, str] = field(default_factory=dict)  #: others that stand for one of those


def scan(file: BinaryIO, limits: UnpackLimits | None = None) -> Scan:
    """Go through a (packed) tar from its beginning. ImageInvalid for what is wrong with it."""
    limits = limits or UnpackLimits()
    source = _unpacked(file, limits)
    found = Scan(source.packing)
    reader = TarReader(source)
    for entry in reader:
        found.entries += 1
        if found.entries > limits.entries:
            raise ImageInvalid(f"the tar has more than {limits.entries} entries, the limit")
        _note(found, entry, split_name(entry.name, limits), source.count)
    while source.read(_PIECE):
        pass
    found.diff_id = f"sha256:{source.digest}"
    return found


def _note(found: Scan, entry: Entry, parts: tuple[bytes, ...], position: int) -> None:
    if not parts:
        return
    if parts[0] in _PROGRAMS or (len(parts) == 1 and entry.kind == "file" and entry.mode & 0o111):
        found.runnable = True
    if len(parts) > _DEEPEST or len(found.members) + len(found.links) >= _MOST_NAMES:
        return
    name = b"/".join(parts).decode("utf-8", "surrogateescape")
    found.members.pop(name, None)
    found.links.pop(name, None)
    if entry.kind == "file":
        found.members[name] = (position, entry.size)
    elif entry.kind in ("symlink", "hardlink"):
        above = "" if entry.kind == "hardlink" else os.path.dirname(name)
        target = os.path.normpath(os.path.join(above, entry.link.decode("utf-8", "surrogateescape")))
        found.links[name] = target.lstrip("/")


class TarContainer:
    """A tar that was scanned. ``file`` is not packed: positions count."""

    def __init__(self, file: BinaryIO, scanned: Scan) -> None:
        self._file, self._scan = file, scanned

    def small(self, name: str, most: int) -> bytes | None:
        place = self._place(name)
        if place is None:
            return None
        return _small(self._slice(*place), place[1], most, name)

    def part(self, name: str) -> tuple[BinaryIO, int]:
        place = self._place(name)
        if place is None:
            raise _missing(name, "the archive has no such file")
        return self._slice(*place), place[1]

    def _place(self, name: str) -> tuple[int, int] | None:
        for _ in range(_MOST_LINKS):
            if name in self._scan.members:
                return self._scan.members[name]
            name = self._scan.links.get(name, "")
        return None

    def _slice(self, position: int, size: int) -> BinaryIO:
        made: Any = io.BufferedReader(_Slice(self._file.fileno(), position, size), _PIECE)
        return cast(BinaryIO, made)


class _Slice(io.RawIOBase):
    """A stretch of a file; reading it moves nobody else's position."""

    def __init__(self, fd: int, position: int, size: int) -> None:
        self._fd, self._at, self._left = fd, position, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._fd, min(len(buffer), self._left), self._at)
        if not data and self._left and len(buffer):
            raise ImageInvalid("the archive was cut while it was being read", hint="try again")
        buffer[: len(data)] = data
        self._at += len(data)
        self._left -= len(data)
        return len(data)


@contextmanager
def seekable(file: BinaryIO, scanned: Scan, folder: Path, limits: UnpackLimits | None = None) -> Iterator[BinaryIO]:
    """The tar unpacked, to be read by position: the file itself, or a copy without a name in ``folder``."""
    if scanned.packing == "tar":
        yield file
        return
    file.seek(0)
    source = _unpacked(file, limits or UnpackLimits())
    try:
        folder.mkdir(0o700, exist_ok=True)
        copy = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
    except OSError as error:
        raise unwritable(folder, error) from error
    with copy:
        while piece := source.read(_PIECE):
            try:
                write_all(copy.fileno(), piece)
            except OSError as error:
                raise unwritable(folder, error) from error
        yield cast(BinaryIO, copy)


def unpacked_pieces(file: BinaryIO, limits: UnpackLimits | None = None) -> Iterator[bytes]:
    """The bytes of a (packed) tar, unpacked."""
    source = _unpacked(file, limits or UnpackLimits())
    while piece := source.read(_PIECE):
        yield piece


def packing_and_digest(file: BinaryIO, limits: UnpackLimits | None = None) -> tuple[str, str]:
    """What a layer is packed with, and the digest of its tar."""
    source = _unpacked(file, limits or UnpackLimits())
    while source.read(_PIECE):
        pass
    return source.packing, f"sha256:{source.digest}"


def _unpacked(file: BinaryIO, limits: UnpackLimits) -> Unpacked:
    hashed = HashedFile(file, hashing=False)
    return Unpacked(hashed, most=limits.stream, ratio=limits.ratio, ratio_from=limits.ratio_from, hashing=True)


def _small(file: BinaryIO, size: int, most: int, name: str) -> bytes:
    if size > most:
        raise ImageInvalid(f"{name[:100]!r} has {size} bytes; at most {most} are allowed")
    return file.read(size) if size else b""


def _missing(name: str, why: str) -> ImageInvalid:
    return ImageInvalid(f"the image is not whole: {name[:100]!r} cannot be read ({why})")
