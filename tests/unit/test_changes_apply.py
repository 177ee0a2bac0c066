"""Changes brought to a folder of the host, out of a sandbox that lies and into a folder that is full of traps."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from changes_helpers import Link, Tree, TreeFiles, build, content, tree_of
from hypothesis import given, settings
from hypothesis import strategies as st

from sloplet.changes import apply as module
from sloplet.changes.apply import Applied, apply
from sloplet.changes.choose import choose
from sloplet.controller import Change, Diff
from sloplet.errors import FileError, SpecError
from sloplet.fs import remove_tree
from sloplet.transfer.common import opened

pytestmark = pytest.mark.anyone


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A target with a canary beside it, which must be as before afterwards."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "canary").write_text("safe")
    yield tmp_path / "target"
    assert tree_of(tmp_path / "outside") == {"canary": b"safe"}
    assert set(os.listdir(tmp_path)) <= {"outside", "target"}
    assert not list(tmp_path.rglob("*.part"))


def added(path: str, type: str = "file", *, size: int = 100, mode: int = 0o644, **more: Any) -> Change:
    return Change(path, more.pop("kind", "added"), type, size, mode, **more)


def removed(path: str, type: str = "file", *below: str) -> Change:
    return Change(path, "removed", type, below=below)


def all_added(tree: Tree, above: str = "") -> list[Change]:
    found = []
    for name, node in tree.items():
        path = f"{above}/{name}"
        if isinstance(node, dict):
            found += [added(path, "dir", mode=0o755), *all_added(node, path)]
        elif isinstance(node, Link):
            found.append(added(path, "symlink"))
        else:
            found.append(added(path, size=len(content(node)), mode=node[1] if isinstance(node, tuple) else 0o644))
    return found


def bring(
    tree: Tree | TreeFiles, to: Path, paths: str | list[str] = "/", changes: list[Change] | None = None, **options: Any
) -> Applied:
    files = tree if isinstance(tree, TreeFiles) else TreeFiles(tree)
    diff = Diff("image", tuple(all_added(files.tree) if changes is None else changes))
    return asyncio.run(apply(files, diff, [paths] if isinstance(paths, str) else paths, to, **options))


def reasons(done: Applied) -> dict[str, str]:
    return dict(done.skipped)


WORK: Tree = {"workspace": {"a.py": b"a\n", "src": {"b.py": b"b\n", "deep": {"c": b"c"}}}, "etc": {"motd": b"m"}}

# -- where things go -------------------------------------------------------------------------------


def test_the_content_of_a_folder_goes_into_the_target(place: Path) -> None:
    done = bring(WORK, place, "/workspace")
    assert tree_of(place) == WORK["workspace"]
    assert done == Applied(written=("a.py", "src", "src/b.py", "src/deep", "src/deep/c"))


def test_a_file_goes_into_the_target_under_its_own_name(place: Path) -> None:
    bring(WORK, place, "/workspace/src/b.py")
    assert tree_of(place) == {"b.py": b"b\n"}


def test_several_paths_go_each_likewise_and_everything_keeps_its_place(place: Path) -> None:
    bring(WORK, place / "few", ["/workspace/a.py", "/workspace/src/", "/etc/motd"])
    assert tree_of(place / "few") == {"a.py": b"a\n", "b.py": b"b\n", "deep": {"c": b"c"}, "motd": b"m"}
    bring(WORK, place / "all", "/")
    assert tree_of(place / "all") == WORK


def test_folders_that_did_not_change_are_made_where_missing(place: Path) -> None:
    bring(WORK, place, "/workspace", [added("/workspace/src/deep/c", kind="changed", what=("content",))])
    assert tree_of(place) == {"src": {"deep": {"c": b"c"}}}


@pytest.mark.parametrize("paths", [[], ["workspace"], [""], ["./a"], ["/a/../b"], ["/./a"], ["/a\0"], [7], [b"/a"]])
def test_paths_that_make_no_sense_are_refused_before_anything_is_made(place: Path, paths: list[Any]) -> None:
    with pytest.raises(SpecError):
        bring(WORK, place, paths)
    assert not place.exists()


def test_a_path_without_changes_is_told(place: Path) -> None:
    assert bring(WORK, place, ["/nothing", "/etc/motd"]) == Applied(
        ("motd",), (), (("/nothing", "nothing has changed there"),)
    )


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"x": {"f": b"1"}, "y": {"f": b"2"}}, ["/x", "/y"]),
        ({"x": {"f": b"1"}, "y": {"f": b"2"}}, ["/x/f", "/y/f"]),
        ({"x": {"f": b"1"}, "y": {"f": {"g": b"2"}}}, ["/x", "/y"]),
        ({"x": {"f": Link("g")}, "y": {"f": {"g": b"2"}}}, ["/y", "/x"]),
    ],
)
def test_two_sources_for_one_place_are_refused_before_anything_is_made(
    place: Path, tree: Tree, paths: list[str]
) -> None:
    with pytest.raises(SpecError, match="both go to"):
        bring(tree, place, paths)
    assert not place.exists()


def test_one_source_chosen_twice_and_folders_of_one_name_are_no_conflict(place: Path) -> None:
    bring({"x": {"d": {"f": b"1"}}, "y": {"d": {"g": b"2"}}}, place, ["/x", "/y", "/x/d"])
    assert tree_of(place) == {"d": {"f": b"1", "g": b"2"}, "f": b"1"}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab/."), min_size=1, max_size=8), min_size=1, max_size=6))
def test_no_place_ever_leaves_the_target(paths: list[str]) -> None:
    changes = [added("/" + path) for path in paths]
    try:
        chosen, _ = choose(changes, ["/"])
    except SpecError:
        return
    for one in chosen:
        assert not {"", ".", ".."} & set(one.place.split("/"))


# -- modes, contents -------------------------------------------------------------------------------


def test_modes_are_kept_without_setuid_and_under_the_umask(place: Path) -> None:
    tree: Tree = {"su": (b"#!", 0o6755), "wide": (b"", 0o666), "none": (b"x", 0o000)}
    folder = added("/sticky", "dir", mode=0o3777)
    before = os.umask(0o027)
    try:
        bring({**tree, "sticky": {}}, place, "/", [*all_added(tree), folder])
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE(os.lstat(place / name).st_mode) for name in ("su", "wide", "none", "sticky")}
    assert modes == {"su": 0o750, "wide": 0o640, "none": 0o000, "sticky": 0o750}


def test_a_folder_whose_mode_changed_gets_it_and_stays_ours(place: Path) -> None:
    (place / "d").mkdir(parents=True)
    (place / "d").chmod(0o755)
    done = bring({"d": {}}, place, "/", [added("/d", "dir", mode=0o4500, kind="changed", what=("mode",))])
    assert stat.S_IMODE(os.stat(place / "d").st_mode) == 0o700
    assert done.written == ("d",)


def test_what_is_the_same_already_is_not_written_again(place: Path) -> None:
    tree: Tree = {"same": b"1", "other": b"2", "mode": (b"3", 0o755), "link": Link("same")}
    bring({**tree, "other": b"x", "mode": b"3"}, place)
    before = {name: os.lstat(place / name).st_ino for name in tree}
    assert bring(tree, place).written == ("mode", "other")
    assert os.lstat(place / "same").st_ino == before["same"]
    assert os.lstat(place / "link").st_ino == before["link"]
    assert tree_of(place) == {"same": b"1", "other": b"2", "mode": b"3", "link": "same"}


def test_a_file_is_taken_as_it_is_now(place: Path) -> None:
    bring({"f": b"much longer than told"}, place, "/", [added("/f", size=3)])
    assert tree_of(place) == {"f": b"much longer than told"}


def test_what_vanished_or_turned_into_something_else_is_left_out_and_the_rest_comes(place: Path) -> None:
    tree: Tree = {"folder": {}, "file": b"x", "good": b"y"}
    changes = [added("/gone"), added("/folder"), added("/file", "symlink"), added("/good")]
    done = bring(tree, place, "/", changes)
    assert set(reasons(done)) == {"gone", "folder", "file"}
    assert tree_of(place) == {"good": b"y"}


def endless() -> Callable[[], AsyncIterator[bytes]]:
    async def stream() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    return stream


def test_a_file_that_does_not_end_is_left_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROWTH", 10**6)
    files = TreeFiles({"good": b"y"})
    files.answers["/endless"] = endless()
    done = bring(files, place, "/", [added("/endless", size=10), added("/good")])
    assert "grows" in reasons(done)["endless"]
    assert tree_of(place) == {"good": b"y"}


def test_all_together_is_bounded_and_a_huge_announced_size_reserves_nothing(place: Path) -> None:
    files = TreeFiles({"small": b"y"})
    assert bring(files, place, "/", [added("/small", size=2**62)]).written == ("small",)
    files.answers["/endless"] = endless()
    with pytest.raises(FileError, match="larger than"):
        bring(files, place, "/", [added("/endless", size=2**62)], max_bytes=10**6)
    assert tree_of(place) == {"small": b"y"}


# -- links -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["/etc/passwd", "../outside", "a/../../outside", "..", "/", "", "d/../../outside/canary", "x" * 5000]
)
def test_links_that_lead_out_are_left_out(place: Path, text: str) -> None:
    done = bring({"bad": Link(text), "good": Link("d/f"), "d": {"f": b"x", "up": Link("../good")}}, place)
    assert "leads out" in reasons(done)["bad"]
    assert tree_of(place) == {"good": "d/f", "d": {"f": b"x", "up": "../good"}}


def test_links_in_the_target_are_never_followed(place: Path) -> None:
    outside = place.parent / "outside"
    build_target(
        place, {"dir": Link("../outside"), "file": Link("../outside/canary"), "dangling": Link("../outside/x")}
    )
    tree: Tree = {"dir": {"canary": b"evil", "new": b"evil"}, "file": b"mine", "dangling": b"mine"}
    done = bring(tree, place)
    assert set(reasons(done)) == {"dir", "dir/canary", "dir/new"}
    assert tree_of(place) == {"dir": "../outside", "file": b"mine", "dangling": b"mine"}
    assert os.listdir(outside) == ["canary"]


def test_a_target_that_is_a_link_itself_is_what_the_caller_named(place: Path) -> None:
    real = place / "real"
    real.mkdir(parents=True)
    (place / "link").symlink_to("real")
    bring({"f": b"x"}, place / "link")
    assert tree_of(real) == {"f": b"x"}


def build_target(place: Path, tree: Tree) -> None:
    place.mkdir()
    build(place, tree)


def test_a_folder_that_turns_into_a_link_meanwhile_is_not_followed(place: Path) -> None:
    build_target(place, {"d": {}})
    swapped = []

    async def swap() -> AsyncIterator[bytes]:
        if not swapped:
            swapped.append(True)
            os.rename(place / "d", place / "moved")
            (place / "d").symlink_to(place.parent / "outside")
        yield b"evil"

    files = TreeFiles({"d": {}})
    files.answers = {"/d/one": swap, "/d/two": swap}
    bring(files, place, "/", [added("/d/one"), added("/d/two")])
    assert swapped
    assert set(os.listdir(place)) == {"d", "moved"}


# -- what is in the way ------------------------------------------------------------------------------


def test_files_replace_files_links_and_empty_folders_only(place: Path) -> None:
    build_target(place, {"file": b"old", "link": Link("file"), "empty": {}, "full": {"x": b"x"}})
    os.mkfifo(place / "pipe")
    done = bring(dict.fromkeys(("file", "link", "empty", "full", "pipe"), b"new"), place)
    assert set(reasons(done)) == {"full", "pipe"}
    assert "not empty" in reasons(done)["full"]
    assert tree_of(place) == {"file": b"new", "link": b"new", "empty": b"new", "full": {"x": b"x"}, "pipe": None}


def test_a_folder_replaces_a_file_only_where_that_was_replaced_inside_and_delete_is_asked_for(place: Path) -> None:
    build_target(place, {"a": b"old"})
    turned = added("/a", "dir", kind="changed", what=("type",))
    assert set(reasons(bring({"a": {}}, place, "/", [turned]))) == {"a"}
    assert set(reasons(bring({"a": {}}, place, "/", [added("/a", "dir")], delete=True))) == {"a"}
    assert tree_of(place) == {"a": b"old"}
    bring({"a": {"b": b"x"}}, place, "/", [turned, added("/a/b")], delete=True)
    assert tree_of(place) == {"a": {"b": b"x"}}


def test_special_files_are_left_out(place: Path) -> None:
    done = bring({}, place, "/", [added("/pipe", "other"), added("/d/socket", "other")])
    assert set(reasons(done)) == {"pipe", "d/socket"}
    assert tree_of(place) == {}


def test_a_target_that_is_no_folder_is_an_error(place: Path) -> None:
    place.write_text("file")
    with pytest.raises(FileError):
        bring({"f": b"x"}, place)
    with pytest.raises(SpecError):
        asyncio.run(apply(TreeFiles(), Diff("image", ()), ["/"], ""))


def test_a_very_deep_place_needs_no_deep_stack(place: Path) -> None:
    tree: Tree = {"f": b"x"}
    for _ in range(1500):
        tree = {"d": tree}
    done = bring(tree, place, "/", [added("/" + "d/" * 1500 + "f")])
    assert len(done.written) == 1
    with opened(str(place), os.O_RDONLY) as fd:
        assert remove_tree(fd, "d") == 1501


# -- removals --------------------------------------------------------------------------------------


def test_removals_happen_only_when_asked_for(place: Path) -> None:
    build_target(place, {"gone": b"x", "stays": b"y"})
    changes = [removed("/gone"), removed("/never-there")]
    done = bring({}, place, "/", changes)
    assert set(reasons(done)) == {"gone"}
    assert bring({}, place, "/", changes, delete=True) == Applied(removed=("gone",))
    assert tree_of(place) == {"stays": b"y"}


def test_a_removed_folder_takes_what_was_in_it_and_keeps_what_was_not(place: Path) -> None:
    target: Tree = {"one": {"a": b"1", "sub": {"b": b"2"}}, "two": {"a": b"1", "mine": b"3"}, "link": Link("one")}
    build_target(place, target)
    changes = [removed("/one", "dir", "a", "sub", "sub/b"), removed("/two", "dir", "a"), removed("/link", "symlink")]
    done = bring({}, place, "/", changes, delete=True)
    assert done.removed == ("link", "one")
    assert "other files" in reasons(done)["two"]
    assert tree_of(place) == {"two": {"mine": b"3"}}


def test_of_a_removed_folder_that_was_named_the_content_goes(place: Path) -> None:
    build_target(place, {"a": b"1", "mine": b"2"})
    assert bring({}, place, "/docs", [removed("/docs", "dir", "a", "b")], delete=True).removed == ("a",)
    assert tree_of(place) == {"mine": b"2"}


def test_removals_follow_no_link_and_cannot_leave_the_target(place: Path) -> None:
    build_target(place, {"d": Link("../outside"), "e": {"l": Link("../../outside"), "f": b"x"}, "kept": {"f": b"x"}})
    absolute = str(place.parent / "outside/canary")  # never a file of the machine's: who runs this may be root
    names = ("l/canary", "../../outside/canary", "..", absolute, "l", "", "f")
    changes = [
        removed("/d/canary"), removed("/e", "dir", *names), removed("/d", "dir", "canary"), removed("/kept")
    ]  # fmt: skip
    done = bring({}, place, "/", changes, delete=True)
    assert done.removed == ("e",)
    assert tree_of(place) == {"d": "../outside", "kept": {"f": b"x"}}
    assert {"d", "kept"} <= set(reasons(done))
