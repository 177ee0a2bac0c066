"""Folders as they were when they were copied into a sandbox (``mode="copy"``): what ``diff`` compares with, and what
``apply`` may overwrite. Each is kept for as long as a sandbox or a saved state speaks of it. Blocking."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..fs import FOLDER, open_in, write_atomic
from ..state.home import ID_RE, Home, check_id, new_id, remove_below, unwritable
from ..volumespec import VolumeSpec
from . import trees
from .opening import open_folder
from .store import staging

FOLDER_NAME = ".copies"


def with_bases(volumes: tuple[VolumeSpec, ...]) -> tuple[VolumeSpec, ...]:
    """Each copy with a place for the folder as it was."""
    return tuple(volume if volume.mounted or volume.base else replace(volume, base=new_id()) for volume in volumes)


def kept(home: Home, base: str) -> Path:
    return home.volumes / FOLDER_NAME / check_id(base)


def keep(home: Home, volume: VolumeSpec) -> Path:
    """The folder as it is now, or as it was when this was first asked for. VolumeError, VolumeNotFound."""
    there = kept(home, volume.base)
    if there.is_dir():
        return there
    source = open_folder(volume, home)
    try:
        with staging(home) as (volumes, staged):
            try:
                os.makedirs(there.parent, 0o700, exist_ok=True)
                os.mkdir(staged, 0o700, dir_fd=volumes)
                read = open_in(source, ".", FOLDER)
                target = open_in(volumes, staged, FOLDER)
                try:
                    trees.Copy(owners=False, plain=True).run(read, target)
                finally:
                    os.close(read)
                    os.close(target)
                os.rename(staged, f"{FOLDER_NAME}/{volume.base}", src_dir_fd=volumes, dst_dir_fd=volumes)
            except OSError as error:
                raise trees.failed(f"the folder {volume.source} could not be copied", error) from error
    finally:
        os.close(source)
    return there


def bases(volumes: Iterable[VolumeSpec]) -> set[str]:
    return {volume.base for volume in volumes if volume.base}


def note_applied(home: Home, base: str, sandbox_id: str, marks: Mapping[str, str]) -> None:
    """What a sandbox has brought back: names below the folder, and what is there now ("none", or a digest)."""
    known = {**applied(home, base, sandbox_id), **marks}
    try:
        folder = os.open(home.volumes / FOLDER_NAME, FOLDER)
        try:
            write_atomic(folder, _marks(base, sandbox_id), json.dumps(known).encode())
        finally:
            os.close(folder)
    except OSError as error:
        raise unwritable(kept(home, base), error) from error


def applied(home: Home, base: str, sandbox_id: str) -> dict[str, str]:
    try:
        known = json.loads((home.volumes / FOLDER_NAME / _marks(base, sandbox_id)).read_bytes())
        return {str(name): str(mark) for name, mark in known.items()}
    except (OSError, ValueError, AttributeError):
        return {}  # it will be said to have changed there: too much rather than too little


def _marks(base: str, sandbox_id: str) -> str:
    return f"{check_id(base)}.{check_id(sandbox_id)}"


def forget(home: Home, base: str) -> None:
    """Idempotent."""
    folder = home.volumes / FOLDER_NAME
    remove_below(folder, check_id(base))
    for name in os.listdir(folder) if folder.is_dir() else ():
        if name.startswith((f"{base}.", f".{base}.")):
            with suppress(OSError):
                os.unlink(folder / name)


def all_kept(home: Home) -> list[str]:
    try:
        names = {name.lstrip(".").partition(".")[0] for name in os.listdir(home.volumes / FOLDER_NAME)}
        return sorted(filter(ID_RE.match, names))
    except FileNotFoundError:
        return []
