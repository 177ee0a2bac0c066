"""The files of volumes, worked on from outside: nothing leads out of a volume, whatever is in it; owners are those that
a sandbox sees; a file is there whole or not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layer_kit import MODE
from sloplet import Volumes
from sloplet.engines.machine import machine
from sloplet.engines.mounting import mount_map
from sloplet.errors import VolumeInUse, VolumeNotFound
from sloplet.state.home import Home
from sloplet.volumes import operations
from sloplet.volumes.content import Contents, open_to_all
from sloplet.volumes.leases import take
from sloplet.volumes.operations import MOST_ENTRIES, Owners, normal
from sloplet.volumes.records import Use

SIZES = machine().root and machine().loop and machine().mkfs is not None
many_owners = pytest.mark.skipif(MODE == "single", reason="here all files are one user's")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home").open()
    Volumes(home).create("data")
    return home


@pytest.fixture
def contents() -> Iterator[Contents]:
    made = Contents()
    yield made
    made.close()


class Vol:
    """A volume, with less to write."""

    def __init__(self, contents: Contents, home: Home, name: str = "data") -> None:
        self.contents, self.home, self.name = contents, home, name
        self.folder = home.volumes / name / "data"

    def write(self, path: str, data: bytes = b"text", *, force: bool = False, **values: int) -> dict[str, Any]:
        draft = self.contents.write(self.home, self.name, path, force=force, **values)
        try:
            draft.write(data)
            return draft.finish()
        finally:
            draft.discard()

    def read(self, path: str) -> bytes:
        found, fd = self.contents.read(self.home, self.name, path)
        with os.fdopen(fd, "rb") as file:
            data = file.read()
        assert found["size"] == len(data)
        return data

    def look(self, path: str) -> dict[str, Any]:
        return self.contents.look(self.home, self.name, path)

    def names(self, path: str = "/", depth: int = 1) -> list[str]:
        return [each["path"] for each in self.contents.listing(self.home, self.name, path, depth)]

    def mkdir(self, path: str, *, force: bool = False, **values: int) -> dict[str, Any]:
        return self.contents.make_folder(self.home, self.name, path, force=force, **values)

    def change(self, path: str, **values: int) -> dict[str, Any]:
        return self.contents.change(self.home, self.name, path, **values)

    def remove(self, path: str) -> None:
        self.contents.remove(self.home, self.name, path)


@pytest.fixture
def vol(contents: Contents, home: Home) -> Vol:
    return Vol(contents, home)


# -- paths and owners --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "found"),
    [("/", ""), ("", ""), ("/a", "a"), ("a", "a"), ("//a//b/", "a/b"), ("/a/./b", "a/b"), ("/a/../b", "b"),
     ("../../etc/passwd", "etc/passwd"), ("/..", ""), ("/a/..", "")],
)  # fmt: skip
def test_paths_end_at_the_volume(path: str, found: str) -> None:
    assert normal(path) == found


@pytest.mark.parametrize(
    ("path", "why"),
    [("/a\0b", "NUL"), ("/" + "a/" * 3000, "too long")],
)
def test_what_is_no_path(path: str, why: str) -> None:
    with pytest.raises(OSError, match=why):
        normal(path)


@pytest.mark.parametrize("owner", [0, 1000, 33, 70000])
def test_owners_are_what_the_mount_makes_of_them(owner: int) -> None:
    """As the map of the mount itself has it, for every id there is."""
    lines = [tuple(map(int, line.split())) for line in mount_map(owner, 1000, 0, private=True).splitlines()]
    owners = Owners((owner, owner), (1000, 1000))
    for disk in (0, 1, 33, 34, 999, 1000, 1001, 65535, 70000):
        there = [inside + disk - first for first, inside, count in lines if first <= disk < first + count]
        assert owners.inside(disk, disk)[0] == (there[0] if there else 65534)


@pytest.mark.parametrize(("uid", "gid"), [(0, None), (None, 0), (0, 0), (1001, None), (1000, 0)])
def test_where_all_is_one_users_nobody_else_is_given_anything(uid: int | None, gid: int | None) -> None:
    owners = Owners((70000, 70000), (1000, 1000), one=True)
    with pytest.raises(PermissionError):
        owners.give("/nothing/there", uid, gid)
    for same in ((None, None), (1000, None), (None, 1000), (1000, 1000)):
        owners.give("/nothing/there", *same)


# -- who waits for whom ------------------------------------------------------------------------------------------------


def test_one_users_slow_work_stops_nobody_else(contents: Contents) -> None:
    """Nor his own quick work. Given up or not: what a thread still does counts."""

    async def scenario() -> None:
        loop, go_on = asyncio.get_running_loop(), threading.Event()
        begun: asyncio.Queue[None] = asyncio.Queue()

        def work() -> str:
            loop.call_soon_threadsafe(begun.put_nowait, None)
            assert go_on.wait(30)
            return "done"

        try:
            slow = [asyncio.ensure_future(contents.off_loop(work, "a", slow=True)) for _ in range(40)]
            quick = [asyncio.ensure_future(contents.off_loop(work, "a")) for _ in range(40)]
            async with asyncio.timeout(10):
                for _ in range(6):
                    await begun.get()
                for each in (*slow[:10], *quick[:10]):
                    each.cancel()
                await asyncio.gather(*slow[:10], *quick[:10], return_exceptions=True)
                for slowly in (True, False):
                    assert await contents.off_loop(lambda: "other", "b", slow=slowly) == "other"
            assert begun.empty(), "no more than a few at a time"
        finally:
            go_on.set()
        assert await asyncio.gather(*slow[10:], *quick[10:]) == ["done"] * 60
        assert await contents.off_loop(lambda: "again", "a", slow=True) == "again"

    asyncio.run(scenario())


# -- what it is for ----------------------------------------------------------------------------------------------------


def test_files_and_folders(vol: Vol) -> None:
    made = vol.write("/a.txt", b"hello", mode=0o640)
    assert (made["name"], made["path"], made["type"], made["size"]) == ("a.txt", "/a.txt", "file", 5)
    assert (made["mode"], made["uid"], made["gid"]) == (0o640, 1000, 1000)
    assert vol.read("a.txt") == b"hello"
    with pytest.raises(FileExistsError):
        vol.write("/a.txt", b"other")
    assert vol.read("/a.txt") == b"hello"
    replaced = vol.write("/a.txt", b"", force=True)
    assert (replaced["size"], replaced["mode"]) == (0, 0o640)  # its mode stays
    with pytest.raises(FileNotFoundError):
        vol.write("/x/y/z")
    vol.write("/x/y/z", force=True)
    assert vol.look("/x/y")["mode"] == 0o777
    assert vol.names(depth=9) == ["/a.txt", "/x", "/x/y", "/x/y/z"]
    assert vol.names() == ["/a.txt", "/x"]
    assert vol.mkdir("/d", mode=0o700)["mode"] == 0o700
    with pytest.raises(FileExistsError):
        vol.mkdir("/d")
    assert vol.mkdir("/d", force=True, mode=0o777)["mode"] == 0o700  # one that is there is let be
    with pytest.raises(FileExistsError):
        vol.mkdir("/a.txt", force=True)
    with pytest.raises(FileNotFoundError):
        vol.mkdir("/n/o")
    assert vol.mkdir("/n/o", force=True)["path"] == "/n/o"
    with pytest.raises(IsADirectoryError):
        vol.write("/d", force=True)
    with pytest.raises(IsADirectoryError):
        vol.read("/d")
    with pytest.raises(NotADirectoryError):
        vol.names("/a.txt")
    vol.remove("/x")
    assert vol.names() == ["/a.txt", "/d", "/n"]
    for call in (vol.remove, vol.look, vol.read, vol.names, lambda path: vol.change(path, mode=1)):
        with pytest.raises(FileNotFoundError):
            call("/x")


def test_a_volume_itself(vol: Vol) -> None:
    open_to_all(vol.home, "data")
    assert vol.look("/")["mode"] == 0o777
    assert (vol.look("")["path"], vol.look("/")["type"], vol.look("/")["uid"]) == ("/", "directory", 1000)
    with pytest.raises(OSError, match="own folder"):
        vol.remove("/")
    with pytest.raises(IsADirectoryError):
        vol.write("/", force=True)
    with pytest.raises(FileExistsError):
        vol.mkdir("/")
    assert vol.mkdir("/", force=True)["path"] == "/"
    assert vol.change("/", mode=0o755)["mode"] == 0o755
    with pytest.raises(PermissionError):
        vol.change("/", uid=0)
    assert vol.change("/", uid=1000, gid=1000)["uid"] == 1000
    with pytest.raises(VolumeNotFound):
        vol.contents.look(vol.home, "another", "/")


@many_owners
def test_owners_are_those_that_sandboxes_see(vol: Vol) -> None:
    me = os.geteuid(), os.getegid()
    for name, uid, gid in (("users", 1000, 1000), ("roots", 0, 0), ("others", 33, 1001)):
        made = vol.write(f"/{name}", uid=uid, gid=gid)
        assert (made["uid"], made["gid"]) == (uid, gid)
        assert (vol.look(name)["uid"], vol.look(name)["gid"]) == (uid, gid)
    info = os.lstat(vol.folder / "users")
    assert (info.st_uid, info.st_gid) == me  # whom the sandbox's user is outside
    assert os.lstat(vol.folder / "roots").st_uid not in (0, me[0])
    assert vol.write("/others", b"again", force=True)["uid"] == 33  # as it was
    changed = vol.change("/others", gid=0)
    assert (changed["uid"], changed["gid"], changed["mode"]) == (33, 0, 0o666)
    vol.change("/roots", mode=0)
    assert vol.read("/roots") == b"text"
    made = vol.mkdir("/p/q", force=True, uid=5, gid=6)
    assert (made["uid"], made["gid"], vol.look("/p")["uid"]) == (5, 6, 5)
    vol.change("/p", mode=0)
    vol.write("/p/q/file", b"deep", uid=7)
    assert vol.read("/p/q/file") == b"deep"
    vol.remove("/p")
    assert "/p" not in vol.names()


def test_no_setuid_from_outside(vol: Vol) -> None:
    assert vol.write("/a", mode=0o6755)["mode"] == 0o755
    assert vol.change("/a", mode=0o4711)["mode"] == 0o711
    assert vol.mkdir("/d", mode=0o3777)["mode"] == 0o1777


@pytest.mark.skipif(not SIZES, reason="volumes of a size need root, loop devices and mkfs.ext4")
def test_a_volume_of_a_size(contents: Contents, home: Home) -> None:
    Volumes(home).create("small", size="16m")
    vol = Vol(contents, home, "small")
    vol.write("/a", b"kept")
    assert vol.read("/a") == b"kept"
    with pytest.raises(OSError, match="No space left"):
        vol.write("/b", bytes(32 << 20))
    assert vol.names() == ["/a"]


# -- hostile content ---------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text("secret")
    return folder


def test_links_lead_nowhere_outside(vol: Vol, outside: Path) -> None:
    vol.write("/inner/file", b"inside", force=True)
    up = "../" * 20
    for name, target in {
        "good": "inner/file", "good-folder": "inner", "rooted": "/inner/file", "abs": str(outside / "secret"),
        "folder": str(outside), "up": f"{up}{outside}/secret", "root": "/", "loop": "loop", "magic": "/proc/self/root",
        "fd": "/proc/self/fd/0", "nowhere": "missing/too",
    }.items():  # fmt: skip
        (vol.folder / name).symlink_to(target)
    assert vol.read("/good") == vol.read("/good-folder/file") == vol.read("/rooted") == b"inside"
    assert vol.read("/root/root/inner/file") == b"inside"
    for path in ("/abs", "/up", "/folder/secret", f"/root{outside}/secret", "/magic/etc/passwd", "/fd", "/nowhere"):
        with pytest.raises(FileNotFoundError):
            vol.read(path)
    with pytest.raises(OSError, match="symbolic links"):
        vol.read("/loop")
    assert (vol.look("/abs")["type"], vol.look("/abs")["target"]) == ("symlink", str(outside / "secret"))
    assert {each["name"] for each in vol.contents.listing(vol.home, "data", "/root", 3)} >= {"abs", "inner", "file"}
    assert vol.names("/good-folder") == ["/good-folder/file"]
    with pytest.raises(FileNotFoundError):
        vol.change("/abs", mode=0o777)
    with pytest.raises(FileNotFoundError):
        vol.write("/folder/new", b"x")
    # with force what is missing is made in the volume, or refused where a link without an end stands
    with pytest.raises(FileNotFoundError):
        vol.write("/folder/new", b"x", force=True)
    with pytest.raises(FileExistsError):
        vol.mkdir("/abs", force=True)
    vol.write("/abs", b"mine", force=True)  # in the place of the link
    assert (vol.look("/abs")["type"], vol.read("/abs")) == ("file", b"mine")
    for name in ("folder", "up", "root", "magic"):
        vol.remove(f"/{name}")  # the link
    assert sorted(each.name for each in outside.iterdir()) == ["secret"]
    assert (outside / "secret").read_text() == "secret"
    assert vol.read("/inner/file") == b"inside"


def test_what_is_no_file_is_not_opened(vol: Vol) -> None:
    os.mkfifo(vol.folder / "pipe")
    assert vol.look("/pipe")["type"] == "unknown"
    with pytest.raises(OSError, match="not a file"):
        vol.read("/pipe")  # would wait for ever
    vol.write("/pipe", b"a file now", force=True)
    assert vol.read("/pipe") == b"a file now"


def test_names_of_any_bytes(vol: Vol) -> None:
    name = os.fsdecode(b"caf\xe9 \xff")
    vol.write("/" + name, b"x")
    assert vol.names() == ["/" + name]
    assert os.listdir(os.fsencode(vol.folder)) == [b"caf\xe9 \xff"]
    with pytest.raises(OSError, match="too long"):
        vol.write("/" + "n" * 256)


def test_folders_that_change_while_they_are_used(vol: Vol, outside: Path) -> None:
    """A folder and a link out of the volume take each other's place all the time."""
    vol.mkdir("/real")
    (vol.folder / "link").symlink_to(outside)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for one, two in (("link", "place"), ("place", "link"), ("real", "place"), ("place", "real")):
                try:
                    os.rename(vol.folder / one, vol.folder / two)
                except OSError:
                    continue

    thread = threading.Thread(target=swap)
    thread.start()
    written = 0
    try:
        for number in range(100):
            for work in (
                lambda number=number: vol.write(f"/place/file{number}", b"x", force=number % 2 == 0),
                lambda: vol.read("/place/secret"),
                lambda number=number: vol.remove(f"/place/{'secret' if number % 2 else 'file'}"),
                lambda: vol.change("/place/secret", mode=0o777),
            ):
                try:
                    work()
                    written += 1
                except OSError:
                    continue
    finally:
        stop.set()
        thread.join()
    assert written, "nothing was ever met"
    assert [each.name for each in outside.iterdir()] == ["secret"]
    assert (outside / "secret").stat().st_mode & 0o777 != 0o777


def test_a_listing_has_an_end(vol: Vol, monkeypatch: pytest.MonkeyPatch) -> None:
    if MODE == "range":
        pytest.skip("it is a child that lists")
    assert MOST_ENTRIES >= 1000
    monkeypatch.setattr(operations, "MOST_ENTRIES", 5)
    for number in range(5):
        vol.write(f"/{number}")
    assert len(vol.names()) == 5
    vol.write("/one-more")
    with pytest.raises(OSError, match="more than 5"):
        vol.names()


# -- whole or not at all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unnamed", [True, False], ids=["unnamed", "named"])
def test_what_breaks_off_leaves_nothing(vol: Vol, unnamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not unnamed:
        if MODE == "range":
            pytest.skip("it is a child that opens")
        real = os.open

        def refusing(path: Any, flags: int, *given: Any, **more: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "not here")
            return real(path, flags, *given, **more)

        monkeypatch.setattr(os, "open", refusing)
    vol.write("/kept", b"before")
    draft = vol.contents.write(vol.home, "data", "/kept", force=True)
    draft.write(b"half of")
    assert vol.read("/kept") == b"before"
    draft.discard()
    draft.discard()
    assert (vol.names(), vol.read("/kept")) == (["/kept"], b"before")
    # two at once, neither by force: one of them is the first
    one, two = (vol.contents.write(vol.home, "data", "/new", force=False) for _ in range(2))
    one.write(b"one")
    two.write(b"two")
    one.finish()
    with pytest.raises(FileExistsError):
        two.finish()
    two.discard()
    assert (vol.names(), vol.read("/new")) == (["/kept", "/new"], b"one")
    vol.write("/new", b"three", force=True)
    assert (vol.names(), vol.read("/new")) == (["/kept", "/new"], b"three")


def test_who_has_it_for_himself_is_not_disturbed(vol: Vol) -> None:
    volumes = Volumes(vol.home)
    draft = vol.contents.write(vol.home, "data", "/file", force=False)
    with pytest.raises(VolumeInUse, match="in use by somebody who writes from outside"):
        volumes.snapshot("data", "half")
    with pytest.raises(VolumeInUse):
        volumes.remove("data")
    draft.discard()
    volumes.snapshot("data", "whole")
    lease = take(vol.home, "data", Use("somebody", pid=os.getpid()))
    try:
        for work in (lambda: vol.write("/a"), lambda: vol.mkdir("/d"), lambda: vol.change("/", mode=0o700)):
            with pytest.raises(VolumeInUse):
                work()
        assert vol.names() == []  # looking disturbs nobody
    finally:
        lease.release()
    vol.write("/a")
