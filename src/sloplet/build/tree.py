"""An image's unpacked tree, to look at and to copy from, with owners as they are inside."""

from __future__ import annotations

import os

from ..engines import jail
from ..engines.base import ResolvedImage
from ..engines.machine import Machine, machine
from ..engines.plan import Set
from ..errors import BuildFailed
from ..images.opening import Opener
from .context import Folder, Owner

_NOBODY = 65534


class TreeFolder(Folder):
    """Files of subordinate ids are opened by who may."""

    def __init__(self, path: str | os.PathLike[str], owner: Owner | None, mapped: bool) -> None:
        super().__init__(path, owner=owner)
        self._opener = Opener(self._root) if mapped else None

    def _open_in(self, path: bytes, flags: int) -> int:
        try:
            return super()._open_in(path, flags)
        except PermissionError:
            if self._opener is None:
                raise
            return self._opener.open(path, flags)

    def close(self) -> None:
        if self._opener is not None:
            self._opener.close()
        super().close()


def tree_folder(resolved: ResolvedImage) -> Folder:
    """The caller closes it."""
    if resolved.path is None:
        raise BuildFailed("this image has no files of its own")
    here = machine()
    kind = jail.mode(here)
    if kind == "range":
        return TreeFolder(resolved.path, inside(here), mapped=True)
    return TreeFolder(resolved.path, _same if kind == "root" and resolved.owners_kept else None, mapped=False)


def _same(uid: int, gid: int) -> tuple[int, int]:
    return uid, gid


def inside(here: Machine) -> Owner:
    """From owners on disk to owners inside, where the map is that of a user with subordinate ids."""
    maps = {step.kind: str(step.args[0]) for step in jail.id_maps(here, 0) if step.kind in (Set.UID_MAP, Set.GID_MAP)}
    users, groups = (_ranges(maps[kind]) for kind in (Set.UID_MAP, Set.GID_MAP))
    return lambda uid, gid: (_mapped(users, uid), _mapped(groups, gid))


def _ranges(text: str) -> list[tuple[int, int, int]]:
    return [(int(a), int(b), int(c)) for a, b, c in (line.split() for line in text.splitlines())]


def _mapped(ranges: list[tuple[int, int, int]], number: int) -> int:
    for first, outside, count in ranges:
        if outside <= number < outside + count:
            return first + number - outside
    return _NOBODY
