"""Disk snapshots in pieces: the same bytes come back, and what did not change is not written again."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloplet.errors import ProtocolError, SnapshotDamaged
from sloplet.segments import INDEX, Joined, Writer
from sloplet.wire.fields import Fields, encode_record
from sloplet.wire.schema import FileType, Tag

pytestmark = pytest.mark.anyone
Files = dict[str, bytes]


def records(files: Files) -> bytes:
    parts = []
    for name, data in files.items():
        head = Fields((Tag.NAME, name.encode()), (Tag.TYPE, int(FileType.FILE)), (Tag.SIZE, len(data)))
        parts.append(encode_record(head))
        for at in range(0, len(data), 60_000):
            parts.append(encode_record(Fields((Tag.OFFSET, at), (Tag.BODY, data[at : at + 60_000]))))
    return b"".join(parts)


def write(folder: Path, stream: bytes, older: Path | None = None, piece: int = 65_536) -> Writer:
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def share(name: str, size: int) -> bool:
        if older is None or not (older / name).exists():
            return False
        os.link(older / name, folder / name)
        return True

    try:
        writer = Writer(fd, share)
        for at in range(0, len(stream), piece):
            writer.feed(stream[at : at + piece])
        writer.finish()
    finally:
        os.close(fd)
    return writer


def joined(folder: Path) -> Iterator[Joined]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with Joined(fd) as file:
            yield file
    finally:
        os.close(fd)


def read(folder: Path) -> bytes:
    for file in joined(folder):
        return file.read(1 << 40)
    raise AssertionError


def tree(count: int, seed: int = 1) -> Files:
    source = random.Random(seed)
    return {f"src/file{number}": source.randbytes(source.randrange(40_000)) for number in range(count)}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 300_000), max_size=6), st.integers(1, 200_000))
def test_the_same_bytes_come_back(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], piece: int) -> None:
    stream = records({f"f{number}": bytes([number % 251]) * size for number, size in enumerate(sizes)})
    folder = tmp_path_factory.mktemp("pieces") / "one"
    write(folder, stream, piece=max(piece, len(stream) // 50))
    assert read(folder) == stream


def test_reading_at_any_place(tmp_path: Path) -> None:
    stream = records(tree(100))
    write(tmp_path / "one", stream)
    for file in joined(tmp_path / "one"):
        assert file.size == len(stream)
        for position in random.Random(2).sample(range(len(stream)), 200):
            data = file.pread(1000, position)
            assert data
            assert data == stream[position : position + len(data)]
        assert file.pread(10, len(stream)) == b""


def test_what_did_not_change_is_shared(tmp_path: Path) -> None:
    files = {**tree(300), "large": random.Random(3).randbytes(9 << 20)}
    write(tmp_path / "one", records(files))
    assert len(list((tmp_path / "one").iterdir())) > 10
    again = write(tmp_path / "two", records(files), tmp_path / "one")
    assert again.shared == len(records(files))
    # one small file changes, one comes, one goes: most of it, and all of the large file, is as it was
    changed = dict(files)
    changed["src/file7"] = b"changed"
    del changed["src/file150"]
    stream = records({"new": b"x" * 5000, **changed})
    third = write(tmp_path / "three", stream, tmp_path / "one")
    assert read(tmp_path / "three") == stream
    assert third.shared > len(stream) - (6 << 20)
    inode = {path.name: path.stat().st_ino for path in (tmp_path / "one").iterdir()}
    assert sum(path.stat().st_ino == inode.get(path.name) for path in (tmp_path / "three").iterdir()) > 5


def test_equal_pieces_are_kept_once(tmp_path: Path) -> None:
    write(tmp_path / "one", records({name: bytes(8 << 20) for name in ("a", "b")}))
    assert read(tmp_path / "one") == records({name: bytes(8 << 20) for name in ("a", "b")})
    assert sum(path.stat().st_size for path in (tmp_path / "one").iterdir()) < 12 << 20


def test_a_stream_that_is_cut_off_or_too_long(tmp_path: Path) -> None:
    stream = records(tree(3))
    with pytest.raises(ProtocolError):
        write(tmp_path / "cut", stream[:-1])
    with pytest.raises(ProtocolError):
        write(tmp_path / "long", b"\xff\xff\xff\x7f" + stream)


@pytest.mark.parametrize("damage", ["missing", "short", "index", "negative"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "one"
    write(folder, records(tree(50)))
    victim = next(path for path in folder.iterdir() if path.name.startswith("o-"))
    if damage == "missing":
        victim.unlink()
    elif damage == "short":
        os.truncate(victim, victim.stat().st_size - 1)
    else:
        text = (folder / INDEX).read_text()
        (folder / INDEX).write_text(text.replace(" ", " -" if damage == "negative" else " x", 1))
    with pytest.raises(SnapshotDamaged):
        read(folder)
