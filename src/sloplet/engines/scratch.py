"""Formatted ext4 images that scratch filesystems start as copies of: one per size, made once, kept in the cache."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import StartFailed

#: No journal (the data dies with the sandbox) and nothing that old versions of mke2fs or the kernel do not know.
_FEATURES = "none,dir_index,dir_nlink,ext_attr,extent,extra_isize,filetype,flex_bg,huge_file,large_file,sparse_super"
_VERSION = 2


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
    sparse = place / (path.name + ".sparse")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(half_made, "xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(size)
        _format(half_made, inodes, mkfs)
        _make_sparse(half_made, sparse, size)
        os.replace(sparse, path)  # whoever comes second replaces it by its equal
    except OSError as error:
        raise StartFailed(f"the scratch image {path} cannot be made: {error}") from error
    finally:
        half_made.unlink(missing_ok=True)
        sparse.unlink(missing_ok=True)
    return str(path)


def _make_sparse(image: Path, to: Path, size: int) -> None:
    """The same bytes, with holes for zeros. What mkfs leaves allocated but unwritten is a hole for SEEK_DATA only until
    its pages are read, ahead of something else perhaps: then each sandbox would copy 64 MiB of zeros."""
    block = 4096
    zeros = bytes(block)
    with open(image, "rb", buffering=0) as source, open(to, "xb", buffering=0) as target:
        os.fchmod(target.fileno(), 0o600)
        target.truncate(size)
        at = 0
        while True:
            try:
                at = os.lseek(source.fileno(), at, os.SEEK_DATA)
            except OSError:
                return  # nothing but a hole from here on
            end = os.lseek(source.fileno(), at, os.SEEK_HOLE)
            while at < end:
                data = os.pread(source.fileno(), block, at)
                if data != zeros:
                    os.pwrite(target.fileno(), data, at)
                at += len(data)


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
