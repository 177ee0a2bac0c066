"""Archives that are damaged, and archives that an enemy made: a typed error, and nothing is left of them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from archive_helpers import Crafted, export, receive
from snapshot_helpers import FILES, World

from sloplet import errors
from sloplet.archive import layout, rootfs, tarwrite
from sloplet.engines.base import ResolvedImage

pytestmark = pytest.mark.anyone

REFUSED = (errors.SnapshotDamaged, errors.SnapshotIncompatible)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With an image in it, and of more than one piece."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "root/bin").mkdir(parents=True)
    (folder / "root/bin/sh").write_bytes(os.urandom(5000))
    world = World(folder / "home")
    export(
        world,
        folder / "a",
        files={**FILES, "noise": os.urandom(20_000)},
        image=ResolvedImage("rootfs", folder / "root"),
    )
    yield folder / "a"
    world.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[World]:
    """Nothing at all may be left there."""
    made = World(tmp_path / "other")
    made.home.open()
    yield made
    made.close()


def nothing_left(world: World) -> None:
    assert world.left() == {"snapshots": [], "run": []}
    assert os.listdir(world.home.images) == []


def test_cut_short(whole: Path, other: World, tmp_path: Path) -> None:
    data = whole.read_bytes()
    points = {
        0,
        1,
        7,
        8,
        9,
        25,
        26,
        27,
        28,
        len(data) - 41,
        len(data) - 40,
        len(data) - 39,
        len(data) - 33,
        len(data) - 1,
    }
    for length in sorted(points | set(random.Random(3).sample(range(len(data)), 60))):
        (tmp_path / "cut").write_bytes(data[:length])
        with pytest.raises(errors.SnapshotDamaged):
            receive(other, tmp_path / "cut")
        nothing_left(other)
    (tmp_path / "cut").write_bytes(data)
    receive(other, tmp_path / "cut")


def test_a_flipped_bit(whole: Path, other: World, tmp_path: Path) -> None:
    data = whole.read_bytes()
    chosen = random.Random(4)
    points = {*range(40), *range(len(data) - 44, len(data)), *chosen.sample(range(len(data)), 120)}
    for at in sorted(points):
        changed = bytearray(data)
        changed[at] ^= 1 << chosen.randrange(8)
        (tmp_path / "flipped").write_bytes(changed)
        with pytest.raises(REFUSED):
            receive(other, tmp_path / "flipped")
        nothing_left(other)


def test_something_behind_it(whole: Path, other: World, tmp_path: Path) -> None:
    data = whole.read_bytes()
    for more in (b"\0", b"x" * 40, data[-40:], data):
        (tmp_path / "longer").write_bytes(data + more)
        with pytest.raises(errors.SnapshotDamaged):
            receive(other, tmp_path / "longer")
        nothing_left(other)


@pytest.mark.parametrize(
    "content", [b"", b"hello", bytes(1 << 20), layout.mark(), layout.mark() + layout.trailer(bytes(32))]
)
def test_no_archive_at_all(other: World, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(errors.SnapshotDamaged):
        receive(other, tmp_path / "x")
    nothing_left(other)


def test_no_file_at_all(other: World, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, error in (
        (tmp_path / "none", errors.FileMissing), (tmp_path, errors.SnapshotDamaged),
        (tmp_path / "fifo", errors.SnapshotDamaged), (Path("/dev/zero"), errors.SnapshotDamaged),
    ):  # fmt: skip
        with pytest.raises(error):
            receive(other, path)
    nothing_left(other)


# -- made by an enemy: all digests are right ---------------------------------------------------------


@pytest.fixture
def crafted(whole: Path) -> Crafted:
    made = Crafted().like(whole)
    made.manifest["image"] = layout.ImageFacts("host", "host", host="0" * 64).to_dict()
    made.manifest["kind"] = "disk"
    return made


def test_a_crafted_one_can_be_whole(crafted: Crafted, other: World, tmp_path: Path) -> None:
    """The positive control of what follows."""
    assert receive(other, crafted.write(tmp_path / "x"))[0] == FILES


NAMES = [
    "../escape",
    "/etc/escape",
    "..",
    ".",
    "",
    "a/b",
    "manifest.json",
    "-x",
    ".hidden",
    "a\0b",
    "x" * 200,
    "a\nb",
    "ä",
]


@pytest.mark.parametrize("name", NAMES)
def test_traversal_in_the_manifest(crafted: Crafted, other: World, tmp_path: Path, name: str) -> None:
    crafted.manifest["state"][0]["name"] = name
    crafted.members[0] = ("state/" + name.replace("\0", ""), crafted.members[0][1])
    with pytest.raises(errors.SnapshotDamaged):
        receive(other, crafted.write(tmp_path / "x"))
    nothing_left(other)
    assert sorted(os.listdir(tmp_path)) == ["other", "x"]


@pytest.mark.parametrize(
    "name", ["state/../../escape", "/tmp/escape", "../state/checkpoint.img", "state//checkpoint.img", "state/pages.img"]
)
def test_traversal_in_the_tar(crafted: Crafted, other: World, tmp_path: Path, name: str) -> None:
    crafted.members[0] = (name, crafted.members[0][1])
    with pytest.raises(errors.SnapshotDamaged, match="in the place of"):
        receive(other, crafted.write(tmp_path / "x"))
    nothing_left(other)


@pytest.mark.parametrize("kind", ["symlink", "hardlink", "folder"])
def test_no_files(crafted: Crafted, other: World, tmp_path: Path, kind: str) -> None:
    crafted.kinds[crafted.members[1][0]] = kind
    with pytest.raises(errors.SnapshotDamaged):
        receive(other, crafted.write(tmp_path / "x"))
    nothing_left(other)


def _swap(c: Crafted) -> None:
    c.members[0], c.members[1] = c.members[1], c.members[0]


def _one_more(c: Crafted) -> None:
    c.members.append(("state/more", b"x"))


def _twice(c: Crafted) -> None:
    c.members.insert(1, c.members[0])


def _twice_in_both(c: Crafted) -> None:
    c.members.insert(1, c.members[0])
    c.manifest["state"].insert(1, dict(c.manifest["state"][0]))


def _one_less(c: Crafted) -> None:
    c.members.pop()


def _other_content(c: Crafted) -> None:
    name, data = c.members[0]
    c.members[0] = (name, data[:-1] + b"!")


def _other_size(c: Crafted) -> None:
    c.members[0] = (c.members[0][0], c.members[0][1] + b"more")


def _unknown_image(c: Crafted) -> None:
    c.members.append((layout.IMAGE_MEMBER, b"x"))


def _tail(c: Crafted) -> None:
    c.tail = tarwrite.END + b"x"


def _no_tail(c: Crafted) -> None:
    c.tail = b""


def _short_tail(c: Crafted) -> None:
    c.tail = bytes(512)


def _second_frame(c: Crafted) -> None:
    c.after = zstandard.ZstdCompressor().compress(b"more")


def _garbage(c: Crafted) -> None:
    c.after = b"garbage"


def _object(c: Crafted) -> None:
    name = "o-" + "0" * 64
    c.members[0], c.manifest["state"][0]["name"] = ("state/" + name, c.members[0][1]), name


@pytest.mark.parametrize(
    "change",
    [_swap, _one_more, _twice, _twice_in_both, _one_less, _other_content, _other_size, _unknown_image, _tail, _no_tail,
     _short_tail, _second_frame, _garbage, _object],
)  # fmt: skip
def test_not_what_the_manifest_says(
    crafted: Crafted, other: World, tmp_path: Path, change: Callable[[Crafted], None]
) -> None:
    change(crafted)
    with pytest.raises(errors.SnapshotDamaged):
        receive(other, crafted.write(tmp_path / "x"))
    nothing_left(other)


def _put(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        at: Any = manifest
        for step in path[:-1]:
            at = at[int(step) if step.isdigit() else step]
        at[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _put("kind", value="dead"), _put("kind", value=None), _put("engine", value=""), _put("engine", value="a\nb"),
        _put("state", value={}), _put("state", value=None), _put("state", "0", "bytes", value=-1),
        _put("state", "0", "bytes", value=True), _put("state", "0", "bytes", value="9"),
        _put("state", "0", "bytes", value=2**70), _put("state", "0", "sha256", value="x"),
        _put("packed", value={}), _put("packed", value={"name": "x", "bytes": 1, "sha256": "0" * 64}),
        _put("image", "kind", value="other"), _put("image", "kind", value="rootfs"), _put("image", "key", value="../x"),
        _put("image", "reference", value="\0"), _put("format", value=[]), _put("format", "cpu", value="avx"),
        _put("extra", value=[]), _put("created_at", value="x"), _put("sandbox", value=5), _put("spec", value={}),
        _put("spec", "name", value="../x"), _put("spec", "limits", "memory", value="1"),
        _put("spec", "limits", "memory", value=-5), _put("spec", "limits", "explicit", value=["root"]),
        _put("spec", "network", value="host"), _put("spec", "env", value=[["A=B", "x"]]),
        _put("spec", "env", value=[["A", "x\0"]]), _put("spec", "workdir", value="../.."),
        _put("spec", "hostname", value="a b"), _put("spec", "user", value=""), _put("spec", "undo", value=10**9),
        _put("spec", "more", value=1), _put("spec", "engine", value="os:system"), _put("spec", "ttl", value=-1),
    ],
)  # fmt: skip
def test_a_manifest_that_makes_no_sense(
    crafted: Crafted, other: World, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    change(crafted.manifest)
    with pytest.raises(errors.SnapshotDamaged):
        receive(other, crafted.write(tmp_path / "x"))
    nothing_left(other)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000, b'{"version": 1e999}'])
def test_no_manifest(
    crafted: Crafted, other: World, tmp_path: Path, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Crafted, "tar", lambda self: _tar(text, self.members) + tarwrite.END)
    with pytest.raises(errors.SnapshotDamaged, match="manifest"):
        receive(other, crafted.write(tmp_path / "x"))
    nothing_left(other)


def _tar(manifest: bytes, members: list[tuple[str, bytes]]) -> bytes:
    parts = [(layout.MANIFEST_MEMBER, manifest), *members]
    return b"".join(
        tarwrite.header(name.encode(), size=len(data)) + data + tarwrite.padding(len(data)) for name, data in parts
    )


# -- bombs -----------------------------------------------------------------------------------------


def test_more_than_the_disk_holds(crafted: Crafted, other: World, tmp_path: Path) -> None:
    """Refused before a byte of it is written."""
    crafted.manifest["state"][0]["bytes"] = 2**50
    with pytest.raises(errors.StateUnwritable, match="room for"):
        receive(other, crafted.write(tmp_path / "x"))
    nothing_left(other)


def test_a_small_declaration_with_much_behind_it(crafted: Crafted, other: World, tmp_path: Path) -> None:
    """The tar's header says more than the manifest: nothing of it is unpacked. A gigabyte would take seconds."""
    body = _tar(json.dumps(crafted.manifest).encode(), [])
    packer = zstandard.ZstdCompressor().compressobj()
    name = crafted.members[0][0].encode()
    data = packer.compress(body + tarwrite.header(name, size=2**40))
    data += b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    body = layout.mark() + data
    assert len(body) < 100_000
    (tmp_path / "x").write_bytes(body + layout.trailer(hashlib.sha256(body).digest()))
    with pytest.raises(errors.SnapshotDamaged, match="its manifest says"):
        receive(other, tmp_path / "x")
    nothing_left(other)


def test_a_huge_manifest(other: World, tmp_path: Path) -> None:
    data = zstandard.ZstdCompressor().compress(tarwrite.header(b"manifest.json", size=2**40) + bytes(1 << 20))
    body = layout.mark() + data
    (tmp_path / "x").write_bytes(body + layout.trailer(hashlib.sha256(body).digest()))
    with pytest.raises(errors.SnapshotDamaged, match="its manifest has"):
        receive(other, tmp_path / "x")


def test_a_huge_window(crafted: Crafted, other: World, tmp_path: Path) -> None:
    """zstd's header may ask for a buffer of gigabytes."""
    settings = zstandard.ZstdCompressionParameters(window_log=30, compression_level=1)
    packer = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    body = layout.mark() + packer.compress(crafted.tar()) + packer.flush()
    (tmp_path / "x").write_bytes(body + layout.trailer(hashlib.sha256(body).digest()))
    with pytest.raises(errors.SnapshotDamaged, match="memory"):
        receive(other, tmp_path / "x")
    nothing_left(other)


# -- images of an enemy ----------------------------------------------------------------------------


def with_image(whole: Path, image: bytes, key: str = "") -> Crafted:
    made = Crafted(image=image).like(whole).with_image(image, key)
    made.manifest["kind"] = "disk"
    return made


def entry(name: bytes, data: bytes = b"", **more: Any) -> bytes:
    return tarwrite.header(name, size=len(data), **more) + data + tarwrite.padding(len(data))


GOOD = entry(b"bin/", kind="folder", mode=0o755) + entry(b"bin/sh", b"#!", mode=0o755)


def test_an_image_can_be_whole(whole: Path, other: World, tmp_path: Path) -> None:
    image = receive(other, with_image(whole, GOOD + tarwrite.END).write(tmp_path / "x"))[1]
    assert image.path is not None
    assert (image.path / "bin/sh").read_bytes() == b"#!"


@pytest.mark.parametrize(
    "image",
    [
        GOOD + entry(b"../escape", b"x") + tarwrite.END,
        GOOD + entry(b"out", kind="symlink", link=b"/") + entry(b"out/../../escape", b"x") + tarwrite.END,
        GOOD + entry(b"in", kind="hardlink", link=b"../../../state.db") + tarwrite.END,
        GOOD,
        b"",
        gzip.compress(GOOD + entry(b"zeros", bytes(8 << 20)) + tarwrite.END),
        gzip.compress(GOOD + tarwrite.END),
    ],
    ids=["traversal", "symlink", "hardlink", "cut", "empty", "packed bomb", "packed"],
)
def test_an_image_that_is_none(whole: Path, other: World, tmp_path: Path, image: bytes) -> None:
    with pytest.raises(errors.SnapshotDamaged):
        receive(other, with_image(whole, image).write(tmp_path / "x"))
    nothing_left(other)
    assert sorted(os.listdir(tmp_path)) == ["other", "x"]


def test_an_image_under_anothers_name(whole: Path, other: World, tmp_path: Path) -> None:
    """A claim to be what somebody's tar unpacks to is not believed: nobody will be given this as that."""
    claimed = "ab" * 32
    image = GOOD + entry(b"evil", b"x") + tarwrite.END
    receive(other, with_image(whole, image, key=claimed).write(tmp_path / "x"))
    assert os.listdir(other.home.images) == [hashlib.sha256(image).hexdigest()]


def test_an_image_of_a_damaged_archive_does_not_stay(whole: Path, other: World, tmp_path: Path) -> None:
    """The image is whole; what comes after it is not."""
    crafted = with_image(whole, GOOD + tarwrite.END)
    crafted.tail = tarwrite.END + b"x"
    with pytest.raises(errors.SnapshotDamaged):
        receive(other, crafted.write(tmp_path / "x"))
    nothing_left(other)


def test_an_image_that_is_here_is_checked_too(whole: Path, other: World, tmp_path: Path) -> None:
    image = GOOD + tarwrite.END
    receive(other, with_image(whole, image).write(tmp_path / "x"))
    crafted = with_image(whole, image)
    crafted.members[-1] = (layout.IMAGE_MEMBER, image[:-1] + b"x")
    with pytest.raises(errors.SnapshotDamaged):
        receive(other, crafted.write(tmp_path / "y"))
    assert rootfs.measure(other.home.images / hashlib.sha256(image).hexdigest() / "rootfs", owners=False)[0] > 0
