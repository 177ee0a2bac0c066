"""Unpacking a tar of a root filesystem into an empty folder that it can never reach out of.

The archive is hostile. Every path is opened below the target's descriptor with symlinks resolved as
if the target were ``/`` (legal images write through ``lib -> usr/lib``), every file is made anew
and exclusively, nothing is ever opened by a path string. Stated exceptions from a faithful copy:

- device nodes and fifos are left out (a sandbox gets a /dev of its own), and counted;
- setuid and setgid bits are taken off: no program in a sandbox gains rights from its file;
- extended attributes are left out: file capabilities, overlayfs's own marks, ACLs, SELinux labels;
- owners are kept as numbers for root, and are the caller's otherwise.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from ..errors import ImageInvalid
from ..fs import open_in, remove_tree, write_all
from .decompress import HashedFile, Unpacked
from .tarstream import MAX_PATH, Entry, TarReader, show

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_ID = 2**32 - 1  # chown's "leave it as it is", so never an owner
_MAX_TIME_NS = 2**33 * 10**9
#: errors that the archive is to blame for; others (a full disk) are the caller's matter
_ARCHIVE_ERRORS = {
    errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG, errno.ENOENT,
    errno.ENOTDIR, errno.EPERM, errno.EXDEV,
}  # fmt: skip


@dataclass(frozen=True)
class UnpackLimits:
    """Where an archive is taken for a bomb."""

    bytes: int = 32 * 2**30  #: unpacked, all in all
    entries: int = 1_000_000
    depth: int = 256  #: folders inside of folders
    ratio: int = 200  #: unpacked to packed size, once more than ``ratio_from`` bytes came out
    ratio_from: int = 256 * 2**20


@dataclass
class Unpack:
    """What came of it, for image.json."""

    digest: str = ""  #: SHA-256 of the archive file as it lies there
    packing: str = ""
    entries: int = 0
    bytes: int = 0  #: of file contents
    owners_kept: bool = False
    skipped: int = 0  #: device nodes and fifos
    stripped: int = 0  #: files and folders that lost setuid or setgid

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def unpack(file: BinaryIO, root_fd: int, limits: UnpackLimits | None = None) -> Unpack:
    """Unpack the (packed) tar in ``file`` into the empty folder ``root_fd``.

    Raises ImageInvalid for what is wrong with the archive, OSError for what is wrong with the disk; the caller
    removes the folder then.
    """
    limits = limits or UnpackLimits()
    hashed = HashedFile(file)
    most = limits.bytes + limits.entries * 2048  # headers and padding come on top of the contents
    packed = Unpacked(hashed, most=most, ratio=limits.ratio, ratio_from=limits.ratio_from)
    extractor = _Extractor(root_fd, limits)
    try:
        reader = TarReader(packed)
        for entry in reader:
            extractor.add(entry, reader)
        extractor.finish()
        while packed.read(1 << 18):  # to the end: the packing's own checksum comes last
            pass
    finally:
        extractor.close()
    result = extractor.result
    if not result.entries:
        raise ImageInvalid("the tar is empty")
    result.packing, result.digest = packed.packing, hashed.finish()
    return result


def split_name(name: bytes, limits: UnpackLimits) -> tuple[bytes, ...]:
    """The components of an archive's path; none for the root itself. A leading ``/`` means the image's root."""
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise ImageInvalid(f"{show(name)} in the tar leads out of its folder")
    if b"\0" in name:
        raise ImageInvalid(f"{show(name)} in the tar holds a NUL byte")
    if len(name) > MAX_PATH:
        raise ImageInvalid(f"{show(name)} in the tar is longer than {MAX_PATH} bytes")
    if len(parts) > limits.depth:
        raise ImageInvalid(f"{show(name)} in the tar is more than {limits.depth} folders deep, the limit")
    return parts


def owners_can_be_kept() -> bool:
    """Whether we may chown to any number: root, and not merely root of a small user namespace."""
    if os.geteuid() != 0:
        return False
    try:
        with open("/proc/self/uid_map", encoding="ascii") as table:
            return any(int(line.split()[2]) >= _NO_ID for line in table)
    except (OSError, ValueError, IndexError):
        return False


class _Extractor:
    """Writes entries below a folder."""

    def __init__(self, root_fd: int, limits: UnpackLimits) -> None:
        self.root_fd = root_fd
        self.limits = limits
        self.result = Unpack(owners_kept=owners_can_be_kept())
        self._parent: tuple[tuple[bytes, ...], int] = ((), -1)  # the folder of the entry before: mostly the next's too
        self._removed = False
        self._folders: dict[tuple[bytes, ...], Entry] = {}  # rights and times are set last: work in them changes both
        self._early_links: list[Entry] = []  # hard links that came before what they link to

    def add(self, entry: Entry, reader: TarReader) -> None:
        self.result.entries += 1
        if self.result.entries > self.limits.entries:
            raise ImageInvalid(f"the tar has more than {self.limits.entries} entries, the limit")
        if entry.kind == "file":
            self.result.bytes += entry.size
            if self.result.bytes > self.limits.bytes:
                raise ImageInvalid(
                    f"{show(entry.name)} brings the tar to {self.result.bytes} bytes; the limit is {self.limits.bytes}"
                )
        with _blame(entry):
            self._add(entry, reader)

    def finish(self) -> None:
        for entry in self._early_links:
            with _blame(entry):
                if not self._hard_link(entry, split_name(entry.name, self.limits)):
                    raise ImageInvalid(
                        f"{show(entry.name)} in the tar is a link to {show(entry.link)}, which is missing"
                    )
        self._drop_parent()
        # The deepest first: a folder without rights must not lock us out of those in it.
        for parts in sorted(self._folders, key=len, reverse=True):
            entry = self._folders[parts]
            with _blame(entry):
                self._finish_folder(parts, entry)

    def close(self) -> None:
        self._drop_parent()

    def _add(self, entry: Entry, reader: TarReader) -> None:
        parts = split_name(entry.name, self.limits)
        if entry.kind in ("device", "fifo"):
            self.result.skipped += 1
            return
        if not parts:
            if entry.kind != "folder":
                raise ImageInvalid(f"{show(entry.name)} in the tar would replace the root folder")
            self._folders[()] = entry
            return
        if entry.kind == "hardlink":
            if not self._hard_link(entry, parts):
                self._early_links.append(entry)
            return
        parent, name = self._folder(parts[:-1]), parts[-1]
        if entry.kind == "folder":
            self._make_folder(parent, name)
            self._folders[parts] = entry
        elif entry.kind == "symlink":
            self._make_link(parent, name, entry)
        else:
            self._make_file(parent, name, entry, reader)

    def _make_file(self, parent: int, name: bytes, entry: Entry, reader: TarReader) -> None:
        try:
            fd = os.open(name, _NEW_FILE, 0o600, dir_fd=parent)
        except FileExistsError:
            self._remove(parent, name)
            fd = os.open(name, _NEW_FILE, 0o600, dir_fd=parent)
        try:
            for piece in reader.data():
                write_all(fd, piece)
            self._set(fd, entry)
        finally:
            os.close(fd)

    def _make_folder(self, parent: int, name: bytes) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                self._remove(parent, name)
                os.mkdir(name, 0o700, dir_fd=parent)

    def _make_link(self, parent: int, name: bytes, entry: Entry) -> None:
        if not entry.link or b"\0" in entry.link or len(entry.link) >= MAX_PATH:
            raise ImageInvalid(f"{show(entry.name)} in the tar is a symlink to {show(entry.link)}")
        try:
            os.symlink(entry.link, name, dir_fd=parent)
        except FileExistsError:
            self._remove(parent, name)
            os.symlink(entry.link, name, dir_fd=parent)
        if self.result.owners_kept:
            os.chown(name, *_owner(entry), dir_fd=parent, follow_symlinks=False)
        moment = _moment(entry)
        os.utime(name, ns=(moment, moment), dir_fd=parent, follow_symlinks=False)

    def _hard_link(self, entry: Entry, parts: tuple[bytes, ...]) -> bool:
        """False if what it links to is not there (yet)."""
        if not parts:
            raise ImageInvalid(f"{show(entry.name)} in the tar would replace the root folder")
        target = split_name(entry.link, self.limits)
        if not target:
            raise ImageInvalid(f"{show(entry.name)} in the tar is a hard link to the root folder")
        try:
            source = open_in(self.root_fd, b"/".join(target[:-1]) or b".", _FOLDER, follow=True)
        except FileNotFoundError:
            return False
        try:
            try:
                found = os.lstat(target[-1], dir_fd=source)
            except FileNotFoundError:
                return False
            if stat.S_ISDIR(found.st_mode):
                raise ImageInvalid(f"{show(entry.name)} in the tar is a hard link to the folder {show(entry.link)}")
            parent, name = self._folder(parts[:-1]), parts[-1]
            try:
                there = os.lstat(name, dir_fd=parent)
                if (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino):
                    return True
                self._remove(parent, name)
                parent = self._folder(parts[:-1])
            except FileNotFoundError:
                pass
            # Never follows: a link to a symlink is a second name of that symlink.
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            return True
        finally:
            os.close(source)

    def _remove(self, parent: int, name: bytes) -> None:
        """Make room for a later entry of the same name."""
        self._removed = True
        try:
            os.unlink(name, dir_fd=parent)
        except (IsADirectoryError, PermissionError):
            remove_tree(parent, os.fsdecode(name))

    def _folder(self, parts: tuple[bytes, ...]) -> int:
        """A descriptor of that folder, made with its parents if missing. Valid until the next call.

        Kept between calls only for the same folder with nothing removed in between: a name may come to mean
        something else when an entry replaces a folder.
        """
        held, fd = self._parent
        if fd >= 0 and held == parts and not self._removed:
            return fd
        self._drop_parent()
        path = b"/".join(parts) or b"."
        try:
            fd = open_in(self.root_fd, path, _FOLDER, follow=True)
        except FileNotFoundError:
            fd = self._make_folders(parts)
        self._parent = (parts, fd)
        return fd

    def _make_folders(self, parts: tuple[bytes, ...]) -> int:
        """Missing parents, as 0755 folders. A dangling symlink on the way is an error: nothing is made behind it."""
        fd = os.dup(self.root_fd)
        for depth, part in enumerate(parts, 1):
            try:
                path = b"/".join(parts[:depth])
                try:
                    below = open_in(self.root_fd, path, _FOLDER, follow=True)
                except FileNotFoundError:
                    os.mkdir(part, 0o755, dir_fd=fd)
                    below = open_in(self.root_fd, path, _FOLDER, follow=True)
            finally:
                os.close(fd)
            fd = below
        return fd

    def _drop_parent(self) -> None:
        _, fd = self._parent
        self._parent, self._removed = ((), -1), False
        if fd >= 0:
            os.close(fd)

    def _finish_folder(self, parts: tuple[bytes, ...], entry: Entry) -> None:
        try:
            fd = open_in(self.root_fd, b"/".join(parts) or b".", _FOLDER | os.O_NOFOLLOW, follow=True)
        except (FileNotFoundError, NotADirectoryError):
            return  # a later entry replaced it
        except OSError as error:
            if error.errno == errno.ELOOP:
                return
            raise
        try:
            self._set(fd, entry)
        finally:
            os.close(fd)

    def _set(self, fd: int, entry: Entry) -> None:
        if self.result.owners_kept:
            os.fchown(fd, *_owner(entry))
        mode = entry.mode & 0o1777
        if mode != entry.mode:
            self.result.stripped += 1
        os.fchmod(fd, mode)
        moment = _moment(entry)
        os.utime(fd, ns=(moment, moment))


def _owner(entry: Entry) -> tuple[int, int]:
    if entry.uid >= _NO_ID or entry.gid >= _NO_ID:
        raise ImageInvalid(f"{show(entry.name)} in the tar has an impossible owner {entry.uid}:{entry.gid}")
    return entry.uid, entry.gid


def _moment(entry: Entry) -> int:
    return min(max(entry.mtime_ns, 0), _MAX_TIME_NS)


class _blame:
    """Turns an OSError that the archive caused into ImageInvalid."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno in _ARCHIVE_ERRORS:
            raise ImageInvalid(f"{show(self._entry.name)} in the tar cannot be unpacked: {error.strerror}") from error
