"""A root filesystem in a folder as a tar: the same bytes for the same files, however often and wherever it is made.

By descriptors, never by path; other filesystems mounted in the folder are left out, as they are in the sandbox. What
``images.unpack`` would leave out (device nodes, sockets, setuid bits, extended attributes) is left out here already,
so that what was unpacked makes the same tar again.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Generator, Iterator

from ..errors import ImageError
from ..fs import FILE, FOLDER
from . import tarwrite

_BLOCK = 1 << 20
_DEPTH = 256  # as images.unpack takes them


def tar(path: str | os.PathLike[str], *, owners: bool) -> Generator[bytes, None, None]:
    """The tar, in pieces. ``owners`` False: all belong to root, as they seem to inside. ImageError if something cannot
    be read or changes meanwhile."""
    try:
        root = os.open(path, FOLDER)
    except OSError as error:
        raise _unreadable("/", error) from error
    try:
        packer = _Packer(os.fstat(root).st_dev, owners)
        yield packer.entry(b"./", os.fstat(root))
        yield from packer.folder(root, b"", 1)
        yield tarwrite.END
    finally:
        os.close(root)


def measure(path: str | os.PathLike[str], *, owners: bool) -> tuple[int, str]:
    """How long that tar is, and its sha256."""
    hashed, size = hashlib.sha256(), 0
    for piece in tar(path, owners=owners):
        hashed.update(piece)
        size += len(piece)
    return size, hashed.hexdigest()


class _Packer:
    def __init__(self, device: int, owners: bool) -> None:
        self._device = device
        self._owners = owners
        self._first: dict[int, bytes] = {}  # inode with several names -> the first of them

    def folder(self, fd: int, prefix: bytes, depth: int) -> Iterator[bytes]:
        if depth > _DEPTH:
            raise ImageError(f"the image is more than {_DEPTH} folders deep", hint="export it without its image")
        for name in sorted(os.fsencode(entry) for entry in os.listdir(fd)):
            path = prefix + name
            try:
                info = os.lstat(name, dir_fd=fd)
                yield from self._one(fd, name, path, info, depth)
            except OSError as error:
                raise _unreadable(os.fsdecode(path), error) from error

    def _one(self, parent: int, name: bytes, path: bytes, info: os.stat_result, depth: int) -> Iterator[bytes]:
        if stat.S_ISDIR(info.st_mode):
            fd = os.open(name, FOLDER, dir_fd=parent)
            try:
                info = os.fstat(fd)
                yield self.entry(path + b"/", info)
                if info.st_dev == self._device:
                    yield from self.folder(fd, path + b"/", depth + 1)
            finally:
                os.close(fd)
        elif stat.S_ISLNK(info.st_mode):
            yield self.entry(path, info, link=os.readlink(name, dir_fd=parent))
        elif stat.S_ISREG(info.st_mode):
            if info.st_nlink > 1 and info.st_dev == self._device:
                if info.st_ino in self._first:
                    yield self.entry(path, info, kind="hardlink", link=self._first[info.st_ino])
                    return
                self._first[info.st_ino] = path
            yield from self._file(parent, name, path)

    def _file(self, parent: int, name: bytes, path: bytes) -> Iterator[bytes]:
        fd = os.open(name, FILE, dir_fd=parent)
        try:
            info = os.fstat(fd)
            yield self.entry(path, info, size=info.st_size)
            left = info.st_size
            while left:
                piece = os.read(fd, min(left, _BLOCK))
                if not piece:
                    raise changed(os.fsdecode(path))
                left -= len(piece)
                yield piece
            yield tarwrite.padding(info.st_size)
        finally:
            os.close(fd)

    def entry(
        self, path: bytes, info: os.stat_result, *, kind: str | None = None, size: int = 0, link: bytes = b""
    ) -> bytes:
        if kind is None:
            kind = "folder" if stat.S_ISDIR(info.st_mode) else "symlink" if stat.S_ISLNK(info.st_mode) else "file"
        return tarwrite.header(
            path, kind=kind, size=size, mode=info.st_mode & 0o1777, uid=info.st_uid if self._owners else 0,
            gid=info.st_gid if self._owners else 0, mtime_ns=info.st_mtime_ns, link=link,
        )  # fmt: skip


def changed(what: str) -> ImageError:
    return ImageError(f"the image changed while it was being read: {what[:300]!r}", hint="try again")


def _unreadable(path: str, error: OSError) -> ImageError:
    return ImageError(
        f"the image's {path[:300]!r} cannot be read: {error.strerror}", hint="export without the image (image=False)"
    )
