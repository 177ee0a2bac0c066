"""Whose the files of a saved state are. As root too: an engine may have given them to another user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from archive_helpers import export, receive
from snapshot_helpers import FORMAT, World
from state_helpers import NOBODY, as_nobody, open_folder


def test_modes_and_owners(tmp_path: Path) -> None:
    """A restoring engine may be another user with a descriptor of the folder; the folder above is ours alone."""
    world = World(tmp_path / "home")
    box = world.sandbox()
    draft = world.snapshots.begin()
    assert stat.S_IMODE(os.stat(draft.path).st_mode) == 0o700
    (draft.path / "pages.img").write_bytes(b"x")
    os.chmod(draft.path / "pages.img", 0o600)
    if os.geteuid() == 0:
        os.chown(draft.path, NOBODY, NOBODY)
        os.chown(draft.path / "pages.img", NOBODY, NOBODY)
    made = world.snapshots.publish(draft, box, role="snapshot", kind="live", format=FORMAT, image={})
    folder = world.folder(made)
    for path, mode in ((folder, 0o755), (folder / "pages.img", 0o644), (folder / "manifest.json", 0o644)):
        info = path.stat()
        assert (stat.S_IMODE(info.st_mode), info.st_uid) == (mode, os.geteuid())
    assert stat.S_IMODE(world.home.snapshots.stat().st_mode) == 0o700
    world.check_whole()
    world.close()


def test_nobody_else_reads_them_in_a_home_that_was_copied() -> None:
    """By something that keeps no modes, or under a umask of its own."""
    with open_folder() as folder:
        world = World(folder / "home")
        made = world.save(world.sandbox())
        world.close()
        pages = world.folder(made) / "pages.img"
        for path in (world.home.path, world.home.snapshots):
            path.chmod(0o755)
        assert as_nobody(pages.read_bytes), "the case in question"
        again = World(world.home.path)
        again.check_whole()
        assert stat.S_IMODE(world.home.snapshots.stat().st_mode) == 0o700
        again.close()
        if os.geteuid() == 0:
            with pytest.raises(PermissionError):
                as_nobody(pages.read_bytes)


def test_no_umask_opens_them(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        world = World(tmp_path / "home")
        export(world, tmp_path / "archive")
        receive(world, tmp_path / "archive")
        world.save(world.sandbox())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "archive").stat().st_mode) == 0o600
    for path in (world.home.path, world.home.snapshots):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    world.close()
