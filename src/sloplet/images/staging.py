"""``images/.tmp-KEY``, where something is made before it has its name; and whether what has its name can be trusted.

Published by rename: it is there whole or not at all, however many processes make it and whichever of them is killed.
Against a loss of power: what was published is marked as ``synced`` once the disk has all of it; until then it counts
only for as long as the machine stays up. So nobody waits for the disk, and nothing half written is ever used.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

from ..fs import FOLDER, sync_filesystem
from ..state.home import Home, unwritable
from . import userns

_SYNCED = "synced"
_BOOT = "boot"


class Staging:
    """A context manager: what was not published is removed at its end. The caller holds the lock of ``key``
    (``image_lock_path``). Raises StateUnwritable."""

    def __init__(self, home: Home, key: str) -> None:
        self.name = f".tmp-{key}"
        self.home = home
        self.fd = -1  #: of the folder
        try:
            home.images.mkdir(mode=0o700, exist_ok=True)
            self.images = os.open(home.images, FOLDER)
        except OSError as error:
            raise unwritable(home.images, error) from error
        try:
            self.clear()
            os.mkdir(self.name, 0o700, dir_fd=self.images)
            self.fd = os.open(self.name, FOLDER, dir_fd=self.images)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise unwritable(home.images, error) from error
            raise

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def clear(self) -> None:
        """Remove what is there by our name: of a writer that was killed, or what came in by another path."""
        userns.remove_in(self.images, self.name)

    def publish(self, name: str, *, sync: bool = True) -> None:
        """Give it its name below images/; no error if that is taken by the same content. ``sync`` False: it is durable
        later (``sync_later``)."""
        try:
            if sync:
                sync_filesystem(self.fd)
            else:
                fd = os.open(_BOOT, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
                try:
                    os.write(fd, boot_id().encode("ascii"))
                finally:
                    os.close(fd)
            rename_new(self.images, self.name, name)
        except OSError as error:
            raise unwritable(self.home.images, error) from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with suppress(Exception):
            self.clear()
        os.close(self.images)


def rename_new(images: int, name: str, target: str) -> None:
    try:
        os.rename(name, target, src_dir_fd=images, dst_dir_fd=images)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return  # the same content came in by another path
    os.fsync(images)


def is_whole(folder: Path) -> bool:
    """Whether all of what was published there is there: the disk has it, or the machine has not been off since."""
    if os.path.lexists(folder / _SYNCED) or not os.path.lexists(folder / _BOOT):
        return True
    try:
        return (folder / _BOOT).read_text("ascii") == boot_id()
    except (OSError, ValueError):
        return False


def sync_later(*folders: Path) -> None:
    """Have the disk take all of them, in a thread that nobody waits for; the next who uses them tries again."""
    waiting = [folder for folder in folders if not os.path.lexists(folder / _SYNCED)]
    if waiting:
        threading.Thread(target=_sync, args=(waiting,), name="sloplet-sync", daemon=True).start()


def _sync(folders: list[Path]) -> None:
    with suppress(OSError):
        fd = os.open(folders[0], FOLDER)
        try:
            sync_filesystem(fd)
        finally:
            os.close(fd)
        for folder in folders:
            with suppress(OSError):
                os.close(os.open(folder / _SYNCED, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


@cache
def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
