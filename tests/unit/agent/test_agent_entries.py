"""The agent: files written in place, extended attributes, and what STAT and LIST add when asked."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest

from agentclient import AGENT, AgentClient
from sloplet.wire.schema import ListFlag, Op, SetxattrsFlag, StatFlag, Tag, WriteFlag

pytestmark = pytest.mark.skipif(not AGENT.exists(), reason="the agent is not built here")

IN_PLACE = (Tag.FLAGS, WriteFlag.IN_PLACE)


@pytest.fixture
def attributed(tmp_path: Path) -> Path:
    """A file with attributes of ours."""
    path = tmp_path / "f"
    path.touch()
    try:
        os.setxattr(path, "user.app.a", b"1\0\xff")
        os.setxattr(path, "user.other", b"2")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    return path


def attributes(box: AgentClient, path: str, *more: tuple[Tag, int | bytes | str]) -> set[bytes]:
    stream = box.call(Op.GETXATTRS, (Tag.PATH, path), *more)
    assert stream.error is None, stream.close
    return {value for record in stream.records() for value in record[Tag.ATTRIBUTE]}


def test_in_place_is_the_same_file(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"something longer")
    (tmp_path / "f").chmod(0o640)
    number = (tmp_path / "f").stat().st_ino
    assert box.write("f", b"new", IN_PLACE).closed[Tag.BYTES] == 3
    assert (tmp_path / "f").read_bytes() == b"new"
    assert (tmp_path / "f").stat().st_ino == number
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640
    assert box.write("f", b"", IN_PLACE, (Tag.MODE, 0o4711)).error is None
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o4711
    assert box.write("g", b"", IN_PLACE, (Tag.MODE, 0o2666)).error is None
    assert stat.S_IMODE((tmp_path / "g").stat().st_mode) == 0o2666
    assert box.write("f", b"12", IN_PLACE).error is None
    assert box.write("f", b"3", (Tag.FLAGS, WriteFlag.IN_PLACE | WriteFlag.APPEND)).error is None
    assert (tmp_path / "f").read_bytes() == b"123"
    assert box.write("f", b"", (Tag.FLAGS, WriteFlag.IN_PLACE | WriteFlag.EXCLUSIVE)).error == errno.EEXIST
    assert (tmp_path / "f").read_bytes() == b"123"


def test_a_reset_leaves_what_was_written_in_place(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    stream = box.open(Op.WRITE, (Tag.PATH, "f"), IN_PLACE)
    box.data(stream, b"x" * 100_000)
    box.ping()
    assert (tmp_path / "f").read_bytes() == b"x" * 100_000
    assert sorted(os.listdir(tmp_path)) == ["f", "home"]
    box.reset(stream)
    assert box.wait(stream).error == errno.ECANCELED
    assert (tmp_path / "f").read_bytes() == b"x" * 100_000


def test_in_place_through_links_and_not_to_magic_ones(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("made")
    assert box.write("link", b"x", IN_PLACE).error is None
    assert (tmp_path / "made").read_bytes() == b"x"
    (tmp_path / "wire").symlink_to("/proc/self/fd/1")
    assert box.write("wire", b"x", IN_PLACE).error in (errno.ELOOP, errno.EACCES)
    os.mkfifo(tmp_path / "pipe")
    assert box.write("pipe", b"x", IN_PLACE).error == errno.ENXIO
    assert box.write("home", b"x", IN_PLACE).error == errno.EISDIR


def test_attributes_are_read_and_set(box: AgentClient, tmp_path: Path, attributed: Path) -> None:
    assert attributes(box, "f") == {b"user.app.a\x001\0\xff", b"user.other\x002"}
    assert attributes(box, "f", (Tag.PREFIX, "user.app.")) == {b"user.app.a\x001\0\xff"}
    assert attributes(box, "home") == set()
    pairs = [(Tag.ATTRIBUTE, b"user.app.b\0two"), (Tag.ATTRIBUTE, b"user.other")]
    assert box.call(Op.SETXATTRS, (Tag.PATH, "f"), *pairs).closed[Tag.COUNT] == 2
    assert set(os.listxattr(attributed)) == {"user.app.a", "user.app.b"}
    assert os.getxattr(attributed, "user.app.b") == b"two"
    os.setxattr(attributed, "user.other", b"stays")
    replaced = box.call(
        Op.SETXATTRS, (Tag.PATH, "f"), (Tag.FLAGS, SetxattrsFlag.REPLACE), (Tag.PREFIX, "user.app."),
        (Tag.ATTRIBUTE, b"user.app.b\0"), (Tag.ATTRIBUTE, b"user.app.c\x003"),
    )  # fmt: skip
    assert replaced.closed[Tag.COUNT] == 3
    assert attributes(box, "f") == {b"user.app.b\0", b"user.app.c\x003", b"user.other\0stays"}


def test_attributes_that_cannot_be(box: AgentClient, tmp_path: Path, attributed: Path) -> None:
    before = attributes(box, "f")
    for bad in (
        b"security.a\x001",
        b"user.\x001",
        b"user",
        b"",
        b"user." + b"n" * 251 + b"\x001",
        b"user.a\0" + b"x" * 61441,
    ):
        good = (Tag.ATTRIBUTE, b"user.good\x001")
        assert box.call(Op.SETXATTRS, (Tag.PATH, "f"), good, (Tag.ATTRIBUTE, bad)).error == errno.EINVAL, bad[:20]
    for bad in (b"", b"user", b"trusted.", b"user." + b"n" * 251):
        assert box.call(Op.GETXATTRS, (Tag.PATH, "f"), (Tag.PREFIX, bad)).error == errno.EINVAL
        assert box.call(Op.STAT, (Tag.PATH, "f"), (Tag.PREFIX, bad)).error == errno.EINVAL
        assert box.call(Op.LIST, (Tag.PATH, "."), (Tag.PREFIX, bad)).error == errno.EINVAL
    assert attributes(box, "f") == before
    assert box.call(Op.SETXATTRS, (Tag.PATH, "f"), (Tag.FLAGS, 2)).error == errno.EINVAL
    assert box.call(Op.GETXATTRS, (Tag.PATH, "f"), (Tag.FLAGS, 0)).error == errno.EPROTO
    assert box.call(Op.GETXATTRS, (Tag.PATH, "none")).error == errno.ENOENT
    assert box.call(Op.GETXATTRS, (Tag.PATH, "/proc/self/root/etc")).error == errno.ELOOP
    refused = box.call(Op.SETXATTRS, (Tag.PATH, "/proc/self/comm"), (Tag.ATTRIBUTE, b"user.a\x001"))
    assert refused.error in (errno.ENOTSUP, errno.EPERM, errno.EACCES)  # the last: of an ordinary user
    assert refused.closed[Tag.WHAT] == b"path"


def test_stat_and_list_add_what_is_asked_for(box: AgentClient, tmp_path: Path, attributed: Path) -> None:
    attributed.write_bytes(b"12345")
    attributed.chmod(0o640)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/link").symlink_to("../f")
    (tmp_path / "d/gone").symlink_to("nowhere")
    (tmp_path / "d/magic").symlink_to("/proc/self/fd/1")
    plain = box.call(Op.STAT, (Tag.PATH, "f")).closed
    assert not {Tag.OWNER, Tag.GROUP, Tag.ATTRIBUTE, Tag.TARGET} & set(plain)
    flags = (Tag.FLAGS, StatFlag.NOFOLLOW | StatFlag.NAMES | StatFlag.TARGET)
    link = box.call(Op.STAT, (Tag.PATH, "d/link"), flags, (Tag.PREFIX, "user.app.")).closed
    assert (link[Tag.LINK], link[Tag.TARGET]) == (b"../f", os.fsencode(attributed))
    assert (link[Tag.TARGET_TYPE], link[Tag.TARGET_SIZE], link[Tag.TARGET_MODE]) == (0, 5, 0o640)
    assert link[Tag.OWNER]
    assert link[Tag.GROUP]
    assert (
        box.call(Op.STAT, (Tag.PATH, "f"), (Tag.PREFIX, "user.app.")).closed[Tag.ATTRIBUTE] == b"user.app.a\x001\0\xff"
    )
    flags = (Tag.FLAGS, ListFlag.RECURSIVE | ListFlag.NAMES | ListFlag.TARGET)
    found = {r[Tag.NAME]: r for r in box.call(Op.LIST, (Tag.PATH, "."), flags, (Tag.PREFIX, "user.app.")).records()}
    assert set(found) == {b"d", b"d/gone", b"d/link", b"d/magic", b"f", b"home"}
    assert found[b"f"][Tag.ATTRIBUTE] == [b"user.app.a\x001\0\xff"]
    assert found[b"d"][Tag.ATTRIBUTE] is None
    assert found[b"d/link"][Tag.TARGET] == os.fsencode(attributed)
    for name in (b"d/gone", b"d/magic", b"d", b"f"):
        assert not {Tag.TARGET, Tag.TARGET_TYPE} & set(found[name]), name
    assert all(record[Tag.OWNER] for record in found.values())
    assert box.call(Op.STAT, (Tag.PATH, "f"), (Tag.FLAGS, 8)).error == errno.EINVAL
    assert box.call(Op.LIST, (Tag.PATH, "."), (Tag.FLAGS, 8)).error == errno.EINVAL
    assert box.run("pwd").out.strip() == os.fsencode(tmp_path), "looking at attributes leaves no trace"


def test_attributes_beside_are_bounded(box: AgentClient) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # ext4 has room for 4 KiB of them only
        path = f"{folder}/f"
        Path(path).touch()
        try:
            for number in range(9):
                os.setxattr(path, f"user.big{number}", b"x" * 3000)
            os.setxattr(path, "user.huge", b"x" * 65536)
        except OSError as error:
            pytest.skip(f"no room for such attributes here: {error}")
        (told,) = box.call(Op.LIST, (Tag.PATH, folder), (Tag.PREFIX, "user.big")).records()
        assert (len(told[Tag.ATTRIBUTE]), told[Tag.COUNT]) == (5, 4)
        assert box.call(Op.STAT, (Tag.PATH, path), (Tag.PREFIX, "user.")).closed[Tag.COUNT] == 5
        assert len(attributes(box, path, (Tag.PREFIX, "user.big"))) == 9
        assert box.call(Op.GETXATTRS, (Tag.PATH, path)).error == errno.E2BIG


def test_processes_by_the_kernels_number(box: AgentClient) -> None:
    stream = box.spawn("echo $$; exec sleep 1000")
    box.until(lambda: stream.out.endswith(b"\n"))
    assert stream.reply is not None
    number = stream.reply[Tag.OSPID]
    assert number == int(stream.out)
    follower = box.open(Op.ATTACH, (Tag.OSPID, number))
    box.until(lambda: follower.reply is not None)
    assert follower.reply is not None
    assert (follower.reply[Tag.PID], follower.reply[Tag.OSPID]) == (stream.reply[Tag.PID], number)
    for pairs in ([], [(Tag.OSPID, number), (Tag.PID, stream.reply[Tag.PID])]):
        assert box.call(Op.ATTACH, *pairs).error == errno.EINVAL
        assert box.call(Op.SIGNAL, (Tag.SIGNUM, 9), *pairs).error == errno.EINVAL
    assert box.call(Op.ATTACH, (Tag.OSPID, 2**40)).error == errno.ESRCH
    assert box.call(Op.ATTACH, (Tag.OSPID, 0)).error == errno.ESRCH
    assert box.call(Op.SIGNAL, (Tag.OSPID, number), (Tag.SIGNUM, 9)).closed[Tag.COUNT] == 1
    assert box.wait(follower).closed[Tag.SIGNUM] == 9
    assert box.wait(stream).closed[Tag.SIGNUM] == 9
    assert box.call(Op.ATTACH, (Tag.OSPID, number)).closed[Tag.SIGNUM] == 9
