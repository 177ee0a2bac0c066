"""From unpacked layers to the one tree of an image: what is in it is planned in memory, then made of hard links.

A file of the tree *is* the file of its layer, so images that share layers share them on disk and in the page cache;
only folders are made anew. A layer's marks take away what lies below, what it adds replaces what is there (folders
meet), and where it only implies a folder, whatever stands there is followed: ``bin/x`` above ``bin -> usr/bin`` is
``usr/bin/x``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ImageInvalid
from ..fs import FILE, FOLDER, NEW_FILE, NO_LINK, open_in
from .extract import UnpackLimits, split_name
from .layer import LayerFacts
from .tarstream import show

T = TypeVar("T")

LAYER_FACTS = "layer.json"
LAYER_TREE = "tree"
_MOST = 2_000_000  # files of all layers together
_DEPTH = 512
_MAX_LINKS = 40
_KEPT_FOLDERS = 32


class File:
    """What is no folder: its layer, and where it lies there. ``folder`` is the path of its folder."""

    __slots__ = ("folder", "layer", "name", "symlink")

    def __init__(self, layer: int, folder: bytes, name: bytes, symlink: bool) -> None:
        self.layer, self.folder, self.name, self.symlink = layer, folder, name, symlink


class Folder:
    """``layer`` and ``path`` say whose rights and times it has; -1: nobody's, it came into being on the way."""

    __slots__ = ("above", "children", "layer", "name", "path")

    def __init__(self, above: Folder | None, name: bytes, layer: int = -1, path: bytes = b"") -> None:
        self.above, self.name = above, name
        self.layer, self.path = layer, path
        self.children: dict[bytes, File | Folder] = {}

    def way(self) -> list[bytes]:
        """From the root, by names."""
        found, at = [], self
        while at.above is not None:
            found.append(at.name)
            at = at.above
        return found[::-1]


@dataclass
class Composed:
    """What came of it."""

    files: int = 0
    folders: int = 0
    copied: int = 0  #: files that could not be linked
    owners: dict[bytes, tuple[int, int]] = field(default_factory=dict)  #: recorded ones, by path, of what is no symlink
    modes: dict[bytes, int] = field(default_factory=dict)  #: with setuid or setgid, which no file has on disk

    def to_dict(self) -> dict[str, Any]:
        return {"files": self.files, "folders": self.folders, "copied": self.copied}


def compose(root: int, layers: int, names: Sequence[str], *, keep_owners: bool) -> Composed:
    """Make the tree of the layers of these names in the folder ``layers``, the lowest first, in the empty folder
    ``root`` (both descriptors).

    ImageInvalid for layers that do not fit each other, OSError for what is wrong with the disk.
    """
    with _Layers(layers, names) as sources:
        try:
            plan = _Plan(sources)
            for index in range(len(names)):
                plan.add(index, sources.facts(index))
            facts = [sources.facts(index) for index in range(len(names))]
            owners = [_by_path(each.owners) for each in facts] if not keep_owners else []
            maker = _Maker(sources, root, keep_owners, owners, [_by_path(each.modes) for each in facts])
            maker.fill(plan.root, root, 0, b"")
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise ImageInvalid("a path in the image's layers is longer than 4096 bytes, the limit") from error
        return maker.result


def relink(root: int, layers: int, name: str, *, keep_owners: bool) -> Composed:
    """The files of one unpacked layer a second time, as they are, in the empty folder ``root``: by hard links to those
    of the layer ``name`` in the folder ``layers``. OSError, ImageInvalid."""
    with _Layers(layers, [name]) as sources:
        plan = _Plan(sources)
        plan.copy(0)
        maker = _Maker(sources, root, keep_owners, [], [{}])
        maker.fill(plan.root, root, 0, b"")
        return maker.result


def _by_path(recorded: Mapping[bytes, T]) -> dict[bytes, T]:
    """An archive may write one path in many ways."""
    return {b"/".join(split_name(name, UnpackLimits())): each for name, each in recorded.items()}


class _Layers:
    """The unpacked layers, of which only a few folders are open at a time. A context manager."""

    def __init__(self, fd: int, names: Sequence[str]) -> None:
        self._fd = fd
        self._names = names
        self._open: dict[tuple[int, bytes], int] = {}

    def __enter__(self) -> _Layers:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def folder(self, layer: int, path: bytes) -> int:
        """A folder of a layer's tree; good until the next call."""
        fd = self._open.get((layer, path))
        if fd is None:
            if len(self._open) >= _KEPT_FOLDERS:
                os.close(self._open.pop(next(iter(self._open))))
            root = os.open(f"{self._names[layer]}/{LAYER_TREE}", FOLDER, dir_fd=self._fd)
            try:
                fd = self._open[layer, path] = open_in(root, path or b".", FOLDER)
            finally:
                os.close(root)
        return fd

    def facts(self, layer: int) -> LayerFacts:
        fd = os.open(f"{self._names[layer]}/{LAYER_FACTS}", FILE, dir_fd=self._fd)
        with os.fdopen(fd, "rb") as file:
            try:
                return LayerFacts.from_json(file.read())
            except (ValueError, KeyError, TypeError) as error:
                raise ImageInvalid(
                    f"an unpacked layer is damaged on this disk ({type(error).__name__}: {error})",
                    hint="`sloplet image prune --all` removes it; then try again",
                ) from error


class _Plan:
    """What is where, layer by layer."""

    def __init__(self, layers: _Layers) -> None:
        self.root = Folder(None, b"")
        self._layers = layers
        self._seen = 0
        self._implied: frozenset[bytes] = frozenset()

    def add(self, layer: int, facts: LayerFacts) -> None:
        """One more layer on top."""
        for path in facts.opaque:
            where = self._walk(_split(path))
            if isinstance(where, Folder):
                where.children.clear()
        for path in facts.whiteouts:
            *parents, name = _split(path)
            above = self._walk(parents)
            if isinstance(above, Folder):
                above.children.pop(name, None)
        self._implied = frozenset(facts.implied)
        if b"" not in self._implied:
            self.root.layer, self.root.path = layer, b""
        self._merge(layer, b"", self.root, 0)
        for name, target in facts.links:
            self._link(_split(name), _split(target))

    def copy(self, layer: int) -> None:
        """Its files alone, whatever it says of the layers below."""
        self.root.layer, self.root.path = layer, b""
        self._merge(layer, b"", self.root, 0)

    def _merge(self, layer: int, path: bytes, above: Folder, depth: int) -> None:
        """The folder ``path`` of a layer on top of ``above``. Through links a layer may be deeper than its names."""
        if depth > _DEPTH:
            raise _too_deep()
        with os.scandir(self._layers.folder(layer, path)) as entries:
            found = [
                (os.fsencode(each.name), each.is_dir(follow_symlinks=False), each.is_symlink()) for each in entries
            ]
        self._count(len(found))
        for name, is_folder, is_link in found:
            if not is_folder:
                above.children[name] = File(layer, path, name, is_link)
                continue
            below = path + b"/" + name if path else name
            self._merge(layer, below, self._meet(layer, below, above, name), depth + 1)

    def _meet(self, layer: int, path: bytes, above: Folder, name: bytes) -> Folder:
        """The folder that a layer's folder ``path`` becomes part of."""
        there = above.children.get(name)
        if path not in self._implied:
            if isinstance(there, Folder):
                there.layer, there.path = layer, path
                return there
        elif isinstance(there, Folder):
            return there
        elif there is not None and there.symlink:
            return self._make(self._target(above, there))
        made = above.children[name] = Folder(above, name, layer, path)
        return made

    def _link(self, name: list[bytes], target: list[bytes]) -> None:
        """A hard link to a file of a lower layer."""
        *parents, last = target
        where = self._walk(parents)
        found = where.children.get(last) if isinstance(where, Folder) else None
        if not isinstance(found, File):
            what = "a folder" if isinstance(found, Folder) else "missing"
            raise ImageInvalid(
                f"{show(b'/'.join(name))} in a layer is a link to {show(b'/'.join(target))}, which is {what}"
            )
        self._make(name[:-1]).children[name[-1]] = found

    def _count(self, more: int) -> None:
        self._seen += more
        if self._seen > _MOST:
            raise ImageInvalid(f"the image's layers have more than {_MOST} files together, the limit")

    # Paths in the tree so far. A path is the way from the root, by names.

    def _walk(self, parts: Sequence[bytes]) -> Folder | None:
        """The folder that a path leads to; None if it leads nowhere."""
        return self._follow(list(parts), make=False)

    def _make(self, parts: Sequence[bytes]) -> Folder:
        found = self._follow(list(parts), make=True)
        assert found is not None
        return found

    def _follow(self, parts: list[bytes], *, make: bool) -> Folder | None:
        todo = list(reversed(parts))
        here, depth = self.root, 0
        links = 0
        while todo:
            part = todo.pop()
            if part == b"..":
                if here.above is not None:
                    here, depth = here.above, depth - 1
                continue
            there = here.children.get(part)
            if isinstance(there, File):
                if there.symlink:
                    links += 1
                    if links > _MAX_LINKS:
                        raise ImageInvalid(f"the image's layers have a loop of symlinks at {show(there.name)}")
                    to = self._read_link(there)
                    if to.startswith(b"/"):
                        here, depth = self.root, 0
                    todo += [step for step in reversed(to.split(b"/")) if step not in (b"", b".")]
                    continue
                if not make:
                    return None
                there = None  # a folder takes the file's place
            if there is None:
                if not make:
                    return None
                self._count(1)  # a link may imply hundreds
                there = here.children[part] = Folder(here, part)
            here, depth = there, depth + 1
            if depth > _DEPTH:
                raise _too_deep()
        return here

    def _target(self, above: Folder, link: File) -> list[bytes]:
        """Where a symlink in the folder ``above`` leads, as a path from the root."""
        to = self._read_link(link)
        steps = [step for step in to.split(b"/") if step not in (b"", b".")]
        return steps if to.startswith(b"/") else [*above.way(), *steps]

    def _read_link(self, link: File) -> bytes:
        return os.readlink(link.name, dir_fd=self._layers.folder(link.layer, link.folder))


class _Maker:
    """Makes what was planned."""

    def __init__(
        self, layers: _Layers, root: int, keep_owners: bool, recorded: Sequence[Mapping[bytes, tuple[int, int]]],
        modes: Sequence[Mapping[bytes, int]],
    ) -> None:  # fmt: skip
        self._layers = layers
        self._root = root
        self._copies: dict[tuple[int, int], bytes] = {}  # of files that can have no name more: where our copy is
        self._room = UnpackLimits().bytes  # for these
        self._keep_owners = keep_owners
        self._recorded = recorded  # by layer
        self._modes = modes  # by layer
        self._ours = (os.geteuid(), os.getegid())
        self.result = Composed()

    def fill(self, folder: Folder, fd: int, depth: int, way: bytes) -> None:
        """All below ``folder``, then its own rights and times."""
        if depth > _DEPTH:
            raise _too_deep()
        for name, node in folder.children.items():
            path = way + b"/" + name if way else name
            if isinstance(node, File):
                self._place(node, fd, name, path)
                if not node.symlink:
                    self._note(path, node.layer, node.folder + b"/" + node.name if node.folder else node.name)
                continue
            self._note(path, node.layer, node.path)
            os.mkdir(name, 0o700, dir_fd=fd)
            below = os.open(name, FOLDER, dir_fd=fd)
            try:
                self.fill(node, below, depth + 1, path)
            finally:
                os.close(below)
        self.result.folders += 1
        if folder.layer < 0:
            os.fchmod(fd, 0o755)
            os.utime(fd, ns=(0, 0))
        else:
            source = self._layers.folder(folder.layer, folder.path)
            self._copy_facts(source, fd, os.fstat(source))

    def _note(self, path: bytes, layer: int, source: bytes) -> None:
        if self._recorded and layer >= 0 and (ids := self._recorded[layer].get(source)) is not None:
            self.result.owners[path] = ids
        if layer >= 0 and (mode := self._modes[layer].get(source)) is not None:
            self.result.modes[path] = mode

    def _place(self, file: File, fd: int, name: bytes, path: bytes) -> None:
        source = self._layers.folder(file.layer, file.folder)
        try:
            os.link(file.name, name, src_dir_fd=source, dst_dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            self._place_copy(file, source, fd, name, path)
        self.result.files += 1

    def _place_copy(self, file: File, source: int, fd: int, name: bytes, path: bytes) -> None:
        """Once for all names of a file: a layer may have thousands for a large one."""
        info = os.lstat(file.name, dir_fd=source)
        key = (info.st_dev, info.st_ino)
        if key in self._copies:
            with suppress(OSError):
                os.link(self._copies[key], name, src_dir_fd=self._root, dst_dir_fd=fd, follow_symlinks=False)
                return
        self._room -= info.st_size
        if self._room < 0:
            raise ImageInvalid(f"the image has too many names for files of {UnpackLimits().bytes} bytes, the limit")
        self._copy(file, source, fd, name, info)
        self._copies[key] = path
        self.result.copied += 1

    def _copy(self, file: File, source: int, fd: int, name: bytes, info: os.stat_result) -> None:
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(file.name, dir_fd=source), name, dir_fd=fd)
            if self._keep_owners:
                os.chown(name, info.st_uid, info.st_gid, dir_fd=fd, follow_symlinks=False)
            os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=fd, follow_symlinks=False)
            return
        from ..volumes.trees import copy_sparse

        old = os.open(file.name, FILE, dir_fd=source)
        try:
            new = os.open(name, NEW_FILE, 0o600, dir_fd=fd)
            try:
                copy_sparse(old, new)
                self._copy_facts(old, new, info)
            finally:
                os.close(new)
        finally:
            os.close(old)

    def _copy_facts(self, source: int, fd: int, info: os.stat_result) -> None:
        if self._keep_owners and (info.st_uid, info.st_gid) != self._ours:
            os.fchown(fd, info.st_uid, info.st_gid)
        for name in os.listxattr(source):
            if name.startswith("user."):
                os.setxattr(fd, name, os.getxattr(source, name))
        os.fchmod(fd, stat.S_IMODE(info.st_mode))
        os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))


def _too_deep() -> ImageInvalid:
    return ImageInvalid(f"the image's layers are more than {_DEPTH} folders deep together, the limit")


def _split(path: bytes) -> list[bytes]:
    return path.split(b"/") if path else []
