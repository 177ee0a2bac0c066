"""From ``image=`` to a root: what is accepted, what is refused and why; an image is there whole or not at all."""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from state_helpers import fewer_and_fewer, finish, killed_at_line, memory_folder, on_small_disk, on_two_cores, start
from test_unpack import folder, member, symlink, tar

from sloplet.engines.base import ResolvedImage
from sloplet.errors import ImageInvalid, ImageNotFound, SlopletError, StateUnwritable
from sloplet.images import resolve as module
from sloplet.images.resolve import resolve
from sloplet.images.unpack import UnpackLimits
from sloplet.state.home import Home, remove_below
from sloplet.state.reaper import reap
from sloplet.state.store import Store

pytestmark = pytest.mark.anyone

ROOTFS = tar(
    folder("usr"), folder("usr/bin"), symlink("bin", "usr/bin"), member("usr/bin/sh", b"#!" * 5000, mode=0o755)
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return Home(tmp_path / "home")


@pytest.fixture
def rootfs(home: Home) -> Path:
    path = Path("rootfs").absolute()
    (path / "bin").mkdir(parents=True)
    return path


def whole(image: ResolvedImage) -> bool:
    assert image.path is not None
    return (image.path / "bin/sh").read_bytes() == b"#!" * 5000


def test_host(home: Home) -> None:
    assert resolve("host", home) == ResolvedImage("host")
    assert not home.path.exists()


def test_folders(home: Home, rootfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(rootfs.parent))
    expected = ResolvedImage("rootfs", rootfs, owners_kept=os.geteuid() == 0)
    for image in (
        "./rootfs",
        f"dir:{rootfs}",
        "dir:rootfs",
        str(rootfs),
        "../work/rootfs/",
        "~/rootfs",
        "dir:~/rootfs",
    ):
        assert resolve(image, home) == expected
    Path("link").symlink_to("rootfs")
    assert resolve("./link", home).path == rootfs, "resolved once, here"
    assert not home.path.exists()
    Path("static").mkdir()
    Path("static/app").touch(0o755)
    assert resolve("./static", home).kind == "rootfs"
    if os.geteuid() == 0:
        os.chown(rootfs, 1000, 1000)
        assert not resolve("./rootfs", home).owners_kept


@pytest.mark.parametrize(
    "image",
    ["registry.example/x/y@sha256:00", "Debian:12", "", "dir:", "dir:/none", "./none", "/none/x.tar",
     "none.tar.gz", "HOST", "file:///x", "./none/../../x", "~nobody-such/x", "/dev/null/x"],
)  # fmt: skip
def test_what_is_not_there(home: Home, image: str) -> None:
    with pytest.raises(ImageNotFound) as caught:
        resolve(image, home)
    assert caught.value.hint
    assert not home.path.exists()


def test_folders_that_are_refused(home: Home, rootfs: Path) -> None:
    home.open()
    Path("empty").mkdir()
    Path("texts").mkdir()
    Path("texts/README").touch(0o644)
    Path("file").touch()
    (home.sandboxes / "x" / "bin").mkdir(parents=True)
    for image, says in {
        "dir:/": "host's own root", "/": "host's own root", "/../": "host's own root", "./empty": "no root filesystem",
        "./texts": "no root filesystem", "dir:./file": "not a folder", str(home.path): "inside of each other",
        str(home.path.parent): "inside of each other", str(home.sandboxes / "x"): "inside of each other",
        str(home.run): "inside of each other",
    }.items():  # fmt: skip
        with pytest.raises(ImageInvalid, match=says):
            resolve(image, home)
    Path("sneaky").symlink_to(home.path)
    with pytest.raises(ImageInvalid, match="inside of each other"):
        resolve("./sneaky", home)


def test_files_that_are_no_tars(home: Home) -> None:
    os.mkfifo("fifo")
    Path("text.tar").write_text("hello")
    Path("empty.tar").touch()
    for image in ("./fifo", "./text.tar", "./empty.tar", "/dev/null"):
        with pytest.raises(ImageInvalid):
            resolve(image, home)
    with pytest.raises(SlopletError):
        resolve("./a\0b", home)
    assert os.listdir(home.images) == []
    assert os.listdir(home.cache) == []


@pytest.mark.parametrize("name", ["image.tar", "image.tar.gz", "image", "bild ü.tgz"])
def test_a_tar_is_unpacked_once(home: Home, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(name).write_bytes(gzip.compress(ROOTFS) if "gz" in name else ROOTFS)
    first = resolve(f"./{name}", home)
    assert whole(first)
    assert first.path is not None
    assert first.path.parent.parent == home.images
    monkeypatch.setattr(module, "unpack", None)
    began = time.perf_counter()
    assert resolve(f"./{name}", home) == first
    assert time.perf_counter() - began < 0.05
    assert sorted(os.listdir(home.run)) == ["owners"]


def test_a_changed_tar_is_another_image(home: Home) -> None:
    Path("i.tar").write_bytes(ROOTFS)
    first = resolve("i.tar", home)
    Path("i.tar").write_bytes(tar(folder("bin"), member("new")))
    second = resolve("i.tar", home)
    assert first.path != second.path
    assert whole(first)
    assert second.path is not None
    assert sorted(os.listdir(second.path)) == ["bin", "new"]
    Path("copy.tar").write_bytes(ROOTFS)
    assert resolve("copy.tar", home) == first, "the same content is the same image"
    assert len(os.listdir(home.images)) == 2


def test_a_damaged_cache_is_not_believed(home: Home) -> None:
    Path("i.tar").write_bytes(ROOTFS)
    first = resolve("i.tar", home)
    (entry,) = home.cache.iterdir()
    for text in ("", "../../../etc", "0" * 64, "x" * 64, "\xff"):
        entry.write_text(text, "latin-1")
        assert resolve("i.tar", home) == first
    assert whole(first)


def test_a_tar_over_a_limit_leaves_nothing(home: Home) -> None:
    Path("i.tar").write_bytes(ROOTFS)
    with pytest.raises(ImageInvalid, match=r"i\.tar.*the limit is 100"):
        resolve("i.tar", home, limits=UnpackLimits(bytes=100))
    assert os.listdir(home.images) == []
    assert whole(resolve("i.tar", home))


def test_two_at_once_unpack_once(home: Home) -> None:
    Path("i.tar").write_bytes(ROOTFS)
    home.open()
    children = [start(lambda: resolve("i.tar", Home(home.path)).path) for _ in range(6)]
    paths = {finish(*child) for child in children}
    assert len(paths) == 1
    assert whole(resolve("i.tar", home))
    assert len(os.listdir(home.images)) == 1
    assert sorted(os.listdir(home.run)) == ["owners"]


def test_killed_at_any_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill -9 at any moment there is one whole image or none, and the next call, or a reap, tidies up."""
    with memory_folder() as memory:
        monkeypatch.chdir(memory)
        Path("i.tar").write_bytes(ROOTFS)
        last = on_two_cores(
            lambda: fewer_and_fewer(50), lambda name, lines: kill_at_every_line(Home(memory / name), lines)
        )
        monkeypatch.undo()
    assert min(last) > 300


def kill_at_every_line(home: Home, lines: Iterator[int]) -> int:
    """The first line that it did not come to."""
    for line in lines:
        if not killed_at_line(line, lambda: resolve("i.tar", Home(home.path))):
            return line
        home.open()
        for name in os.listdir(home.images):
            assert name.startswith(".tmp-") or whole(ResolvedImage("rootfs", home.images / name / "rootfs"))
        if line % 2:
            assert whole(resolve("i.tar", Home(home.path)))
        store = Store(home)
        assert reap(home, store, lambda engine, sandbox_id: None).errors == []
        store.close()
        assert sorted(os.listdir(home.run)) == ["owners"]
        assert [name for name in os.listdir(home.images) if name.startswith(".")] == []
        for path in (home.images, home.cache):
            for name in os.listdir(path):
                remove_below(path, name)
    raise AssertionError("there is no end of it")


def test_a_full_disk_leaves_nothing(home: Home, tmp_path: Path) -> None:
    Path("big.tar").write_bytes(tar(folder("bin"), member("bin/big", os.urandom(2**20))))
    image = str(Path("big.tar").absolute())
    (tmp_path / "disk").mkdir()

    def check() -> list[str]:
        small = Home(tmp_path / "disk" / "home")
        with pytest.raises(StateUnwritable, match="full"):
            resolve(image, small)
        return os.listdir(small.images) + os.listdir(small.cache)

    assert on_small_disk(tmp_path / "disk", "512k", check) == []
