"""Giving a user of an image back what is his.

Where the caller has subordinate ids, a sandbox with volumes exchanges its user with root (engines/mounting.py): the
image's files show as the user's, and the user's own as root's. These are found here, on the host's side, where they
still have the id that they were unpacked with. Blocking.
"""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from pathlib import Path

from ..engines import insiders, jail
from ..engines.base import ResolvedImage
from ..engines.machine import Machine
from ..errors import EngineError
from ..fs import FOLDER, open_in
from ..images.opening import Opener
from ..spec import SandboxSpec

_MOST = 20_000  # what is given back at a start
_BYTES = 64 << 20  # of files: each is copied to the sandbox's own layer


def users_own(image: ResolvedImage, spec: SandboxSpec, facts: Machine) -> tuple[str, ...]:
    """Paths inside that the image gives to the sandbox's user, folders first; of files as many as can be afforded."""
    if image.path is None or jail.mode(facts) != "range" or not any(volume.mounted for volume in spec.volumes):
        return ()
    uid, _ = insiders.ids_of(spec.run_user, image)
    assert facts.subuid is not None
    return _owned(image.path, facts.subuid[0] + uid - 1) if uid else ()


@lru_cache(maxsize=16)
def _owned(root: Path, owner: int) -> tuple[str, ...]:
    folders: list[str] = []
    files: list[str] = []
    room, todo = _BYTES, [""]
    top = os.open(root, FOLDER)
    opener = Opener(top)
    try:
        while todo and len(folders) + len(files) < _MOST:
            here = todo.pop()
            try:
                fd = _open(top, here or ".", opener)
            except (OSError, EngineError):
                continue  # closed to us: it is given back itself
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        path = f"{here}/{entry.name}" if here else entry.name
                        info = _stat(entry, path, opener)
                        if info is None:
                            continue
                        if stat.S_ISDIR(info.st_mode):
                            todo.append(path)
                        if info.st_uid != owner:
                            continue
                        if stat.S_ISDIR(info.st_mode):
                            folders.append(path)
                        elif info.st_size <= room:
                            room -= info.st_size
                            files.append(path)
            finally:
                os.close(fd)
    finally:
        opener.close()
        os.close(top)
    return tuple(f"/{path}" for path in (folders + files)[:_MOST])


def _open(top: int, name: str, opener: Opener) -> int:
    try:
        return open_in(top, name, FOLDER)
    except PermissionError:
        return opener.open(os.fsencode(name), FOLDER)


def _stat(entry: os.DirEntry[str], path: str, opener: Opener) -> os.stat_result | None:
    """Of what lies in a closed folder, too: to be listed it must only be readable."""
    try:
        return entry.stat(follow_symlinks=False)
    except PermissionError:
        pass
    try:
        fd = opener.open(os.fsencode(path), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, EngineError):
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
