"""Files on the host's side, by directory descriptors: nothing here resolves an untrusted path by string.

``open_in`` opens a path below a directory and can never leave it; ``remove_tree`` removes whatever a
sandbox left (mode-000 folders, thousands of levels, hostile links) and never follows a link nor
crosses a mount; ``write_atomic`` publishes a file whole or not at all. Where the kernel has
``openat2`` (5.6) it does the confinement; elsewhere a walk over O_NOFOLLOW components does.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress

from .errors import StateUnwritable

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  #: O_NONBLOCK: opening a fifo must not hang
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: A file that cannot have one name more (EMLINK), or where that is no way at all (EXDEV): who wants it copies it.
NO_LINK = frozenset({errno.EMLINK, errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_SYS_OPENAT2 = 437  # the same number on every architecture that Python runs on
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH, _IN_ROOT = 0x01, 0x02, 0x04, 0x08, 0x10
_MAX_LINKS = 40  # as the kernel's own limit

_Openat2 = Callable[[int, bytes, int, int, int], int]
_openat2: _Openat2 | None = None
_openat2_probed = False


def open_in(
    dir_fd: int, path: str | bytes, flags: int, mode: int = 0, *, follow: bool = False, cross_mounts: bool = True
) -> int:
    """Open ``path`` below ``dir_fd``; the result is close-on-exec and never outside of that directory.

    ``follow=False``: no symlink anywhere in the path (ELOOP or ENOTDIR), no ``..`` and no leading ``/`` (EXDEV).
    ``follow=True``: symlinks, ``..`` and ``/`` are resolved as if ``dir_fd`` were the root directory;
    a last component that is a symlink is followed too unless O_NOFOLLOW is in ``flags``.
    ``cross_mounts=False``: a mount point on the way is EXDEV.
    """
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise OSError(errno.EINVAL, "a path cannot hold a NUL byte", os.fsdecode(raw))
    flags |= os.O_CLOEXEC
    call = _kernel_openat2()
    if call is None:
        return _walk(dir_fd, raw, flags, mode, follow, cross_mounts)
    resolve = (_IN_ROOT | _NO_MAGICLINKS) if follow else (_BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS)
    if not cross_mounts:
        resolve |= _NO_XDEV
    if not follow and b".." in raw.split(b"/"):
        raise OSError(errno.EXDEV, "the path leaves its directory", os.fsdecode(raw))
    for _ in range(64):  # EAGAIN: something was renamed meanwhile and the kernel could not prove the confinement
        try:
            return call(dir_fd, raw, flags, mode if flags & (os.O_CREAT | os.O_TMPFILE) else 0, resolve)
        except BlockingIOError:
            continue
    raise OSError(errno.EAGAIN, "the directory changes too fast to be resolved safely", os.fsdecode(raw))


def _kernel_openat2() -> _Openat2 | None:
    """The system call, or None where the kernel or a seccomp filter of the host has it not."""
    global _openat2, _openat2_probed
    if not _openat2_probed:
        call = _bind_openat2()
        try:
            os.close(call(-100, b"/", os.O_PATH | os.O_CLOEXEC, 0, 0))
            _openat2 = call
        except OSError:
            _openat2 = None
        _openat2_probed = True
    return _openat2


def _bind_openat2() -> _Openat2:
    import ctypes

    class OpenHow(ctypes.Structure):
        _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]

    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]

    def openat2(dir_fd: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
        how = OpenHow(flags, mode, resolve)
        while True:
            fd = int(syscall(_SYS_OPENAT2, dir_fd, path, ctypes.byref(how), ctypes.sizeof(how)))
            if fd >= 0:
                return fd
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), os.fsdecode(path))

    return openat2


def _walk(dir_fd: int, path: bytes, flags: int, mode: int, follow: bool, cross_mounts: bool) -> int:
    """``open_in`` without openat2: one O_NOFOLLOW component at a time, ``..`` only back over what was walked."""
    shown = os.fsdecode(path)
    if not path:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), shown)
    if not follow and (path.startswith(b"/") or b".." in path.split(b"/")):
        raise OSError(errno.EXDEV, "the path leaves its directory", shown)
    parts = [part for part in reversed(path.split(b"/")) if part not in (b"", b".")]
    want_dir = path.endswith((b"/", b"/."))
    mount = None if cross_mounts else _mount_id(dir_fd)
    held = [os.dup(dir_fd)]  # the directories from dir_fd down to where we are
    links = 0
    try:
        while parts:
            part = parts.pop()
            if part == b"..":
                if len(held) > 1:
                    os.close(held.pop())
                continue
            last = not parts
            node = -1
            with suppress(FileNotFoundError):
                node = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=held[-1])
            try:
                if node < 0 and not last:
                    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), shown)
                if mount is not None and node >= 0 and _mount_id(node) != mount:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), shown)
                if node >= 0 and stat.S_ISLNK(os.fstat(node).st_mode) and not (last and flags & os.O_NOFOLLOW):
                    links += 1
                    if not follow or links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), shown)
                    target = os.readlink(b"", dir_fd=node)
                    if target.startswith(b"/"):
                        while len(held) > 1:
                            os.close(held.pop())
                    parts += [step for step in reversed(target.split(b"/")) if step not in (b"", b".")]
                    continue
                if last:
                    more = os.O_NOFOLLOW | (os.O_DIRECTORY if want_dir else 0)
                    return os.open(part, flags | more, mode, dir_fd=held[-1])
                if not stat.S_ISDIR(os.fstat(node).st_mode):
                    raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), shown)
                held.append(node)
                node = -1
            finally:
                if node >= 0:
                    os.close(node)
        return os.open(b".", flags, mode, dir_fd=held[-1])
    finally:
        for fd in held:
            os.close(fd)


def _mount_id(fd: int) -> str:
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
        return next((line for line in info if line.startswith("mnt_id:")), "")


class _Level:
    """A directory that ``remove_tree`` is inside of."""

    def __init__(self, name: str, device: int, inode: int) -> None:
        self.name, self.device, self.inode = name, device, inode
        self.folders: list[str] = []
        self.removed = 0  #: entries gone in the last pass: without progress there is no further pass
        self.kept = False  #: something below could not be removed


def remove_tree(dir_fd: int, name: str, *, missing_ok: bool = True) -> int:
    """Remove ``name`` in ``dir_fd`` and all below; returns how many entries went.

    One descriptor is open at a time, however deep the tree: the way up is ``..``, checked against
    the device and inode seen on the way down. What cannot be removed does not stop the rest; the
    StateUnwritable at the end names the first of it. Safe against others removing the same tree.
    """
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is not the name of an entry")
    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=dir_fd).st_mode):
            os.unlink(name, dir_fd=dir_fd)
            return 1
        remover = _Remover(dir_fd)
        remover.run(name)
    except FileNotFoundError:
        if missing_ok:
            return 0
        raise
    except OSError as error:
        raise _cannot_remove(name, error) from error
    if remover.failed:
        path, cause = remover.failed
        raise _cannot_remove(path, cause) from cause
    return remover.count


class _Remover:
    """The state of one ``remove_tree``."""

    def __init__(self, dir_fd: int) -> None:
        self.dir_fd = dir_fd
        self.levels: list[_Level] = []
        self.count = 0
        self.failed: tuple[str, OSError] | None = None

    def run(self, name: str) -> None:
        here = self.enter(self.dir_fd, name)
        try:
            self.empty(here)
            while self.levels:
                level = self.levels[-1]
                if level.folders:
                    child = level.folders.pop()
                    try:
                        below = self.enter(here, child)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        self.fail(child, error)
                        continue
                    os.close(here)
                    here = below
                    self.empty(here)
                else:
                    here = self.leave(here)
        finally:
            if here != self.dir_fd:
                os.close(here)

    def enter(self, parent: int, name: str) -> int:
        try:
            fd = open_in(parent, name, FOLDER, cross_mounts=False)
        except PermissionError:
            # A folder that its owner cannot read. O_PATH needs no permission on it, and the link in /proc leads to
            # exactly what was opened, whatever its name means by now.
            handle = open_in(parent, name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, cross_mounts=False)
            try:
                os.chmod(f"/proc/self/fd/{handle}", 0o700)
            finally:
                os.close(handle)
            fd = open_in(parent, name, FOLDER, cross_mounts=False)
        info = os.fstat(fd)
        if info.st_mode & 0o700 != 0o700:
            with suppress(OSError):
                os.fchmod(fd, 0o700)
        self.levels.append(_Level(name, info.st_dev, info.st_ino))
        return fd

    def empty(self, here: int) -> None:
        """Remove what is no folder, note the folders."""
        level = self.levels[-1]
        level.removed = 0
        with os.scandir(here) as entries:
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        level.folders.append(entry.name)
                        continue
                    os.unlink(entry.name, dir_fd=here)
                    level.removed += 1
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self.fail(entry.name, error)
        self.count += level.removed

    def leave(self, here: int) -> int:
        """Remove the empty folder we are in, from its parent; returns the parent's descriptor."""
        level = self.levels[-1]
        if len(self.levels) == 1:
            parent = self.dir_fd
        else:
            above = self.levels[-2]
            parent = os.open("..", FOLDER, dir_fd=here)
            info = os.fstat(parent)
            if (info.st_dev, info.st_ino) != (above.device, above.inode):
                os.close(parent)
                raise OSError(errno.EXDEV, "it was moved while it was being removed")
        try:
            if not level.kept:
                os.rmdir(level.name, dir_fd=parent)
                self.count += 1
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and level.removed:
                # Listing while removing may skip entries on some filesystems: look again.
                if parent != self.dir_fd:
                    os.close(parent)
                self.empty(here)
                return here
            self.fail(None, error)
        self.levels.pop()
        if level.kept and self.levels:
            self.levels[-1].kept = True
        elif self.levels:
            self.levels[-1].removed += 1
        os.close(here)
        return parent

    def fail(self, name: str | None, error: OSError) -> None:
        self.levels[-1].kept = True
        if self.failed is None:
            names = [level.name for level in self.levels] + ([name] if name is not None else [])
            self.failed = ("/".join(names), error)


def _cannot_remove(path: str, error: OSError) -> StateUnwritable:
    shown = path if len(path) <= 300 else path[:140] + "/.../" + path[-140:]
    hints = {
        errno.EPERM: "it may be immutable (`lsattr`, `chattr -i`) or belong to another user",
        errno.EACCES: "it belongs to another user: remove it as that user or as root",
        errno.EXDEV: "something is mounted there: `umount` it first",
        errno.EBUSY: "something is mounted there: `umount` it first",
        errno.EROFS: "the filesystem is read-only",
    }
    hint = hints.get(error.errno or 0)
    return StateUnwritable(f"cannot remove {shown!r}: {error.strerror}", hint=hint)


def write_atomic(dir_fd: int, name: str, data: bytes, mode: int = 0o600) -> None:
    """Publish a file whole and durable, or leave the old one as it was."""
    temporary = f".{name}.{os.urandom(6).hex()}.tmp"
    fd = os.open(temporary, NEW_FILE, mode, dir_fd=dir_fd)
    try:
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    os.fsync(dir_fd)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_filesystem(fd: int) -> None:
    """Make everything on the filesystem of ``fd`` durable: one call instead of an fsync for each of many files."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
