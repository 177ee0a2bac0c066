"""Unified diffs: patch(1) takes them, and no input takes long."""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloplet.changes.text import MAX_TEXT, Effort, as_text, unified

pytestmark = pytest.mark.anyone

_lines = st.lists(st.sampled_from(["a", "b", "c", "", "--- x", "+y", "@@ -1 +1 @@", "\\ No", "\r", "\f"]), max_size=30)
_texts = st.tuples(_lines, st.booleans()).map(lambda drawn: "\n".join(drawn[0]) + ("\n" if drawn[1] else ""))


def patched(old: str, new: str, diff: str) -> str:
    """What a reader of the format makes of ``old``, by this module's own few lines."""
    before = old.split("\n")
    out: list[str] = []
    at, missing_end = 0, not old.endswith("\n") if old else False
    end_of_new = new.endswith("\n")
    lines = diff.split("\n")[2:-1]
    if before and before[-1] == "":
        before.pop()
    i = 0
    while i < len(lines):
        assert lines[i].startswith("@@ -"), lines[i]
        spans = [[*map(int, part[1:].split(","))] for part in lines[i].split(" ")[1:3]]
        (start, count), (new_start, new_count) = ([span[0], span[1] if len(span) > 1 else 1] for span in spans)
        begin = start - 1 if count else start
        out += before[at:begin]
        assert len(out) == (new_start - 1 if new_count else new_start)
        at = begin
        i += 1
        while count or new_count:
            sign, text = lines[i][0], lines[i][1:]
            if sign in " -":
                assert before[at] == text
                at, count = at + 1, count - 1
            if sign in " +":
                out.append(text)
                new_count -= 1
            i += 1
            if i < len(lines) and lines[i].startswith("\\ No newline"):
                assert (sign in " -" and at == len(before) and missing_end) or (sign == "+" and not end_of_new)
                i += 1
    out += before[at:]
    return "\n".join(out) + ("\n" if out and end_of_new else "")


@settings(max_examples=200, deadline=None)
@given(_texts, _texts, st.sampled_from([0, 5, 50, 10**6]))
def test_a_diff_leads_from_the_old_text_to_the_new_one(old: str, new: str, steps: int) -> None:
    diff = unified("/f", old, new, Effort(steps))
    if old == new:
        assert diff == ""
    else:
        assert diff.startswith("--- a/f\n+++ b/f\n@@ -")
        assert patched(old, new, diff) == new


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch(1) here")
def test_patch_takes_them() -> None:
    dice = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "f")
        for _ in range(40):
            old = [dice.choice("abcdef") for _ in range(dice.randrange(1, 40))]
            new = [line for line in old if dice.random() < 0.8] + [dice.choice("xyz")] * dice.randrange(3)
            dice.shuffle(new) if dice.random() < 0.2 else None
            before, after = ("\n".join(text) + dice.choice(["", "\n"]) for text in (old, new))
            diff = unified("/f", before, after)
            if not diff:
                continue
            file.write_text(before)
            done = subprocess.run(["patch", "-s", "-p1", "f"], cwd=folder, input=diff, text=True, capture_output=True)
            assert done.returncode == 0, done.stdout + diff
            assert (file.read_text() if file.exists() else "") == after


def test_a_small_edit_in_a_long_file_is_a_small_diff() -> None:
    lines = [f"line {number}\n" for number in range(10_000)]
    edited = [*lines[:5000], "new\n", *lines[5000:9000], *lines[9001:]]
    assert len(unified("/f", "".join(lines), "".join(edited)).splitlines()) == 2 + 2 * 8


def test_no_text_takes_long() -> None:
    dice = random.Random(3)
    numbers = [f"{number}\n" for number in range(40_000)]
    shuffled = numbers[:]
    dice.shuffle(shuffled)
    cases = [
        ("".join(numbers), "".join(shuffled)),
        ("".join(dice.choice("abcdefghij") + "\n" for _ in range(100_000)),
         "".join(dice.choice("abcdefghij") + "\n" for _ in range(100_000))),
        ("\n" * 200_000, "x" + "\n" * 100_000),
    ]  # fmt: skip
    effort = Effort()
    started = time.process_time()
    for old, new in cases:
        assert unified("/f", old, new, effort)
    assert time.process_time() - started < 5
    assert effort.left < 8_000_000


def test_missing_sides_and_empty_files() -> None:
    assert unified("/f", None, "x\n") == "--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n"
    assert unified("/f", "x\n", None) == "--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    assert unified("/f", None, "") == unified("/f", "", None) == ""


def test_names_cannot_break_out_of_the_header() -> None:
    name = '/a\n+++ b/etc/passwd\t"x"\\\udce9\x1b[31m'
    header = unified(name, "1\n", "2\n").split("@@")[0]
    assert header.count("\n") == 2
    assert header.splitlines()[0] == '--- "a/a\\n+++ b/etc/passwd\\t\\"x\\"\\\\\\351\\033[31m"'
    assert unified("/plain é", "1", "2").startswith("--- a/plain é\n")


def test_what_is_text() -> None:
    assert as_text("é\n".encode()) == "é\n"
    assert as_text(b"") == ""
    assert as_text(b"a" * MAX_TEXT) is not None
    assert as_text(b"a" * (MAX_TEXT + 1)) is as_text(b"a\0") is as_text(b"\xff") is None
