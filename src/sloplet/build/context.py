"""Folders that files are copied from: the context of a build, or an image's tree. By descriptors, never out of them."""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..errors import BuildError, BuildFailed, RecipeInvalid
from ..fs import FILE, FOLDER, open_in
from .ignore import Ignore, is_pattern, pattern_expression

MAX_FILES = 1_000_000
_NODE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1 << 18
_MAX_LINKS = 40
_MAX_IGNORE = 2**20


@dataclass(frozen=True)
class Found:
    """A file of a folder, ``path`` relative to it ("": itself)."""

    path: str
    kind: str  #: file, folder, symlink, other
    mode: int
    uid: int = 0
    gid: int = 0
    size: int = 0
    link: str = ""


#: From owners on disk to those inside.
Owner = Callable[[int, int], tuple[int, int]]


class Folder:
    """A folder to copy from. ``ignore``: what does not exist in it; ``owner``: whom its files belong to in an image, by
    their owners on disk (None: to root)."""

    def __init__(
        self, path: str | os.PathLike[str], *, ignore: Ignore | None = None, owner: Owner | None = None
    ) -> None:
        try:
            self._root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BuildError(f"the folder {os.fspath(path)} cannot be used: {error.strerror}") from error
        self.shown = os.fspath(path)
        self._ignore = ignore or Ignore()
        self._owner = owner

    @property
    def owners(self) -> bool:
        """Whether the owners that it tells are those inside."""
        return self._owner is not None

    def close(self) -> None:
        root, self._root = self._root, -1
        if root >= 0:
            os.close(root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_in(self, path: bytes, flags: int) -> int:
        return open_in(self._root, path, flags)

    def lstat(self, path: str) -> Found | None:
        """What is there, no link followed. BuildFailed if it may not be looked at."""
        path = path.strip("/")
        if path and self._ignore.ignores(path):
            return None
        try:
            fd = self._open_in(_raw(path) or b".", _NODE)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENAMETOOLONG, errno.EXDEV, errno.EINVAL):
                return None
            raise self._denied(path, error) from error
        try:
            return self._found(path, fd)
        finally:
            os.close(fd)

    def _found(self, path: str, fd: int) -> Found:
        info = os.fstat(fd)
        owner = (0, 0) if self._owner is None else self._owner(info.st_uid, info.st_gid)
        kind = _kind(info.st_mode)
        link = os.readlink(b"", dir_fd=fd).decode("utf-8", "surrogateescape") if kind == "symlink" else ""
        size = info.st_size if kind == "file" else 0
        return Found(path, kind, stat.S_IMODE(info.st_mode), *owner, size, link)

    def names(self, path: str) -> list[str]:
        """What is in a folder; nothing if it is none."""
        found = self.lstat(path)
        return self._names(path.strip("/")) if found is not None and found.kind == "folder" else []

    def _names(self, path: str) -> list[str]:
        try:
            fd = self._open_in(_raw(path) or b".", FOLDER)
        except OSError as error:
            raise self._denied(path, error) from error
        try:
            return sorted(os.listdir(fd), key=os.fsencode)
        finally:
            os.close(fd)

    def walk(self, path: str, exclude: Ignore | None = None) -> Iterator[Found]:
        """Everything below a folder, each folder before what is in it. Sockets, pipes and devices are left out."""
        waiting, count = [path.strip("/")], 0
        while waiting:
            folder = waiting.pop()
            below = []
            for name in self._names(folder):
                each = f"{folder}/{name}" if folder else name
                relative = each[len(path.strip("/")) :].lstrip("/")
                ignored = self._ignore.ignores(each) or (exclude is not None and exclude.ignores(relative))
                if ignored and (self._ignore.prunes(each) or (exclude is not None and exclude.prunes(relative))):
                    continue
                found = self._look(each)
                if found is None or found.kind == "other":
                    continue
                if found.kind == "folder":
                    below.append(each)
                if ignored:
                    continue
                count += 1
                if count > MAX_FILES:
                    raise BuildFailed(f"{self.shown} has more than {MAX_FILES:,} files", hint="use a .dockerignore")
                yield self.whole(found)
            waiting += reversed(below)

    def whole(self, found: Found) -> Found:
        """What is told of a file to who copies it: with bits that no sandbox may see."""
        return found

    def _look(self, path: str) -> Found | None:
        try:
            fd = self._open_in(_raw(path), _NODE)
        except FileNotFoundError:
            return None  # gone since
        except OSError as error:
            raise self._denied(path, error) from error
        try:
            return self._found(path, fd)
        finally:
            os.close(fd)

    def match(self, pattern: str) -> list[str]:
        """The paths that a pattern names, in order; none if there are none. ValueError for what is no pattern."""
        wanted = posixpath.normpath(pattern.lstrip("/") or ".")
        expression = pattern_expression(wanted)
        fixed = []
        for part in wanted.split("/"):
            if is_pattern(part):
                break
            fixed.append(part)
        start = "/".join(fixed)
        depth = None if "**" in wanted else wanted.count("/") + 1
        top = self.lstat(resolve(self.lstat, start))
        if top is None or top.kind != "folder":
            return []
        found = []
        for item in self._shallow(top.path, depth, start):
            if expression.match(item):
                found.append(item)
        return sorted(found, key=os.fsencode)

    def _shallow(self, path: str, depth: int | None, shown: str) -> Iterator[str]:
        """Names below a folder, not deeper than ``depth`` parts; those that are ignored are not there."""
        for name in self._names(path):
            each, named = (f"{above}/{name}" if above else name for above in (path, shown))
            found = self.lstat(each)
            if found is not None:
                yield named
            if depth is not None and named.count("/") + 1 >= depth:
                continue
            if (found is not None and found.kind == "folder") or (found is None and not self._ignore.prunes(each)):
                kind = self._look(each)
                if kind is not None and kind.kind == "folder":
                    yield from self._shallow(each, depth, named)

    def data(self, found: Found, digest: str | None = None) -> Callable[[], Iterator[bytes]]:
        """The bytes of a file; BuildFailed if they are not those of ``digest`` (any more)."""

        def pieces() -> Iterator[bytes]:
            seen, left = hashlib.sha256(), found.size
            fd = self.open(found.path)
            try:
                while left > 0 and (piece := os.read(fd, min(left, _PIECE))):
                    seen.update(piece)
                    left -= len(piece)
                    yield piece
            finally:
                os.close(fd)
            if digest is not None and seen.hexdigest() != digest:
                raise BuildFailed(f"{found.path} changed while it was being read", hint="try again")

        return pieces

    def digest(self, found: Found) -> str:
        seen = hashlib.sha256()
        for piece in self.data(found)():
            seen.update(piece)
        return seen.hexdigest()

    def read(self, path: str, most: int) -> bytes | None:
        """A small file, links followed inside; None if there is none."""
        found = self.lstat(resolve(self.lstat, path))
        if found is None or found.kind != "file" or found.size > most:
            return None
        return b"".join(self.data(found)())

    def open(self, path: str) -> int:
        """A descriptor of a plain file, the caller's to close."""
        try:
            fd = self._open_in(_raw(path), FILE)
        except OSError as error:
            raise self._denied(path, error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise BuildFailed(f"{path} changed while it was being read", hint="try again")
        return fd

    def _denied(self, path: str, error: OSError) -> BuildFailed:
        return BuildFailed(f"{os.path.join(self.shown, path)} cannot be read: {error.strerror}")


def resolve(lstat: Callable[[str], Found | None], path: str) -> str:
    """Where a path leads inside of a root: links followed, ``..`` not above it. What is missing stays as it is written.
    BuildFailed for a loop."""
    parts = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    done: list[str] = []
    links = 0
    while parts:
        part = parts.pop()
        if part == "..":
            if done:
                done.pop()
            continue
        found = lstat("/".join([*done, part]))
        if found is not None and found.kind == "symlink":
            links += 1
            if links > _MAX_LINKS:
                raise BuildFailed(f"/{path.lstrip('/')} is a loop of symbolic links")
            if found.link.startswith("/"):
                done = []
            parts += [step for step in reversed(found.link.split("/")) if step not in ("", ".")]
            continue
        done.append(part)
    return "/".join(done)


def digest_of(folder: Folder, found: Iterable[Found], digests: dict[str, str]) -> str:
    """What tells these files from others: names, kinds, modes, owners, contents. ``digests`` gets the files' own."""
    seen = hashlib.sha256()
    for each in sorted(found, key=lambda item: os.fsencode(item.path)):
        if each.kind == "file" and each.path not in digests:
            digests[each.path] = folder.digest(each)
        facts = (each.path, each.kind, each.mode, each.uid, each.gid, each.link, digests.get(each.path, ""))
        seen.update(repr(facts).encode("utf-8", "surrogateescape"))
    return seen.hexdigest()


def read_ignore(folder: Path, dockerfile: Path) -> Ignore:
    """``NAME.dockerignore`` beside the Dockerfile, else ``.dockerignore`` of the context. RecipeInvalid."""
    for path in (dockerfile.with_name(f"{dockerfile.name}.dockerignore"), folder / ".dockerignore"):
        try:
            lines = _small(path).decode("utf-8").removeprefix("\ufeff").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except UnicodeDecodeError:
            raise RecipeInvalid(f"{path} is not UTF-8 text") from None
        except OSError as error:
            raise RecipeInvalid(f"{path} cannot be read: {error.strerror}") from error
        return parse_ignore(lines, os.fspath(path))
    return Ignore()


def parse_ignore(lines: list[str], shown: str) -> Ignore:
    """RecipeInvalid, which tells the line."""
    for number, line in enumerate(lines, 1):
        try:
            Ignore([line])
        except ValueError as error:
            raise RecipeInvalid(f"{shown} line {number}: {error}") from None
    return Ignore(lines)


def _small(path: Path) -> bytes:
    """A plain file, whoever made the folder: a pipe does not hold us up, and nothing endless fills the memory."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", os.fspath(path))
        data = file.read(_MAX_IGNORE + 1)
    if len(data) > _MAX_IGNORE:
        raise OSError(errno.EFBIG, f"it has more than {_MAX_IGNORE} bytes", os.fspath(path))
    return data


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def _raw(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
