"""The image as a sandbox sees it before anything is written: a folder of the host, or parts of the host itself.

Everything is opened below a descriptor and without following a link (``fs.open_in``): an image may hold
links to anywhere. What cannot be read for us is told as such (``Unreadable``), never guessed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from ..engines import jail
from ..engines.base import ResolvedImage
from ..engines.machine import machine
from ..errors import EngineError
from ..fs import FILE, FOLDER, open_in
from ..images import host
from ..images.opening import Opener

_NODE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Node(NamedTuple):
    """What is at a path."""

    type: str  #: file, dir, symlink, other
    mode: int = 0
    size: int = 0
    target: str = ""
    owner: tuple[int, int] | None = None  #: uid and gid as they are inside; None: cannot be told
    ours: bool = False  #: the runtime made it, or it is a mount's root: its mode says nothing
    image: bool = False  #: it is the image's own, and is read there
    through: bool = False  #: a folder below which the image's files show


class Unreadable(Exception):
    """The image has the file and we may not read it, or it is none."""


class Base(Protocol):
    """What lies below all changes. Paths are absolute. Blocking: for threads."""

    def lstat(self, path: str) -> Node | None: ...

    def listdir(self, path: str) -> list[str]:
        """Names; none of what is no folder or cannot be read."""

    def open(self, path: str) -> int:
        """A descriptor of a regular file, the caller's to close. Unreadable."""

    def close(self) -> None: ...


class NoBase:
    """Nothing at all: everything is an addition (the process rung, which has no root of its own)."""

    def lstat(self, path: str) -> Node | None:
        return Node("dir", ours=True, image=True, through=True) if path == "/" else None

    def listdir(self, path: str) -> list[str]:
        return []

    def open(self, path: str) -> int:
        raise Unreadable

    def close(self) -> None:
        pass


class FolderBase:
    """A folder of the host as the root (``image="dir:..."``, unpacked images)."""

    def __init__(
        self, folder: str | os.PathLike[str], *, owners: bool = False, public: bool = False, mapped: bool = False
    ) -> None:
        """``owners``: its files carry the owners that are seen inside. ``public``: only what is open to everybody can
        be read inside, so it is not read here either. ``mapped``: some may be subordinate ids', whom we act for."""
        self._root = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._owners = owners
        self._public = public
        self._opener = Opener(self._root) if mapped else None
        self._last: tuple[str, Node | None] = ("", None)  # both sides of a comparison ask for the same path in turn

    def lstat(self, path: str) -> Node | None:
        if path != self._last[0]:
            self._last = (path, self._look(path))
        return self._last[1]

    def _open(self, path: str, flags: int) -> int:
        try:
            return open_in(self._root, _below(path), flags)
        except PermissionError:
            if self._opener is None:
                raise
            try:
                return self._opener.open(_below(path), flags)
            except EngineError as error:  # there is no such child to be had
                raise PermissionError(errno.EACCES, error.message) from error

    def _look(self, path: str) -> Node | None:
        try:
            fd = self._open(path, _NODE)
        except (OSError, ValueError):
            return None
        try:
            return self._node(fd)
        finally:
            os.close(fd)

    def _node(self, fd: int) -> Node:
        info = os.fstat(fd)
        owner = (info.st_uid, info.st_gid) if self._owners else None
        kind, target = _kind(info.st_mode), ""
        if kind == "symlink":
            target = os.readlink(b"", dir_fd=fd).decode("utf-8", "surrogateescape")
        size = info.st_size if kind == "file" else 0
        return Node(kind, stat.S_IMODE(info.st_mode), size, target, owner, image=True, through=kind == "dir")

    def listdir(self, path: str) -> list[str]:
        try:
            fd = self._open(path, FOLDER)
        except (OSError, ValueError):
            return []
        try:
            if self._public and not os.fstat(fd).st_mode & stat.S_IROTH:
                return []
            return os.listdir(fd)
        except OSError:
            return []
        finally:
            os.close(fd)

    def open(self, path: str) -> int:
        try:
            fd = self._open(path, FILE)
        except (OSError, ValueError) as error:
            raise Unreadable from error
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or (self._public and not info.st_mode & stat.S_IROTH):
            os.close(fd)
            raise Unreadable
        return fd

    def close(self) -> None:
        if self._opener is not None:
            self._opener.close()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1


class HostBase:
    """``image="host"``: the parts of ``host.layout``, each where it is put."""

    def __init__(self, view: host.HostView) -> None:
        self._parts: dict[str, host.Part] = {}
        self._children: dict[str, set[str]] = {}
        self._folders: dict[str, FolderBase] = {}
        for part in host.layout(view):
            self._parts.setdefault(part.path, part)  # a folder is made once, with its first mode
            for above in _chain(part.path):
                parent, _, name = above.rpartition("/")
                self._children.setdefault(parent or "/", set()).add(name)
            source = part.source if isinstance(part, host.Bind) else part.path
            if isinstance(part, (host.Overlay, host.Bind)) and os.path.isdir(source):
                with suppress(OSError):
                    self._folders[part.path] = FolderBase(source, public=True)

    def lstat(self, path: str) -> Node | None:
        part = self._parts.get(path)
        if isinstance(part, host.Link):
            return Node("symlink", 0o777, target=part.target, image=True)
        if isinstance(part, host.File):
            return Node("file", part.mode, len(part.content), image=True)
        if isinstance(part, host.Bind) and path not in self._folders:
            return _bound_file(part.source)
        if path == "/" or path in self._folders or path in self._children:
            mode = part.mode if isinstance(part, host.Folder) else 0o755
            return Node("dir", mode, ours=not isinstance(part, host.Folder), image=True, through=True)
        if part is not None:
            return Node("dir", part.mode, image=True, through=True) if isinstance(part, host.Folder) else None
        folder, rest = self._inside(path)
        return folder.lstat(rest) if folder else None

    def listdir(self, path: str) -> list[str]:
        folder, rest = self._inside(path)
        found = set(folder.listdir(rest)) if folder else set()
        return list(found | self._children.get(path, set()))

    def open(self, path: str) -> int:
        part = self._parts.get(path)
        if isinstance(part, host.File):
            return _memory_file(part.content)
        if isinstance(part, host.Bind) and path not in self._folders:
            try:
                return os.open(part.source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                raise Unreadable from error
        folder, rest = self._inside(path)
        if folder is None:
            raise Unreadable
        return folder.open(rest)

    def _inside(self, path: str) -> tuple[FolderBase | None, str]:
        """The folder of the host that a path lies in, and the rest of the path."""
        above = path
        while above:
            if above in self._folders:
                return self._folders[above], path[len(above) :] or "/"
            above = above.rpartition("/")[0]
        return None, path

    def close(self) -> None:
        for folder in self._folders.values():
            folder.close()


def base_of(image: ResolvedImage) -> Base:
    """The base of a sandbox with that image. Blocking; close it."""
    if image.kind == "host":
        return HostBase(host.look())
    assert image.path is not None
    return FolderBase(Path(image.path), owners=image.owners_kept, mapped=jail.mode(machine()) == "range")


@contextmanager
def closing_base(base: Base) -> Iterator[Base]:
    try:
        yield base
    finally:
        base.close()


class Pieces:
    """A file of the base, in pieces. A context manager."""

    def __init__(self, base: Base, path: str) -> None:
        self._fd = base.open(path)

    def read(self, count: int) -> bytes:
        try:
            return os.read(self._fd, count)
        except OSError as error:
            raise Unreadable from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "dir"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def _below(path: str) -> bytes:
    return path.strip("/").encode("utf-8", "surrogateescape") or b"."


def _chain(path: str) -> Iterable[str]:
    """/a, /a/b, /a/b/c."""
    parts = path.strip("/").split("/")
    for count in range(1, len(parts) + 1):
        yield "/" + "/".join(parts[:count])


def _bound_file(source: str) -> Node | None:
    try:
        info = os.stat(source)  # a bind mount follows links too
    except OSError:
        return None
    kind = _kind(info.st_mode)
    return Node(kind, stat.S_IMODE(info.st_mode), info.st_size if kind == "file" else 0, image=True)


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("sloplet-base", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
