"""Downloads from a sandbox that lies, uploads from a host that changes (GAUNTLET F-13, F-14)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sloplet import Sandbox
from sloplet.errors import FileError, FileExists, FileMissing
from sloplet.files import AsyncFiles
from sloplet.results import FileInfo
from sloplet.transfer import download
from sloplet.transfer.common import stays_inside

pytestmark = pytest.mark.anyone


def entry(name: str, type: str = "file", *, size: int = 1, mode: int = 0o644, target: str | None = None) -> FileInfo:
    return FileInfo(name, type, size, mode, 0, 0, 0.0, target)


class Liar(AsyncFiles):
    """Answers what it likes."""

    def __init__(self, entries: list[FileInfo], content: bytes = b"x", *, endless: bool = False) -> None:
        self.entries = entries
        self.content = content
        self.endless = endless
        self.missing: set[str] = set()
        self.on_read: Any = None

    async def stat(self, path: str, **_: Any) -> FileInfo:
        return entry(path, "dir")

    async def list(self, path: str = ".", **_: Any) -> list[FileInfo]:
        return self.entries

    async def stream(self, path: str, **_: Any) -> AsyncIterator[bytes]:
        if self.on_read is not None:
            self.on_read(path)
        if path in self.missing:
            raise FileMissing(f"{path}: gone")
        yield self.content
        while self.endless:
            yield self.content


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A target with a canary beside it, which must be as before afterwards."""
    (tmp_path / "canary").write_text("safe")
    (tmp_path / "elsewhere").mkdir()
    yield tmp_path / "target"
    assert (tmp_path / "canary").read_text() == "safe"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert set(os.listdir(tmp_path)) <= {"canary", "elsewhere", "target"}


def fetch(files: AsyncFiles, place: Path, **options: Any) -> Any:
    return asyncio.run(download(files, "/tree", place, **options))


def content(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "",
        "/",
        "../canary",
        "/etc/passwd",
        "a/../../canary",
        "a/..",
        "./a",
        "a//b",
        "a/",
        "/a",
        "nul\0",
        "x" * 256,
        "a/" + "y" * 300,
        "../elsewhere/x",
    ],
)
@pytest.mark.parametrize("type", ["file", "dir", "symlink", "other"])
def test_names_that_are_none(place: Path, name: str, type: str) -> None:
    with pytest.raises(FileError, match="not a name"):
        fetch(Liar([entry("fine"), entry(name, type, target="x")]), place)
    assert content(place) == [], "all names are looked at before anything is made"


@pytest.mark.parametrize(
    "name", ["new\nline", "esc\x1b]0;x\x07", "..x", "...", " ", "-rf", "*", "\udcff", "con", "a\\b"]
)
def test_odd_names_are_kept(place: Path, name: str) -> None:
    fetch(Liar([entry(name)]), place)
    assert os.listdir(place) == [name]


def test_a_file_below_a_link_of_the_same_listing(place: Path) -> None:
    liar = Liar([entry("a", "symlink", target="../elsewhere"), entry("a/x")])
    with pytest.raises((FileError, OSError)):
        fetch(liar, place)
    assert not (place / "a").is_symlink()


def test_a_link_that_appears_while_it_runs(place: Path) -> None:
    liar = Liar([entry("a", "dir"), entry("a/x"), entry("a/y")])

    def swap(path: str) -> None:
        if not (place / "a").is_symlink():
            os.rename(place / "a", place / "moved")
            os.symlink(place.parent / "elsewhere", place / "a")

    liar.on_read = swap
    with pytest.raises(NotADirectoryError):
        fetch(liar, place)


def test_the_same_name_twice(place: Path) -> None:
    with pytest.raises(FileExists, match="same on this machine"):
        fetch(Liar([entry("a"), entry("a")]), place)
    with pytest.raises((FileError, OSError)):
        fetch(Liar([entry("b"), entry("b/c")]), place)


def test_names_the_host_takes_for_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case-insensitive filesystem, imitated: A and a are the same entry."""
    real_lstat, real_rename = os.lstat, os.rename

    def folded(name: str) -> str:
        return name.lower() if isinstance(name, str) and not name.startswith(".sloplet") else name

    monkeypatch.setattr(os, "lstat", lambda name, *, dir_fd=None: real_lstat(folded(name), dir_fd=dir_fd))
    monkeypatch.setattr(
        os,
        "rename",
        lambda a, b, *, src_dir_fd, dst_dir_fd: real_rename(a, folded(b), src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd),
    )
    with pytest.raises(FileExists, match="case"):
        fetch(Liar([entry("README"), entry("readme")]), place)


def test_endless_files(place: Path) -> None:
    liar = Liar([entry("small", size=1)], bytes(65536), endless=True)
    with pytest.raises(FileError, match="larger than 1000000") as caught:
        fetch(liar, place, max_bytes=1_000_000)
    assert caught.value.errno == 27
    assert content(place) == [], "no half file is left"


def test_the_bound_is_for_all_together(place: Path) -> None:
    liar = Liar([entry(f"f{number}") for number in range(20)], bytes(100))
    with pytest.raises(FileError, match="larger"):
        fetch(liar, place, max_bytes=1000)
    assert fetch(liar, place, max_bytes=2000).bytes == 2000


@pytest.mark.parametrize("size", [-1, 2**62, 0])
def test_sizes_are_hints_only(place: Path, size: int) -> None:
    progress = fetch(Liar([entry("f", size=size)], b"12345"), place)
    assert (progress.bytes, (place / "f").read_bytes()) == (5, b"12345")


def test_what_vanishes_is_told(place: Path) -> None:
    liar = Liar([entry("a"), entry("b")])
    liar.missing = {"/tree/b"}
    progress = fetch(liar, place)
    assert (progress.files, progress.skipped) == (1, ("b",))
    assert content(place) == ["a"]


@pytest.mark.parametrize("mode", [0o7777, 0o4755, 0o2755, 0o1777, 0o6000, -1, 2**62])
def test_no_mode_gives_privileges(place: Path, mode: int) -> None:
    fetch(Liar([entry("f", mode=mode), entry("d", "dir", mode=mode), entry("d/g", mode=mode)]), place)
    for name in ("f", "d", "d/g"):
        assert (place / name).lstat().st_mode & 0o7000 == 0


def test_folders_can_be_removed_again(place: Path) -> None:
    fetch(Liar([entry("closed", "dir", mode=0), entry("closed/f", mode=0)]), place)
    assert (place / "closed").stat().st_mode & 0o777 == 0o700


def test_a_deep_tree(place: Path) -> None:
    names = ["/".join(["d"] * depth) for depth in range(1, 200)]
    fetch(Liar([*(entry(name, "dir") for name in names), entry(names[-1] + "/f")]), place)
    assert (place / names[-1] / "f").exists()


@pytest.mark.parametrize(
    ("name", "text", "inside"),
    [
        ("l", "f", True),
        ("l", "./f", True),
        ("l", ".", True),
        ("l", "a/b/c", True),
        ("a/l", "../f", True),
        ("a/b/l", "../../f", True),
        ("a/l", "..", True),
        ("l", "..", False),
        ("l", "../f", False),
        ("a/l", "../../f", False),
        ("l", "/f", False),
        ("l", "//f", False),
        ("l", "", False),
        ("l", "a/..", False),
        ("l", "a/../b", False),
        ("a/b/l", "../c/../../..", False),
        ("l", "f\0", False),
        ("l", "x" * 5000, False),
    ],
)
def test_which_links_stay(name: str, text: str, inside: bool) -> None:
    assert stays_inside(name, text) is inside


def test_no_chain_of_kept_links_leads_out(place: Path) -> None:
    """What the rule on ``..`` is for: links that are harmless alone."""
    fetch(
        Liar(
            [
                entry("p", "dir"),
                entry("p/q", "dir"),
                entry("p/q/top", "symlink", target="../.."),
                entry("x", "symlink", target="p/q/top/../canary"),
                entry("y", "symlink", target="p/q/top/p"),
            ]
        ),
        place,
    )
    assert not (place / "x").is_symlink()
    for path in place.rglob("*"):
        assert str(path.resolve()).startswith(str(place.resolve()))


def test_upload_of_a_tree_that_changes(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    for number in range(40):
        (source / f"f{number:02}").write_text("x")

    def swap(_: object) -> None:
        for number in range(30, 40):
            path = source / f"f{number}"
            if path.exists() and not path.is_symlink():
                path.unlink()
                path.symlink_to(secret)

    with Sandbox(engine="fake") as box:
        with contextlib.suppress(OSError):
            box.upload(source, "dst", on_progress=swap)
        for info in box.files.list("dst"):
            assert b"secret" not in box.files.read(f"dst/{info.name}")


def test_upload_keeps_memory_small(tmp_path: Path) -> None:
    big = tmp_path / "big"
    with big.open("wb") as out:
        out.truncate(30_000_000)
    with Sandbox(engine="fake") as box:
        seen: list[int] = []
        assert box.upload(big, "big", on_progress=lambda progress: seen.append(progress.bytes)).bytes == 30_000_000
        assert len(seen) >= 25
        assert box.files.stat("big").size == 30_000_000


def test_a_cancelled_download_leaves_nothing_half(place: Path) -> None:
    liar = Liar([entry("a"), entry("b")], bytes(1000), endless=True)

    async def main() -> None:
        task = asyncio.ensure_future(download(liar, "/tree", place, on_progress=lambda progress: task.cancel()))
        with pytest.raises(asyncio.CancelledError):
            await task

    async def with_turns() -> None:
        original = liar.stream

        async def stream(path: str, **options: Any) -> AsyncIterator[bytes]:
            async for piece in original(path, **options):
                yield piece
                await asyncio.sleep(0)

        liar.stream = stream  # type: ignore[method-assign]
        await main()

    asyncio.run(with_turns())
    assert content(place) == []
