"""Work on a volume's files from outside, on descriptors. Nothing here leaves the volume, whatever links in it say: a
path is resolved as if the volume were the root directory. Also the jobs of a child that acts for subordinate ids
(``userns``).

Owners are told and taken as a sandbox has them: the owner of the volume is the sandbox's user inside, and the other way
round (engines/mounting.py).
"""

from __future__ import annotations

import errno
import os
import posixpath
import socket
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..engines.machine import RANGE_SIZE
from ..fs import FOLDER, NEW_FILE, open_in, remove_tree

Made = tuple[Any, list[int]]  #: what is told, and descriptors that are the caller's now
Operation = Callable[[dict[str, Any], Sequence[int]], Made]

NEW_FOLDER_MODE, NEW_FILE_MODE = 0o777, 0o666
MOST_ENTRIES, MOST_DEPTH = 10_000, 64  #: of one listing
_MOST_PATH = 4096
_MODES = 0o1777  # no setuid, no setgid: what is written from outside needs neither
_NOBODY = 65534
_HANDLE = os.O_PATH | os.O_NOFOLLOW
_UNNAMED_NOT_HERE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


def normal(path: str) -> str:
    """Without the leading slash; "": the volume itself. ``..`` ends at the volume. OSError for what is no path."""
    if "\0" in path:
        raise OSError(errno.EINVAL, "a path cannot hold a NUL byte")
    found = posixpath.normpath("/" + path).lstrip("/")
    if len(os.fsencode(found)) >= _MOST_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return found


@dataclass(frozen=True)
class Owners:
    """``disk``: the volume's owner, ``user``: who has his files inside. ``one``: all is one user's, and stays so."""

    disk: tuple[int, int]
    user: tuple[int, int]
    one: bool = False

    @staticmethod
    def of(arguments: dict[str, Any], root: int) -> Owners:
        info = os.fstat(root)
        given = arguments.get("disk")
        disk = (info.st_uid, info.st_gid) if given is None else (int(given[0]), int(given[1]))
        uid, gid = arguments["user"]
        return Owners(disk, (int(uid), int(gid)), arguments.get("owners") == "recorded")

    def inside(self, uid: int, gid: int) -> tuple[int, int]:
        if self.one:
            return self.user
        return _seen(uid, self.disk[0], self.user[0]), _seen(gid, self.disk[1], self.user[1])

    def give(self, where: int | str, uid: int | None, gid: int | None) -> None:
        """None: as it is. PermissionError where there is nobody else."""
        if self.one:
            wanted = (self.user[0] if uid is None else uid, self.user[1] if gid is None else gid)
            if wanted != self.user:
                raise PermissionError(errno.EPERM, "all files here are one user's")
            return
        os.chown(where, _kept(uid, self.disk[0], self.user[0]), _kept(gid, self.disk[1], self.user[1]))


def _seen(number: int, disk: int, user: int) -> int:
    if number == disk:
        return user
    if number == user:
        return disk if disk < RANGE_SIZE else _NOBODY
    return number if number < RANGE_SIZE else _NOBODY


def _kept(number: int | None, disk: int, user: int) -> int:
    if number is None:
        return -1
    if not 0 <= number < RANGE_SIZE or (number == disk and disk >= RANGE_SIZE):
        raise OSError(errno.EINVAL, f"an owner is a number below {RANGE_SIZE}")
    return disk if number == user else user if number == disk else number


# -- looking -----------------------------------------------------------------------------------------------------------


def look(arguments: dict[str, Any], fds: Sequence[int]) -> Made:
    """Of what is there; of a link, of the link."""
    fd = open_in(fds[0], arguments["path"] or ".", _HANDLE, follow=True, cross_mounts=False)
    try:
        return _entry(fd, arguments["path"], Owners.of(arguments, fds[0])), []
    finally:
        os.close(fd)


def _entry(fd: int, path: str, owners: Owners) -> dict[str, Any]:
    info, target = os.fstat(fd), None
    if stat.S_ISLNK(info.st_mode):
        target = os.readlink("", dir_fd=fd)
    return _described(info, path, target, owners)


def _described(info: os.stat_result, path: str, target: str | None, owners: Owners) -> dict[str, Any]:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    uid, gid = owners.inside(info.st_uid, info.st_gid)
    found = {
        "name": posixpath.basename(path) or "/", "type": kinds.get(stat.S_IFMT(info.st_mode), "unknown"),
        "path": "/" + path, "size": info.st_size, "mode": stat.S_IMODE(info.st_mode), "uid": uid, "gid": gid,
        "atime": info.st_atime, "mtime": info.st_mtime, "ctime": info.st_ctime,
    }  # fmt: skip
    if target is not None:
        found["target"] = target
    return found


def listing(arguments: dict[str, Any], fds: Sequence[int]) -> Made:
    """What is in a folder, by name; what is below comes after its folder. OSError (E2BIG) if it is too much."""
    owners, path = Owners.of(arguments, fds[0]), arguments["path"]
    depth = min(int(arguments.get("depth") or 1), MOST_DEPTH)
    found: list[dict[str, Any]] = []
    fd = open_in(fds[0], path or ".", os.O_RDONLY | os.O_DIRECTORY, follow=True, cross_mounts=False)
    try:
        _list(fd, path, depth, owners, found)
    finally:
        os.close(fd)
    return found, []


def _list(here: int, path: str, depth: int, owners: Owners, found: list[dict[str, Any]]) -> None:
    names = []
    with os.scandir(here) as there:
        for each in there:
            names.append(each.name)
            if len(names) + len(found) > MOST_ENTRIES:
                raise OSError(errno.E2BIG, f"there are more than {MOST_ENTRIES} entries")
    for name in sorted(names):
        below = posixpath.join(path, name)
        try:
            handle = open_in(here, name, _HANDLE, follow=True, cross_mounts=False)
        except OSError:
            continue  # it went meanwhile
        try:
            entry = _entry(handle, below, owners)
        finally:
            os.close(handle)
        found.append(entry)
        if depth > 1 and entry["type"] == "directory":
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                inner = open_in(here, name, FOLDER, cross_mounts=False)
                try:
                    _list(inner, below, depth - 1, owners, found)
                finally:
                    os.close(inner)


# -- changing ----------------------------------------------------------------------------------------------------------


def change(arguments: dict[str, Any], fds: Sequence[int]) -> Made:
    """Whose it is, and what its mode is; of a link, of what it leads to."""
    path, owners = arguments["path"], Owners.of(arguments, fds[0])
    uid, gid, mode = arguments.get("uid"), arguments.get("gid"), arguments.get("mode")
    fd = open_in(fds[0], path or ".", os.O_PATH, follow=True, cross_mounts=False)
    try:
        if not path and (uid, gid) != (None, None) and owners.inside(*_raw(fd)) != (
            owners.user[0] if uid is None else uid, owners.user[1] if gid is None else gid
        ):  # fmt: skip
            # who he is inside is decided by who the owner outside is
            raise PermissionError(errno.EPERM, "a volume belongs to its sandboxes' user")
        _set(f"/proc/self/fd/{fd}", owners, uid, gid, mode)
        return _entry(fd, path, owners), []
    finally:
        os.close(fd)


def _raw(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_uid, info.st_gid


def _set(where: int | str, owners: Owners, uid: int | None, gid: int | None, mode: int | None) -> None:
    if (uid, gid) != (None, None):
        owners.give(where, uid, gid)
    if mode is not None:
        os.chmod(where, mode & _MODES)


def make_folder(arguments: dict[str, Any], fds: Sequence[int]) -> Made:
    """``force``: with all above it, and one that is there is as good."""
    root, path, owners, force = fds[0], arguments["path"], Owners.of(arguments, fds[0]), bool(arguments["force"])
    above, name = posixpath.split(path)
    if not name:
        if not force:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        return look(arguments, fds)
    parent = _above(root, above, owners, arguments, force)
    try:
        try:
            fd = _new_folder(parent, name, owners, arguments, arguments.get("mode"))
        except FileExistsError:
            if not force:
                raise
            try:
                fd = open_in(root, path, os.O_PATH | os.O_DIRECTORY, follow=True, cross_mounts=False)
            except (FileNotFoundError, NotADirectoryError):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        try:
            return _entry(fd, path, owners), []
        finally:
            os.close(fd)
    finally:
        os.close(parent)


def _new_folder(parent: int, name: str, owners: Owners, arguments: dict[str, Any], mode: int | None) -> int:
    os.mkdir(name, 0o700, dir_fd=parent)
    fd = open_in(parent, name, FOLDER, cross_mounts=False)
    try:
        _set(fd, owners, *_wanted_owner(arguments, owners), NEW_FOLDER_MODE if mode is None else mode)
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            os.rmdir(name, dir_fd=parent)
        raise
    return fd


def _wanted_owner(arguments: dict[str, Any], owners: Owners) -> tuple[int, int]:
    uid, gid = arguments.get("uid"), arguments.get("gid")
    return owners.user[0] if uid is None else uid, owners.user[1] if gid is None else gid


def _above(root: int, path: str, owners: Owners, arguments: dict[str, Any], force: bool) -> int:
    """The folder that something is to be made in; what is missing of it is made if ``force``."""
    try:
        return open_in(root, path or ".", os.O_PATH | os.O_DIRECTORY, follow=True, cross_mounts=False)
    except FileNotFoundError:
        if not force:
            raise
    here, words = os.dup(root), path.split("/")
    try:
        for number, name in enumerate(words, 1):
            try:
                step = open_in(here, name, os.O_PATH | os.O_DIRECTORY, cross_mounts=False)
            except FileNotFoundError:
                step = _new_folder(here, name, owners, arguments, None)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                # a link: it is followed as the root directory has it
                so_far = "/".join(words[:number])
                step = open_in(root, so_far, os.O_PATH | os.O_DIRECTORY, follow=True, cross_mounts=False)
            os.close(here)
            here = step
        return here
    except BaseException:
        os.close(here)
        raise


def remove(arguments: dict[str, Any], fds: Sequence[int]) -> Made:
    """With all that is below it; of a link, the link. StateUnwritable if something of it cannot be."""
    above, name = posixpath.split(arguments["path"])
    if not name:
        raise OSError(errno.EINVAL, "a volume's own folder cannot be removed")
    parent = open_in(fds[0], above or ".", os.O_PATH | os.O_DIRECTORY, follow=True, cross_mounts=False)
    try:
        return {"removed": remove_tree(parent, name, missing_ok=False)}, []
    finally:
        os.close(parent)


# -- content -----------------------------------------------------------------------------------------------------------


def read(arguments: dict[str, Any], fds: Sequence[int]) -> Made:
    """A file, opened; links are followed. What is no file is never opened."""
    handle = open_in(fds[0], arguments["path"] or ".", os.O_PATH, follow=True, cross_mounts=False)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a file")
        # what was looked at, whatever its name means by now
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
        return _entry(fd, arguments["path"], Owners.of(arguments, fds[0])), [fd]
    finally:
        os.close(handle)


def begin(arguments: dict[str, Any], fds: Sequence[int]) -> Made:
    """A file without a name to write to, and the folder that it is to be in. ``force``: it may take a file's place."""
    root, owners, force = fds[0], Owners.of(arguments, fds[0]), bool(arguments["force"])
    above, name = posixpath.split(arguments["path"])
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    parent = _above(root, above, owners, arguments, force)
    try:
        _replaced(parent, name, force)
        temporary = ""
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=parent)
        except OSError as error:
            if error.errno not in _UNNAMED_NOT_HERE:
                raise
            temporary = f".{os.urandom(8).hex()}.part"
            fd = os.open(temporary, NEW_FILE, 0o600, dir_fd=parent)
    except BaseException:
        os.close(parent)
        raise
    return {"temporary": temporary}, [parent, fd]


def _replaced(parent: int, name: str, force: bool) -> os.stat_result | None:
    """What a new file takes the place of. FileExistsError, IsADirectoryError."""
    try:
        info = os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not force:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    return info


def finish(arguments: dict[str, Any], fds: Sequence[int]) -> Made:
    """``fds``: the volume, and what ``begin`` gave. The file is there whole or not at all; the owner and the mode of
    one that it replaces stay, unless others were asked for."""
    root, parent, fd = fds
    path, owners, force = arguments["path"], Owners.of(arguments, root), bool(arguments["force"])
    name, temporary = posixpath.basename(path), arguments["temporary"]
    before = _replaced(parent, name, force)
    uid, gid = _wanted_owner(arguments, owners)
    mode = arguments.get("mode")
    if before is not None and stat.S_ISREG(before.st_mode):
        old = owners.inside(before.st_uid, before.st_gid)
        uid = old[0] if arguments.get("uid") is None else uid
        gid = old[1] if arguments.get("gid") is None else gid
        mode = stat.S_IMODE(before.st_mode) if mode is None else mode
    _set(fd, owners, uid, gid, NEW_FILE_MODE if mode is None else mode)
    if before is not None or temporary:
        _put(parent, fd, temporary, name, force)
    else:
        try:
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=parent)
        except FileExistsError:
            if not force:
                raise
            _put(parent, fd, "", name, force)
    return _entry(fd, path, owners), []


def _put(parent: int, fd: int, temporary: str, name: str, force: bool) -> None:
    """In the place of what is there."""
    if not temporary:
        temporary = f".{os.urandom(8).hex()}.part"
        os.link(f"/proc/self/fd/{fd}", temporary, dst_dir_fd=parent)
    try:
        if force:
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            return
        os.link(temporary, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
        os.unlink(temporary, dir_fd=parent)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise


def discard(arguments: dict[str, Any], fds: Sequence[int]) -> Made:
    """``fds`` as for ``finish``."""
    if arguments["temporary"]:
        with suppress(FileNotFoundError):
            os.unlink(arguments["temporary"], dir_fd=fds[1])
    return {}, []


OPERATIONS: dict[str, Operation] = {
    "look": look, "list": listing, "change": change, "make_folder": make_folder, "remove": remove, "read": read,
    "begin": begin, "finish": finish, "discard": discard,
}  # fmt: skip


def job(arguments: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
    """In a child: ``fds`` begins with a socket that the descriptors which come of it are sent over."""
    told, made = OPERATIONS[arguments["operation"]](arguments, fds[1:])
    if made:
        with socket.socket(fileno=os.dup(fds[0])) as back:
            socket.send_fds(back, [b"f"], made)
        for fd in made:
            os.close(fd)
    return {"told": told}
