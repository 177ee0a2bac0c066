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
from ..images import userns
from ..images.opening import Opener
from . import tarwrite

_BLOCK = 1 << 20
_DEPTH = 256  # as images.unpack takes them
_NODE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
Owners = bool | userns.OwnerMap


def tar(path: str | os.PathLike[str], *, owners: Owners) -> Generator[bytes, None, None]:
    """The tar, in pieces. ``owners``: True: as they are on disk; False: all belong to root, as they seem to inside; a
    function: from those on disk to those inside. ImageError if something cannot be read or changes meanwhile."""
    try:
        root = os.open(path, FOLDER)
    except OSError as error:
        raise _unreadable("/", error) from error
    opener = Opener(root) if callable(owners) and userns.acts_for_others() else None
    try:
        packer = _Packer(os.fstat(root).st_dev, owners, opener)
        yield packer.entry(b"./", os.fstat(root))
        yield from packer.folder(root, b"", 1)
        yield tarwrite.END
    finally:
        if opener is not None:
            opener.close()
        os.close(root)


def measure(path: str | os.PathLike[str], *, owners: Owners) -> tuple[int, str]:
    """How long that tar is, and its sha256."""
    hashed, size = hashlib.sha256(), 0
    for piece in tar(path, owners=owners):
        hashed.update(piece)
        size += len(piece)
    return size, hashed.hexdigest()


class _Packer:
    def __init__(self, device: int, owners: Owners, opener: Opener | None) -> None:
        self._device = device
        self._owners: userns.OwnerMap = owners if callable(owners) else _kept if owners else _roots
        self._opener = opener  # opens what belongs to subordinate ids
        self._first: dict[int, bytes] = {}  # inode with several names -> the first of them

    def folder(self, fd: int, prefix: bytes, depth: int) -> Iterator[bytes]:
        if depth > _DEPTH:
            raise ImageError(f"the image is more than {_DEPTH} folders deep", hint="export it without its image")
        for name in sorted(os.fsencode(entry) for entry in os.listdir(fd)):
            path = prefix + name
            try:
                info = self._lstat(fd, name, path)
                yield from self._one(fd, name, path, info, depth)
            except OSError as error:
                raise _unreadable(os.fsdecode(path), error) from error

    def _one(self, parent: int, name: bytes, path: bytes, info: os.stat_result, depth: int) -> Iterator[bytes]:
        if stat.S_ISDIR(info.st_mode):
            fd = self._open(parent, name, path, FOLDER)
            try:
                info = os.fstat(fd)
                yield self.entry(path + b"/", info)
                if info.st_dev == self._device:
                    yield from self.folder(fd, path + b"/", depth + 1)
            finally:
                os.close(fd)
        elif stat.S_ISLNK(info.st_mode):
            yield self.entry(path, info, link=self._readlink(parent, name, path))
        elif stat.S_ISREG(info.st_mode):
            if info.st_nlink > 1 and info.st_dev == self._device:
                if info.st_ino in self._first:
                    yield self.entry(path, info, kind="hardlink", link=self._first[info.st_ino])
                    return
                self._first[info.st_ino] = path
            yield from self._file(parent, name, path)

    def _file(self, parent: int, name: bytes, path: bytes) -> Iterator[bytes]:
        fd = self._open(parent, name, path, FILE)
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

    def _open(self, parent: int, name: bytes, path: bytes, flags: int) -> int:
        try:
            return os.open(name, flags, dir_fd=parent)
        except PermissionError:
            if self._opener is None:
                raise
            return self._opener.open(path, flags)

    def _lstat(self, parent: int, name: bytes, path: bytes) -> os.stat_result:
        try:
            return os.lstat(name, dir_fd=parent)
        except PermissionError:
            fd = self._open(parent, name, path, _NODE)
            try:
                return os.fstat(fd)
            finally:
                os.close(fd)

    def _readlink(self, parent: int, name: bytes, path: bytes) -> bytes:
        try:
            return os.readlink(name, dir_fd=parent)
        except PermissionError:
            fd = self._open(parent, name, path, _NODE)
            try:
                return os.readlink(b"", dir_fd=fd)
            finally:
                os.close(fd)

    def entry(
        self, path: bytes, info: os.stat_result, *, kind: str | None = None, size: int = 0, link: bytes = b""
    ) -> bytes:
        if kind is None:
            kind = "folder" if stat.S_ISDIR(info.st_mode) else "symlink" if stat.S_ISLNK(info.st_mode) else "file"
        uid, gid = self._owners(info.st_uid, info.st_gid)
        return tarwrite.header(
            path, kind=kind, size=size, mode=info.st_mode & 0o1777, uid=uid, gid=gid, mtime_ns=info.st_mtime_ns,
            link=link,
        )  # fmt: skip


def _kept(uid: int, gid: int) -> tuple[int, int]:
    return uid, gid


def _roots(uid: int, gid: int) -> tuple[int, int]:
    return 0, 0


def changed(what: str) -> ImageError:
    return ImageError(f"the image changed while it was being read: {what[:300]!r}", hint="try again")


def _unreadable(path: str, error: OSError) -> ImageError:
    return ImageError(
        f"the image's {path[:300]!r} cannot be read: {error.strerror}", hint="export without the image (image=False)"
    )
