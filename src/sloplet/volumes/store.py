"""Named volumes: made, listed, copied, removed. Each is there whole or not at all, whoever is killed when."""

from __future__ import annotations

import builtins
import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..errors import VolumeError, VolumeExists
from ..fs import FILE, FOLDER, open_in, sync_filesystem
from ..images import userns
from ..quantities import parse_size
from ..state.home import Home, new_id, unwritable
from ..state.locks import FileLock
from ..volumespec import NAME_RE, check_volume_name
from . import records, sized, trees
from .leases import locked, take, users
from .records import DATA, IMAGE, SNAPSHOTS, USERS, Use, VolumeInfo

_Infos = builtins.list[VolumeInfo]


class Volumes:
    """The named volumes of a SLOPLET_HOME. Blocking; safe with any number of processes at once.

    volumes = Volumes()
    volumes.create("data", size="2g")
    with Sandbox(volumes={"/data": "data"}) as box: ...
    volumes.snapshot("data", "before")
    volumes.clone("data", "again", snapshot="before")
    """

    def __init__(self, home: Home | str | os.PathLike[str] | None = None) -> None:
        self.home = home if isinstance(home, Home) else Home(home)

    def create(self, name: str, *, size: int | str | None = None) -> VolumeInfo:
        """A new and empty one. VolumeExists. ``size``: the most that it holds, for example "2g"; ControlUnavailable
        where that cannot be enforced."""
        check_volume_name(name)
        most = None if size is None else parse_size(size, "size")
        if most is not None:
            sized.check_possible(most)
        info = VolumeInfo(name, time.time(), most)

        def fill(folder: int) -> None:
            if most is None:
                os.mkdir(DATA, 0o755, dir_fd=folder)
            else:
                sized.format_image(folder, most)

        self._publish(info, fill, f"{name}")
        return records.read(self.home, name)

    def ensure(self, name: str) -> VolumeInfo:
        """The one of that name, made if there is none."""
        try:
            return records.read(self.home, name)
        except VolumeError:
            try:
                return self.create(name)
            except VolumeExists:
                return records.read(self.home, name)

    def list(self) -> _Infos:
        """All of them, by name."""
        self.home.open()
        names = sorted(name for name in os.listdir(self.home.volumes) if NAME_RE.match(name))
        found = []
        for name in names:
            try:
                found.append(self._known(name))
            except VolumeError:
                continue  # it was removed just now, or is damaged: `inspect` says how
        return found

    def inspect(self, name: str) -> VolumeInfo:
        """Everything known of one: also its snapshots, and what it takes on the disk. VolumeNotFound."""
        info = self._known(name)
        snapshots = tuple(
            replace(records.read(self.home, name, each), used=self._used(name, each)) for each in self._snapshots(name)
        )
        return replace(info, used=self._used(name), snapshots=snapshots)

    def remove(self, name: str) -> None:
        """With all its snapshots. VolumeInUse, VolumeNotFound."""
        records.read(self.home, check_volume_name(name))
        lease = take(self.home, name, Use("its removal", mode="alone", since=time.time(), pid=os.getpid()))
        try:
            with staging(self.home) as (volumes, staged):
                try:
                    with locked(self.home, name):  # who just asks who has it must not find half of it
                        os.rename(name, staged, src_dir_fd=volumes, dst_dir_fd=volumes)
                    os.fsync(volumes)
                except OSError as error:
                    raise unwritable(records.folder_of(self.home, name), error) from error
        finally:
            lease.release()

    def snapshot(self, name: str, snapshot: str) -> VolumeInfo:
        """Keep its content as it is now, under a name. VolumeInUse while a sandbox may write it; VolumeExists."""
        return self._copy(name, None, name, snapshot)

    def remove_snapshot(self, name: str, snapshot: str) -> None:
        """VolumeNotFound; VolumeInUse while a snapshot of the volume is being copied."""
        records.read(self.home, name, snapshot)
        use = Use(f"the removal of its snapshot {snapshot}", mode="going", since=time.time(), pid=os.getpid())
        lease = take(self.home, name, use)
        try:
            with staging(self.home) as (volumes, staged):
                records.read(self.home, name, snapshot)
                try:
                    os.rename(f"{name}/{SNAPSHOTS}/{snapshot}", staged, src_dir_fd=volumes, dst_dir_fd=volumes)
                    os.fsync(volumes)
                except OSError as error:
                    raise unwritable(records.folder_of(self.home, name, snapshot), error) from error
        finally:
            lease.release()

    def clone(self, name: str, new: str, *, snapshot: str | None = None) -> VolumeInfo:
        """A new volume with the content that one has now, or had at a snapshot. VolumeExists."""
        return self._copy(name, snapshot, new, None)

    # -- how ---------------------------------------------------------------------------

    def _known(self, name: str) -> VolumeInfo:
        info = records.read(self.home, check_volume_name(name))
        return replace(info, users=tuple(users(self.home, name)))

    def _snapshots(self, name: str) -> builtins.list[str]:
        try:
            return sorted(filter(NAME_RE.match, os.listdir(records.folder_of(self.home, name) / SNAPSHOTS)))
        except FileNotFoundError:
            return []

    def _used(self, name: str, snapshot: str | None = None) -> int:
        folder = records.folder_of(self.home, name, snapshot)
        try:
            return os.lstat(folder / IMAGE).st_blocks * 512
        except FileNotFoundError:
            pass
        try:
            fd = os.open(folder / DATA, FOLDER)
        except OSError:
            return 0
        try:
            return trees.usage(fd)
        finally:
            os.close(fd)

    def _copy(self, name: str, snapshot: str | None, new: str, as_snapshot: str | None) -> VolumeInfo:
        source = records.read(self.home, check_volume_name(name), snapshot)
        check_volume_name(new if as_snapshot is None else as_snapshot)
        told = name if snapshot is None else f"{name}:{snapshot}"
        info = VolumeInfo(as_snapshot or new, time.time(), source.size, told)
        place = new if as_snapshot is None else f"{name}/{SNAPSHOTS}/{as_snapshot}"
        # of a filesystem in a file, whoever reads it has it mounted, too
        mode = "kept" if snapshot is not None else "still" if source.size is None else "alone"
        lease = take(self.home, name, Use(f"a copy to {place}", mode=mode, since=time.time(), pid=os.getpid()))
        try:
            records.read(self.home, name, snapshot)  # now it stays
            self._publish(info, lambda folder: self._fill(folder, name, snapshot, source), place)
        finally:
            lease.release()
        return records.read(self.home, new, as_snapshot)

    def _fill(self, folder: int, name: str, snapshot: str | None, source: VolumeInfo) -> None:
        above = os.open(records.folder_of(self.home, name, snapshot), FOLDER)
        try:
            if source.size is None:
                os.mkdir(DATA, 0o700, dir_fd=folder)
                with _opened(above, DATA, FOLDER) as old, _opened(folder, DATA, FOLDER) as new:
                    userns.run("copy", {}, [old, new])
                return
            with _opened(above, IMAGE, FILE) as old:
                if snapshot is None:
                    sized.wait_until_unmounted(old)
                new = os.open(IMAGE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
                try:
                    trees.copy_file(old, new)
                finally:
                    os.close(new)
        finally:
            os.close(above)

    def _publish(self, info: VolumeInfo, fill: Callable[[int], None], place: str) -> None:
        """Make a volume, or a snapshot, in a folder without a name, and give it that when it is complete."""
        self.home.open()
        with staging(self.home) as (volumes, staged):
            try:
                self._check_free(volumes, place)
                os.mkdir(staged, 0o700, dir_fd=volumes)
                with _opened(volumes, staged, FOLDER) as folder:
                    fill(folder)
                    if "/" not in place:
                        for part in (USERS, SNAPSHOTS):
                            os.mkdir(part, 0o700, dir_fd=folder)
                    records.write(folder, info)
                    sync_filesystem(folder)
                    _rename(volumes, staged, place)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise _taken(place) from None
                raise trees.failed(f"the volume {info.name!r} could not be made", error) from error

    def _check_free(self, volumes: int, place: str) -> None:
        try:
            os.stat(place, dir_fd=volumes, follow_symlinks=False)
        except FileNotFoundError:
            return
        raise _taken(place)


@contextmanager
def staging(home: Home) -> Iterator[tuple[int, str]]:
    """``volumes/`` and a name in it that is ours: what is there at the end, or after a crash, is removed."""
    home.open()
    ours = new_id()
    lock = FileLock.take(staging_lock(home, ours), wait=True)
    assert lock is not None
    try:
        volumes = os.open(home.volumes, FOLDER)
    except OSError as error:
        lock.release()
        raise unwritable(home.volumes, error) from error
    try:
        yield volumes, f".tmp-{ours}"
    finally:
        os.close(volumes)
        try:
            remove_staged(home, ours)
        finally:
            lock.release()


def staging_lock(home: Home, staged: str) -> Path:
    return home.run / f"volume-{staged}.lock"


def remove_staged(home: Home, staged: str) -> None:
    userns.remove(home.volumes, f".tmp-{staged}")


def _rename(volumes: int, staged: str, place: str) -> None:
    above = place.rpartition("/")[0]
    os.rename(staged, place, src_dir_fd=volumes, dst_dir_fd=volumes)
    os.fsync(volumes)
    if above:
        with _opened(volumes, above, FOLDER) as folder:
            os.fsync(folder)


def _taken(place: str) -> VolumeExists:
    volume, _, snapshot = place.partition(f"/{SNAPSHOTS}/")
    if snapshot:
        return VolumeExists(f"the volume {volume!r} already has a snapshot {snapshot!r}", hint="take another name")
    return VolumeExists(f"there already is a volume {volume!r}", hint="`sloplet volume ls` lists them")


@contextmanager
def _opened(parent: int, name: str, flags: int) -> Iterator[int]:
    fd = open_in(parent, name, flags)
    try:
        yield fd
    finally:
        os.close(fd)
