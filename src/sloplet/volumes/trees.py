"""Copies of folders, by descriptors. What is in them is a sandbox's, and hostile: no link is followed, nothing special
is opened, and depth is bounded by nothing but the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import VolumeError
from ..fs import FILE, FOLDER, NEW_FILE, open_in

_FICLONE = 0x40049409
_PIECE = 1 << 20


class _Level:
    """A folder being copied, and what is still to be copied of it."""

    def __init__(self, name: str, info: os.stat_result) -> None:
        self.name = name
        self.info = info
        self.folders: list[str] = []


class Copy:
    """One copy, from a folder to another that is empty; both descriptors stay the caller's. Raises OSError.

    Owners are kept where we may set them, modes without setuid and setgid of files, times, the caller's own extended
    attributes, hard links within the tree; sockets and devices are left out. Where the disk can share blocks nothing is
    copied twice.
    """

    def __init__(self, *, owners: bool = True, plain: bool = False) -> None:
        """``plain``: nothing but files, folders and links, with nothing but permission bits."""
        self.files = self.bytes = 0
        self.skipped = 0
        self._owners, self._plain = owners, plain
        self._levels: list[_Level] = []
        self._root = -1
        self._links: dict[tuple[int, int], str] = {}  # of files with several names: the first one's copy
        self._shares = True

    def run(self, source: int, target: int) -> None:
        self._root = target
        here, there = os.dup(source), os.dup(target)
        try:
            self._enter("", here, there)
            while True:
                level = self._levels[-1]
                if level.folders:
                    name = level.folders.pop()
                    os.mkdir(name, 0o700, dir_fd=there)
                    with self._told(name):
                        here = _onward(here, open_in(here, name, FOLDER, cross_mounts=False))
                    there = _onward(there, open_in(there, name, FOLDER))
                    self._enter(name, here, there)
                    continue
                self._finish(there, level.info)
                self._levels.pop()
                if not self._levels:
                    return
                here, there = _onward(here, _up(here)), _onward(there, _up(there))
                if not os.path.samestat(os.fstat(here), self._levels[-1].info):
                    raise OSError(errno.EXDEV, "it was moved while it was being copied")
        finally:
            os.close(here)
            os.close(there)

    def _enter(self, name: str, here: int, there: int) -> None:
        self._levels.append(_Level(name, os.fstat(here)))
        self._levels[-1].folders = self._content(here, there)

    def _content(self, here: int, there: int) -> list[str]:
        """Copy what is no folder; the names of those that are."""
        folders = []
        with os.scandir(here) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    folders.append(entry.name)
                elif stat.S_ISREG(info.st_mode):
                    self._file(here, there, entry.name, info)
                elif stat.S_ISLNK(info.st_mode):
                    os.symlink(os.readlink(entry.name, dir_fd=here), entry.name, dir_fd=there)
                    self._own(there, entry.name, info)
                    self.files += 1
                elif stat.S_ISFIFO(info.st_mode) and not self._plain:
                    os.mkfifo(entry.name, stat.S_IMODE(info.st_mode) & 0o777, dir_fd=there)
                    self._own(there, entry.name, info)
                else:
                    self.skipped += 1
        return folders

    def _file(self, here: int, there: int, name: str, info: os.stat_result) -> None:
        key = (info.st_dev, info.st_ino)
        known = self._links.get(key) if info.st_nlink > 1 else None
        if known is not None:
            with suppress(OSError):  # too deep to be named: it becomes a file of its own
                os.link(known, name, src_dir_fd=self._root, dst_dir_fd=there, follow_symlinks=False)
                return
        with self._told(name):
            source = open_in(here, name, FILE)
        try:
            target = os.open(name, NEW_FILE, 0o600, dir_fd=there)
            try:
                self._bytes(source, target)
                _copy_attributes(source, target)
                self._finish(target, os.fstat(source))
            finally:
                os.close(target)
        finally:
            os.close(source)
        self.files += 1
        self.bytes += info.st_size
        if info.st_nlink > 1:
            self._links[key] = self._path(name)

    def _path(self, name: str) -> str:
        return "/".join([*(level.name for level in self._levels[1:]), name])

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Which of many files cannot be read."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {self._path(name)[-200:]!r}") from error

    def _bytes(self, source: int, target: int) -> None:
        if self._shares:
            try:
                fcntl.ioctl(target, _FICLONE, source)
                return
            except OSError:
                self._shares = False
        copy_sparse(source, target)

    def _own(self, folder: int, name: str, info: os.stat_result) -> None:
        if self._owners:
            os.chown(name, info.st_uid, info.st_gid, dir_fd=folder, follow_symlinks=False)

    def _finish(self, fd: int, info: os.stat_result) -> None:
        if self._owners:
            os.fchown(fd, info.st_uid, info.st_gid)
        kept = 0o7777 if stat.S_ISDIR(info.st_mode) else 0o1777
        os.fchmod(fd, info.st_mode & (0o777 if self._plain else kept))
        os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))


def copy_sparse(source: int, target: int) -> None:
    """The bytes of a file, with its holes."""
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(source, at, os.SEEK_HOLE)
        os.lseek(source, at, os.SEEK_SET)
        os.lseek(target, at, os.SEEK_SET)
        while at < end:
            moved = os.sendfile(target, source, None, min(_PIECE, end - at))
            if moved == 0:
                return  # it has become shorter
            at += moved


def copy_file(source: int, target: int) -> None:
    """The same, shared where the disk can."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        copy_sparse(source, target)


def usage(folder: int) -> int:
    """Bytes on the disk of all that is in a folder; what cannot be read, or named in 4096 bytes, counts nothing. Each
    file once."""
    total = 0
    seen: set[tuple[int, int]] = set()
    todo = ["."]
    while todo:
        path = todo.pop()
        try:
            fd = open_in(folder, path, FOLDER, cross_mounts=False)
        except OSError:
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(info.st_mode):
                        todo.append(f"{path}/{entry.name}")
                    elif info.st_nlink > 1:
                        if (info.st_dev, info.st_ino) in seen:
                            continue
                        seen.add((info.st_dev, info.st_ino))
                    total += info.st_blocks * 512
        except OSError:
            pass
        finally:
            os.close(fd)
    return total


def failed(what: str, error: OSError) -> VolumeError:
    hints = {
        errno.ENOSPC: "the disk is full; nothing was left half there",
        errno.EDQUOT: "your disk quota is used up; nothing was left half there",
        errno.EACCES: "it may belong to another user, of this machine or of the sandbox that wrote it",
        errno.EPERM: "it may belong to another user, of this machine or of the sandbox that wrote it",
    }
    return VolumeError(f"{what}: {error.strerror or error}", hint=hints.get(error.errno or 0))


def _up(fd: int) -> int:
    return os.open("..", FOLDER, dir_fd=fd)


def _onward(old: int, new: int) -> int:
    os.close(old)
    return new


def _copy_attributes(source: int, target: int) -> None:
    with suppress(OSError):
        for name in os.listxattr(source):
            if name.startswith("user."):
                os.setxattr(target, name, os.getxattr(source, name))
