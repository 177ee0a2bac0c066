"""L: warm pools with real engines: one each, never of an image that was replaced, gone with the program.

What does not depend on an engine (bounds, cancellation, templates, names) is in tests/unit/test_pools.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hostile_kit import eventually, runtime
from live_kit import Traces, call, folder_of_its_own

from sloplet import Sandbox
from sloplet.engines.agentbin import agent_path
from sloplet.pools import _key
from sloplet.testing import leaks

pytestmark = [pytest.mark.anyone, pytest.mark.usefixtures("gvisor")]


def _full(box: Sandbox) -> None:
    held = runtime()
    eventually(lambda: held.pools.count(box.spec) == box.spec.pool, 30, "the pool is not filled")


def _give_up(box: Sandbox) -> None:
    """As when nobody has claimed from it for long."""
    held = runtime()

    async def now() -> None:
        held.pools._give_up(_key(box.spec))

    _full(box)
    call(now())


def _started(**settings: Any) -> Sandbox:
    box = Sandbox(**settings)
    box.start()
    return box


def test_one_each_and_itself() -> None:
    """Each claimed one has an id, a host name and random numbers of its own, and answers at once."""
    _started(engine="gvisor").kill()  # what is made once is there
    before = Traces()
    first = _started(engine="gvisor", pool=2)
    boxes = [first]
    try:
        _full(first)
        began = time.monotonic()
        boxes.append(_started(engine="gvisor", pool=2))
        assert boxes[-1].run("echo hello").stdout == "hello\n"
        assert time.monotonic() - began < 2, "it was started, not claimed"
        with ThreadPoolExecutor(4) as pool:
            boxes += pool.map(lambda _: _started(engine="gvisor", pool=2), range(4))
        said = [
            box.run("hostname; head -c 16 /dev/urandom | od -x; cat /run/sloplet/generation").stdout for box in boxes
        ]
        assert len(set(said)) == len(boxes) == len({box.id for box in boxes})
        assert [text.split()[0] for text in said] == [box.id for box in boxes]
    finally:
        for box in boxes:
            box.kill()
        _give_up(first)
    assert before.left() == []


def _tar(path: Path, word: str) -> None:
    """A root file system: a program, and a word that tells it from another."""
    root = path.parent / "root"
    for name in ("bin", "tmp", "etc"):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(agent_path(), root / "bin/sh")
    (root / "word").write_text(word)
    with tarfile.open(path.with_suffix(".new"), "w") as tar:
        tar.add(root, ".")
    os.replace(path.with_suffix(".new"), path)


def test_an_image_that_was_replaced(tmp_path: Path) -> None:
    image = tmp_path / "image.tar"
    _tar(image, "old")
    settings = {"engine": "gvisor", "image": str(image), "pool": 1}
    boxes = [_started(**settings)]
    try:
        _full(boxes[0])
        assert boxes[0].files.read_text("/word") == "old"
        _tar(image, "new")
        for _ in range(2):
            boxes.append(_started(**settings))
            assert boxes[-1].files.read_text("/word") == "new"
            _full(boxes[0])
    finally:
        for box in boxes:
            box.kill()
        _give_up(boxes[0])


PROGRAM = """
import os, sys, time
from sloplet import Sandbox
made = Sandbox(engine="gvisor", pool=2)
made.start()
from sloplet.portal import portal
from sloplet.runtime import embedded_runtime
runtime = portal().call(embedded_runtime())
until = time.monotonic() + 30
while runtime.pools.count(made.spec) < int(sys.argv[2]) and time.monotonic() < until:
    time.sleep(0.01)
print("ready", flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
"""


def _descendants() -> set[int]:
    leaks.bury_orphans()
    return leaks.descendants()


@pytest.mark.parametrize(("how", "ready"), [("exit", 2), ("exit", 0), ("kill", 1)])
def test_nothing_is_left_of_it(how: str, ready: int) -> None:
    """After the program has ended, or was killed and the next one has cleaned up; also with one just being made."""
    with folder_of_its_own() as folder, leaks.adopted_orphans():
        eventually(lambda: not _descendants(), 20, "the tests before have not ended")
        before = Traces(folder / "none", bury=True)
        env = {**os.environ, "SLOPLET_HOME": str(folder / "home")}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how, str(ready)], env=env, capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.returncode) == ("ready\n", -9 if how == "kill" else 0), done.stderr
        if how == "kill":
            subprocess.run([sys.executable, "-m", "sloplet.cli", "gc"], env=env, check=True, capture_output=True)
        assert before.left() == []
        assert list((folder / "home/sandboxes").glob("*/*")) == []
