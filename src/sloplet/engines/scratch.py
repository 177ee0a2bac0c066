"""Formatted ext4 images that scratch filesystems start as copies of: one per size, made once, kept in the cache."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import StartFailed

#: No journal (the data dies with the sandbox) and nothing that old versions of mke2fs or the kernel do not know.
_FEATURES = "none,dir_index,dir_nlink,ext_attr,extent,extra_isize,filetype,flex_bg,huge_file,large_file,sparse_super"
_VERSION = 1


def cache_folder(place: Path) -> Path:
    """SLOPLET_HOME/cache, found from a sandbox's place below SLOPLET_HOME/sandboxes; else beside the place."""
    for parent in place.parents:
        if parent.name == "sandboxes":
            return parent.parent / "cache"
    return place.parent / "cache"


def template(place: Path, size: int, inodes: int, mkfs: str) -> str:
    """The image of that size, made if it is not there yet. Raises StartFailed."""
    folder = cache_folder(place)
    path = folder / f"scratch-v{_VERSION}-{size}-{inodes}.img"
    if path.exists():
        return str(path)
    half_made = place / path.name  # in the place: should we be killed, the reaper removes it with that
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(half_made, "xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(size)
        _format(half_made, inodes, mkfs)
        os.replace(half_made, path)  # whoever comes second replaces it by its equal
    except OSError as error:
        raise StartFailed(f"the scratch image {path} cannot be made: {error}") from error
    finally:
        half_made.unlink(missing_ok=True)
    return str(path)


def _format(image: Path, inodes: int, mkfs: str) -> None:
    argv = [
        mkfs, "-q", "-F", "-t", "ext4", "-O", _FEATURES, "-b", "4096", "-I", "256", "-N", str(inodes), "-m", "0",
        "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", str(image),
    ]  # fmt: skip
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, nothing, fd) for fd in (0, 1, 2)]
        pid = os.posix_spawn(mkfs, argv, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, file_actions=actions)
    finally:
        os.close(nothing)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise OSError(f"{mkfs} failed ({os.waitstatus_to_exitcode(status)})")
