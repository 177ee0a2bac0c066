"""What is known of a volume, and how it lies on disk: a folder that describes itself.

::

    volumes/NAME/volume.json          its record
    volumes/NAME/data/                its files; of a limited size: disk.img, a filesystem
    volumes/NAME/users/ID             locked by whoever has it (leases.py)
    volumes/NAME/snapshots/SNAPSHOT/  the same again: volume.json and data/ or disk.img
    volumes/.tmp-ID/                  half made or half removed; its lock is run/volume-ID.lock
    volumes/.copies/ID/               folders as they were when they were copied into a sandbox (copies.py)
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import VolumeError, VolumeNotFound
from ..fs import FILE, open_in, write_atomic
from ..state.home import Home
from ..volumespec import check_volume_name

VERSION = 1
RECORD, DATA, IMAGE, USERS, SNAPSHOTS = "volume.json", "data", "disk.img", "users", "snapshots"
_MOST = 1 << 16
_OF_SNAPSHOTS = {"kept", "going"}


@dataclass(frozen=True)
class Use:
    """Somebody has a volume."""

    sandbox: str  #: its id, or what else it is used for
    name: str | None = None
    #: rw, ro; still: nobody may write; alone: nobody else may have it; kept, going: a snapshot of it is read, or goes
    mode: str = "rw"
    shared: bool = False
    since: float = 0.0
    pid: int = 0  #: of the process that holds it

    def excludes(self, other: Use) -> bool:
        """Whether both cannot be at a time."""
        modes = {self.mode, other.mode}
        if "alone" not in modes and modes & _OF_SNAPSHOTS:
            return modes == _OF_SNAPSHOTS
        for one, two in ((self, other), (other, self)):
            if one.mode == "alone" or (one.mode == "rw" and not one.shared):
                return True
            if one.mode == "still" and two.mode == "rw":
                return True
        return False

    def __str__(self) -> str:
        a_sandbox = self.mode in ("rw", "ro") and " " not in self.sandbox
        who = f"the sandbox {self.name or self.sandbox}" if a_sandbox else self.sandbox
        how = {"rw": "read-write", "ro": "read-only"}.get(self.mode, "")
        return f"{who} ({', '.join(filter(None, (how, 'shared' if self.shared else '')))})" if how else who

    def to_dict(self) -> dict[str, Any]:
        return {
            "sandbox": self.sandbox, "name": self.name, "mode": self.mode, "shared": self.shared, "since": self.since,
            "pid": self.pid,
        }  # fmt: skip


@dataclass(frozen=True)
class VolumeInfo:
    """A named volume, or a snapshot of one."""

    name: str
    created_at: float
    size: int | None = None  #: the most that it holds; None: as much as its disk
    source: str = ""  #: what it is a copy of
    path: str = ""  #: where it lies on this machine
    used: int | None = None  #: bytes on the disk; None: not looked at
    users: tuple[Use, ...] = ()
    snapshots: tuple[VolumeInfo, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "created_at": self.created_at, "size": self.size, "source": self.source,
            "path": self.path, "used": self.used, "users": [use.to_dict() for use in self.users],
            "snapshots": [snapshot.to_dict() for snapshot in self.snapshots],
        }  # fmt: skip


def folder_of(home: Home, name: str, snapshot: str | None = None) -> Path:
    folder = home.volumes / check_volume_name(name)
    return folder if snapshot is None else folder / SNAPSHOTS / check_volume_name(snapshot)


def read(home: Home, name: str, snapshot: str | None = None) -> VolumeInfo:
    """VolumeNotFound; VolumeError for one that is damaged."""
    folder = folder_of(home, name, snapshot)
    what = f"the volume {name!r}" if snapshot is None else f"the snapshot {snapshot!r} of the volume {name!r}"
    try:
        fd = os.open(folder / RECORD, FILE)
        try:
            facts = json.loads(os.read(fd, _MOST))
        finally:
            os.close(fd)
        if facts["version"] != VERSION:
            raise VolumeError(f"{what} was made by another version of sloplet")
        size = facts["size"]
        return VolumeInfo(
            snapshot or name,
            float(facts["created_at"]),
            None if size is None else int(size),
            str(facts["source"]),
            str(folder / (DATA if size is None else IMAGE)),
        )
    except (FileNotFoundError, NotADirectoryError):
        hint = "`sloplet volume ls` lists them" if snapshot is None else f"`sloplet volume inspect {name}` lists them"
        raise VolumeNotFound(f"there is no {what.removeprefix('the ')}", hint=hint) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VolumeError(f"{what} is damaged: {error}", hint=f"its files are in {folder}") from error


def write(folder: int, info: VolumeInfo) -> None:
    """Into a folder that is being made. Raises OSError."""
    facts = {"version": VERSION, "created_at": info.created_at, "size": info.size, "source": info.source}
    write_atomic(folder, RECORD, json.dumps(facts, indent=1).encode())


def open_data(home: Home, name: str) -> int:
    """The folder of a volume's files, by descriptor. VolumeError."""
    try:
        return open_in_volume(home, name, DATA, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise VolumeError(f"the volume {name!r} cannot be opened: {error.strerror}") from error


def open_in_volume(home: Home, name: str, part: str, flags: int) -> int:
    folder = os.open(folder_of(home, name), os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return open_in(folder, part, flags | os.O_NOFOLLOW)
    finally:
        os.close(folder)
