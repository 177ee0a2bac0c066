"""Named volumes on disk: whole or not at all, had by those who may, and copied without trusting what is in them."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from state_helpers import on_small_disk

from sloplet import Volumes
from sloplet.engines.machine import machine
from sloplet.errors import (
    ControlUnavailable,
    InvalidLimit,
    InvalidName,
    SlopletError,
    VolumeError,
    VolumeExists,
    VolumeInUse,
    VolumeNotFound,
)
from sloplet.fs import FOLDER
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home, new_id
from sloplet.state.locks import FileLock
from sloplet.state.reaper import reap
from sloplet.state.store import Store
from sloplet.volumes import copies, leases, sized, trees
from sloplet.volumes.leases import take, users
from sloplet.volumes.opening import open_volumes
from sloplet.volumes.records import Use, VolumeInfo
from sloplet.volumes.store import staging_lock
from sloplet.volumes.trees import Copy
from sloplet.volumespec import Volume, VolumeSpec, check_volumes

SIZES = machine().root and machine().loop and machine().mkfs is not None


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").open()


@pytest.fixture
def volumes(home: Home) -> Volumes:
    return Volumes(home)


def data(volumes: Volumes, name: str) -> Path:
    return volumes.home.volumes / name / "data"


def left(home: Home) -> list[str]:
    """What is half there, and locks."""
    hidden = [name for name in os.listdir(home.volumes) if name.startswith(".tmp-")]
    return hidden + [name for name in os.listdir(home.run) if name.startswith("volume-")]


def test_made_listed_and_removed(volumes: Volumes) -> None:
    assert volumes.list() == []
    made = volumes.create("data")
    volumes.create("other")
    assert made.name == "data"
    assert made.size is None
    assert os.listdir(made.path) == []
    assert [info.name for info in volumes.list()] == ["data", "other"]
    (Path(made.path) / "f").write_bytes(b"x" * 10000)
    assert (volumes.inspect("data").used or 0) >= 10000
    volumes.remove("data")
    assert [info.name for info in volumes.list()] == ["other"]
    assert left(volumes.home) == []


def test_what_is_refused(volumes: Volumes) -> None:
    volumes.create("data")
    with pytest.raises(VolumeExists, match="already is a volume 'data'"):
        volumes.create("data")
    for name in ("nothing", "data2"):
        for act in (volumes.inspect, volumes.remove):
            with pytest.raises(VolumeNotFound, match=name):
                act(name)
    for name in ("a/b", "..", "", ".tmp-x", "a b"):
        with pytest.raises(InvalidName):
            volumes.create(name)
    with pytest.raises(VolumeNotFound, match="snapshot 's' of the volume 'data'"):
        volumes.clone("data", "new", snapshot="s")
    with pytest.raises(VolumeNotFound):
        volumes.remove_snapshot("data", "s")
    with pytest.raises(InvalidLimit):
        volumes.create("small", size="lots")
    assert left(volumes.home) == []


def test_a_record_that_is_damaged_is_told(volumes: Volumes) -> None:
    volumes.create("data")
    record = volumes.home.volumes / "data" / "volume.json"
    record.write_text("{")
    with pytest.raises(VolumeError, match="damaged"):
        volumes.inspect("data")
    record.write_text(json.dumps({"version": 99, "created_at": 0, "size": None, "source": ""}))
    with pytest.raises(VolumeError, match="another version"):
        volumes.inspect("data")
    assert volumes.list() == []


def test_snapshots_and_clones_hold_what_was_there(volumes: Volumes) -> None:
    volumes.create("data")
    (data(volumes, "data") / "f").write_text("one")
    volumes.snapshot("data", "before")
    (data(volumes, "data") / "f").write_text("two")
    made = volumes.clone("data", "old", snapshot="before")
    assert made.source == "data:before"
    volumes.clone("data", "now")
    assert (data(volumes, "old") / "f").read_text() == "one"
    assert (data(volumes, "now") / "f").read_text() == "two"
    (data(volumes, "now") / "f").write_text("three")
    assert (data(volumes, "data") / "f").read_text() == "two", "nothing is shared by name"
    with pytest.raises(VolumeExists, match="already has a snapshot"):
        volumes.snapshot("data", "before")
    with pytest.raises(VolumeExists):
        volumes.clone("data", "old")
    assert [each.name for each in volumes.inspect("data").snapshots] == ["before"]
    volumes.remove_snapshot("data", "before")
    assert volumes.inspect("data").snapshots == ()
    assert left(volumes.home) == []


# -- who has it ----------------------------------------------------------------------------------

RW, SHARED, RO = Use("rw"), Use("shared", shared=True), Use("ro", mode="ro")
STILL, ALONE = Use("still", mode="still"), Use("alone", mode="alone")


@pytest.mark.parametrize(
    ("one", "other", "excluded"),
    [
        (RW, RW, True), (RW, RO, True), (RW, SHARED, True), (RO, RO, False), (SHARED, SHARED, False),
        (SHARED, RO, False), (STILL, RO, False), (STILL, SHARED, True), (STILL, RW, True), (STILL, STILL, False),
        (ALONE, RO, True), (ALONE, ALONE, True),
    ],
)  # fmt: skip
def test_who_may_have_it_together(volumes: Volumes, one: Use, other: Use, excluded: bool) -> None:
    assert one.excludes(other) == other.excludes(one) == excluded
    volumes.create("data")
    first = take(volumes.home, "data", Use(f"{one.sandbox}-1", "me", one.mode, one.shared, pid=os.getpid()))
    second = Use(f"{other.sandbox}-2", mode=other.mode, shared=other.shared, pid=os.getpid())
    if excluded:
        with pytest.raises(VolumeInUse, match=r"'data' is in use by (the sandbox me|\w+-1)"):
            take(volumes.home, "data", second)
        first.release()
    lease = take(volumes.home, "data", second)
    lease.release()
    if not excluded:
        first.release()
    assert users(volumes.home, "data") == []
    assert os.listdir(volumes.home.volumes / "data" / "users") == []


def test_one_sandbox_has_it_in_two_ways(home: Home, volumes: Volumes) -> None:
    """The one that writes counts, whichever is opened first."""
    volumes.create("data")
    asked = check_volumes({"/a": Volume("data", read_only=True), "/b": Volume("data", shared=True)})
    opened = open_volumes(home, new_id(), None, asked)
    try:
        assert sorted(use.mode for use in users(home, "data")) == ["ro", "rw"]
        with pytest.raises(VolumeInUse):
            volumes.snapshot("data", "torn")
    finally:
        opened.close()
    assert users(home, "data") == []
    volumes.snapshot("data", "whole")


def test_a_snapshot_stays_while_it_is_copied(volumes: Volumes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what was not yet copied would be missing, and nobody told."""
    volumes.create("data")
    (data(volumes, "data") / "folder").mkdir()
    (data(volumes, "data") / "folder" / "file").write_text("kept")
    volumes.snapshot("data", "before")
    fill = Volumes._fill
    refused = []

    def filling(self: Volumes, *rest: Any) -> None:
        other = Volumes(volumes.home)
        for remove in (lambda: other.remove_snapshot("data", "before"), lambda: other.remove("data")):
            with pytest.raises(VolumeInUse, match="a copy to again") as caught:
                remove()
            refused.append(caught.value)
        with other_user(other, "data"):
            fill(self, *rest)

    monkeypatch.setattr(Volumes, "_fill", filling)
    volumes.clone("data", "again", snapshot="before")
    assert len(refused) == 2
    assert (data(volumes, "again") / "folder" / "file").read_text() == "kept"
    volumes.remove_snapshot("data", "before")
    volumes.remove("data")


@contextmanager
def other_user(volumes: Volumes, name: str) -> Iterator[None]:
    """A sandbox that writes it: what is copied is the snapshot, which it does not have."""
    lease = take(volumes.home, name, Use(new_id(), pid=os.getpid()))
    try:
        yield
    finally:
        lease.release()


def test_nothing_comes_back_of_what_is_just_removed(volumes: Volumes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for a volume at the very moment in which it goes must not leave a folder of its name."""
    volumes.create("data")
    rename, reads = os.rename, leases.read
    asked, gone = threading.Event(), threading.Event()
    told: list[BaseException] = []

    def asks() -> None:
        try:
            take(volumes.home, "data", Use(new_id(), mode="ro", pid=os.getpid())).release()
        except VolumeError as error:
            told.append(error)

    asking = threading.Thread(target=asks)

    def slow_read(home: Home, name: str) -> VolumeInfo:
        found = reads(home, name)
        if threading.current_thread() is asking:
            asked.set()
            gone.wait(1)
        return found

    def slow_rename(source: Any, target: Any, **how: Any) -> None:
        if source == "data":
            asking.start()
            asked.wait(1)
        rename(source, target, **how)
        gone.set()

    monkeypatch.setattr(leases, "read", slow_read)
    monkeypatch.setattr(os, "rename", slow_rename)
    volumes.remove("data")
    asking.join()
    assert [type(error) for error in told] in ([VolumeInUse], [VolumeNotFound])
    assert not os.path.lexists(volumes.home.volumes / "data")
    monkeypatch.undo()
    volumes.create("data")


def test_a_full_disk_is_freed(tmp_path: Path) -> None:
    """By removing what is on it, for which nothing can be written."""
    copies_here = os.geteuid() == 0  # for others a child copies, which cannot be had in the namespace of this disk

    def check() -> tuple[list[str], bool]:
        volumes = Volumes(tmp_path / "home")
        volumes.create("data")
        if copies_here:
            volumes.snapshot("data", "s")
        with suppress(OSError), open(data(volumes, "data") / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        with pytest.raises(SlopletError, match="No space left"):
            volumes.create("other")
        if copies_here:
            volumes.remove_snapshot("data", "s")
        with suppress(OSError), open(data(volumes, "data") / "filler", "ab", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        volumes.remove("data")
        volumes.create("other")
        return [info.name for info in volumes.list()], os.statvfs(tmp_path).f_bavail * 4096 > 500_000

    assert on_small_disk(tmp_path, "1m", check) == (["other"], True)


def test_all_of_a_wide_volume_is_counted(volumes: Volumes) -> None:
    volumes.create("data")
    for number in range(400):
        (data(volumes, "data") / str(number)).mkdir()
        (data(volumes, "data") / str(number) / "f").write_bytes(b"x" * 5000)
    assert (volumes.inspect("data").used or 0) >= 400 * 5000


def test_one_that_is_had_is_neither_removed_nor_copied(volumes: Volumes) -> None:
    volumes.create("data")
    lease = take(volumes.home, "data", Use("abc", "dev", "rw", pid=os.getpid()))
    assert [str(use) for use in volumes.inspect("data").users] == ["the sandbox dev (read-write)"]
    for act in (
        lambda: volumes.remove("data"),
        lambda: volumes.snapshot("data", "s"),
        lambda: volumes.clone("data", "x"),
    ):
        with pytest.raises(VolumeInUse, match="the sandbox dev"):
            act()
    lease.release()
    reader = take(volumes.home, "data", Use("abc", "dev", "ro", pid=os.getpid()))
    volumes.snapshot("data", "s")
    with pytest.raises(VolumeInUse):
        volumes.remove("data")
    reader.release()
    volumes.remove("data")


def test_one_sandbox_has_it_as_often_as_it_asks(volumes: Volumes) -> None:
    """A rollback starts the next before the last has ended."""
    volumes.create("data")
    first = take(volumes.home, "data", Use("abc", pid=os.getpid()))
    second = take(volumes.home, "data", Use("abc", pid=os.getpid()))
    assert first is second
    first.release()
    with pytest.raises(VolumeInUse):
        take(volumes.home, "data", Use("other", pid=os.getpid()))
    second.release()
    take(volumes.home, "data", Use("other", pid=os.getpid())).release()


HOLD = """
import os, sys, time
from sloplet.state.home import Home
from sloplet.volumes.leases import take
from sloplet.volumes.records import Use, VolumeInfo
lease = take(Home(sys.argv[1]), "data", Use("abc", "dev", pid=os.getpid()))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_holder_has_nothing(volumes: Volumes) -> None:
    volumes.create("data")
    command = [sys.executable, "-c", HOLD, str(volumes.home.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(VolumeInUse, match="the sandbox dev"):
            take(volumes.home, "data", Use("mine", pid=os.getpid()))
        holder.kill()
    take(volumes.home, "data", Use("mine", pid=os.getpid())).release()
    assert os.listdir(volumes.home.volumes / "data" / "users") == []


def test_what_has_a_copy_of_the_lock_has_the_volume(volumes: Volumes) -> None:
    """As a sandbox's supervisor does: it outlives a holder that is killed by some milliseconds."""
    volumes.create("data")
    lease = take(volumes.home, "data", Use("abc", pid=2**22 + 1))  # nobody: the holder is gone
    copy = os.dup(lease.fileno())
    os.close(lease._lock._fd)
    lease._lock._fd = -1
    timer = threading.Timer(0.2, os.close, [copy])
    timer.start()
    take(volumes.home, "data", Use("mine", pid=os.getpid())).release()
    assert timer.finished.is_set(), "it was waited for"
    timer.join()


def test_many_at_once(volumes: Volumes) -> None:
    volumes.create("data")
    won: list[int] = []
    lost: list[int] = []
    gate = threading.Barrier(8)

    def one(number: int) -> None:
        gate.wait()
        try:
            take(volumes.home, "data", Use(f"box{number}", pid=os.getpid()))
            won.append(number)
        except VolumeInUse:
            lost.append(number)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    take(volumes.home, "data", Use(f"box{won[0]}", pid=os.getpid())).release()


# -- what a crash leaves ---------------------------------------------------------------------------


def test_half_made_ones_go_and_those_being_made_stay(home: Home) -> None:
    store = Store(home)
    dead, busy = new_id(), new_id()
    for each in (dead, busy):
        (home.volumes / f".tmp-{each}" / "data").mkdir(parents=True)
    (home.run / f"volume-{dead}.lock").touch()
    (home.run / "volume-name-data.lock").touch()
    lock = FileLock.take(staging_lock(home, busy))
    assert lock is not None
    assert reap(home, store, lambda *_: None).files == 2
    assert os.listdir(home.volumes) == [f".tmp-{busy}"]
    lock.release()
    reap(home, store, lambda *_: None)
    assert left(home) == []


def test_copies_stay_as_long_as_somebody_speaks_of_them(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "f").write_text("x")
    store = Store(home)
    asked = copies.with_bases(check_volumes({"/w": Volume(folder, mode="copy")}))
    spec = SandboxSpec(volumes=asked)
    sandbox_id = new_id()
    store.reserve(sandbox_id, spec, engine="fake", rung="process", holder="keeper", owner=new_id())
    store.mark_running(sandbox_id)
    store.mark_dead(sandbox_id, "for a test", disown=True)
    kept = copies.keep(home, asked[0])
    copies.note_applied(home, asked[0].base, sandbox_id, {"f": "none"})
    (folder / "f").write_text("y")
    assert copies.keep(home, asked[0]) == kept
    assert (kept / "f").read_text() == "x", "as it was"
    reap(home, store, lambda *_: None)
    assert kept.is_dir()
    assert copies.applied(home, asked[0].base, sandbox_id) == {"f": "none"}
    store.remove(sandbox_id)
    reap(home, store, lambda *_: None)
    assert os.listdir(kept.parent) == []


# -- hostile content ---------------------------------------------------------------------------------


def copied(source: Path, target: Path, **how: bool) -> Copy:
    target.mkdir()
    made = Copy(**{"owners": os.geteuid() == 0, **how})
    old, new = os.open(source, FOLDER), os.open(target, FOLDER)
    try:
        made.run(old, new)
    finally:
        os.close(old)
        os.close(new)
    return made


def test_what_cannot_be_read_is_named(volumes: Volumes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "secret").touch()
    real = trees.open_in

    def refusing(parent: int, name: str, flags: int, **how: Any) -> int:
        if name == "secret":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(parent, name, flags, **how)

    monkeypatch.setattr(trees, "open_in", refusing)
    volume = VolumeSpec("/d", str(folder), "copy", base=new_id())
    with pytest.raises(VolumeError, match="Permission denied: 'sub/secret'"):
        copies.keep(volumes.home, volume)
    assert left(volumes.home) == []


def test_a_copy_is_the_same(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "deep").mkdir(parents=True)
    (source / "sub").chmod(0o2750)
    (source / "file").write_bytes(os.urandom(300000))
    (source / "file").chmod(0o640)
    os.utime(source / "file", (1, 1_000_000_000))
    with open(source / "holes", "wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 29)
        file.write(b"middle")
    os.link(source / "file", source / "sub" / "deep" / "again")
    (source / "empty").touch()
    target = tmp_path / "target"
    copied(source, target)
    assert (target / "file").read_bytes() == (source / "file").read_bytes()
    assert stat.S_IMODE((target / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((target / "sub").stat().st_mode) == 0o2750
    assert (target / "file").stat().st_mtime == 1_000_000_000
    assert os.path.samefile(target / "file", target / "sub" / "deep" / "again")
    assert not os.path.samefile(target / "file", source / "file")
    holes = (target / "holes").stat()
    assert holes.st_size == 1 << 30
    assert holes.st_blocks * 512 < 1 << 20
    with open(target / "holes", "rb") as file:
        file.seek(1 << 29)
        assert file.read(6) == b"middle"


def test_a_copy_follows_nothing(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    source = tmp_path / "source"
    source.mkdir()
    (source / "to-file").symlink_to(outside / "secret")
    (source / "to-folder").symlink_to(outside)
    (source / "up").symlink_to("../../../../../../etc")
    os.mkfifo(source / "fifo")
    (source / "setuid").write_text("x")
    (source / "setuid").chmod(0o6755)
    if os.geteuid() == 0:
        os.mknod(source / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    target = tmp_path / "target"
    made = copied(source, target)
    assert os.readlink(target / "to-file") == str(outside / "secret")
    assert os.readlink(target / "to-folder") == str(outside)
    assert stat.S_ISFIFO(os.lstat(target / "fifo").st_mode)
    assert os.lstat(target / "setuid").st_mode & 0o6000 == 0
    assert not os.path.lexists(target / "device")
    assert made.skipped == (os.geteuid() == 0)


def test_a_copy_goes_as_deep_as_it_must(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    here = os.open(source, FOLDER)
    for _ in range(2500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", FOLDER, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=here))
    os.close(here)
    target = tmp_path / "target"
    assert copied(source, target).files == 1
    for tree in (source, target):
        subprocess.run(["rm", "-rf", str(tree)], check=True)


def test_a_copy_that_fails_leaves_nothing(volumes: Volumes, monkeypatch: pytest.MonkeyPatch) -> None:
    volumes.create("data")
    (data(volumes, "data") / "f").write_text("x")

    def full(self: Copy, source: int, target: int) -> None:
        os.mkdir("half", dir_fd=target)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Copy, "run", full)
    monkeypatch.setattr("sloplet.images.userns.jail.mode", lambda _: "single")
    with pytest.raises(VolumeError, match="No space left on device") as caught:
        volumes.clone("data", "new")
    assert "nothing was left half there" in str(caught.value)
    assert [info.name for info in volumes.list()] == ["data"]
    assert left(volumes.home) == []
    assert volumes.inspect("data").users == ()


# -- folders of this machine -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where", ["/", "{home}", "{home}/volumes", "{above}", "{link}", "/proc", "/proc/self", "/sys", "/dev"]
)
def test_what_no_sandbox_may_see(home: Home, tmp_path: Path, where: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(home.path)
    folder = where.format(home=home.path, above=home.path.parent, link=link)
    with pytest.raises(VolumeError):
        open_volumes(home, "id", None, [VolumeSpec("/x", folder, "ro")])


def test_folders_that_are_none(home: Home, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(VolumeError, match="is not a folder"):
        open_volumes(home, "id", None, [VolumeSpec("/x", str(tmp_path / "file"), "ro")])
    with pytest.raises(VolumeNotFound, match="does not exist"):
        open_volumes(home, "id", None, [VolumeSpec("/x", str(tmp_path / "missing"), "ro")])


def test_named_ones_are_made_when_they_are_first_written(home: Home) -> None:
    with pytest.raises(VolumeNotFound, match="no volume 'new'"):
        open_volumes(home, "id", None, [VolumeSpec("/x", "new", "ro")])
    opened = open_volumes(home, "id", "dev", [VolumeSpec("/x", "new", "rw")])
    (mount,) = opened.mounts
    assert (mount.path, mount.read_only, mount.private) == ("/x", False, True)
    assert len(opened.held) == 1
    with pytest.raises(VolumeInUse):
        open_volumes(home, "other", None, [VolumeSpec("/y", "fresh", "rw"), VolumeSpec("/x", "new", "rw")])
    assert users(home, "fresh") == [], "what was had before the refusal is given back"
    opened.close()
    opened.close()
    assert users(home, "new") == []


# -- limited sizes -------------------------------------------------------------------------------------


@pytest.mark.skipif(SIZES, reason="sizes can be limited here")
def test_a_limit_that_cannot_be_enforced_is_refused(volumes: Volumes) -> None:
    with pytest.raises(ControlUnavailable, match="size"):
        volumes.create("data", size="64m")
    assert volumes.list() == []


def names(mount: int) -> list[str]:
    folder = os.open(".", FOLDER, dir_fd=mount)
    try:
        return os.listdir(folder)
    finally:
        os.close(folder)


@pytest.mark.skipif(not SIZES, reason="needs root, loop devices and mkfs.ext4")
def test_a_limited_one_is_one_filesystem_however_often_it_is_mounted(volumes: Volumes) -> None:
    volumes.create("data", size="16m")
    first, second = sized.mount(volumes.home, "data"), sized.mount(volumes.home, "data")
    try:
        assert os.fstat(first).st_dev == os.fstat(second).st_dev
        assert names(first) == [], "no lost+found"
        fd = os.open("f", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=first)
        os.write(fd, b"seen at once")
        os.close(fd)
        assert names(second) == ["f"]
    finally:
        os.close(first)
        os.close(second)
    volumes.snapshot("data", "s")
    copy = volumes.clone("data", "again", snapshot="s")
    assert copy.size == 16 * 2**20
    mounted = sized.mount(volumes.home, "again")
    assert names(mounted) == ["f"]
    os.close(mounted)
    volumes.remove("data")
    volumes.remove("again")
    with pytest.raises(InvalidLimit):
        volumes.create("tiny", size="1k")
