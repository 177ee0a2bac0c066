"""A listing made complete: removals are found, names of the sandbox are left out, all else stays as it came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sloplet.changes.base import FolderBase
from sloplet.changes.listed import Completed
from sloplet.errors import ProtocolError
from sloplet.images import host
from sloplet.wire.fields import Fields, RecordDecoder, encode_record
from sloplet.wire.schema import FileType, Tag

pytestmark = pytest.mark.anyone


def folder(name: str, *entries: str, more: bool = False) -> Fields:
    fields = Fields((Tag.NAME, name.encode("utf-8", "surrogateescape")))
    if not more:
        fields.add(Tag.TYPE, int(FileType.DIR)).add(Tag.MODE, 0o755)
    for entry in entries:
        fields.add(Tag.ENTRY, entry.encode("utf-8", "surrogateescape"))
    return fields


def file(name: str, data: bytes) -> list[Fields]:
    head = Fields((Tag.NAME, name), (Tag.TYPE, int(FileType.FILE)), (Tag.SIZE, len(data)), (Tag.MODE, 0o644))
    return [head, Fields((Tag.OFFSET, 0), (Tag.BODY, data))]


@pytest.fixture
def base(tmp_path: Path) -> FolderBase:
    for name in ("etc/hosts", "usr/bin/a", "usr/bin/b", "usr/share/doc/x", "proc/keep", "tmp/old"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("image")
    (tmp_path / "link").symlink_to("usr/bin")
    (tmp_path / "usr/bin" / b"bad-\xff".decode("utf-8", "surrogateescape")).write_text("")
    return FolderBase(tmp_path)


def completed(base: FolderBase, *records: Fields, step: int = 7) -> list[Fields]:
    data = b"".join(encode_record(record) for record in records)
    made, decoder = Completed(base), RecordDecoder()
    out = b"".join(made.feed(data[at : at + step]) for at in range(0, len(data), step)) + made.finish()
    return decoder.feed(out)


def seen(found: list[Fields]) -> list[Any]:
    """Names, a removed one with a minus before it; contents as they are."""
    told: list[Any] = []
    for record in found:
        assert Tag.ENTRY not in record
        if Tag.NAME not in record:
            told.append(record.raw(Tag.BODY))
        else:
            gone = record.integer(Tag.TYPE) == FileType.REMOVED
            told.append(("-" if gone else "") + record.raw(Tag.NAME).decode("utf-8", "surrogateescape"))
    return told


def test_what_is_not_listed_is_gone(base: FolderBase) -> None:
    found = completed(
        base,
        folder(".", "etc", "usr", "proc", "tmp", "link"),
        folder("usr", "bin"),
        folder("usr/bin", "a"),
        folder("usr/bin", "new", more=True),
        *file("usr/bin/new", b"12"),
        folder("tmp"),
    )
    assert seen(found) == [
        ".", "usr", "-usr/share", "usr/bin", "-usr/bin/b", "-usr/bin/bad-\udcff", "usr/bin/new", b"12", "tmp",
        "-tmp/old",
    ]  # fmt: skip
    assert found[3].integer(Tag.MODE) == 0o755


def test_a_folder_in_the_place_of_a_link_or_new_has_lost_nothing(base: FolderBase) -> None:
    assert seen(completed(base, folder("link", "x"), folder("new", "y"))) == ["link", "new"]


def test_what_names_the_sandbox_is_left_out_unless_it_was_changed(base: FolderBase) -> None:
    named = {each.path: each.content for each in host.naming_files("some-box")}
    for path, content in named.items():
        kept = file("kept", b"x")
        assert seen(completed(base, *file(path[1:], content), *kept)) == ["kept", b"x"], path
        mine = content + b"10.0.0.1 mine\n"
        assert seen(completed(base, *file(path[1:], mine), *kept)) == [path[1:], mine, "kept", b"x"], path
        assert seen(completed(base, *file(path[1:], content))) == []


def test_what_is_never_a_file_of_it(base: FolderBase) -> None:
    assert seen(completed(base, folder("proc"), *file("dev/x", b"x"), *file("ok", b"y"))) == ["ok", b"y"]
    assert seen(completed(base, folder(".", "etc", "usr", "tmp", "link"))) == ["."]


@pytest.mark.parametrize(
    "records",
    [
        [folder("usr", "bin", more=True)],
        [folder("usr"), folder("tmp", "x", more=True)],
        [folder("../up")],
        [folder("usr", "a/b")],
        [Fields((Tag.TYPE, 0))],
    ],
)
def test_nonsense(base: FolderBase, records: list[Fields]) -> None:
    with pytest.raises(ProtocolError):
        completed(base, *records)


def test_a_record_that_is_cut_off(base: FolderBase) -> None:
    made = Completed(base)
    assert made.feed(encode_record(folder("usr"))[:-1]) == b""
    with pytest.raises(ProtocolError):
        made.finish()
    with pytest.raises(ProtocolError):
        Completed(base).feed(b"\xff\xff\xff\xff")
