"""What changes lie upon: images, the host, disk snapshots."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from changes_helpers import Tree, TreeFiles, build, decode_listing, encoded, record, told

from sloplet.changes.base import FolderBase, HostBase, NoBase, Unreadable
from sloplet.changes.compare import compare
from sloplet.changes.read import Collector
from sloplet.changes.reading import OldState, sandbox_reader
from sloplet.changes.stored import read_stored
from sloplet.errors import FileError, SnapshotDamaged
from sloplet.images.host import File, Folder, HostView, layout
from sloplet.images.host import Link as HostLink
from sloplet.wire.fields import Fields
from sloplet.wire.schema import ChangeFlag, Tag

pytestmark = pytest.mark.anyone

# -- bases -----------------------------------------------------------------------------------------


def test_a_folder_as_base_follows_no_link_and_reads_files_only(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (root / "out").symlink_to(outside)
    (root / "file").write_text("x")
    os.mkfifo(root / "pipe")
    base = FolderBase(root)
    try:
        node = base.lstat("/out")
        assert node is not None
        assert (node.type, node.target) == ("symlink", str(outside))
        assert base.lstat("/out/secret") is None
        assert base.lstat("/../outside/secret") is None
        assert base.listdir("/out") == []
        for path in ("/out/secret", "/pipe", "/", "/missing", "/../outside/secret"):
            with pytest.raises(Unreadable):
                base.open(path)
        os.close(base.open("/file"))
        assert sorted(base.listdir("/")) == ["file", "out", "pipe"]
    finally:
        base.close()


def test_the_host_as_base_is_what_its_layout_says(tmp_path: Path) -> None:
    prefix = tmp_path / "python"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").write_bytes(b"program")
    (prefix / "secret").write_bytes(b"secret")
    (prefix / "secret").chmod(0o600)
    view = HostView({"/lib": "-> usr/lib", "/etc/services": "file"}, {"/etc/services": b"ssh 22\n"}, (), (str(prefix),))
    base = HostBase(view)
    try:
        for part in layout(view):
            node = base.lstat(part.path)
            assert node is not None, part
            kind = {Folder: "dir", HostLink: "symlink", File: "file"}.get(type(part), "dir")
            assert node.type == kind, part
        assert "services" in base.listdir("/etc")
        assert "python" in base.listdir(str(tmp_path))
        fd = base.open("/etc/services")
        assert os.read(fd, 100) == b"ssh 22\n"
        os.close(fd)
        program = base.lstat(f"{prefix}/bin/python")
        assert program is not None
        assert program.size == 7
        with pytest.raises(Unreadable):  # closed to others: a sandbox does not see it, and no diff tells it
            base.open(f"{prefix}/secret")
        assert base.lstat("/etc/shadow") is None
        assert base.lstat("/home/somebody") is None
    finally:
        base.close()


def test_without_a_base_everything_below_the_prefix_is_an_addition() -> None:
    collector = Collector(True, "/tmp/box/work")
    for fields in (record(".", {}), record("src", {}), record("src/a", b"x")):
        collector.add(fields)
    files = TreeFiles({"tmp": {"box": {"work": {"src": {"a": b"x"}}}}})
    found = asyncio.run(compare(collector.listing, NoBase(), sandbox_reader(files), folders=["/tmp/box/work"]))
    assert [(c.path, c.kind) for c in found] == [("/tmp/box/work/src", "added"), ("/tmp/box/work/src/a", "added")]
    assert found[1].text is not None


# -- stored states -----------------------------------------------------------------------------------


class InMemory(io.BytesIO):
    """What ``read_stored`` reads from."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.size = len(data)

    def skip(self, count: int, /) -> None:
        self.seek(count, io.SEEK_CUR)

    def pread(self, count: int, position: int, /) -> bytes:
        return self.getvalue()[position : position + count]


@contextmanager
def stored(*records: Fields) -> Iterator[InMemory]:
    yield InMemory(b"".join(encoded(list(records))))


def body(offset: int, data: bytes) -> Fields:
    return Fields((Tag.OFFSET, offset), (Tag.BODY, data))


def read_all(state: OldState, path: str, most: int = 10**9) -> bytes:
    async def pieces() -> bytes:
        return b"".join([piece async for piece in state.read(path, most)])

    return asyncio.run(pieces())


def test_a_stored_state_gives_back_contents_holes_and_hard_links() -> None:
    link = record("link", b"", size=300_000).add(Tag.FLAGS, int(ChangeFlag.HARD_LINK)).add(Tag.PATH2, b"sparse")
    records = [
        record("sparse", b"", size=300_000), body(5, b"abc"), body(100_000, b"x" * 60_000), body(160_000, b"y"),
        record("empty", b""), record("folder", {}), record("zeros", b"", size=10), link,
    ]  # fmt: skip
    with stored(*records) as file:
        state = asyncio.run(read_stored(file))
        data = read_all(state, "/sparse")
        assert data == bytes(5) + b"abc" + bytes(99_992) + b"x" * 60_000 + b"y" + bytes(139_999)
        assert read_all(state, "/link") == data
        assert read_all(state, "/sparse", 7) == data[:7]
        assert read_all(state, "/empty") == b""
        assert read_all(state, "/zeros") == bytes(10)
        for path in ("/folder", "/missing"):
            with pytest.raises(FileError):
                read_all(state, path)


def test_a_diff_against_a_stored_state() -> None:
    image: Tree = {"etc": {"motd": b"hello\n"}}
    new: Tree = {**image, "keep": b"same\n", "edit": b"new\n"}
    records = [record("keep", b"same\n"), body(0, b"same\n"), record("edit", b"old\n"), body(0, b"old\n")]
    with stored(*records) as file, tempfile.TemporaryDirectory() as folder:
        build(Path(folder), image)
        base = FolderBase(folder)
        state = asyncio.run(read_stored(file))
        listing = decode_listing(encoded(told(image, new, lambda: False)), True)
        found = asyncio.run(compare(listing, base, sandbox_reader(TreeFiles(new)), state))
        base.close()
    assert [change.path for change in found] == ["/edit"]
    assert found[0].text == "--- a/edit\n+++ b/edit\n@@ -1 +1 @@\n-old\n+new\n"


@pytest.mark.parametrize(
    "records",
    [
        [body(0, b"x")],
        [record("d", {}), body(0, b"x")],
        [record("f", b"", size=9), body(4, b"xy"), body(5, b"z")],
        [record("f", b"", size=9), body(-1, b"xy")],
        [record("../f", b"")],
    ],
)
def test_a_damaged_stored_state_is_refused(records: list[Fields]) -> None:
    with stored(*records) as file, pytest.raises(SnapshotDamaged):
        asyncio.run(read_stored(file))


def test_a_truncated_stored_state_is_refused_wherever_it_ends() -> None:
    whole = b"".join(encoded([record("f", b"", size=5), body(0, b"12345"), record("g", b"")]))
    ends = {0, len(whole)}
    for fields in ([record("f", b"", size=5)], [record("f", b"", size=5), body(0, b"12345")]):
        ends.add(len(b"".join(encoded(fields))))
    for end in range(len(whole)):
        file = InMemory(whole[:end])
        if end in ends:
            asyncio.run(read_stored(file))
        else:
            with pytest.raises(SnapshotDamaged):
                asyncio.run(read_stored(file))
