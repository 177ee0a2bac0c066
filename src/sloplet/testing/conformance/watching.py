"""Conformance: files.watch()."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ...results import FileChange
from ...sync import Sandbox


def _changes(box: Sandbox, action: Callable[[], object], last: str, recursive: bool = False) -> list[FileChange]:
    """What a watch of ``d`` sees of an action, until the name ``last`` turns up."""
    seen: list[FileChange] = []
    for change in box.files.watch("d", recursive=recursive):
        if change.kind == "ready":
            action()
            continue
        seen.append(change)
        if last in (change.name, change.new_name):
            return seen
    raise AssertionError(f"the watch ended: {seen}")


def _has(seen: list[FileChange], kinds: str, name: str) -> bool:
    return any(change.kind in kinds.split() and name in (change.name, change.new_name) for change in seen)


class TestWatch:
    def test_created_and_modified(self, box: Sandbox) -> None:
        box.files.mkdir("d")
        seen = _changes(box, lambda: box.run("echo 1 > d/new; echo 2 >> d/new; touch d/last"), "last")
        assert _has(seen, "created", "new")
        assert _has(seen, "modified", "new")

    def test_removed(self, box: Sandbox) -> None:
        box.files.write("d/old", "x")
        seen = _changes(box, lambda: box.run("rm d/old; touch d/last"), "last")
        assert _has(seen, "removed", "old")

    def test_renamed(self, box: Sandbox) -> None:
        box.files.write("d/before", "x")
        seen = _changes(box, lambda: box.run("mv d/before d/after; touch d/last"), "last")
        assert FileChange("renamed", "before", "after") in seen

    def test_moved_in_and_out(self, box: Sandbox) -> None:
        box.files.write("d/out", "x")
        box.files.write("in", "x")
        seen = _changes(box, lambda: box.run("mv d/out .; mv in d; touch d/last"), "last")
        assert _has(seen, "removed renamed", "out")
        assert _has(seen, "created renamed", "in")

    def test_written_by_the_api(self, box: Sandbox) -> None:
        box.files.mkdir("d")
        seen = _changes(box, lambda: box.files.write("d/f", "x"), "f")
        assert _has(seen, "created modified renamed", "f")

    def test_written_in_place(self, box: Sandbox) -> None:
        box.files.mkdir("d")
        data = b"x" * 300_000

        def action() -> None:
            box.files.write("d/f", data, in_place=True)
            box.files.write("d/f", data, in_place=True)
            box.files.write("d/last", b"", in_place=True)

        seen = _changes(box, action, "last")
        assert [(change.kind, change.name) for change in seen] == [
            ("created", "f"), ("attributes", "f"), ("modified", "f"),
            ("modified", "f"), ("created", "last"),
        ]  # fmt: skip

    def test_only_folders(self, box: Sandbox) -> None:
        box.files.write("f", "x")
        with pytest.raises(NotADirectoryError):
            list(box.files.watch("f", folder=True))
        with pytest.raises(FileNotFoundError):
            list(box.files.watch("missing", folder=True))
        assert next(iter(box.files.watch(".", folder=True))).kind == "ready"

    def test_attributes(self, box: Sandbox) -> None:
        box.files.write("d/f", "x")
        seen = _changes(box, lambda: (box.files.chmod("d/f", 0o600), box.run("touch d/last")), "last")
        assert _has(seen, "attributes", "f")

    def test_recursive(self, box: Sandbox) -> None:
        box.files.mkdir("d/a/b")
        seen = _changes(box, lambda: box.run("echo > d/a/b/deep; touch d/last"), "last", recursive=True)
        assert _has(seen, "created", "a/b/deep")

    def test_recursive_follows_new_folders(self, box: Sandbox) -> None:
        box.files.mkdir("d")

        def action() -> None:
            box.files.mkdir("d/fresh")
            for number in range(200):  # the watch of a new folder begins a moment after it is made
                box.files.write(f"d/fresh/{number}", "x")

        seen = _changes(box, action, "fresh/199", recursive=True)
        assert _has(seen, "created", "fresh")

    def test_not_recursive(self, box: Sandbox) -> None:
        box.files.mkdir("d/a")
        seen = _changes(box, lambda: box.run("echo > d/a/deep; touch d/last"), "last")
        assert not any("deep" in change.name for change in seen)

    def test_stopping_it_frees_it(self, box: Sandbox) -> None:
        box.files.mkdir("d")
        for _ in range(150):  # more than a user's inotify instances
            for change in box.files.watch("d"):
                assert change.kind == "ready"
                break
        assert box.run("echo fine").ok
