"""R-05 and R-06: a holder that runs out of descriptors, and two hundred sandboxes at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from hostile_kit import Target, runtime

from sloplet import AsyncSandbox
from sloplet.errors import SlopletError
from sloplet.portal import portal
from sloplet.testing.leaks import settled, snapshot

COUNT = int(os.environ.get("SLOPLET_HOSTILE_COUNT", "200"))

FEW_DESCRIPTORS = """
import resource, sys
sys.path[:0] = sys.argv[2:]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from sloplet import Sandbox
from sloplet.errors import SlopletError

boxes, refused = [], None
while refused is None and len(boxes) < 60:
    box = Sandbox(engine=sys.argv[1])
    try:
        box.start()
        boxes.append(box)
    except SlopletError as error:
        refused = error
print("refused", type(refused).__name__, len(boxes) > 3, flush=True)
print("others", all(box.run("echo alive").stdout == "alive\\n" for box in boxes[:3]), flush=True)
for box in boxes[1:]:
    box.kill()
with Sandbox(engine=sys.argv[1]) as again:
    print("recovered", again.run("echo alive").stdout.strip(), flush=True)
boxes[0].kill()
"""


def test_r05_few_descriptors(target: Target) -> None:
    """ulimit -n 64: a typed error, the others live on, and it recovers by itself."""
    if target.facts is not None:
        pytest.skip("the holder is another process")
    command = [sys.executable, "-c", FEW_DESCRIPTORS, target.name, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines["refused"].split()[0] in (
        "StartFailed",
        "StateUnwritable",
        "StateBusy",
        "StateError",
        "EngineUnavailable",
    )
    assert lines["refused"].endswith("True")
    assert lines["others"] == "True"
    assert lines["recovered"] == "alive"


async def _one(name: str, number: int) -> str:
    box = AsyncSandbox(engine=name)
    try:
        await box.start()
        if number % 7 == 0:
            return "killed at once"
        result = await box.run(f"echo {number}")
        assert result.stdout == f"{number}\n"
        return "used"
    except SlopletError as error:
        return f"refused: {type(error).__name__}"
    finally:
        await box.kill()


@pytest.mark.timeout(180)
def test_r06_two_hundred_at_once(target: Target) -> None:
    """All end, or fail cleanly; nothing is left."""
    home = runtime().home.path

    async def all_of_them(count: int) -> list[str]:
        return await asyncio.gather(*(_one(target.name, number) for number in range(count)))

    with target.in_use():
        portal().call(all_of_them(3))  # what is made once per process is no leak
        before = snapshot(home)
        outcomes = portal().call(all_of_them(COUNT))
    assert len(outcomes) == COUNT
    assert outcomes.count("used") > COUNT // 2, set(outcomes)
    assert settled(before, home, within=15) == []
