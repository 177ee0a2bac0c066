"""An image's unpacked tree, to look at and to copy from, with owners as they are inside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from ..engines import jail
from ..engines.base import ResolvedImage
from ..engines.machine import machine
from ..errors import BuildFailed
from ..images import userns
from ..images.opening import Opener
from ..images.owners import recorded, recorded_modes
from .context import Folder, Found, Owner


class TreeFolder(Folder):
    """Files of subordinate ids are opened by who may. ``recorded``: whom files belong to where the disk does not say,
    by path; all others to root. ``modes``: those with setuid and setgid, which the disk lacks."""

    def __init__(
        self, path: str | os.PathLike[str], owner: Owner | None, mapped: bool,
        recorded: Mapping[str, tuple[int, int]] | None = None, modes: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(path, owner=owner)
        self._opener = Opener(self._root) if mapped else None
        self._recorded = recorded or {}
        self._modes = modes or {}

    def _found(self, path: str, fd: int) -> Found:
        found = super()._found(path, fd)
        owner = self._recorded.get(path, (found.uid, found.gid))
        return replace(found, uid=owner[0], gid=owner[1])

    def whole(self, found: Found) -> Found:
        return replace(found, mode=self._modes.get(found.path, found.mode))

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
    kind, modes = jail.mode(machine()), recorded_modes(resolved.path)
    if kind == "range":
        return TreeFolder(resolved.path, userns.inside(), mapped=True, modes=modes)
    if kind == "root" and resolved.owners_kept:
        return TreeFolder(resolved.path, _same, mapped=False, modes=modes)
    return TreeFolder(resolved.path, _root, mapped=False, recorded=recorded(resolved.path), modes=modes)


def _root(uid: int, gid: int) -> tuple[int, int]:
    return 0, 0


def _same(uid: int, gid: int) -> tuple[int, int]:
    return uid, gid
