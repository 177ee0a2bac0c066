"""What a sandbox tells against an image: every difference, nothing else, whatever is told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from changes_helpers import (
    Link,
    Tree,
    TreeFiles,
    build,
    decode_listing,
    differences,
    edited,
    encoded,
    grown,
    listed,
    record,
    told,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sloplet.changes import read
from sloplet.changes.base import FolderBase
from sloplet.changes.compare import compare
from sloplet.changes.read import Collector
from sloplet.changes.reading import OldState, sandbox_reader
from sloplet.controller import Change
from sloplet.errors import FileError, ProtocolError
from sloplet.images.host import naming_files
from sloplet.wire.fields import Fields
from sloplet.wire.schema import ChangeFlag, FileType, Tag

pytestmark = pytest.mark.anyone

IMAGE: Tree = {
    "bin": Link("usr/bin"),
    "etc": {"hosts": b"127.0.0.1 image\n", "passwd": b"root:x:0:0::/root:/bin/sh\n", "motd": b"hello\n"},
    "usr": {"bin": {"sh": (b"\x7fELF\0", 0o755)}, "share": {"doc": {"a": b"1\n", "b": b"2\n"}}},
}


def changes(
    old: Tree, new: Tree, records: list[Fields], *, complete: bool = True, before: list[Fields] | None = None,
    before_tree: Tree | None = None, **options: Any,
) -> tuple[Change, ...]:  # fmt: skip
    """``old`` is the image; ``records`` tell of ``new``; ``before``: a snapshot to compare with instead."""
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), old)
        base = FolderBase(folder)
        state = None
        if before is not None:
            read_old = sandbox_reader(TreeFiles(before_tree))
            state = OldState(decode_listing(encoded(before), complete), read_old)
        listing = decode_listing(encoded(records), complete)
        try:
            return asyncio.run(compare(listing, base, sandbox_reader(TreeFiles(new)), state, **options))
        finally:
            base.close()


def short(found: tuple[Change, ...]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(change.path, change.kind, change.what) for change in found]


def image_with(**more: Any) -> Tree:
    return {**IMAGE, **more}


def diff(new: Tree, **options: Any) -> tuple[Change, ...]:
    return changes(IMAGE, new, told(IMAGE, new, lambda: False), **options)


# -- every difference, by definition ---------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(), st.booleans())
def test_differences_from_the_image_are_what_they_are_by_definition(seed: int, complete: bool) -> None:
    dice = random.Random(seed)
    old = grown(dice)
    new = edited(dice, old)
    records = (told if complete else listed)(old, new, lambda: dice.random() < 0.3)
    assert short(changes(old, new, records, complete=complete)) == sorted(differences(old, new))


@settings(max_examples=100, deadline=None)
@given(st.integers(), st.booleans())
def test_differences_from_a_snapshot_are_what_they_are_by_definition(seed: int, complete: bool) -> None:
    dice = random.Random(seed)
    image = grown(dice)
    old = edited(dice, image)
    new = edited(dice, old)
    tell = told if complete else listed
    before, after = (tell(image, tree, lambda: dice.random() < 0.3) for tree in (old, new))
    found = changes(image, new, after, complete=complete, before=before, before_tree=old)
    assert short(found) == sorted(differences(old, new))


# -- what a change says ----------------------------------------------------------------------------


def test_a_change_tells_kind_size_mode_and_text() -> None:
    new = image_with(etc={**IMAGE["etc"], "motd": (b"hello you\n", 0o600)}, new=(b"x", 0o4755))
    motd, added = diff(new)
    assert (motd.path, motd.kind, motd.type, motd.size, motd.mode) == ("/etc/motd", "changed", "file", 10, 0o600)
    assert motd.what == ("content", "mode")
    assert motd.text == "--- a/etc/motd\n+++ b/etc/motd\n@@ -1 +1 @@\n-hello\n+hello you\n"
    assert (added.path, added.mode) == ("/new", 0o4755)
    assert added.text == "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n\\ No newline at end of file\n"


def test_a_removed_file_shows_what_it_said_and_a_removed_folder_is_one_entry_with_its_names() -> None:
    new: Tree = {**IMAGE, "etc": {k: v for k, v in IMAGE["etc"].items() if k != "motd"}, "usr": {"bin": {}}}
    motd, sh, share = diff(new)
    assert motd.text == "--- a/etc/motd\n+++ /dev/null\n@@ -1 +0,0 @@\n-hello\n"
    assert (motd.kind, motd.size) == ("removed", 0)
    assert (sh.path, sh.text, sh.binary) == ("/usr/bin/sh", None, True)
    assert (share.path, share.type, share.below) == ("/usr/share", "dir", ("doc", "doc/a", "doc/b"))


def test_what_is_no_text_or_too_long_is_binary_and_text_can_be_left_out() -> None:
    new = image_with(zeros=b"a\0b", latin=b"\xe9t\xe9", long=b"x\n" * 200_000, empty=b"", folder={})
    found = {change.path: change for change in diff(new)}
    assert [found[path].binary for path in ("/zeros", "/latin", "/long", "/empty", "/folder")] == [True] * 3 + [
        False
    ] * 2
    assert found["/empty"].text == ""
    assert {(change.text, change.binary) for change in diff(new, text=False)} == {(None, False)}


def test_all_text_together_is_bounded() -> None:
    line = b"0123456789abcde\n"
    new = image_with(**{f"f{i:02}": line * 15_000 for i in range(40)})
    found = diff(new)
    shown = [change for change in found if change.text is not None]
    assert 30 <= len(shown) < 40
    assert [change.path for change in shown] == [change.path for change in found][: len(shown)]
    assert all(change.binary for change in found[len(shown) :])


def test_a_file_with_equal_bytes_is_read_and_is_no_change_and_one_of_another_size_is_not_read() -> None:
    new = image_with(usr={**IMAGE["usr"], "bin": {"sh": (b"longer than before", 0o755)}})
    files = TreeFiles(new)
    records = told(IMAGE, new, lambda: True)
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), IMAGE)
        base = FolderBase(folder)
        found = asyncio.run(compare(decode_listing(encoded(records), True), base, sandbox_reader(files), text=False))
        base.close()
    assert short(found) == [("/usr/bin/sh", "changed", ("content",))]
    assert "/usr/bin/sh" not in files.reads
    assert "/etc/motd" in files.reads


def test_an_edit_of_the_same_size_is_found_whatever_its_time_says() -> None:
    new = image_with(etc={**IMAGE["etc"], "motd": b"hullo\n"})
    assert short(diff(new)) == [("/etc/motd", "changed", ("content",))]


def test_a_file_that_cannot_be_read_any_more_is_told_as_changed() -> None:
    records = [record("etc", {}), record("etc/motd", b"other\n")]
    found = changes(IMAGE, {}, records)
    assert [(change.path, change.what, change.binary) for change in found] == [("/etc/motd", ("content",), True)]


def test_owners_are_compared_only_where_they_can_be_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.chmod(tmp_path / "file", 0o644)
    me = (os.getuid(), os.getgid())

    def found(owners: bool, uid: int, gid: int) -> list[tuple[str, ...]]:
        base = FolderBase(tmp_path, owners=owners)
        listing = decode_listing(encoded([record("file", b"x", uid=uid, gid=gid)]), True)
        try:
            return [c.what for c in asyncio.run(compare(listing, base, sandbox_reader(TreeFiles({"file": b"x"}))))]
        finally:
            base.close()

    assert found(True, *me) == []
    assert found(True, me[0] + 1, me[1]) == [("owner",)]
    assert found(True, 65534, 65534) == []
    assert found(False, me[0] + 1, me[1]) == []


# -- what the runtime makes is no change -------------------------------------------------------------


def test_what_the_runtime_makes_is_no_change() -> None:
    made = {file.path.rpartition("/")[2]: file.content for file in naming_files("box-1")}
    agent = b"agent:x:1000:1000::/home/agent:/bin/sh\n"
    etc = {**IMAGE["etc"], **made, "passwd": IMAGE["etc"]["passwd"] + agent, "group": b"agent:x:1000:\n"}
    new = image_with(
        etc=etc, run={"sloplet": {"generation": b"1 x\n"}}, proc={"x": b""}, dev={"y": b""}, tmp={}, home={"agent": {}},
        srv={"deep": {"work": {}}},
    )  # fmt: skip
    assert short(diff(new, folders=["/srv/deep/work"])) == []
    assert ("/srv/deep/work", "added", ()) in short(diff(new))


def test_what_users_do_to_the_runtimes_files_is_a_change() -> None:
    agent = b"agent:x:1000:1000::/home/agent:/bin/sh\n"
    passwd = IMAGE["etc"]["passwd"] + agent + b"bob:x:1001:1001::/home/bob:/bin/sh\n"
    new = image_with(etc={**IMAGE["etc"], "hosts": b"10.0.0.1 evil\n", "hostname": b"two words\n", "passwd": passwd})
    found = {change.path: change for change in diff(new)}
    assert set(found) == {"/etc/hosts", "/etc/hostname", "/etc/passwd"}
    text = found["/etc/passwd"].text
    assert text is not None
    assert [line for line in text.splitlines() if line.startswith(("+", "-"))][2:] == [
        "+bob:x:1001:1001::/home/bob:/bin/sh"
    ]
    new = image_with(etc={**IMAGE["etc"], "passwd": (IMAGE["etc"]["passwd"] + agent, 0o666)})
    assert short(diff(new)) == [("/etc/passwd", "changed", ("mode",))]


# -- lies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [b"..", b"a/../b", b"/etc/passwd", b"a//b", b"a/", b"./a", b"a\0b", b"x" * 256, b"a/" + b"y" * 256]
)
def test_names_that_are_none_are_refused(name: bytes) -> None:
    with pytest.raises(ProtocolError):
        Collector(True).add(record(name, b""))
    with pytest.raises(ProtocolError):
        Collector(False).add(record("folder", {}).add(Tag.ENTRY, name))
    Collector(True).add(record(b"a/b", b""))
    Collector(True).add(record(b"...", b""))


@pytest.mark.parametrize(
    "fields",
    [
        record("a", b"", type=9),
        record("a", b"", type=-1),
        record("a", b"", size=-1),
        record("a", b"", size=2**63 - 1),
        record(".", b"", type=FileType.FILE),
        record(".", None),
        Fields((Tag.NAME, b"a")),
        Fields((Tag.TYPE, 0)),
        Fields((Tag.OFFSET, 0), (Tag.BODY, b"x")),
        record("a", b"").add(Tag.ENTRY, b"x"),
        record("a", b"").add(Tag.FLAGS, int(ChangeFlag.HARD_LINK)),
        record("a", b"").add(Tag.FLAGS, int(ChangeFlag.HARD_LINK)).add(Tag.PATH2, b"../x"),
    ],
)
def test_records_that_make_no_sense_are_refused(fields: Fields) -> None:
    with pytest.raises(ProtocolError):
        Collector(False).add(fields)


def test_more_than_can_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "MAX_ENTRIES", 100)
    for complete in (True, False):
        collector = Collector(complete)
        for _ in range(100):
            collector.add(record("same", b""))
        with pytest.raises(FileError, match="more files"):
            collector.add(record("same", b""))
    collector = Collector(False)
    for number in range(5):
        collector.add(record(f"d{number}", {}))
    with pytest.raises(FileError, match="more files"):
        collector.add(record("d", dict.fromkeys((f"n{i}" for i in range(100)), b""), entries=True))


def test_a_file_that_is_longer_or_shorter_than_told_does_no_harm() -> None:
    for real in (b"", b"hell", b"hello\nand more"):
        records = [record("etc", {}), record("etc/motd", b"", size=6), record("new", b"", size=3)]
        found = changes(IMAGE, {"etc": {"motd": real}, "new": real}, records)
        assert short(found) == [("/etc/motd", "changed", ("content",)), ("/new", "added", ())]


def test_an_endless_file_is_read_no_further_than_told() -> None:
    given_out = 0

    async def endless() -> Any:
        nonlocal given_out
        while True:
            given_out += 1
            yield b"hello\n"

    files = TreeFiles()
    files.answers["/etc/motd"] = endless
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), IMAGE)
        base = FolderBase(folder)
        listing = decode_listing(encoded([record("etc", {}), record("etc/motd", b"hello\n")]), True)
        found = asyncio.run(compare(listing, base, sandbox_reader(files)))
        base.close()
    assert short(found) == [("/etc/motd", "changed", ("content",))]
    assert given_out < 10


def test_no_more_is_read_than_was_asked_for() -> None:
    async def read() -> bytes:
        files = TreeFiles()
        files.answers["/f"] = pieces
        return b"".join([piece async for piece in sandbox_reader(files)("/f", 7)])

    async def pieces() -> Any:
        for _ in range(5):
            yield b"12345"

    assert asyncio.run(read()) == b"1234512"


def test_files_below_files_and_below_what_is_gone_are_not_believed() -> None:
    records = [
        record("a", b"x"),
        record("a/b", b"y"),
        record("usr", None),
        record("usr/bin", {}),
        record("usr/bin/x", b""),
    ]
    assert short(changes(IMAGE, {"a": b"x"}, records)) == [("/a", "added", ()), ("/usr", "removed", ())]


def test_a_very_deep_tree_needs_no_deep_stack() -> None:
    path = "/".join(["d"] * 2000)
    records = [record("/".join(["d"] * depth), {}) for depth in range(1, 2001)] + [record(f"{path}/f", b"x")]
    found = changes({}, {}, records)
    assert len(found) == 2001
    assert found[-1].path == f"/{path}/f"


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_listing_or_a_protocol_error(data: bytes) -> None:
    for complete in (True, False):
        try:
            decode_listing([data], complete)
        except ProtocolError:
            pass


def test_changes_survive_the_way_through_the_keeper() -> None:
    found = diff(image_with(**{"caf\udce9": b"x"}))
    again = [Change.from_dict(json.loads(json.dumps(change.to_dict()))) for change in found]
    assert [dataclasses.astuple(change) for change in again] == [dataclasses.astuple(change) for change in found]
