"""Folders as they were when they were copied into a sandbox (``mode="copy"``): what ``diff`` compares with, and what
``apply`` may overwrite. Each is kept for as long as a sandbox or a saved state speaks of it. Blocking."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..fs import FOLDER, open_in
from ..state.home import ID_RE, Home, check_id, new_id, remove_below
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
    source = open_folder(volume.source, home)
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


def forget(home: Home, base: str) -> None:
    """Idempotent."""
    remove_below(home.volumes / FOLDER_NAME, check_id(base))


def all_kept(home: Home) -> list[str]:
    try:
        return [name for name in os.listdir(home.volumes / FOLDER_NAME) if ID_RE.match(name)]
    except FileNotFoundError:
        return []
