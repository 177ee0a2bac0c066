"""A filesystem in memory: owners, modes, symlinks, a size limit, change events. Errors are ``OSError``, as Linux's."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...wire.schema import FileType, WatchMask

MAX_LINKS = 40
READ, WRITE, EXECUTE = 4, 2, 1
_ids = itertools.count(1)


class Cred(NamedTuple):
    """Who acts."""

    uid: int
    gid: int
    name: str = ""
    home: str = "/"
    wary: bool = False  # acts for somebody: of links follows only root's


ROOT = Cred(0, 0, "root", "/root")


def fail(number: int, what: str) -> OSError:
    return OSError(number, os.strerror(number), what)


@dataclass(eq=False)
class Node:
    """A file, directory, symlink or device. ``program`` makes a file one of the fake's commands."""

    type: FileType
    mode: int
    uid: int = 0
    gid: int = 0
    data: bytearray = field(default_factory=bytearray)
    entries: dict[str, Node] = field(default_factory=dict)
    target: str = ""
    device: str = ""
    program: str = ""
    attributes: dict[bytes, bytes] = field(default_factory=dict)  # extended ones
    parent: Node | None = None  # of directories
    name: str = ""  # of directories
    mtime_ns: int = field(default_factory=time.time_ns)
    ino: int = field(default_factory=lambda: next(_ids))

    @property
    def is_dir(self) -> bool:
        return self.type is FileType.DIR

    @property
    def size(self) -> int:
        if self.type is FileType.SYMLINK:
            return len(os.fsencode(self.target))
        return 4096 if self.is_dir else len(self.data)

    def allows(self, cred: Cred, want: int) -> bool:
        if cred.uid == 0:
            return not want & EXECUTE or self.is_dir or bool(self.mode & 0o111)
        shift = 6 if cred.uid == self.uid else 3 if cred.gid == self.gid else 0
        return (self.mode >> shift) & want == want

    def path(self) -> str:
        """Of a directory."""
        parts: list[str] = []
        here: Node | None = self
        while here is not None and here.parent is not None:
            parts.append(here.name)
            here = here.parent
        return "/" + "/".join(reversed(parts))


@dataclass(eq=False)
class Watcher:
    root: Node
    recursive: bool
    tell: Callable[[int, str, str | None], None]

    def relative(self, folder: Node, name: str) -> str | None:
        """The name as this watcher knows it, or None if it is none of its business."""
        parts, here = [name], folder
        while here is not self.root:
            if here.parent is None or not self.recursive:
                return None
            parts.append(here.name)
            here = here.parent
        return "/".join(reversed(parts))


class Vfs:
    """The tree, and every operation on it. ``cwd`` arguments are absolute paths."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.root = Node(FileType.DIR, 0o755)
        self.watchers: list[Watcher] = []

    # -- finding -------------------------------------------------------------------

    def find(self, path: str, cwd: str, cred: Cred, *, follow: bool = True) -> Node:
        node = self._walk(path, cwd, cred, follow)[2]
        if node is None:
            raise fail(errno.ENOENT, path)
        return node

    def locate(self, path: str, cwd: str, cred: Cred, *, follow: bool = False) -> tuple[Node, str, Node | None]:
        """The directory that holds (or would hold) ``path``, the name there, and what is there now."""
        return self._walk(path, cwd, cred, follow)

    def _walk(self, path: str, cwd: str, cred: Cred, follow: bool) -> tuple[Node, str, Node | None]:
        if not path or "\0" in path:
            raise fail(errno.EINVAL if path else errno.ENOENT, path)
        if len(os.fsencode(path)) > 4095:
            raise fail(errno.ENAMETOOLONG, path[:40])
        here = self.root
        full = path if path.startswith("/") else cwd + "/" + path
        todo = [part for part in reversed(full.split("/")) if part]
        slash, links = path.endswith("/"), 0
        folder, name, node = self.root, "", self.root
        while todo:
            part = todo.pop()
            if not here.is_dir:
                raise fail(errno.ENOTDIR, path)
            if not here.allows(cred, EXECUTE):
                raise fail(errno.EACCES, path)
            if part == ".":
                folder, name, node = here.parent or here, here.name, here
                continue
            if part == "..":
                here = here.parent or here
                folder, name, node = here.parent or here, here.name, here
                continue
            if len(os.fsencode(part)) > 255:
                raise fail(errno.ENAMETOOLONG, path)
            found = here.entries.get(part)
            if found is None:
                if todo:
                    raise fail(errno.ENOENT, path)
                return here, part, None
            if found.type is FileType.SYMLINK and (todo or follow or slash):
                links += 1
                if links > MAX_LINKS or (cred.wary and found.uid != 0):
                    raise fail(errno.ELOOP, path)
                todo += [step for step in reversed(found.target.split("/")) if step]
                if found.target.startswith("/"):
                    here = self.root
                folder, name, node = here.parent or here, here.name, here
                continue
            folder, name, node = here, part, found
            here = found
        if slash and not node.is_dir:
            raise fail(errno.ENOTDIR, path)
        return folder, name, node

    def executable(self, name: str, path_variable: str, cwd: str, cred: Cred) -> Node:
        """The file that a command's name means. ENOENT or EACCES as execvp would say."""
        tries = [name] if "/" in name else [f"{p or '.'}/{name}" for p in path_variable.split(":")]
        problem = fail(errno.ENOENT, name)
        for candidate in tries:
            try:
                node = self.find(candidate, cwd, cred)
            except OSError as error:
                if error.errno != errno.ENOENT and (error.errno != errno.ENOTDIR or "/" in name):
                    problem = error
                continue
            if node.type is FileType.FILE and node.allows(cred, EXECUTE):
                return node
            problem = fail(errno.EACCES, name)
        raise problem

    # -- changing --------------------------------------------------------------------

    def _room_in(self, folder: Node, cred: Cred, path: str) -> None:
        if not folder.allows(cred, WRITE | EXECUTE):
            raise fail(errno.EACCES, path)

    def _may_unlink(self, folder: Node, node: Node, cred: Cred, path: str) -> None:
        self._room_in(folder, cred, path)
        if folder.mode & 0o1000 and cred.uid not in (0, folder.uid, node.uid):
            raise fail(errno.EPERM, path)

    def _add(self, folder: Node, name: str, node: Node, *, quiet: bool = False) -> Node:
        folder.entries[name] = node
        if node.is_dir:
            node.parent, node.name = folder, name
        folder.mtime_ns = time.time_ns()
        if not quiet:
            self.emit(WatchMask.CREATED, folder, name)
        return node

    def _drop(self, folder: Node, name: str) -> None:
        node = folder.entries.pop(name)
        self.used -= len(node.data)
        folder.mtime_ns = time.time_ns()

    def create(self, path: str, cwd: str, cred: Cred, mode: int, *, exclusive: bool = False) -> Node:
        """Open-with-O_CREAT: the file at ``path``, made if missing."""
        folder, name, node = self.locate(path, cwd, cred, follow=not exclusive)
        if node is not None:
            if exclusive:
                raise fail(errno.EEXIST, path)
            if node.is_dir:
                raise fail(errno.EISDIR, path)
            if not node.allows(cred, WRITE):
                raise fail(errno.EACCES, path)
            return node
        if path.endswith("/"):
            raise fail(errno.EISDIR, path)
        self._room_in(folder, cred, path)
        return self._add(folder, name, Node(FileType.FILE, mode & 0o7777, cred.uid, cred.gid))

    def publish(self, path: str, cwd: str, cred: Cred, data: bytes, mode: int | None) -> None:
        """Replace a file at once, as temporary file and rename would."""
        folder, name, node = self.locate(path, cwd, cred, follow=True)
        if node is not None and node.is_dir:
            raise fail(errno.EISDIR, path)
        self._room_in(folder, cred, path)
        old = len(node.data) if node is not None else 0
        if self.used - old + len(data) > self.limit:
            raise fail(errno.ENOSPC, path)
        if node is not None:
            self._drop(folder, name)
        kept = mode if mode is not None else node.mode if node is not None else 0o644
        fresh = Node(FileType.FILE, kept & 0o7777, cred.uid, cred.gid, data=bytearray(data))
        self.used += len(data)
        self._add(folder, name, fresh, quiet=node is not None)
        self.emit(WatchMask.MODIFIED, folder, name)

    def write(self, node: Node, offset: int, data: bytes) -> int:
        """Write at an offset; as much as fits. ENOSPC if nothing does."""
        growth = max(0, offset + len(data) - len(node.data))
        room = self.limit - self.used
        if growth > room:
            data = data[: len(data) - (growth - room)]
            if not data:
                raise fail(errno.ENOSPC, "write")
            growth = max(0, offset + len(data) - len(node.data))
        if offset > len(node.data):
            node.data += bytes(offset - len(node.data))
        node.data[offset : offset + len(data)] = data
        node.mtime_ns = time.time_ns()
        self.used += growth
        return len(data)

    def truncate(self, node: Node) -> None:
        self.used -= len(node.data)
        node.data = bytearray()

    def mkdir(
        self, path: str, cwd: str, cred: Cred, mode: int = 0o755, *, parents: bool = False, owner: Cred | None = None
    ) -> Node:
        folder, name, node = None, "", None
        try:
            folder, name, node = self.locate(path.rstrip("/") or "/", cwd, cred, follow=parents)
        except FileNotFoundError:
            if not parents:
                raise
            above = path.rstrip("/").rpartition("/")[0]
            if not above:
                raise
            self.mkdir(above, cwd, cred, parents=True, owner=owner)
            folder, name, node = self.locate(path.rstrip("/"), cwd, cred)
        if node is not None:
            if parents and node.is_dir:
                return node
            raise fail(errno.EEXIST, path)
        self._room_in(folder, cred, path)
        whose = owner or cred
        return self._add(folder, name, Node(FileType.DIR, mode & 0o7777, whose.uid, whose.gid))

    def remove(self, path: str, cwd: str, cred: Cred, *, recursive: bool = False) -> int:
        folder, name, node = self.locate(path, cwd, cred)
        if node is None:
            raise fail(errno.ENOENT, path)
        if node is self.root or path.rstrip("/").rpartition("/")[2] in (".", ".."):
            raise fail(errno.EINVAL, path)
        return self._remove(folder, name, node, cred, recursive, path)

    def _remove(self, folder: Node, name: str, node: Node, cred: Cred, recursive: bool, path: str) -> int:
        self._may_unlink(folder, node, cred, path)
        count = 0
        if node.is_dir and node.entries:
            if not recursive:
                raise fail(errno.ENOTEMPTY, path)
            if not node.allows(cred, READ):
                raise fail(errno.EACCES, path)
            for below in list(node.entries):
                count += self._remove(node, below, node.entries[below], cred, True, path)
        self._drop(folder, name)
        self.emit(WatchMask.REMOVED, folder, name)
        return count + 1

    def move(self, path: str, target: str, cwd: str, cred: Cred, *, replace: bool) -> None:
        folder, name, node = self.locate(path.rstrip("/") or "/", cwd, cred)
        if node is None:
            raise fail(errno.ENOENT, path)
        to_folder, to_name, old = self.locate(target.rstrip("/") or "/", cwd, cred)
        self._may_unlink(folder, node, cred, path)
        self._room_in(to_folder, cred, target)
        if old is not None:
            if not replace:
                raise fail(errno.EEXIST, target)
            if old is node:
                return
            if old.is_dir != node.is_dir:
                raise fail(errno.EISDIR if old.is_dir else errno.ENOTDIR, target)
            if old.entries:
                raise fail(errno.ENOTEMPTY, target)
            self._may_unlink(to_folder, old, cred, target)
        here: Node | None = to_folder
        while here is not None and node.is_dir:
            if here is node:
                raise fail(errno.EINVAL, target)
            here = here.parent
        if old is not None:
            self._drop(to_folder, to_name)
        del folder.entries[name]
        self._add(to_folder, to_name, node, quiet=True)
        self.emit(WatchMask.RENAMED, folder, name, to_folder, to_name)

    def symlink(self, path: str, target: str, cwd: str, cred: Cred) -> None:
        folder, name, node = self.locate(path, cwd, cred)
        if node is not None:
            raise fail(errno.EEXIST, path)
        self._room_in(folder, cred, path)
        self._add(folder, name, Node(FileType.SYMLINK, 0o777, cred.uid, cred.gid, target=target))

    def chmod(self, path: str, cwd: str, cred: Cred, mode: int) -> None:
        folder, name, node = self.locate(path, cwd, cred, follow=True)
        if node is None:
            raise fail(errno.ENOENT, path)
        if cred.uid not in (0, node.uid):
            raise fail(errno.EPERM, path)
        node.mode = mode & 0o7777
        self.emit(WatchMask.ATTRIBUTES, folder, name)

    def chown(self, path: str, cwd: str, cred: Cred, uid: int, gid: int) -> None:
        folder, name, node = self.locate(path, cwd, cred, follow=True)
        if node is None:
            raise fail(errno.ENOENT, path)
        if cred.uid != 0 and (uid != node.uid or cred.uid != node.uid or gid not in (node.gid, cred.gid)):
            raise fail(errno.EPERM, path)
        node.uid, node.gid = uid, gid
        node.mode &= 0o1777
        self.emit(WatchMask.ATTRIBUTES, folder, name)

    # -- looking ---------------------------------------------------------------------

    def walk(self, node: Node, cred: Cred, depth: int) -> Iterator[tuple[str, Node]]:
        """Everything below a directory, parents first, at most ``depth`` levels; unreadable folders are not entered."""
        for name in sorted(node.entries):
            below = node.entries[name]
            yield name, below
            if below.is_dir and depth > 1 and below.allows(cred, READ | EXECUTE):
                for inner, found in self.walk(below, cred, depth - 1):
                    yield f"{name}/{inner}", found

    def emit(self, mask: WatchMask, folder: Node, name: str, to_folder: Node | None = None, to_name: str = "") -> None:
        for watcher in list(self.watchers):
            old = watcher.relative(folder, name)
            new = watcher.relative(to_folder, to_name) if to_folder is not None else None
            if to_folder is None:
                if old is not None:
                    watcher.tell(int(mask), old, None)
            elif old is not None and new is not None:
                watcher.tell(int(WatchMask.RENAMED), old, new)
            elif old is not None:
                watcher.tell(int(WatchMask.REMOVED), old, None)
            elif new is not None:
                watcher.tell(int(WatchMask.CREATED), new, None)
