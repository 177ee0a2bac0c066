"""L: `kill -9` of the holder in the middle of snapshot, fork, pause, resume, rollback, template, checkpoint and undo.

At lines that put files, rows and sandboxes in order, and at any time. Afterwards every state that is listed is whole
and a sandbox goes on from it; what slept, sleeps; nothing is left. SLOPLET_SOAK=1: at many more.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_kit import SOAK, Traces, folder_of_its_own

from sloplet.testing import leaks

pytestmark = [pytest.mark.anyone, pytest.mark.usefixtures("gvisor"), pytest.mark.timeout(0 if SOAK else 300)]

PROGRAM = str(Path(__file__).with_name("live_crash.py"))
POINTS = 100 if SOAK else 6  # of each kind


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_of_its_own() as path, leaks.adopted_orphans():
        leaks.bury_orphans()
        before = Traces(path, bury=True)
        yield path
        assert before.left() == []


def _hold(home: Path, at: int, after: float | None = None) -> list[str]:
    """What it said that it had done. It ends by itself, or ``after`` so many seconds from when it was ready."""
    home.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, PROGRAM, "hold", str(home), str(at)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    words: list[str] = []
    for line in process.stdout:
        words.append(line.strip())
        if words == ["ready"] and after is not None:
            timer = threading.Timer(after, process.kill)
            timer.start()
    process.stdout.close()
    assert process.wait(20) == -9, "control: it was killed"
    return words


def _judge(home: Path, done: list[str]) -> list[str]:
    words = [sys.executable, PROGRAM, "judge", str(home), *done]
    judged = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    broken = list(json.loads(judged.stdout)) if judged.returncode == 0 else [judged.stderr[-2000:]]
    shutil.rmtree(home, ignore_errors=True)
    return broken


def test_killed_in_the_middle(folder: Path) -> None:
    whole = _hold(folder / "whole", 0)
    lines = int(whole[-1].removeprefix("count "))
    assert len(whole) == 11, "control: all of it is done when nobody kills it"
    assert lines > 500, "control: the lines are seen"
    assert _judge(folder / "whole", whole[1:-1]) == []
    dice = random.Random(os.urandom(8) if SOAK else 7)
    plan: list[tuple[int, float | None]] = [(dice.randrange(1, lines), None) for _ in range(POINTS)]
    plan += [(0, dice.random() * 3.5) for _ in range(POINTS)]

    def point(number: int) -> tuple[tuple[int, float | None], list[str], list[str]]:
        home = folder / f"home{number}"
        done = [word for word in _hold(home, *plan[number])[1:] if not word.startswith("count")]
        return plan[number], done, _judge(home, done)

    with ThreadPoolExecutor(2) as pool:
        points = list(pool.map(point, range(len(plan))))
    for each in points:
        print(each)
    assert [each for each in points if each[2]] == []
    assert len({tuple(each[1]) for each in points}) > 1, "control: at different moments"
