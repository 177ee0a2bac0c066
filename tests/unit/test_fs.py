"""sloplet.fs: nothing leaves its directory, everything can be removed, files are published whole."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from state_helpers import as_nobody, on_small_disk, open_folder

from sloplet import fs
from sloplet.errors import StateUnwritable
from sloplet.state.home import remove_below

_SETFLAGS, _IMMUTABLE = 0x40086602, 0x10


@pytest.fixture(params=["openat2", "walk"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with the system call and with the walk that stands in for it."""
    if request.param == "walk":
        monkeypatch.setattr(fs, "_openat2", None)
        monkeypatch.setattr(fs, "_openat2_probed", True)
    elif fs._kernel_openat2() is None:
        pytest.skip("this kernel has no openat2")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    """A folder with every kind of way out, and a canary outside."""
    (tmp_path / "canary").write_text("host")
    inside = tmp_path / "root"
    (inside / "usr" / "lib").mkdir(parents=True)
    (inside / "usr" / "lib" / "file").write_text("inside")
    (inside / "canary").write_text("inside")
    for name, target in {
        "lib": "usr/lib", "absolute": "/usr/lib", "up": "../canary", "far": "../../../../../../canary",
        "loop": "loop", "out": str(tmp_path), "host": str(tmp_path / "canary"), "magic": "/proc/self/root",
        "dangling": "nowhere/x",
    }.items():  # fmt: skip
        (inside / name).symlink_to(target)
    fd = os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def read(fd: int) -> str:
    with os.fdopen(fd, "r") as file:
        return file.read()


def refusal(root: int, path: str, *, follow: bool = False) -> int | None:
    """The errno of an open that must fail."""
    try:
        os.close(fs.open_in(root, path, os.O_RDONLY, follow=follow))
    except OSError as error:
        return error.errno
    raise AssertionError(f"{path!r} was opened")


@pytest.mark.parametrize(
    "path",
    ["lib/file", "absolute/file", "/lib/file", "usr/../lib/file", "../../usr/lib/file", "usr//./lib/file", "up", "far"],
)
def test_links_resolve_as_if_the_folder_were_the_root(root: int, path: str) -> None:
    assert read(fs.open_in(root, path, os.O_RDONLY, follow=True)) == "inside"


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("loop", errno.ELOOP), ("loop/x", errno.ELOOP), ("out/canary", errno.ENOENT), ("host", errno.ENOENT),
        ("magic/etc/passwd", errno.ENOENT), ("dangling", errno.ENOENT), ("canary/", errno.ENOTDIR),
        ("canary/..", errno.ENOTDIR), ("", errno.ENOENT), ("a\0b", errno.EINVAL), ("x" * 300, errno.ENAMETOOLONG),
    ],
)  # fmt: skip
def test_no_way_out_with_links(root: int, path: str, number: int) -> None:
    assert refusal(root, path, follow=True) == number


@pytest.mark.parametrize("path", ["lib/file", "absolute/file", "up", "host", "loop", "dangling"])
def test_without_links_a_link_anywhere_is_refused(root: int, path: str) -> None:
    assert refusal(root, path) in (errno.ELOOP, errno.ENOTDIR)


@pytest.mark.parametrize("path", ["/canary", "../canary", "usr/../../canary", "usr/../canary"])
def test_without_links_the_path_only_goes_down(root: int, path: str) -> None:
    assert refusal(root, path) == errno.EXDEV


def test_creating_through_a_link_stays_inside(root: int, tmp_path: Path) -> None:
    os.close(fs.open_in(root, "lib/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, follow=True))
    assert (tmp_path / "root/usr/lib/new").exists()
    with pytest.raises(FileNotFoundError):
        fs.open_in(root, "out/new", os.O_WRONLY | os.O_CREAT, 0o600, follow=True)
    assert not (tmp_path / "new").exists()


def test_descriptors_are_not_inherited_and_none_leaks(root: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = fs.open_in(root, "lib/file", os.O_RDONLY, follow=True)
    assert not os.get_inheritable(fd)
    os.close(fd)
    for path in ("loop", "out/x", "usr/lib/none", "canary/x"):
        assert refusal(root, path, follow=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_mount_on_the_way_can_be_refused(tmp_path: Path) -> None:
    def check() -> list[object]:
        (tmp_path / "file").write_text("x")
        top = os.open(tmp_path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.close(fs.open_in(top, f"{tmp_path.name}/file", os.O_RDONLY))
        try:
            fs.open_in(top, f"{tmp_path.name}/file", os.O_RDONLY, cross_mounts=False)
        except OSError as error:
            first = error.errno
        with pytest.raises(StateUnwritable, match="mounted"):
            fs.remove_tree(top, tmp_path.name)
        return [first, (tmp_path / "file").exists()]

    assert on_small_disk(tmp_path, "1m", check) == [errno.EXDEV, True]


# Removing


def removed(path: Path) -> int:
    return remove_below(path.parent, path.name)


def test_remove_never_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "file").write_text("x")
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "link").symlink_to("../keep")
    (tree / "sub" / "link").symlink_to(tmp_path / "keep" / "file")
    os.mkfifo(tree / "fifo")
    assert removed(tree) == 5
    assert (tmp_path / "keep" / "file").read_text() == "x"
    (tmp_path / "link").symlink_to("keep")
    assert removed(tmp_path / "link") == 1
    assert (tmp_path / "keep" / "file").exists()


@pytest.mark.anyone
def test_remove_copes_with_depth_on_few_descriptors(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    for level in range(5000):
        os.mkdir("d", 0o700, dir_fd=fd)
        if level % 1000 == 0:
            os.mkdir("side", 0o700, dir_fd=fd)
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)
    assert removed(tmp_path / "d") == 5000 + 4 + 1  # one "side" lies beside the first "d"
    assert os.listdir(tmp_path) == ["side"]


def test_remove_copes_with_folders_without_rights() -> None:
    def check() -> bool:
        tree = folder / "tree"
        (tree / "a" / "b").mkdir(parents=True)
        (tree / "a" / "b" / "file").write_text("x")
        (tree / "a" / "read-only").mkdir()
        (tree / "a" / "read-only" / "file").write_text("x")
        (tree / "a" / "read-only").chmod(0o500)
        (tree / "a" / "b").chmod(0)
        (tree / "a").chmod(0)
        tree.chmod(0)
        removed(tree)
        return tree.exists()

    with open_folder() as folder:
        assert as_nobody(check) is False


def test_remove_names_what_resists_and_removes_the_rest(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    for name in ("a", "stuck", "z"):
        (tree / "sub" / name).write_text("x")
    with (tree / "sub" / "stuck").open() as file:
        try:
            fcntl.ioctl(file, _SETFLAGS, struct.pack("l", _IMMUTABLE))
        except OSError:
            pytest.skip("no immutable files here")
        try:
            with pytest.raises(StateUnwritable, match=r"tree/sub/stuck.*chattr"):
                removed(tree)
            assert os.listdir(tree / "sub") == ["stuck"]
        finally:
            fcntl.ioctl(file, _SETFLAGS, struct.pack("l", 0))
    assert removed(tree) == 3


def test_remove_of_nothing(tmp_path: Path) -> None:
    assert removed(tmp_path / "none") == 0
    assert removed(tmp_path / "none" / "below") == 0
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(FileNotFoundError):
            fs.remove_tree(fd, "none", missing_ok=False)
        for name in ("", ".", "..", "a/b"):
            with pytest.raises(ValueError, match="not the name"):
                fs.remove_tree(fd, name)
    finally:
        os.close(fd)


@pytest.mark.anyone
def test_remove_of_many(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for folder in range(20):
        (tree / str(folder)).mkdir(parents=True)
        for file in range(200):
            os.close(os.open(tree / str(folder) / str(file), os.O_CREAT))
    assert removed(tree) == 20 * 201 + 1


# Writing


def test_write_atomic_replaces_whole_or_not_at_all(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fs.write_atomic(fd, "file", b"one")
        fs.write_atomic(fd, "file", b"two", 0o640)
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"two"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["file"]


def test_write_atomic_on_a_full_disk_keeps_the_old(tmp_path: Path) -> None:
    def check() -> tuple[object, bytes, list[str]]:
        fd = os.open(tmp_path, os.O_RDONLY)
        fs.write_atomic(fd, "file", b"old")
        try:
            fs.write_atomic(fd, "file", bytes(2**20))
        except OSError as error:
            number = error.errno
        return number, (tmp_path / "file").read_bytes(), os.listdir(tmp_path)

    assert on_small_disk(tmp_path, "64k", check) == (errno.ENOSPC, b"old", ["file"])


def test_sync_filesystem(tmp_path: Path) -> None:
    call: Callable[[int], None] = fs.sync_filesystem
    fd = os.open(tmp_path, os.O_RDONLY)
    call(fd)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        call(fd)
