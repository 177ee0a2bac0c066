"""The verbs of docs/live.md over a controller of records: what they print, what they refuse, what they ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_controller import Records, Said, info

from sloplet.cli.diff import inside, select
from sloplet.cli.fork import child_names
from sloplet.controller import Change
from sloplet.errors import InvalidName

pytestmark = pytest.mark.anyone


def test_snapshot(records: Records, said: Said) -> None:
    assert said("snapshot", "dev", "base")[1].startswith("base (snap0001): live, 1M in ")
    assert said("snapshot", "dev", "-q")[1] == "snap0002\n"
    document = json.loads(said("snapshot", "dev", "--json")[1])
    assert (document["id"], document["parent"], document["kind"]) == ("snap0003", "snap0002", "live")


def test_a_disk_snapshot_says_what_it_is(records: Records, said: Said) -> None:
    assert "disk (files only: the container engine cannot save processes)" in said("snapshot", "box", "base")[1]
    assert "its files are back, and nothing runs" in said("rollback", "box", "base")[1]


@pytest.mark.parametrize(
    "words",
    [
        ("snapshot", "dev", "../x"),
        ("template", "create", "a b", "dev"),
        ("fork", "dev", "--name", "-x-"),
        ("import", __file__, "--name", "x/y"),
    ],
)
def test_bad_names(records: Records, said: Said, words: tuple[str, ...]) -> None:
    code, out, err = said(*words)
    assert (code, out) == (125, "")
    assert "use 1 to 63 letters, digits" in err


@pytest.mark.parametrize(
    "words",
    [("pause",), ("snapshot",), ("fork",), ("rollback", "dev"), ("apply", "dev", "--to", "."), ("apply", "dev", "x"),
     ("export", "dev"), ("import",), ("template", "create", "x"), ("snapshots", "rm", "dev"),
     ("snapshots", "dev", "extra"), ("fork", "dev", "many"), ("undo", "dev", "x"),
     ("template", "crate", "x"), ("diff", "dev", "--stat", "--name-only")],
)  # fmt: skip
def test_words_that_make_no_sense(records: Records, said: Said, words: tuple[str, ...]) -> None:
    code, out, err = said(*words)
    assert (code, out) == (125, "")
    assert err.startswith("sloplet: ")
    assert err.endswith(")\n"), "an error has a hint"


@pytest.mark.parametrize("verb", ["pause", "resume", "snapshot", "snapshots", "fork", "undo", "diff"])
def test_missing_sandbox(records: Records, said: Said, verb: str) -> None:
    code, out, err = said(verb, "nobody")
    assert (code, out, err) == (125, "", "sloplet: there is no sandbox 'nobody' (see `sloplet ls`)\n")


@pytest.mark.parametrize("words", [("rollback", "dev", "no"), ("fork", "dev", "--snapshot", "no"),
                                   ("diff", "dev", "--against", "no"), ("snapshots", "rm", "dev", "no"),
                                   ("snapshots", "inspect", "dev", "no"), ("template", "rm", "no"),
                                   ("template", "inspect", "no")])  # fmt: skip
def test_missing_snapshot(records: Records, said: Said, words: tuple[str, ...]) -> None:
    code, out, err = said(*words)
    assert (code, out, err) == (125, "", "sloplet: there is no snapshot 'no' (see `sloplet snapshots`)\n")


def test_the_tree(records: Records, said: Said) -> None:
    base = records.add("dev", "base")
    point = records.add("dev", None, base.id, role="undo", note="rm -rf /\x1b[31m")
    left = records.add("dev", "left", base.id)
    right = records.add("dev", "right", point.id)
    records.add("dev", None, left.id)
    records.add("box", "other", kind="disk")
    records.put(records.boxes["id-dev"], head=right.id)
    code, out, err = said("snapshots", "dev")
    assert (code, err) == (0, "")
    rows = [(len(line) - len(line.lstrip(" │├└─")), line.lstrip(" │├└─").split("  ")[0]) for line in out.splitlines()]
    assert rows == [(0, "dev"), (4, "base"), (8, "left"), (12, "snap0005"), (8, "right")]
    assert out.splitlines()[4].endswith("← now")
    assert out.count("← now") == 1
    assert "undo" not in out

    everything = said("snapshots", "dev", "--all")[1]
    assert "undo: before `rm -rf /?[31m`" in everything
    both = said("snapshots")[1]
    assert "disk: files only" in both
    assert "right" in both


def test_the_tree_when_the_head_is_not_shown(records: Records, said: Said) -> None:
    base = records.add("dev", "base")
    point = records.add("dev", None, base.id, role="undo")
    records.put(records.boxes["id-dev"], head=point.id)
    assert "base  snap0001  live  1M  59s ago  ← now" in said("snapshots", "dev")[1]


def test_the_tree_of_a_fork_says_where_it_comes_from(records: Records, said: Said) -> None:
    base = records.add("dev", "base")
    records.boxes["id-dev-1"] = info("dev-1")
    records.add("dev-1", "mine", base.id)
    assert "from base of dev" in said("snapshots")[1]


def test_the_tree_of_circular_records_ends(records: Records, said: Said) -> None:
    records.add("dev", "a", "snap0002")
    records.add("dev", "b", "snap0001")
    code, out, _ = said("snapshots", "dev")
    assert code == 0
    assert " a " in out
    assert " b " in out


def test_snapshots_as_json_and_none(records: Records, said: Said) -> None:
    assert said("snapshots") == (0, "", "no snapshots (make one with `sloplet snapshot NAME`)\n")
    assert "dev has no snapshots (make one with `sloplet snapshot dev`)" in said("snapshots", "dev")[2]
    said("snapshot", "dev", "base")
    said("snapshot", "dev", "next")
    found = json.loads(said("snapshots", "--json")[1])
    assert [(item["name"], item["parent"], item["head"]) for item in found] == [
        ("base", None, False),
        ("next", "snap0001", True),
    ]
    assert json.loads(said("snapshots", "ls", "dev", "--json")[1]) == found


def test_snapshots_rm_and_inspect(records: Records, said: Said) -> None:
    said("snapshot", "dev", "base")
    said("snapshot", "dev", "next")
    code, _, err = said("snapshots", "rm", "dev", "base")
    assert code == 125
    assert "next descends from" in err
    assert "parent:  base" in said("snapshots", "inspect", "dev", "next")[1]
    assert said("snapshots", "rm", "dev", "base", "--force") == (0, "base\n", "")
    assert "parent:  snap0001" in said("snapshots", "inspect", "dev", "next")[1]


def test_fork_names_its_children(records: Records, said: Said) -> None:
    assert said("fork", "dev", "3") == (0, "dev-1\ndev-2\ndev-3\n", "")
    assert said("fork", "dev") == (0, "dev-4\n", "")
    base = records.add("dev", "base")
    assert said("fork", "dev", "2", "--snapshot", "base", "--name", "try")[1] == "try-1\ntry-2\n"
    assert records.asked[-1] == ("fork", "id-dev", 2, ["try-1", "try-2"], base.id)
    assert [item["name"] for item in json.loads(said("fork", "dev", "2", "--json")[1])] == ["dev-5", "dev-6"]


@pytest.mark.parametrize("count", ["0", "-1", "100000"])
def test_fork_of_a_wrong_number(records: Records, said: Said, count: str) -> None:
    code, out, err = said("fork", "dev", count)
    assert (code, out) == (125, "")
    assert err == f"sloplet: fork({count}) is out of range (1 to 1000 copies at a time)\n"
    assert records.asked == []


def test_child_names() -> None:
    assert child_names("a", 3, ["A-1", "a-3", "b-2"]) == ["a-2", "a-4", "a-5"]
    with pytest.raises(InvalidName):
        child_names("x" * 62, 1, [])


def test_rollback_and_undo(records: Records, said: Said) -> None:
    base = records.add("dev", "base")
    assert said("rollback", "dev", "base")[1] == "dev: as it was at base, 59s ago\n"
    assert records.asked == [("rollback", "id-dev", base.id)]
    code, _, err = said("undo", "dev")
    assert code == 125
    assert "create it with --undo N" in err
    records.add("dev", None, role="undo", note="make install")
    records.add("dev", None, role="undo", note="rm -rf src\n\x1b[2J")
    assert said("undo", "dev")[1].startswith("dev: undid `rm -rf src\\n?[2J`, as it was ")
    assert said("undo", "dev", "2")[1].startswith("dev: undid 2 commands, the first of them `make install`")
    for steps in ("0", "-3"):
        assert "a whole number from 1 on" in said("undo", "dev", steps)[2]


CHANGES = (
    Change("/workspace/app.py", "changed", "file", 40, 0o644, ("content",),
           "--- a/workspace/app.py\n+++ b/workspace/app.py\n@@ -1 +1,2 @@\n-old\n+new\n+\ttab\n"),
    Change("/workspace/data.bin", "added", "file", 2048, 0o644, binary=True),
    Change("/workspace/src", "added", "dir", 0, 0o755),
    Change("/workspace/src/x\x1b.py", "added", "file", 3, 0o644, (), "--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+hi\n"),
    Change("/etc/motd", "removed", "file"),
)  # fmt: skip


def test_diff(records: Records, said: Said) -> None:
    assert said("diff", "dev") == (0, "", "no changes since the image\n")
    records.changes = CHANGES
    code, out, err = said("diff", "dev")
    assert (code, err) == (0, "")
    assert "changed /workspace/app.py (40)\n--- a/workspace/app.py\n" in out
    assert "+\ttab\n" in out
    assert "added /workspace/data.bin (2K, binary)\nadded /workspace/src (dir)\n" in out
    assert "\x1b" not in out
    assert out.endswith("removed /etc/motd\n3 added, 1 changed, 1 removed\n")
    assert records.asked[-1] == ("diff", "id-dev", None, True)


def test_diff_in_short(records: Records, said: Said) -> None:
    records.changes = CHANGES
    names = said("diff", "dev", "--name-only")[1].splitlines()
    assert names == [change.path for change in CHANGES]
    assert records.asked[-1] == ("diff", "id-dev", None, False)
    stat = said("diff", "dev", "--stat")[1]
    assert [line.split() for line in stat.splitlines()][1] == [
        "changed",
        "/workspace/app.py",
        "40",
        "+2",
        "-1",
        "content",
    ]
    assert stat.endswith("3 added, 1 changed, 1 removed\n")
    document = json.loads(said("diff", "dev", "src", "--json")[1])
    assert [item["path"] for item in document["changes"]] == ["/workspace/src", "/workspace/src/x\x1b.py"]
    assert document["summary"] == {"added": 2, "changed": 0, "removed": 0}


def test_diff_against_a_snapshot(records: Records, said: Said) -> None:
    base = records.add("dev", "base")
    assert said("diff", "dev", "--against", "base")[2] == "no changes since the snapshot base\n"
    assert records.asked[-1] == ("diff", "id-dev", base.id, True)


@pytest.mark.parametrize(
    ("paths", "count"), [([], 5), (["src"], 2), (["/workspace/"], 4), (["/work"], 0), (["/"], 5), (["./app.py"], 1),
                         (["../etc"], 1)],
)  # fmt: skip
def test_paths_select_what_is_at_or_below(paths: list[str], count: int) -> None:
    assert len(select(CHANGES, [inside(path, "/workspace") for path in paths])) == count


def test_apply_plans_without_touching(records: Records, said: Said, tmp_path: Path) -> None:
    records.changes = CHANGES
    out = said("apply", "dev", "/", "--to", str(tmp_path), "--dry-run")[1]
    assert "would write workspace/app.py\n" in out
    assert "would skip etc/motd: it was removed; --delete removes it\n" in out
    out = said("apply", "dev", "/", "--to", str(tmp_path), "--dry-run", "--delete")[1]
    assert "would remove etc/motd\n" in out
    assert said("apply", "dev", "app.py", "src", "--to", str(tmp_path), "--dry-run")[1] == (
        "would write app.py\nwould write x?.py\n"
    )
    assert "nothing to do" in said("apply", "dev", "none", "--to", str(tmp_path), "--dry-run")[2]
    assert [*tmp_path.iterdir()] == []


def test_templates(records: Records, said: Said) -> None:
    assert "sloplet template create TEMPLATE SANDBOX" in said("template")[2]
    assert said("template", "create", "warm", "dev")[1].startswith("warm (snap0001): live, 1M in ")
    assert [line.split()[0] for line in said("template")[1].splitlines()] == ["NAME", "warm"]
    assert said("template", "ls", "-q")[1] == "warm\n"
    assert json.loads(said("template", "--json")[1])[0]["role"] == "template"
    assert "of:      dev (id-dev)" in said("template", "inspect", "warm")[1]
    assert said("template", "rm", "warm")[1] == "warm\n"
    assert records.saved == []


def test_export_and_import(records: Records, said: Said, tmp_path: Path) -> None:
    target = tmp_path / "dev.sloplet"
    assert said("export", "dev", str(target), "--no-image")[1].startswith(f"{target}: live, 2K in ")
    assert records.asked[-1] == ("export", "id-dev", str(target), False)
    assert said("import", str(target), "--name", "two")[1] == "two\n"
    assert records.asked[-1] == ("load", str(target), "two")
    code, _, err = said("import", str(tmp_path / "none"))
    assert code == 125
    assert "`sloplet export`" in err
