"""Folders that are watched."""

from __future__ import annotations

import pytest
from e2b.exceptions import SandboxException

from e2b import FilesystemEventType, NotFoundException, Sandbox

CREATE, WRITE, CHMOD = FilesystemEventType.CREATE, FilesystemEventType.WRITE, FilesystemEventType.CHMOD


def seen(handle: object) -> list[tuple[str, FilesystemEventType]]:
    return [(event.name, event.type) for event in handle.get_new_events()]  # type: ignore[attr-defined]


def test_a_new_file_is_three_events_at_once(shared: Sandbox, word: str) -> None:
    shared.files.make_dir(word)
    handle = shared.files.watch_dir(word)
    shared.files.write(f"{word}/new", "x")
    assert seen(handle) == [("new", CREATE), ("new", CHMOD), ("new", WRITE)]
    assert seen(handle) == []
    shared.files.write(f"{word}/new", "y")
    assert ("new", WRITE) in seen(handle)
    handle.stop()


def test_renames_and_removals(shared: Sandbox, word: str) -> None:
    shared.files.write(f"{word}/old", "x")
    handle = shared.files.watch_dir(word)
    shared.files.rename(f"{word}/old", f"{word}/new")
    assert seen(handle) == [("old", FilesystemEventType.RENAME), ("new", CREATE)]
    shared.commands.run(f"rm {word}/new")
    assert seen(handle) == [("new", FilesystemEventType.REMOVE)]
    handle.stop()


def test_everything_below(shared: Sandbox, word: str) -> None:
    shared.files.make_dir(f"{word}/there")
    handle = shared.files.watch_dir(word, recursive=True)
    shared.files.write(f"{word}/there/file", "x")
    assert seen(handle) == [("there/file", CREATE), ("there/file", CHMOD), ("there/file", WRITE)]
    shared.files.make_dir(f"{word}/nested")
    shared.files.write(f"{word}/nested/file", "x")
    found = seen(handle)
    assert ("nested", CREATE) in found
    assert ("nested/file", WRITE) in found
    handle.stop()


def test_what_cannot_be_watched(shared: Sandbox) -> None:
    with pytest.raises(NotFoundException):
        shared.files.watch_dir("nothing-here")
    shared.files.write("no-folder", "x")
    with pytest.raises(SandboxException):
        shared.files.watch_dir("no-folder")
