"""Whose the files of a saved state are. As root too: an engine may have given them to another user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from snapshot_helpers import FORMAT, World
from state_helpers import NOBODY


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
