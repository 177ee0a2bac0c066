"""From what a sandbox asked for to what is mounted: opened once, and by descriptor from then on. Blocking."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..engines.base import Mount
from ..errors import VolumeError, VolumeNotFound
from ..state.home import Home
from ..volumespec import VolumeSpec
from . import records, sized
from .leases import Lease, locked, take
from .records import Use
from .store import Volumes

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_FILES = ("/proc", "/sys", "/dev")
#: Where the services of a machine and of its users listen.
_SERVICES = ("/run", "/var/run")
_EMPTY = ".empty"


@dataclass
class Opened:
    """The volumes of one sandbox. ``mounts`` and ``held`` go to its engine; ``started`` when that has them, ``close``
    when every process of the sandbox is gone."""

    mounts: tuple[Mount, ...] = ()
    _leases: list[Lease] = field(default_factory=list)

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(lease.fileno() for lease in self._leases)

    def started(self) -> None:
        """What was opened is mounted now."""
        for mount in self.mounts:
            os.close(mount.fd)
        self.mounts = ()

    def close(self) -> None:
        """Idempotent."""
        self.started()
        while self._leases:
            self._leases.pop().release()


def open_volumes(
    home: Home, sandbox_id: str, name: str | None, volumes: Sequence[VolumeSpec], *, alone: bool = False
) -> Opened:
    """Open what is to be mounted, and have it. ``alone``: the sandbox is only looked at. Nothing in it runs, so nobody
    is kept from anything. VolumeNotFound, VolumeInUse, VolumeError."""
    home.open()
    opened = Opened()
    try:
        for volume in volumes:
            if volume.mounted:
                if volume.named and not alone:
                    opened._leases.append(_have(home, volume, sandbox_id, name))
                opened.mounts += (_open(home, volume, read_only=volume.mode == "ro"),)
    except BaseException:
        opened.close()
        raise
    return opened


def _have(home: Home, volume: VolumeSpec, sandbox_id: str, name: str | None) -> Lease:
    if volume.mode == "rw":
        Volumes(home).ensure(volume.source)
    return take(home, volume.source, Use(sandbox_id, name, volume.mode, volume.shared, time.time(), os.getpid()))


def _open(home: Home, volume: VolumeSpec, *, read_only: bool) -> Mount:
    if volume.absent:
        return _mount(volume, _empty(home), read_only=True, label="nothing: its volume is on another machine")
    if not volume.named:
        return _mount(volume, open_folder(volume, home), read_only=read_only, label=volume.source)
    whole = records.read(home, volume.source).size is not None
    if whole:
        with locked(home, volume.source):
            fd = sized.mount(home, volume.source)
    else:
        fd = records.open_data(home, volume.source)
    label = f"the volume {volume.source}"
    return _mount(volume, fd, read_only=read_only, label=label, private=True, whole=whole)


def _mount(
    volume: VolumeSpec, fd: int, *, read_only: bool, label: str, private: bool = False, whole: bool = False
) -> Mount:
    info = os.fstat(fd)
    return Mount(volume.path, fd, read_only, (info.st_uid, info.st_gid), label, private, whole)


def open_folder(volume: VolumeSpec, home: Home) -> int:
    """A folder of this machine, by descriptor. Links in its path are the caller's own and are followed, this once; or
    not at all (``nofollow``)."""
    path = volume.source
    try:
        fd = _walk(path) if volume.nofollow else os.open(path, _FOLDER)
    except OSError as error:
        raise _no_folder(path, error) from error
    try:
        _refuse(path, Path(os.readlink(f"/proc/self/fd/{fd}")), home)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _walk(path: str) -> int:
    """The folder of exactly this path: a link anywhere in it is ENOTDIR. ``path`` is absolute and normal."""
    fd = os.open("/", _FOLDER)
    for name in path.split("/")[1:]:
        try:
            step = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
        finally:
            os.close(fd)
        fd = step
    return fd


def _no_folder(path: str, error: OSError) -> VolumeError:
    if error.errno == errno.ENOENT:
        return VolumeNotFound(f"the folder {path} does not exist", hint="make it first; a word alone is a named volume")
    if error.errno == errno.ENOTDIR:
        return VolumeError(f"{path} is not a folder", hint="volumes are folders; upload() copies a file in")
    return VolumeError(f"the folder {path} cannot be used: {error.strerror}")


def _refuse(path: str, real: Path, home: Home) -> None:
    """What must not be seen inside."""
    state = home.path.resolve()
    if real == Path("/"):
        raise VolumeError("the host's own root cannot be a volume", hint="name the folder that is needed")
    if real == state or real in state.parents or state in real.parents:
        raise VolumeError(
            f"the folder {path} and Sloplet's state directory lie inside of each other",
            hint="a sandbox must not see SLOPLET_HOME: name a folder beside it",
        )
    if any(real.is_relative_to(tree) for tree in _NOT_FILES) and not real.is_relative_to("/dev/shm"):
        raise VolumeError(f"{path} is the kernel's, and cannot be a volume")
    if any(real.is_relative_to(tree) for tree in _SERVICES) and not real.is_relative_to("/run/media"):
        raise VolumeError(
            f"{path} has the sockets of this machine's services, and cannot be a volume",
            hint="a sandbox could talk to them through it: copy what is needed to another folder",
        )


def _empty(home: Home) -> int:
    """In the place of a volume that did not come with a sandbox from elsewhere."""
    folder = home.volumes / _EMPTY
    folder.mkdir(0o555, exist_ok=True)
    return os.open(folder, _FOLDER | os.O_NOFOLLOW)
