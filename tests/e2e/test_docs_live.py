"""docs/live.md from top to bottom: its commands and its Python are run in order, and what it shows is what comes."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_helpers import SLOPLET, gvisor_environment

pytestmark = pytest.mark.anyone

PAGE = Path(__file__).resolve().parents[2] / "docs" / "live.md"
_BLOCK = re.compile(r"^(?P<comment><!--[^\n]*-->\n)?```(?P<kind>sh|console|python)\n(?P<text>.*?)^```", re.M | re.S)
_NOT_HERE = "it is for inside a sandbox"
_LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

#: Executes programs that come as lines of JSON, all in one namespace, and answers each.
_PYTHON = """
import json, sys, traceback
names = {}
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    try:
        exec(compile(json.loads(line), "docs/live.md", "exec"), names)
        said = ""
    except BaseException:
        said = traceback.format_exc()
    print(json.dumps(said), file=answers, flush=True)
"""


class Step(NamedTuple):
    kind: str
    text: str
    expected: str = ""


def steps() -> list[Step]:
    """Blocks of shell, commands of sessions with their output, and blocks of Python."""
    found = []
    for block in _BLOCK.finditer(PAGE.read_text()):
        if block["kind"] != "console":
            if _NOT_HERE not in (block["comment"] or ""):
                found.append(Step(block["kind"], block["text"]))
            continue
        for part in re.split(r"^\$ ", block["text"], flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            found.append(Step("console", command, output))
    return found


class Reader:
    """Someone who does what the page says."""

    def __init__(self, folder: Path) -> None:
        (folder / "bin").mkdir()
        (folder / "bin" / "sloplet").write_text(f'#!/bin/sh\nexec {" ".join(SLOPLET)} "$@"\n')
        (folder / "bin" / "sloplet").chmod(0o755)
        (folder / "here").mkdir()
        self.here = folder / "here"
        self.environment = {
            **os.environ,
            **gvisor_environment(),
            "SLOPLET_HOME": str(folder / "home"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }
        self.python = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _PYTHON], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=self.here, env=self.environment,
        )  # fmt: skip

    def shell(self, text: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", text], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, cwd=self.here, env=self.environment, timeout=90,
        )  # fmt: skip
        return done.returncode, done.stdout

    def execute(self, text: str) -> str:
        assert self.python.stdin is not None
        assert self.python.stdout is not None
        self.python.stdin.write(json.dumps(text) + "\n")
        self.python.stdin.flush()
        answer: str = json.loads(self.python.stdout.readline())
        return answer

    def wait_for_checkpoint(self, name: str) -> None:
        """Until one was made that began after now: on a busy machine that takes longer than the page suggests."""
        now = time.time()
        until = time.monotonic() + 60
        while json.loads(self.shell(f"sloplet info {name} --json")[1])["saved_at"] < now:
            assert time.monotonic() < until, "no checkpoint was made"

    def leave(self) -> None:
        assert self.python.stdin is not None
        assert self.python.stdout is not None
        self.python.stdin.close()
        self.python.wait(60)
        self.python.stdout.close()
        assert self.shell("sloplet rm --all --force")[0] == 0


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    try:
        yield made
    finally:
        made.leave()


def test_the_page_has_what_is_run() -> None:
    found = steps()
    kinds = [step.kind for step in found]
    assert kinds.count("console") >= 25
    assert kinds.count("python") >= 8
    verbs = {verb for step in found for verb in re.findall(r"\bsloplet (\w+)", step.text)}
    assert verbs >= {
        "snapshot",
        "snapshots",
        "fork",
        "rollback",
        "pause",
        "undo",
        "diff",
        "apply",
        "template",
        "export",
        "import",
    }


@pytest.mark.timeout(240)
def test_the_page(reader: Reader) -> None:
    checker = doctest.OutputChecker()
    for step in steps():
        if step.kind == "python":
            assert reader.execute(step.text) == "", step.text
            continue
        if step.text.startswith("kill -9"):
            reader.wait_for_checkpoint("safe")
        code, printed = reader.shell(step.text)
        if step.kind == "sh":
            assert (code, printed) == (0, ""), step.text
        else:
            shown = f"$ {step.text}\n--- the page says\n{step.expected}--- it prints\n{printed}"
            assert checker.check_output(step.expected, printed, _LIKE), shown


def test_the_example(reader: Reader) -> None:
    """Five copies try five fixes; one passes, and comes out."""
    example = PAGE.parents[1] / "examples" / "live_fork.py"
    code, printed = reader.shell(f"{sys.executable} -W error {example}")
    assert code == 0, printed
    lines = printed.splitlines()
    assert [line.split("  ")[0] for line in lines if line.endswith(" passed")] == ["(len(values) or 1)"]
    assert len(lines) == 6
    assert (reader.here / "fixed" / "mean.py").read_text().endswith("/ (len(values) or 1)\n")


def test_the_show(reader: Reader) -> None:
    """What scripts/try ends with; it checks by itself what it shows."""
    example = PAGE.parents[1] / "examples" / "live_state.py"
    code, printed = reader.shell(f"{sys.executable} -W error {example}")
    assert code == 0, printed
    assert printed.count("✓") == 7, printed
