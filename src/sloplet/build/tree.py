"""An image's unpacked tree, to look at and to copy from, with owners as they are inside."""

from __future__ import annotations

import os

from ..engines import jail
from ..engines.base import ResolvedImage
from ..engines.machine import machine
from ..errors import BuildFailed
from ..images import userns
from ..images.opening import Opener
from .context import Folder, Owner


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
    kind = jail.mode(machine())
    if kind == "range":
        return TreeFolder(resolved.path, userns.inside(), mapped=True)
    return TreeFolder(resolved.path, _same if kind == "root" and resolved.owners_kept else None, mapped=False)


def _same(uid: int, gid: int) -> tuple[int, int]:
    return uid, gid
