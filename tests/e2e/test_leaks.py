"""Two hundred sandboxes come and go, holders are killed outright, and everything is as it was before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sloplet import Sandbox
from sloplet.errors import EngineUnavailable
from sloplet.testing.leaks import adopted_orphans, bury_orphans, diff, settled, snapshot

CYCLES = int(os.environ.get("SLOPLET_LEAK_CYCLES", "200"))

HOLDER = """
import sys, time
from sloplet import Sandbox

boxes = [Sandbox(engine=sys.argv[1]) for _ in range(20)]
for box in boxes:
    box.start()
    box.spawn(["sh", "-c", "sleep 1000 & sleep 1000"], detached=True)
    box.files.write("kept", "x" * 100_000)
print("ready", flush=True)
time.sleep(1000)
"""

FORGETFUL = """
import sys
from sloplet import Sandbox

boxes = [Sandbox(engine=sys.argv[1]) for _ in range(5)]
for box in boxes:
    box.run(["true"])
    box.spawn(["sleep", "1000"], detached=True)
"""

AFTERWARDS = """
import sys
from sloplet import Sandbox

with Sandbox(engine=sys.argv[1]) as box:
    assert box.run(["true"]).ok
"""


@pytest.fixture(params=["container", "process"])
def engine(request: pytest.FixtureRequest, home: Path) -> Iterator[str]:
    name: str = request.param
    try:
        with Sandbox(engine=name) as box:  # also warms up: what is made once per process is not a leak
            box.run(["true"])
    except EngineUnavailable as error:
        pytest.skip(str(error))
    with adopted_orphans():
        yield name
        bury_orphans()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SLOPLET_HOME of its own for what this test starts in other processes."""
    path = tmp_path / "home"
    monkeypatch.setenv("SLOPLET_HOME", str(path))
    return path


def _runtime_home() -> Path:
    """Where this process's own runtime keeps its state; it was fixed when the first sandbox was made."""
    from sloplet.portal import portal
    from sloplet.runtime import embedded_runtime

    return portal().call(embedded_runtime()).home.path


@pytest.mark.timeout(300)
def test_cycles_leave_everything_as_before(engine: str) -> None:
    home = _runtime_home()
    _cycle(engine, 0)
    before = snapshot(home)
    for number in range(CYCLES):
        _cycle(engine, number)
    assert settled(before, home) == []


def _cycle(engine: str, number: int) -> None:
    with Sandbox(engine=engine) as box:
        assert box.run("echo $((6 * 7))").stdout == "42\n"
        box.files.write("note", f"cycle {number}")
        if number % 10 == 0:
            assert box.files.read_text("note") == f"cycle {number}"
            box.spawn(["sh", "-c", "sleep 1000 & sleep 1000"], detached=True)


def test_a_sandbox_that_is_killed_leaves_nothing(engine: str) -> None:
    home = _runtime_home()
    before = snapshot(home)
    for _ in range(5):
        box = Sandbox(engine=engine)
        box.start()
        box.spawn(["sleep", "1000"], detached=True)
        box.kill()
    assert settled(before, home) == []


@pytest.mark.timeout(180)
@pytest.mark.parametrize("cleaner", ["new sandbox", "gc"])
def test_a_holder_killed_outright_leaves_nothing(engine: str, home: Path, cleaner: str) -> None:
    clean = [sys.executable, "-c", AFTERWARDS, engine]
    subprocess.run(clean, check=True)  # so that the home is made
    bury_orphans()
    before = snapshot(home)
    with subprocess.Popen([sys.executable, "-c", HOLDER, engine], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        during = snapshot(home)
        assert len(during.records - before.records) == 20, "positive control: the detector sees what is held"
        assert len(during.processes - before.processes) > 20
        holder.send_signal(signal.SIGKILL)
    subprocess.run(clean if cleaner == "new sandbox" else [sys.executable, "-m", "sloplet.cli", "gc"], check=True)
    assert settled(before, home, bury=True) == []


def test_sandboxes_never_closed_end_quietly_with_the_program(engine: str, home: Path) -> None:
    subprocess.run([sys.executable, "-c", AFTERWARDS, engine], check=True)
    before = snapshot(home)
    done = subprocess.run([sys.executable, "-c", FORGETFUL, engine], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert settled(before, home, bury=True) == []


def test_the_detector_sees_a_process_a_file_and_a_descriptor(tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    assert settled(before, tmp_path) == []
    (tmp_path / "left").touch()
    with open(tmp_path / "left", "rb"), subprocess.Popen(["sleep", "100"]) as child:
        found = "\n".join(diff(before, snapshot(tmp_path)))
        child.kill()
    assert "sleep 100" in found
    assert "home: +1 left" in found
    assert "open_files: +1" in found
