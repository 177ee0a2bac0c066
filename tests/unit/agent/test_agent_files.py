"""File operations of the agent."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from agent_helpers import can, connect

from agentclient import AGENT, AgentClient
from sloplet.wire.schema import (
    INITIAL_CREDIT,
    FileType,
    HelloFlag,
    ListFlag,
    MkdirFlag,
    MoveFlag,
    Op,
    RemoveFlag,
    StatFlag,
    Tag,
    WriteFlag,
)

pytestmark = pytest.mark.skipif(not AGENT.exists(), reason="the agent is not built here")


def test_write_and_read(box: AgentClient, tmp_path: Path) -> None:
    data = os.urandom(2_500_000)
    stream = box.write("some file", data)
    assert stream.closed[Tag.BYTES] == len(data)
    assert (tmp_path / "some file").read_bytes() == data
    assert stat.S_IMODE((tmp_path / "some file").stat().st_mode) == 0o644
    assert set(os.listdir(tmp_path)) == {"home", "some file"}
    read = box.call(Op.READ, (Tag.PATH, str(tmp_path / "some file")))
    assert bytes(read.out) == data
    assert read.reply is not None
    assert (read.reply[Tag.TYPE], read.reply[Tag.SIZE]) == (FileType.FILE, len(data))
    assert read.closed[Tag.BYTES] == len(data)
    part = box.call(Op.READ, (Tag.PATH, "some file"), (Tag.OFFSET, 1000), (Tag.LENGTH, 77))
    assert bytes(part.out) == data[1000:1077]
    assert box.call(Op.READ, (Tag.PATH, "some file"), (Tag.OFFSET, 10**9)).closed[Tag.BYTES] == 0
    assert box.call(Op.READ, (Tag.PATH, "some file"), (Tag.LENGTH, 0)).closed[Tag.BYTES] == 0
    assert box.call(Op.READ, (Tag.PATH, "some file"), (Tag.OFFSET, -1)).error == errno.EINVAL


def test_write_keeps_the_mode_unless_given(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "f").chmod(0o751)
    box.write("f", b"new")
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o751
    box.write("f", b"newer", (Tag.MODE, 0o600))
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    assert (tmp_path / "f").read_bytes() == b"newer"
    assert box.write("f", b"", (Tag.MODE, 0o10000)).error == errno.EINVAL


def test_reset_or_death_in_a_write_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    client = connect([], tmp_path)
    stream = client.open(Op.WRITE, (Tag.PATH, "f"))
    client.data(stream, b"x" * 100_000)
    client.ping()
    assert (tmp_path / "f").read_bytes() == b"old"
    assert len([name for name in os.listdir(tmp_path) if name.startswith(".sloplet-")]) == 1
    client.reset(stream)
    assert client.wait(stream).error == errno.ECANCELED
    assert sorted(os.listdir(tmp_path)) == ["f", "home"]
    client.close()
    assert (tmp_path / "f").read_bytes() == b"old"


def test_lost_wire_in_a_write_leaves_no_litter(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    client = connect([], tmp_path)
    stream = client.open(Op.WRITE, (Tag.PATH, "f"))
    client.data(stream, b"x" * 100_000)
    client.ping()
    client.close()
    assert sorted(os.listdir(tmp_path)) == ["f", "home"]
    assert (tmp_path / "f").read_bytes() == b"old"


def test_write_flags(box: AgentClient, tmp_path: Path) -> None:
    assert box.write("a/b/c", b"1").error == errno.ENOENT
    assert box.write("a/b/c", b"1", (Tag.FLAGS, WriteFlag.PARENTS)).error is None
    assert box.write("a/b/c", b"2", (Tag.FLAGS, WriteFlag.EXCLUSIVE)).error == errno.EEXIST
    assert box.write("a/b/c", b"2", (Tag.FLAGS, WriteFlag.APPEND)).error is None
    assert (tmp_path / "a/b/c").read_bytes() == b"12"
    assert box.write("new", b"3", (Tag.FLAGS, WriteFlag.APPEND | WriteFlag.EXCLUSIVE)).error is None
    assert box.write("new", b"3", (Tag.FLAGS, WriteFlag.APPEND | WriteFlag.EXCLUSIVE)).error == errno.EEXIST
    assert box.write("a", b"").error == errno.EISDIR
    assert box.write("fresh/", b"").error == errno.EISDIR
    assert box.write("x", b"", (Tag.FLAGS, 64)).error == errno.EINVAL
    # two exclusive writers at once: one wins
    one, two = (box.open(Op.WRITE, (Tag.PATH, "race"), (Tag.FLAGS, WriteFlag.EXCLUSIVE)) for _ in range(2))
    for stream, data in ((one, b"one"), (two, b"two")):
        box.data(stream, data)
        box.end(stream)
    assert box.wait(one).error is None
    assert box.wait(two).error == errno.EEXIST
    assert (tmp_path / "race").read_bytes() == b"one"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".sloplet-")]


def test_write_follows_links_and_replaces_their_target(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/target").write_bytes(b"old")
    (tmp_path / "hop").symlink_to("d/target")
    (tmp_path / "link").symlink_to(tmp_path / "hop")
    assert box.write("link", b"new").error is None
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "d/target").read_bytes() == b"new"
    (tmp_path / "dangling").symlink_to("d/made")
    assert box.write("dangling", b"x").error is None
    assert (tmp_path / "d/made").read_bytes() == b"x"
    (tmp_path / "loop").symlink_to("loop")
    assert box.write("loop", b"x").error == errno.ELOOP
    assert box.call(Op.READ, (Tag.PATH, "loop")).error == errno.ELOOP


def test_magic_links_are_not_followed(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "wire").symlink_to("/proc/self/fd/1")
    for path in ("/proc/self/fd/1", "/proc/self/fd/0", "wire", "/proc/self/root/etc/passwd", "/proc/self/exe"):
        assert box.call(Op.READ, (Tag.PATH, path)).error == errno.ELOOP, path
        assert box.write(path, b"x").error in (errno.ELOOP, errno.EACCES), path
    assert box.call(Op.CHMOD, (Tag.PATH, "wire"), (Tag.MODE, 0)).error == errno.ELOOP
    assert box.call(Op.READ, (Tag.PATH, "/proc/self/status")).out.startswith(b"Name:")


def test_fifos_and_devices_do_not_hang(box: AgentClient, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert box.call(Op.READ, (Tag.PATH, "pipe")).error == errno.EINVAL
    assert box.write("pipe", b"x").error == errno.ENXIO
    assert box.call(Op.READ, (Tag.PATH, "/dev/zero")).error == errno.EINVAL
    assert box.write("/dev/null", b"x").closed[Tag.BYTES] == 1
    reader = box.spawn("wc -c < pipe")
    stream = box.open(Op.WRITE, (Tag.PATH, "pipe"))
    box.ping()
    while stream.close is not None and stream.error == errno.ENXIO:  # the reader has not opened its end yet
        stream = box.open(Op.WRITE, (Tag.PATH, "pipe"))
        box.ping()
    box.data(stream, b"x" * 1_000_000)
    box.end(stream)
    assert box.wait(stream).closed[Tag.BYTES] == 1_000_000
    assert box.wait(reader).out.strip() == b"1000000"


def test_full_disk(tmp_path: Path) -> None:
    if not can(["unshare", "-Urm", "sh", "-c", "mount -t tmpfs t /mnt"]):
        pytest.skip("no user namespaces here")
    client = AgentClient(
        [
            "unshare",
            "-Urmpf",
            "--mount-proc",
            "sh",
            "-c",
            'mount -t tmpfs -o size=1m t /mnt && exec "$0" agent',
            str(AGENT),
        ],
        [(Tag.USER, "root"), (Tag.WORKDIR, "/mnt"), (Tag.HOME, "/mnt"), (Tag.FLAGS, HelloFlag.NO_USERS)],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    try:
        client.write("f", b"old")
        assert client.write("f", bytes(3_000_000)).error == errno.ENOSPC
        assert client.call(Op.READ, (Tag.PATH, "f")).out == b"old"
        assert [r[Tag.NAME] for r in client.call(Op.LIST, (Tag.PATH, ".")).records()] == [b"f"]
    finally:
        client.close()


def test_stat(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "f").chmod(0o4751)
    os.utime(tmp_path / "f", ns=(1, 1_234_567_890_123_456_789))
    (tmp_path / "link").symlink_to("f")
    os.mkfifo(tmp_path / "pipe")
    close = box.call(Op.STAT, (Tag.PATH, "link")).closed
    assert (close[Tag.TYPE], close[Tag.SIZE], close[Tag.MODE]) == (FileType.FILE, 5, 0o4751)
    assert close[Tag.MTIME_NS] == 1_234_567_890_123_456_789
    close = box.call(Op.STAT, (Tag.PATH, "link"), (Tag.FLAGS, StatFlag.NOFOLLOW)).closed
    assert (close[Tag.TYPE], close[Tag.LINK]) == (FileType.SYMLINK, b"f")
    assert box.call(Op.STAT, (Tag.PATH, "pipe")).closed[Tag.TYPE] == FileType.OTHER
    assert box.call(Op.STAT, (Tag.PATH, "/")).closed[Tag.TYPE] == FileType.DIR
    assert box.call(Op.STAT, (Tag.PATH, "f/")).error == errno.ENOTDIR
    assert box.call(Op.STAT, (Tag.PATH, "none")).error == errno.ENOENT
    assert box.call(Op.STAT, (Tag.PATH, "")).error == errno.EINVAL
    assert box.call(Op.STAT, (Tag.PATH, "/x" * 3000)).error == errno.ENAMETOOLONG
    assert box.call(Op.STAT, (Tag.PATH, b"a\0b")).error == errno.EINVAL
    assert box.call(Op.STAT, (Tag.FLAGS, 0)).error == errno.EINVAL


def test_mkdir_move_chmod_symlink(box: AgentClient, tmp_path: Path) -> None:
    assert box.call(Op.MKDIR, (Tag.PATH, "a/b")).error == errno.ENOENT
    assert box.call(Op.MKDIR, (Tag.PATH, "a/b/c/"), (Tag.FLAGS, MkdirFlag.PARENTS), (Tag.MODE, 0o700)).error is None
    assert stat.S_IMODE((tmp_path / "a/b/c").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o755
    assert box.call(Op.MKDIR, (Tag.PATH, "a")).error == errno.EEXIST
    assert box.call(Op.MKDIR, (Tag.PATH, "a"), (Tag.FLAGS, MkdirFlag.PARENTS)).error is None
    (tmp_path / "f").write_bytes(b"1")
    (tmp_path / "g").write_bytes(b"2")
    assert box.call(Op.MKDIR, (Tag.PATH, "f/x"), (Tag.FLAGS, MkdirFlag.PARENTS)).error == errno.ENOTDIR
    assert box.call(Op.MKDIR, (Tag.PATH, "f"), (Tag.FLAGS, MkdirFlag.PARENTS)).error == errno.EEXIST
    assert box.call(Op.MOVE, (Tag.PATH, "f"), (Tag.PATH2, "g")).error == errno.EEXIST
    assert box.call(Op.MOVE, (Tag.PATH, "f"), (Tag.PATH2, "g"), (Tag.FLAGS, MoveFlag.REPLACE)).error is None
    assert (tmp_path / "g").read_bytes() == b"1"
    assert box.call(Op.MOVE, (Tag.PATH, "g"), (Tag.PATH2, "a/h")).error is None
    assert box.call(Op.MOVE, (Tag.PATH, "g"), (Tag.PATH2, "a/h")).error == errno.ENOENT
    assert box.call(Op.MOVE, (Tag.PATH, "a/.."), (Tag.PATH2, "z")).error == errno.EINVAL
    assert box.call(Op.CHMOD, (Tag.PATH, "a/h"), (Tag.MODE, 0o640)).error is None
    assert stat.S_IMODE((tmp_path / "a/h").stat().st_mode) == 0o640
    assert box.call(Op.SYMLINK, (Tag.PATH, "s"), (Tag.PATH2, "anything at all")).error is None
    assert os.readlink(tmp_path / "s") == "anything at all"
    assert box.call(Op.SYMLINK, (Tag.PATH, "s"), (Tag.PATH2, "x")).error == errno.EEXIST


def test_list(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/deep").write_bytes(b"123")
    (tmp_path / "d/link").symlink_to("e")
    (tmp_path / os.fsdecode(b"d/\xff\n")).write_bytes(b"")
    names = {r[Tag.NAME]: r for r in box.call(Op.LIST, (Tag.PATH, "d")).records()}
    assert set(names) == {b"e", b"link", b"\xff\n"}
    assert names[b"link"][Tag.LINK] == b"e"
    assert names[b"e"][Tag.TYPE] == FileType.DIR
    deep = box.call(Op.LIST, (Tag.PATH, "."), (Tag.FLAGS, ListFlag.RECURSIVE)).records()
    assert {r[Tag.NAME] for r in deep} == {b"home", b"d", b"d/e", b"d/link", b"d/\xff\n", b"d/e/deep"}
    two = box.call(Op.LIST, (Tag.PATH, "."), (Tag.FLAGS, ListFlag.RECURSIVE), (Tag.DEPTH, 2)).records()
    assert {r[Tag.NAME] for r in two} == {b"home", b"d", b"d/e", b"d/link", b"d/\xff\n"}
    assert box.call(Op.LIST, (Tag.PATH, "d/e/deep")).error == errno.ENOTDIR
    assert box.call(Op.LIST, (Tag.PATH, "none")).error == errno.ENOENT
    assert box.call(Op.LIST, (Tag.PATH, "."), (Tag.DEPTH, 0)).error == errno.EINVAL


@pytest.mark.anyone
def test_ten_thousand_entries(bare: AgentClient, tmp_path: Path) -> None:
    for i in range(10_000):
        (tmp_path / f"many-{i % 10}").mkdir(exist_ok=True)
        (tmp_path / f"many-{i % 10}" / f"file-{i}").touch()
    stream = bare.open(Op.LIST, (Tag.PATH, "."), (Tag.FLAGS, ListFlag.RECURSIVE))
    stream.grants = False
    bare.until(lambda: stream.taken == INITIAL_CREDIT)  # lists are under flow control too
    stream.grants = True
    bare.grant(stream)
    names = {r[Tag.NAME] for r in bare.wait(stream).records()}
    assert len(names) == 10_011
    for i in range(10):
        gone = bare.call(Op.REMOVE, (Tag.PATH, f"many-{i}"), (Tag.FLAGS, RemoveFlag.RECURSIVE))
        assert gone.closed[Tag.COUNT] == 1001
    assert os.listdir(tmp_path) == ["home"]


def make_deep(top: Path, depth: int) -> None:
    top.mkdir()
    here = os.getcwd()
    os.chdir(top)
    try:
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        Path("bottom").touch()
    finally:
        os.chdir(here)


@pytest.mark.anyone
def test_very_deep_trees(bare: AgentClient, tmp_path: Path) -> None:
    make_deep(tmp_path / "deep", 5000)
    records = bare.call(Op.LIST, (Tag.PATH, "deep"), (Tag.FLAGS, ListFlag.RECURSIVE)).records()
    assert len(records) == 5001
    assert records[-1][Tag.NAME] == b"d/" * 5000 + b"bottom"
    gone = bare.call(Op.REMOVE, (Tag.PATH, "deep"), (Tag.FLAGS, RemoveFlag.RECURSIVE))
    assert gone.closed[Tag.COUNT] == 5002
    assert not (tmp_path / "deep").exists()


def test_remove(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/f").touch()
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep/me").touch()
    (tmp_path / "d/link").symlink_to(tmp_path / "keep")
    (tmp_path / "tolink").symlink_to("keep")
    recursive = (Tag.FLAGS, RemoveFlag.RECURSIVE)
    assert box.call(Op.REMOVE, (Tag.PATH, "d")).error == errno.ENOTEMPTY
    assert box.call(Op.REMOVE, (Tag.PATH, "none")).error == errno.ENOENT
    assert box.call(Op.REMOVE, (Tag.PATH, "none"), (Tag.FLAGS, RemoveFlag.MISSING_OK)).closed[Tag.COUNT] == 0
    assert box.call(Op.REMOVE, (Tag.PATH, "tolink/"), recursive).error == errno.ENOTDIR
    assert box.call(Op.REMOVE, (Tag.PATH, "d/.."), recursive).error == errno.EINVAL
    assert box.call(Op.REMOVE, (Tag.PATH, "tolink"), recursive).closed[Tag.COUNT] == 1
    assert box.call(Op.REMOVE, (Tag.PATH, "d"), recursive).closed[Tag.COUNT] == 4
    assert (tmp_path / "keep/me").exists()
    assert sorted(os.listdir(tmp_path)) == ["home", "keep"]


def test_remove_goes_on_past_what_it_cannot(users: AgentClient) -> None:
    users.run("mkdir -p t/a/b/c t/z/y; touch t/a/1 t/a/b/2 t/z/3; mkdir t/a/b/locked; touch t/a/b/locked/x")
    users.run("chown root /mnt/work/t/a/b/locked; chmod 755 /mnt/work/t/a/b/locked", (Tag.USER, "root"))
    users.call(Op.CHOWN, (Tag.PATH, "t/a/b/locked"), (Tag.OWNER, "0:0"), (Tag.USER, "root"))
    gone = users.call(Op.REMOVE, (Tag.PATH, "t"), (Tag.FLAGS, RemoveFlag.RECURSIVE))
    assert gone.error == errno.EACCES
    assert users.output("find t | sort").split() == ["t", "t/a", "t/a/b", "t/a/b/locked", "t/a/b/locked/x"]


def test_remove_of_the_root_is_survived(users: AgentClient) -> None:
    """A tmpfs as root would be needed to let it really happen: here a mount point must stay, and be told."""
    gone = users.call(Op.REMOVE, (Tag.PATH, "/mnt"), (Tag.FLAGS, RemoveFlag.RECURSIVE), (Tag.USER, "root"))
    assert gone.error == errno.EBUSY
    assert users.output("ls -A /mnt | wc -l", (Tag.CWD, "/"), (Tag.USER, "root")).strip() == "0"
