"""CHANGES and UNPACK: what is told of a sandbox, unpacked in a fresh one, is told of that one too."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jailed import Jail, small_root

from agentclient import AgentClient, Answer, Stream, WireClient, encode
from sloplet.engines.base import ResolvedImage
from sloplet.engines.container import ContainerEngine
from sloplet.engines.machine import machine
from sloplet.spec import Limits
from sloplet.wire.schema import ChangeFlag, ChangesFlag, ListingFlag, Op, Tag

pytestmark = pytest.mark.anyone

REMOVED = 4
MAKE = r"""
set -e
cd /data
echo more >> edited; rm removed; rm -r gone; rm -r remade; mkdir remade; echo new > remade/new; chmod 4751 moded
rm typed; mkdir typed; : > typed/empty; chmod 1770 deep
mv deep/deeper deep/moved 2>/dev/null || { cp -a deep/deeper deep/moved; rm -r deep/deeper; }
rm link; ln -s /etc/nowhere link
mkdir -p /made/a/b/c; ln -s ../b /made/a/up; ln -s loop /made/loop
printf %s "$(printf 'x%.0s' 0 1 2 3 4 5 6 7 8 9)" > /made/ten
dd if=/dev/urandom of=/made/big bs=1000 count=300 2>/dev/null; ln /made/big /made/a/same; ln /made/big /made/a/b/too
truncate -s 50M /made/sparse; printf end >> /made/sparse
printf mid | dd of=/made/sparse bs=1 seek=1000000 conv=notrunc 2>/dev/null
truncate -s 1M /made/hole
odd="$(printf 'a\001b\nc\377 \\d')"; : > "/made/$odd"; mkdir "/made/-rf" ; : > /made/-rf/...
touch -d '1999-01-02 03:04:05.678901234' /made/ten /made/a/b; touch -h -d '2001-01-01' /made/loop
chmod 0 /made/a/b/c; chmod 2555 /made/a
mkfifo /made/pipe; rmdir /root 2>/dev/null || :
mkdir -p /tmp/d; chmod 700 /tmp/d; : > /tmp/d/f
"""


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> ResolvedImage:
    folder = tmp_path_factory.mktemp("image")
    return small_root(folder / "root")


@pytest.fixture
def start(tmp_path: Path, rootfs: ResolvedImage) -> Iterator[Callable[..., Jail]]:
    """Starts containers: of a small image, or with image=..."""
    if not ContainerEngine().probe().available:
        pytest.skip("no containers here")
    tmp_path.chmod(0o755)
    made: list[Jail] = []

    def new(image: ResolvedImage = rootfs, one_uid: bool = False, **spec: Any) -> Jail:
        engine = ContainerEngine(facts=replace(machine(), newuidmap=None) if one_uid else None)
        made.append(Jail(engine, image, tmp_path / f"place{len(made)}", **spec))
        return made[-1]

    yield new
    for box in made:
        box.close()


def _changes(box: WireClient, *pairs: tuple[Tag, int | bytes | str], contents: bool = False) -> Stream:
    stream = box.call(Op.CHANGES, (Tag.FLAGS, ChangesFlag.CONTENTS if contents else 0), *pairs)
    assert stream.error is None, stream.close
    return stream


def _files(stream: Stream) -> dict[bytes, Answer]:
    """Records of files by name; none is told twice, and no folder after what is in it."""
    found: dict[bytes, Answer] = {}
    for record in stream.records():
        name = record[Tag.NAME]
        if name is None:
            continue
        assert name not in found
        if record[Tag.TYPE] == 1:
            assert not any(other.startswith(name + b"/") for other, was in found.items() if was[Tag.TYPE] != REMOVED)
        found[name] = record
    return found


def _unpack(box: WireClient, data: bytes, *pairs: tuple[Tag, int | bytes | str]) -> Stream:
    stream = box.open(Op.UNPACK, *pairs)
    box.data(stream, data)
    if stream.close is None:
        WireClient.end(box, stream)
    return box.wait(stream)


def _record(*pairs: tuple[Tag, int | bytes | str]) -> bytes:
    body = encode(pairs)
    return struct.pack("<I", len(body)) + body


def _file(name: bytes | str, content: bytes = b"", **more: int) -> bytes:
    fields = [(Tag.NAME, name), (Tag.TYPE, 0), (Tag.SIZE, more.get("size", len(content))), (Tag.MODE, 0o644)]
    body = _record(*fields)
    return body + (_record((Tag.OFFSET, more.get("offset", 0)), (Tag.BODY, content)) if content else b"")


def _contents(stream: Stream) -> dict[bytes, str]:
    """Checksums of what all files hold; hard links have what their first name has."""
    found: dict[bytes, str] = {}
    content, name = bytearray(), b""
    for record in [*stream.records(), Answer({Tag.NAME: b""})]:
        if record[Tag.NAME] is None:
            content[record[Tag.OFFSET] : record[Tag.OFFSET] + len(record[Tag.BODY])] = record[Tag.BODY]
            continue
        if name:
            found[name] = hashlib.sha256(content).hexdigest()
        name = record[Tag.NAME] if record[Tag.TYPE] == 0 else b""
        content = bytearray(record[Tag.SIZE] if name else 0)
        if record[Tag.PATH2]:
            found[name], name = found[record[Tag.PATH2]], b""
    return found


@pytest.mark.parametrize("one_uid", [False, True])
def test_a_round_trip(start: Callable[..., Jail], one_uid: bool) -> None:
    if one_uid and os.getuid() == 0:
        pytest.skip("root has many")
    user = {"one_uid": True, "user": "agent"} if one_uid else {}
    first = start(**user)
    assert _files(_changes(first)) == {}  # what was laid out before the first command is no change
    done = first.run(MAKE)
    assert done.closed[Tag.EXIT_CODE] == 0, bytes(done.err)
    for path, owner in () if one_uid else (("/made/ten", "12:34"), ("/made/a/b", "9:9")):
        assert first.call(Op.CHOWN, (Tag.PATH, path), (Tag.OWNER, owner)).error is None
    packed = _changes(first, contents=True)
    assert packed.reply is not None
    assert packed.reply[Tag.FLAGS] == ListingFlag.COMPLETE
    told = _files(packed)
    assert packed.closed[Tag.COUNT] == len(told)
    assert told[b"data/removed"][Tag.TYPE] == told[b"data/gone"][Tag.TYPE] == REMOVED
    assert told[b"data/remade"][Tag.FLAGS] == ChangeFlag.OPAQUE
    assert told[b"made/ten"][Tag.MTIME_NS] == 915246245678901234
    assert (told[b"made/ten"][Tag.UID], told[b"made/ten"][Tag.GID]) == ((1000, 1000) if one_uid else (12, 34))
    assert told[b"data/moded"][Tag.MODE] == 0o4751
    assert told[b"made/pipe"][Tag.TYPE] == 3
    links = [name for name in (b"made/big", b"made/a/same", b"made/a/b/too") if told[name][Tag.FLAGS]]
    assert len(links) == 2
    assert b"made/a\1b" not in told
    assert b"made/a\1b\nc\377 \\d" in told
    assert packed.closed[Tag.BYTES] < 2_000_000  # 51 MB of holes are not sent
    second = start(**user)
    answer = _unpack(second, bytes(packed.out))
    assert answer.error is None, answer.close
    assert answer.closed[Tag.BYTES] == packed.closed[Tag.BYTES]
    again = _files(_changes(second))
    expected = {name: value for name, value in told.items() if name != b"made/pipe"}
    # which name of a linked file comes first is the folder's order
    for name in (b"made/big", b"made/a/same", b"made/a/b/too"):
        for side in (expected, again):
            side[name] = Answer({t: v for t, v in side[name].items() if t not in (Tag.FLAGS, Tag.PATH2)})
    assert {n: dict(_told(v)) for n, v in again.items()} == {n: dict(_told(v)) for n, v in expected.items()}
    contents = _contents(packed)
    assert contents == _contents(_changes(second, contents=True))
    assert contents[b"made/ten"] == hashlib.sha256(b"x" * 10).hexdigest()
    assert contents[b"made/big"] == first.output("sha256sum /made/big").split()[0]
    assert contents[b"made/sparse"] == first.output("sha256sum /made/sparse").split()[0]
    inodes = second.output("stat -c %i /made/big /made/a/same /made/a/b/too").split()
    assert len(set(inodes)) == 1
    assert int(second.output("stat -c %b /made/sparse")) < 1000


def _told(record: Answer) -> Answer:
    """A folder's size is the file system's own affair."""
    return Answer({t: v for t, v in record.items() if not (t is Tag.SIZE and record[Tag.TYPE] == 1)})


def test_the_host_image_has_layers_of_several_kinds(start: Callable[..., Jail]) -> None:
    box = start(ResolvedImage("host"))
    assert _files(_changes(box)) == {}
    box.output("touch /usr/x && mkdir /opt/y && rm /etc/hostname && echo > /workspace/z")
    expected = {
        b"usr": 1, b"usr/x": 0, b"opt": 1, b"opt/y": 1, b"etc": 1, b"etc/hostname": REMOVED, b"workspace": 1,
        b"workspace/z": 0,
    }  # fmt: skip
    if os.getuid() == 0:  # others may not remove what is the host's
        box.output("rm /usr/bin/env")
        expected |= {b"usr/bin": 1, b"usr/bin/env": REMOVED}
    told = _files(_changes(box, contents=True))
    assert {name: record[Tag.TYPE] for name, record in told.items()} == expected


def test_a_new_generation_is_no_change(start: Callable[..., Jail]) -> None:
    box = start()
    box.again((Tag.GENERATION, "another"))
    assert box.output("cat /run/sloplet/generation") == "2 another\n"
    assert _files(_changes(box)) == {}


def test_commands_cannot_reach_where_changes_lie(start: Callable[..., Jail]) -> None:
    box = start()
    assert box.run("ls /proc/1/fd").closed[Tag.EXIT_CODE] != 0
    found = box.output("for p in /proc/[0-9]*; do ls -l $p/fd 2>/dev/null; done; cat /proc/self/mountinfo")
    assert "/up" not in found
    assert "pipe:" in found  # positive control: it does see descriptors


def test_others_are_served_while_a_big_one_is_told(start: Callable[..., Jail]) -> None:
    box = start()
    box.output(
        "mkdir /many; cd /many; i=0; while [ $i -lt 3000 ]; do : > f$i; i=$((i+1)); done; "
        "dd if=/dev/urandom of=big bs=1M count=20 2>/dev/null"
    )
    big = box.open(Op.CHANGES, (Tag.FLAGS, ChangesFlag.CONTENTS))
    big.grants = False
    box.until(lambda: big.taken > 200_000)
    assert box.output("echo served") == "served\n"
    assert big.close is None
    big.grants = True
    box.grant(big)
    box.wait(big)
    assert big.closed[Tag.BYTES] == 20 * 2**20
    assert len(_files(big)) == big.closed[Tag.COUNT] == 3003


@pytest.mark.parametrize("name", [b"", b"/abs", b"a/../b", b"..", b"a//b", b"a/", b"./a", b"x" * 256, b"a/./b"])
def test_names_that_are_none(bare: AgentClient, tmp_path: Path, name: bytes) -> None:
    assert _unpack(bare, _file(name), (Tag.PATH, str(tmp_path))).error == errno.EPROTO
    bare.ping()


@pytest.mark.parametrize(
    "data",
    [
        _record((Tag.OFFSET, 0), (Tag.BODY, b"x")),  # of no file
        _file("f", b"xxxx", size=3),
        _file("f", b"xxxx", offset=-1),
        _file("f", b"xxxx", size=2**62, offset=2**62),
        _record((Tag.NAME, "f"), (Tag.TYPE, 9)),
        _record((Tag.NAME, "f"), (Tag.TYPE, 0), (Tag.MODE, 0o10000)),
        _record((Tag.NAME, "f"), (Tag.TYPE, 0), (Tag.UID, 2**32 - 1)),
        _record((Tag.NAME, "f"), (Tag.TYPE, 2)),
        _record((Tag.NAME, "f"), (Tag.TYPE, 0), (Tag.FLAGS, ChangeFlag.HARD_LINK), (Tag.PATH2, "../etc/passwd")),
        _record((Tag.NAME, "."), (Tag.TYPE, 0)),
        _record((Tag.NAME, "f"), (Tag.TYPE, 1), (Tag.ENTRY, "x")),
        _record((Tag.PID, 1)),
        _file("whole")[:-1],
        struct.pack("<I", 65533) + b"x" * 65533,
        b"garbage that is none",
    ],
)
def test_records_that_cannot_be(bare: AgentClient, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "to").mkdir()
    answer = _unpack(bare, data, (Tag.PATH, str(tmp_path / "to")))
    assert answer.error == errno.EPROTO, answer.close
    left = [path.name for path in (tmp_path / "to").iterdir()]
    assert not [name for name in left if name.startswith(".sloplet")]
    bare.ping()


def test_no_link_is_followed(bare: AgentClient, tmp_path: Path) -> None:
    to, outside = tmp_path / "to", tmp_path / "outside"
    to.mkdir()
    outside.mkdir()
    (to / "link").symlink_to(outside)
    assert _unpack(bare, _file("link/f", b"x"), (Tag.PATH, str(to))).error == errno.ELOOP
    assert not list(outside.iterdir())
    assert _unpack(bare, _file("link", b"x"), (Tag.PATH, str(to))).error is None  # the link itself is replaced
    assert (to / "link").read_bytes() == b"x"
    assert not (to / "link").is_symlink()


def test_a_folder_is_all_additions(bare: AgentClient, tmp_path: Path) -> None:
    source, to = tmp_path / "source", tmp_path / "to"
    (source / "a/b").mkdir(parents=True)
    to.mkdir()
    (source / "a/b/f").write_bytes(os.urandom(200_000))
    (source / "a/link").symlink_to("/nowhere")
    os.utime(source / "a", ns=(5, 5 * 10**9 + 7))
    (to / "a").write_text("in the way")
    packed = _changes(bare, (Tag.PATH, str(source)), contents=True)
    assert set(_files(packed)) == {b".", b"a", b"a/b", b"a/b/f", b"a/link"}
    assert _unpack(bare, bytes(packed.out), (Tag.PATH, str(to))).closed[Tag.COUNT] == 5
    assert (to / "a/b/f").read_bytes() == (source / "a/b/f").read_bytes()
    assert (to / "a").stat().st_mtime_ns == 5 * 10**9 + 7
    assert _files(_changes(bare, (Tag.PATH, str(to)))).keys() == _files(packed).keys()


def test_extended_attributes_go_along_if_asked_for(bare: AgentClient, tmp_path: Path) -> None:
    source, to = tmp_path / "from", tmp_path / "to"
    (source / "d").mkdir(parents=True)
    to.mkdir()
    (source / "d/f").write_bytes(b"content")
    os.link(source / "d/f", source / "d/same")
    (source / "d/empty").touch(0o444)
    (source / "plain").touch()
    (source / "link").symlink_to("d/f")
    try:
        for path in (source, source / "d", source / "d/f", source / "d/empty"):
            os.setxattr(path, "user.a", b"1\0" + path.name.encode())
            os.setxattr(path, "user.overlay.origin", b"not ours")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    where = (Tag.PATH, str(source))
    assert not any(record[Tag.ATTRIBUTE] for record in _changes(bare, where, contents=True).records())
    packed = bare.call(Op.CHANGES, (Tag.FLAGS, ChangesFlag.CONTENTS | ChangesFlag.ATTRIBUTES), where)
    told = {name: record[Tag.ATTRIBUTE] for name, record in _files(packed).items() if record[Tag.ATTRIBUTE]}
    linked = {b"d/f", b"d/same"} & told.keys()
    assert len(linked) == 1, "a file with two names has them once"
    assert told.keys() - linked == {b".", b"d", b"d/empty"}
    assert told[b"d"] == [b"user.a\x001\0d"]
    assert _unpack(bare, bytes(packed.out), (Tag.PATH, str(to))).error is None
    for name in (".", "d", "d/f", "d/empty"):
        assert os.listxattr(to / name) == ["user.a"], name
        assert os.getxattr(to / name, "user.a") == os.getxattr(source / name, "user.a")
    assert os.listxattr(to / "plain") == []
    assert (to / "d/empty").stat().st_mode & 0o777 == 0o444
    for bad in (b"user.overlay.opaque\0y", b"trusted.a\x001", b"", b"user.\0"):
        record = _record((Tag.NAME, "x"), (Tag.TYPE, 0), (Tag.SIZE, 0), (Tag.MODE, 0o644), (Tag.ATTRIBUTE, bad))
        assert _unpack(bare, record, (Tag.PATH, str(to))).error == errno.EPROTO
    assert not (to / "x").exists()


def test_an_attribute_without_room_costs_only_itself(bare: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "probe").touch()
    try:
        os.setxattr(tmp_path / "probe", "user.a", b"1")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    large = b"user.large\0" + b"x" * 40000  # more than ext4 has room for
    given = [(Tag.ATTRIBUTE, each) for each in (b"user.a\x001", large, b"user.z\x002")]
    facts = ((Tag.SIZE, 0), (Tag.MODE, 0o755))
    records = _record((Tag.NAME, "f"), (Tag.TYPE, 0), *facts, *given) + _record(
        (Tag.NAME, "d"), (Tag.TYPE, 1), *facts, *given
    )
    assert _unpack(bare, records, (Tag.PATH, str(tmp_path))).error is None
    for name in ("f", "d"):
        assert set(os.listxattr(tmp_path / name)) >= {"user.a", "user.z"}


def test_what_a_pipe_took_the_place_of_does_not_come_back(bare: AgentClient, tmp_path: Path) -> None:
    to = tmp_path / "to"
    to.mkdir()
    (to / "file").write_text("the image's")
    (to / "link").symlink_to("file")
    (to / "d/deep").mkdir(parents=True)
    (to / "d/deep/f").touch()
    os.mkfifo(to / "pipe")
    (to / "stays").touch()
    records = b"".join(_record((Tag.NAME, name), (Tag.TYPE, 3)) for name in ("file", "link", "d", "pipe", "none"))
    assert _unpack(bare, records, (Tag.PATH, str(to))).error is None
    assert sorted(os.listdir(to)) == ["pipe", "stays"]


def test_where_there_is_no_root_of_its_own(bare: AgentClient, tmp_path: Path) -> None:
    assert bare.call(Op.CHANGES).error == errno.EOPNOTSUPP
    assert bare.call(Op.UNPACK).error == errno.EOPNOTSUPP
    assert bare.call(Op.CHANGES, (Tag.PATH, str(tmp_path / "none"))).error == errno.ENOENT
    assert bare.call(Op.CHANGES, (Tag.FLAGS, 4)).error == errno.EINVAL


def test_names_as_deep_as_they_get(bare: AgentClient, tmp_path: Path) -> None:
    to, part = tmp_path / "to", "d" * 200
    to.mkdir()
    bare.output(
        f"cd {tmp_path}; mkdir deep; cd deep; i=0; "
        f"while [ $i -lt 60 ]; do mkdir {part}; cd -P {part}; i=$((i+1)); done; echo end > f"
    )
    packed = _changes(bare, (Tag.PATH, str(tmp_path / "deep")), contents=True)
    assert len(_files(packed)) == 62
    assert _unpack(bare, bytes(packed.out), (Tag.PATH, str(to))).error is None
    again = _changes(bare, (Tag.PATH, str(to)), contents=True)
    assert _files(again).keys() == _files(packed).keys()
    assert again.closed[Tag.BYTES] == 4
    shutil.rmtree(tmp_path / "deep")
    shutil.rmtree(to)


def test_a_full_disk_leaves_the_agent_fine(start: Callable[..., Jail]) -> None:
    box = start(limits=Limits(disk=2**25))
    free = int(box.output("stat -f -c %a /")) * int(box.output("stat -f -c %S /"))
    piece = os.urandom(61440)
    data = bytearray(_file("fits", b"small")) + _record((Tag.NAME, "big"), (Tag.TYPE, 0), (Tag.SIZE, free + 2**24))
    stream = box.open(Op.UNPACK)
    box.data(stream, bytes(data))
    offset = 0
    while stream.close is None and offset < free + 2**23:
        box.data(stream, _record((Tag.OFFSET, offset), (Tag.BODY, piece)))
        offset += len(piece)
    box.wait(stream)
    assert stream.error == errno.ENOSPC
    assert b"big" in stream.closed[Tag.MESSAGE]
    assert box.output("cat /fits") == "small"
    told = _files(_changes(box))
    assert set(told) == {b".", b"fits"}
