"""Conformance: volumes. Whose files they are, who may have them, that they are not saved with the sandbox; and that an
engine which has none says so before anything is made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ...engines.base import Capabilities
from ...errors import FileDenied, UnsupportedOperation, VolumeInUse
from ...volumes.store import Volumes
from ...volumespec import Volume
from .support import MakeBox, needs


@pytest.fixture
def volume() -> Iterator[str]:
    """The name of a volume that is gone after the test (ask for it before ``make_box``: sandboxes go first)."""
    name = f"conformance-{os.urandom(4).hex()}"
    yield name
    if any(info.name == name for info in Volumes().list()):
        Volumes().remove(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    (made / "file").write_text("from outside\n")
    return made


class TestVolumes:
    def test_one_that_cannot_be_had_is_refused(
        self, volume: str, make_box: MakeBox, capabilities: Capabilities
    ) -> None:
        needs(not capabilities.volumes, "the engine has volumes")
        with pytest.raises(UnsupportedOperation):
            make_box(volumes={"/data": volume})
        assert not any(info.name == volume for info in Volumes().list())

    def test_a_named_one_outlives_its_sandbox(self, volume: str, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs(capabilities.volumes, "the engine has no volumes")
        first = make_box(volumes={"/data": volume})
        first.run("echo kept > /data/file", check=True)
        with pytest.raises(VolumeInUse, match=first.id):
            make_box(volumes={"/data": volume})
        first.kill()
        again = make_box(volumes={"/other/place": volume})
        assert again.run("cat /other/place/file").stdout == "kept\n"
        assert [item.value for item in again.guarantees() if item.control == "volume"] == ["/other/place"]

    def test_a_folder_is_read_only_unless_asked_otherwise(
        self, make_box: MakeBox, capabilities: Capabilities, folder: Path
    ) -> None:
        needs(capabilities.volumes, "the engine has no volumes")
        box = make_box(volumes={"/shown": folder, "/own": Volume(folder, mode="rw")})
        assert box.files.read_text("/shown/file") == "from outside\n"
        with pytest.raises(FileDenied):
            box.files.write("/shown/file", "from inside")
        box.run("echo from inside > /own/made", check=True)
        assert (folder / "made").read_text() == "from inside\n"
        assert (folder / "made").stat().st_uid == folder.stat().st_uid
        assert box.run("cat /shown/made").stdout == "from inside\n"

    def test_it_is_no_part_of_what_is_saved(self, volume: str, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs(capabilities.volumes, "the engine has no volumes")
        needs(capabilities.live_snapshots or capabilities.disk_snapshots, "nothing can be saved")
        box = make_box(volumes={"/data": volume})
        box.run("echo old > own; echo old > /data/file", check=True)
        box.snapshot("one")
        box.run("echo new > own; echo new > /data/file", check=True)
        assert [change.path for change in box.diff().changes] == [f"{box.workdir}/own"]
        box.rollback("one")
        assert box.run("cat own /data/file").stdout == "old\nnew\n"
