"""Folders that were copied into a sandbox, as part of what it is compared with: there the base is the folder as it was
when it was copied, not the image."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..controller import Change
from ..images.host import below
from .base import Base, FolderBase, Node, Unreadable
from .read import Entry, Listing

_PIECE = 1 << 18


class CopiedBase:
    """``base`` with a folder of this machine at each of some paths: ``{path inside: folder}``."""

    def __init__(self, base: Base, copies: Mapping[str, str | os.PathLike[str]]) -> None:
        self._base = base
        self._copies = {path: FolderBase(folder) for path, folder in copies.items()}
        self._above: dict[str, set[str]] = {}
        for path in copies:
            while path != "/":
                parent, _, name = path.rpartition("/")
                path = parent or "/"
                self._above.setdefault(path, set()).add(name)

    def lstat(self, path: str) -> Node | None:
        if path in self._copies:
            return Node("dir", ours=True, image=True, through=True)
        folder, rest = self._find(path)
        if folder is not None:
            return folder.lstat(rest)
        found = self._base.lstat(path)
        if path in self._above and (found is None or found.type != "dir"):
            return Node("dir", ours=True, image=True, through=True)
        return found

    def listdir(self, path: str) -> list[str]:
        folder, rest = self._find(path)
        if folder is not None:
            return folder.listdir(rest)
        return list({*self._base.listdir(path), *self._above.get(path, ())})

    def open(self, path: str) -> int:
        folder, rest = self._find(path)
        return self._base.open(path) if folder is None else folder.open(rest)

    def digest(self, path: str) -> str:
        """Of a file that was copied; a link's is its text; "" for what is neither, or not of a copy."""
        folder, rest = self._find(path)
        node = folder.lstat(rest) if folder is not None else None
        if folder is None or node is None:
            return ""
        if node.type == "symlink":
            return link_digest(node.target)
        try:
            fd = folder.open(rest)
        except Unreadable:
            return ""
        try:
            return file_digest(fd)
        finally:
            os.close(fd)

    def _find(self, path: str) -> tuple[FolderBase | None, str]:
        for at, folder in self._copies.items():
            if below(path, at):
                return folder, path[len(at) :] or "/"
        return None, path

    def close(self) -> None:
        for folder in self._copies.values():
            folder.close()
        self._base.close()


def all_told(listing: Listing, paths: Iterable[str]) -> Listing:
    """Where only changes against the image are listed, all of a copy is: what is not listed of it is gone."""
    if listing.complete:
        for path in paths:
            for each in [one for one in listing.entries if below(one, path)]:
                if listing.entries[each].type == "dir":
                    listing.entries[each] = listing.entries[each]._replace(opaque=True)
            listing.entries.setdefault(path, Entry("dir", opaque=True))
    return listing


def with_before(
    changes: Iterable[Change], base: CopiedBase, paths: Iterable[str], applied: Mapping[str, str]
) -> tuple[Change, ...]:
    """What was at each changed path of a copy before, or was brought back since (``applied``), so that it is known
    again where it came from. Blocking."""
    places = tuple(paths)

    def marks(path: str) -> str:
        return " ".join(dict.fromkeys(filter(None, (base.digest(path) or "none", applied.get(path)))))

    def known(change: Change) -> Change:
        inside = tuple(marks(f"{change.path}/{name}") for name in change.below)
        return replace(change, before=marks(change.path), below_before=inside)

    return tuple(known(one) if any(below(one.path, path) for path in places) else one for one in changes)


def file_digest(fd: int) -> str:
    digest = hashlib.sha256()
    try:
        while piece := os.read(fd, _PIECE):
            digest.update(piece)
    except OSError:
        return ""
    return digest.hexdigest()


def link_digest(text: str) -> str:
    return "link:" + hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
