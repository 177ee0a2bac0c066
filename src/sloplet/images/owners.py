"""Whom the files of an image belong to on disk: whom the archive says, as far as we may give files away.

``kept``: we are root, outside or in a user namespace with the map that sandboxes get (``userns``); numbers are the
archive's. ``recorded``: all files are the caller's, and what the archive says is written down.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ImageInvalid
from .tarstream import Entry, show

_NO_ID = 2**32 - 1  # chown's "leave it as it is", so never an owner
NOBODY = 65534
MOST_INSIDE = 65535  #: the largest id that a sandbox knows
MODES = "modes.json"  #: likewise: modes with setuid or setgid, which no file on disk has
RECORDED = "owners.json"  #: beside an image's tree: whom its files belong to, where the disk does not say


def all_ids_are_ours() -> bool:
    """Whether we may chown to any number: root, and not merely root of a small user namespace."""
    if os.geteuid() != 0:
        return False
    try:
        with open("/proc/self/uid_map", encoding="ascii") as table:
            return any(int(line.split()[2]) >= _NO_ID for line in table)
    except (OSError, ValueError, IndexError):
        return False


@dataclass
class Owners:
    """``most``: the largest id that a file can be given to; None: any. What belongs to others is given to nobody."""

    kept: bool
    most: int | None = None
    record: bool = False
    foreign: int = 0  #: how many files belonged to others
    recorded: dict[bytes, tuple[int, int]] = field(default_factory=dict)  #: by name, where not root's
    _ours: tuple[int, int] = field(default_factory=lambda: (os.geteuid(), os.getegid()))

    def give(self, fd: int, entry: Entry) -> None:
        ids = self._ids(entry)
        if self.kept and ids != self._ours:
            os.fchown(fd, *ids)

    def give_link(self, parent: int, name: bytes, entry: Entry) -> None:
        ids = self._ids(entry)
        if self.kept and ids != self._ours:
            os.chown(name, *ids, dir_fd=parent, follow_symlinks=False)

    def _ids(self, entry: Entry) -> tuple[int, int]:
        uid, gid = entry.uid, entry.gid
        if uid >= _NO_ID or gid >= _NO_ID:
            if not self.kept and not self.record:
                return uid, gid
            raise ImageInvalid(f"{show(entry.name)} in the tar has an impossible owner {uid}:{gid}")
        if self.most is not None and (uid > self.most or gid > self.most):
            self.foreign += 1
            uid, gid = (number if number <= self.most else NOBODY for number in (uid, gid))
        if self.record and (uid or gid):
            self.recorded[entry.name] = (uid, gid)
        return uid, gid


def write_recorded(owners: Mapping[bytes, tuple[int, int]]) -> bytes:
    return json.dumps({os.fsdecode(path): list(ids) for path, ids in owners.items()}).encode("ascii")


def write_modes(modes: Mapping[bytes, int]) -> bytes:
    return json.dumps({os.fsdecode(path): mode for path, mode in modes.items()}).encode("ascii")


def recorded_modes(rootfs: Path) -> dict[str, int]:
    """Of an image's tree: by path without a leading slash, where they are more than the disk says."""
    try:
        found = json.loads((rootfs.parent / MODES).read_bytes())
        return {str(path): int(mode) & 0o7777 for path, mode in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ImageInvalid(
            f"what is recorded of an image's modes is damaged ({error})", hint="`sloplet image prune --all` removes it"
        ) from error


def recorded(rootfs: Path) -> dict[str, tuple[int, int]]:
    """Of an image's tree: by path without a leading slash; none where the disk says."""
    try:
        data = (rootfs.parent / RECORDED).read_bytes()
    except OSError:
        return {}
    try:
        return {str(path): (int(ids[0]), int(ids[1])) for path, ids in json.loads(data).items()}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ImageInvalid(
            f"what is recorded of an image's owners is damaged ({error})", hint="`sloplet image prune --all` removes it"
        ) from error
