"""Writing the entries of a tar below a folder that they can never reach out of.

The archive is hostile. Every path is opened below the target's descriptor with symlinks resolved as if the target were
``/`` (legal images write through ``lib -> usr/lib``), every file is made anew and exclusively, nothing is ever opened
by a path string. Stated exceptions from a faithful copy:

- device nodes and fifos are left out (a sandbox gets a /dev of its own), and counted;
- setuid and setgid bits are taken off: no program in a sandbox gains rights from its file;
- of extended attributes those of users stay, but for overlayfs's own marks; file capabilities, ACLs, SELinux labels and
  all that is trusted are left out, and counted;
- owners are kept as numbers where we may give files away, and are the caller's otherwise.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from ..errors import ImageInvalid
from ..fs import open_in, remove_tree, write_all
from .owners import Owners
from .tarstream import MAX_PATH, Entry, TarReader, show

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_TIME_NS = 2**33 * 10**9
_MAX_LINKS = 40  # symlinks on the way to a folder that is still to be made
_KEPT_FOLDERS = 16
#: errors that the archive is to blame for; others (a full disk) are the caller's matter
_ARCHIVE_ERRORS = {
    errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG, errno.ENOENT,
    errno.ENOTDIR, errno.EPERM, errno.EXDEV, errno.EFBIG,
}  # fmt: skip

Parts = tuple[bytes, ...]


@dataclass(frozen=True)
class UnpackLimits:
    """Where an archive is taken for a bomb."""

    bytes: int = 32 * 2**30  #: unpacked, all in all
    entries: int = 1_000_000  #: and folders that are only implied by what is in them
    depth: int = 256  #: folders inside of folders
    ratio: int = 200  #: unpacked to packed size, once more than ``ratio_from`` bytes came out
    ratio_from: int = 256 * 2**20

    @property
    def stream(self) -> int:
        """Bytes that the tar itself may have: headers and padding come on top of the contents."""
        return self.bytes + self.entries * 2048


def split_name(name: bytes, limits: UnpackLimits) -> Parts:
    """The components of an archive's path; none for the root itself. A leading ``/`` means the image's root."""
    parts = tuple([part for part in name.split(b"/") if part not in (b"", b".")])
    if b".." in parts:
        raise ImageInvalid(f"{show(name)} in the tar leads out of its folder")
    if b"\0" in name:
        raise ImageInvalid(f"{show(name)} in the tar holds a NUL byte")
    if len(name) > MAX_PATH:
        raise ImageInvalid(f"{show(name)} in the tar is longer than {MAX_PATH} bytes")
    if len(parts) > limits.depth:
        raise ImageInvalid(f"{show(name)} in the tar is more than {limits.depth} folders deep, the limit")
    return parts


class Extractor:
    """Writes entries below the folder ``root_fd``, which is empty. A context manager: closes what it opened."""

    def __init__(self, root_fd: int, limits: UnpackLimits, owners: Owners) -> None:
        self.root_fd = root_fd
        self.limits = limits
        self.owners = owners
        self.entries = 0
        self.bytes = 0  #: of file contents
        self.skipped = 0  #: device nodes and fifos
        self.stripped: dict[bytes, int] = {}  #: files and folders that lost setuid or setgid, with their modes
        self.attributes = 0  #: extended attributes that were left out
        self._not_exact = _umask(root_fd) | 0o7000  # rights that a new file does not get by being asked for
        self.implied: set[Parts] = set()  #: folders that no entry speaks of, but for what is in them
        self._made = 0  # how often one of these was made
        self._open: dict[Parts, int] = {}  # folders that were last written to
        self._above: bytes | None = None  # one of them, as the entry before named it
        self._above_fd = -1
        self._folders: dict[Parts, Entry] = {}  # rights and times are set last: work in them changes both
        self._early_links: list[Entry] = []  # hard links that came before what they link to

    def __enter__(self) -> Extractor:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_folders()

    def add(self, entry: Entry, reader: TarReader) -> None:
        """Raises ImageInvalid for what is wrong with the archive, OSError for what is wrong with the disk."""
        self.count()
        if entry.kind == "file":
            self.bytes += entry.size if entry.sparse is None else entry.sparse.size
            if self.bytes > self.limits.bytes:
                raise ImageInvalid(
                    f"{show(entry.name)} brings the tar to {self.bytes} bytes; the limit is {self.limits.bytes}"
                )
        try:
            self._add(entry, reader)
        except OSError as error:
            raise _blamed(entry, error) from error

    def count(self) -> None:
        """One more entry."""
        self.entries += 1
        self._check_entries()

    def _check_entries(self) -> None:
        if self.entries + self._made > self.limits.entries:
            raise ImageInvalid(f"the tar has more than {self.limits.entries} entries, the limit")

    @property
    def spoken_of(self) -> set[Parts]:
        """Folders that have an entry."""
        return set(self._folders)

    def finish(self) -> Iterator[tuple[Parts, Parts]]:
        """After the last entry: links that came early, then folders. Yields the links (name, target) whose target is
        not here; who takes none of them from here must refuse them."""
        for entry in self._early_links:
            parts = split_name(entry.name, self.limits)
            with Blame(entry):
                if not self._hard_link(entry, parts):
                    yield self.landing(parts), split_name(entry.link, self.limits)
        self._close_folders()
        # The deepest first: a folder without rights must not lock us out of those in it.
        for parts in sorted(self.implied, key=len, reverse=True):
            self._set_implied(parts)
        for parts in sorted(self._folders, key=len, reverse=True):
            entry = self._folders[parts]
            with Blame(entry):
                self._finish_folder(parts, entry)

    # -- entries -----------------------------------------------------------------------------

    def _add(self, entry: Entry, reader: TarReader) -> None:
        kind = entry.kind
        above, _, base = entry.name.rpartition(b"/")
        if kind == "file" and above == self._above and base not in (b"", b".", b"..") and b"\0" not in base:
            self._make_file(self._above_fd, base, entry, reader)  # in the folder of the one before, as most are
            return
        parts = split_name(entry.name, self.limits)
        if kind in ("device", "fifo"):
            self.skipped += 1
        elif not parts:
            if kind != "folder":
                raise ImageInvalid(f"{show(entry.name)} in the tar would replace the root folder")
            self._folders[()] = entry
        elif kind == "hardlink":
            if not self._hard_link(entry, parts):
                self._early_links.append(entry)
        else:
            parent, name = self._folder(parts[:-1]), parts[-1]
            if kind == "file":
                self._make_file(parent, name, entry, reader)
                if len(above) < MAX_PATH - 256 and self._open.get(parts[:-1]) == parent:
                    self._above, self._above_fd = above, parent
            elif kind == "folder":
                self._make_folder(parent, name)
                self._folders[parts] = entry
            else:
                self._make_link(parent, name, entry)

    def _make_file(self, parent: int, name: bytes, entry: Entry, reader: TarReader) -> None:
        exact = not entry.mode & self._not_exact
        mode = entry.mode if exact else 0o600
        try:
            fd = os.open(name, _NEW_FILE, mode, dir_fd=parent)
        except FileExistsError:
            self.make_room(parent, name)
            fd = os.open(name, _NEW_FILE, mode, dir_fd=parent)
        try:
            if entry.sparse is not None:
                self._write_parts(fd, entry, reader)
            elif entry.size:
                for piece in reader.data():
                    written = os.write(fd, piece)
                    if written != len(piece):  # the disk is nearly full, or a signal came
                        write_all(fd, piece[written:])
            self._set(fd, entry, exact)
        finally:
            os.close(fd)

    @staticmethod
    def _write_parts(fd: int, entry: Entry, reader: TarReader) -> None:
        assert entry.sparse is not None
        os.ftruncate(fd, entry.sparse.size)
        parts = iter(entry.sparse.extents)
        left = 0
        for piece in reader.data():
            view = memoryview(piece)
            while view:
                while not left:
                    offset, left = next(parts)
                    os.lseek(fd, offset, os.SEEK_SET)
                write_all(fd, bytes(view[:left]))
                now = min(left, len(view))
                view, left = view[now:], left - now

    def _make_folder(self, parent: int, name: bytes) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                self.make_room(parent, name)
                os.mkdir(name, 0o700, dir_fd=parent)

    def _make_link(self, parent: int, name: bytes, entry: Entry) -> None:
        if not entry.link or b"\0" in entry.link or len(entry.link) >= MAX_PATH:
            raise ImageInvalid(f"{show(entry.name)} in the tar is a symlink to {show(entry.link)}")
        try:
            os.symlink(entry.link, name, dir_fd=parent)
        except FileExistsError:
            self.make_room(parent, name)
            os.symlink(entry.link, name, dir_fd=parent)
        self.owners.give_link(parent, name, entry)
        self.attributes += len(entry.xattrs)  # the kernel has none of users' for symlinks
        moment = _moment(entry)
        os.utime(name, ns=(moment, moment), dir_fd=parent, follow_symlinks=False)

    def _hard_link(self, entry: Entry, parts: Parts) -> bool:
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
                self.make_room(parent, name)
            except FileNotFoundError:
                pass
            # Never follows: a link to a symlink is a second name of that symlink.
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            return True
        finally:
            os.close(source)

    def make_room(self, parent: int, name: bytes) -> None:
        """For a later entry of the same name. ``parent`` is still good afterwards; no other folder is: a name may come
        to mean something else when an entry replaces a folder."""
        self._above = None
        for parts, fd in list(self._open.items()):
            if fd != parent:
                os.close(self._open.pop(parts))
        try:
            os.unlink(name, dir_fd=parent)
        except (IsADirectoryError, PermissionError):
            remove_tree(parent, os.fsdecode(name))

    # -- folders -----------------------------------------------------------------------------

    def _folder(self, parts: Parts) -> int:
        """A descriptor of that folder, made with its parents if missing. Good until the next call."""
        fd = self._open.get(parts)
        if fd is not None:
            return fd
        if len(self._open) >= _KEPT_FOLDERS:
            self._above = None
            os.close(self._open.pop(next(iter(self._open))))
        try:
            fd = open_in(self.root_fd, b"/".join(parts) or b".", _FOLDER, follow=True)
        except FileNotFoundError:
            fd = self._make_folders(parts)
        self._open[parts] = fd
        return fd

    def _make_folders(self, parts: Parts) -> int:
        """Missing parents, as 0755 folders; those that a symlink leads to, too: another layer may have them."""
        there = self.landing(parts, make=True)
        return open_in(self.root_fd, b"/".join(there) or b".", _FOLDER)

    def landing(self, parts: Parts, *, make: bool = False) -> Parts:
        """Where a path leads in this tree, by names without symlinks: of its last component the parents only, unless
        ``make``, which makes all that is missing on the way."""
        held: list[bytes] = []
        todo = list(reversed(parts))
        links = 0
        while todo:
            part = todo.pop()
            if part == b"..":
                held[-1:] = []
                continue
            path = b"/".join([*held, part])
            last = not todo and not make
            try:
                info = None if last else os.lstat(path, dir_fd=self.root_fd)
            except FileNotFoundError:
                info = None
                if make:
                    self._made += 1  # one entry may imply hundreds
                    self._check_entries()
                    os.mkdir(path, 0o755, dir_fd=self.root_fd)
                    self.implied.add((*held, part))
            if info is None or stat.S_ISDIR(info.st_mode):
                held.append(part)
                if len(held) > self.limits.depth:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                continue
            if not stat.S_ISLNK(info.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            to = os.readlink(path, dir_fd=self.root_fd)
            if to.startswith(b"/"):
                held = []
            todo += [step for step in reversed(to.split(b"/")) if step not in (b"", b".")]
        return tuple(held)

    def _close_folders(self) -> None:
        self._above = None
        while self._open:
            os.close(self._open.popitem()[1])

    def _finish_folder(self, parts: Parts, entry: Entry) -> None:
        fd = self._reopen(parts)
        if fd is not None:
            try:
                self._set(fd, entry)
            finally:
                os.close(fd)

    def _set_implied(self, parts: Parts) -> None:
        """A folder that nothing is known of: equal for all who unpack the same."""
        fd = None if parts in self._folders else self._reopen(parts)
        if fd is not None:
            try:
                os.fchmod(fd, 0o755)
                os.utime(fd, ns=(0, 0))
            finally:
                os.close(fd)

    def _reopen(self, parts: Parts) -> int | None:
        """None if a later entry replaced it."""
        try:
            return open_in(self.root_fd, b"/".join(parts) or b".", _FOLDER | os.O_NOFOLLOW, follow=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise

    # -- what is known of a file ---------------------------------------------------------------

    def _set(self, fd: int, entry: Entry, exact: bool = False) -> None:
        """``exact``: it was made with its rights."""
        self.owners.give(fd, entry)
        if entry.xattrs:
            self.attributes += _set_attributes(fd, entry)
        if not exact:
            mode = entry.mode & 0o1777
            if mode != entry.mode:
                self.stripped[entry.name] = entry.mode & 0o7777
            os.fchmod(fd, mode)
        moment = _moment(entry)
        os.utime(fd, ns=(moment, moment))


def _umask(root_fd: int) -> int:
    """The rights that new files are denied here: all, where a folder's ACL has a say in it."""
    try:
        if "system.posix_acl_default" in os.listxattr(root_fd):
            return 0o777
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0o777


def _set_attributes(fd: int, entry: Entry) -> int:
    """How many were left out: those that are not users', and those that the filesystem cannot keep."""
    lost = 0
    for name, value in entry.xattrs.items():
        try:
            if not name.startswith(b"user.") or name.startswith(b"user.overlay.") or b"\0" in name:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            os.setxattr(fd, name, value)
        except OSError as error:
            if error.errno in (errno.EIO, errno.EROFS):
                raise
            lost += 1
    return lost


def _moment(entry: Entry) -> int:
    return min(max(entry.mtime_ns, 0), _MAX_TIME_NS)


def _blamed(entry: Entry, error: OSError) -> Exception:
    """An OSError that the archive caused as ImageInvalid."""
    if error.errno in _ARCHIVE_ERRORS:
        return ImageInvalid(f"{show(entry.name)} in the tar cannot be unpacked: {error.strerror}")
    return error


class Blame:
    """Turns an OSError that the archive caused into ImageInvalid."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and error.errno in _ARCHIVE_ERRORS:
            raise _blamed(self._entry, error) from error
