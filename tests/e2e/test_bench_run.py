"""The benchmark itself runs, small, and says what it could not measure."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import SLOPLET, gvisor_environment, sloplet

from sloplet.testing.bench.measures import BrokenRun, must
from sloplet.testing.bench.memory import descendants
from sloplet.testing.bench.run import Plan, run
from sloplet.testing.bench.stats import CURVES
from sloplet.testing.leaks import adopted_orphans

SMALL = {"starts": 2, "slow_starts": 1, "execs": 3, "processes": 1, "sandboxes": 4, "live": 3, "small_files": 1,
         "large_files": 1, "outputs": 1, "output_bytes": 2**22, "warmup": 1, "at_once": 2}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> str:
    from sloplet import Sandbox
    from sloplet.errors import EngineUnavailable

    for name in ("container", "process"):
        try:
            with Sandbox(engine=name):
                return name
        except EngineUnavailable:
            continue
    pytest.skip("neither container nor process runs here")


@pytest.mark.anyone
@pytest.mark.timeout(120)
def test_every_suite_gives_numbers(engine: str) -> None:
    report = run(Plan(engines=(engine,), against=("subprocess",), **SMALL))  # type: ignore[arg-type]
    data = report.to_dict()
    measured = {series["metric"] for series in data["series"] if series["subject"] in (engine, "sloplet")}
    assert measured == {
        "start.first_result", "start.whole_life", "exec.round_trip", "code.round_trip", "code.wire", "cli.run",
        "import.sloplet", "import.sandbox", "rate.sandboxes", "files.write_1m", "files.read_1m", "files.write_100m",
        "files.read_100m", "output.stdout", "output.host_memory", "live.count", "live.pss", "live.machine",
    }  # fmt: skip
    live = report.get("live.pss", engine)
    assert live is not None
    assert 0 < live.p50 < 50
    assert data["skipped"] == {}


@pytest.mark.anyone
@pytest.mark.timeout(60)
def test_cli_json_names_what_is_not_there() -> None:
    command = [sys.executable, "-m", "sloplet.cli", "bench", "--quick", "--only", "import", "--engine", "no-such",
               "--against", "subprocess", "--json", "--check"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    data = json.loads(done.stdout)
    assert "no-such" in data["skipped"]["no-such"]
    assert [series["metric"] for series in data["series"]] == ["import.sloplet", "import.sandbox"]
    assert done.returncode == (1 if any(bar["passed"] is False for bar in data["bars"]) else 0)


def test_a_broken_command_is_no_number() -> None:
    with pytest.raises(BrokenRun, match="wrong"):
        must(False, "wrong")


# -- sloplet bench --live ---------------------------------------------------------------

_QUICK = ("bench", "--live", "--quick", "--rounds", "1")


@pytest.fixture
def gvisor(tmp_path: Path) -> dict[str, str]:
    """What a program needs to find runsc; everything it makes is below tmp_path / "tmp"."""
    from sloplet.engines import registry

    found = gvisor_environment()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.items():
            patch.setenv(name, value)
        probe = registry.load("gvisor").probe()
    if not probe.available:
        pytest.skip(f"gvisor cannot run here: {probe.reason}")
    (tmp_path / "tmp").mkdir()
    return {**found, "TMPDIR": str(tmp_path / "tmp"), "SLOPLET_HOME": str(tmp_path / "home")}


def _left(before: set[int], tmp_path: Path) -> list[str]:
    """Processes and files that a run has left behind; what was killed has five seconds to be gone."""
    give_up = time.monotonic() + 5
    while (new := descendants() - before) and time.monotonic() < give_up:
        for pid in new:
            with contextlib.suppress(ChildProcessError):  # those that ended are ours to take
                os.waitpid(pid, os.WNOHANG)
    names = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in new]
    return names + [path.name for path in (tmp_path / "tmp").iterdir()]


@pytest.mark.timeout(180)
def test_live_gives_numbers_that_fit_together(gvisor: dict[str, str], tmp_path: Path) -> None:
    before = descendants()
    with adopted_orphans():
        done = sloplet(*_QUICK, "--json", "--plot", str(tmp_path / "curve.svg"), env=gvisor, timeout=170)
        assert done.returncode == 0, done.stderr
        assert _left(before, tmp_path) == []
    data = json.loads(done.stdout)
    p50 = {(one["metric"], one["subject"]): one["summary"]["p50"] for one in data["series"]}
    ours = {metric for metric, subject in p50 if subject == "gvisor"}
    assert {bar["metric"] for bar in data["bars"]} | {f"curve.{name}_16" for name in CURVES} <= ours
    assert data["skipped"].keys() <= {"container"}
    for subject in ("gvisor", "runsc"):
        assert 0 < p50["restore.answer", subject] < p50["restore.result", subject]
        assert p50["fork.answer", subject] < p50["fork.result", subject]
        assert 0 < p50["snapshot.time", subject] < 60
    assert p50["restore.returned", "runsc"] < p50["restore.answer", "runsc"]
    assert 16 < p50["pause.disk", "gvisor"] < 64, "its process holds 16 MiB"
    assert 0.1 < p50["snapshot.disk", "runsc"] < p50["pause.disk", "gvisor"]
    assert p50["pause.intact", "gvisor"] == 1
    assert 2 < p50["weight.running", "gvisor"] < 200
    assert p50["weight.paused", "gvisor"] == 0
    assert "polyline" in (tmp_path / "curve.svg").read_text()
    _ratios_are_of_the_medians(data, p50)


def _ratios_are_of_the_medians(data: dict[str, Any], p50: dict[tuple[str, str], float]) -> None:
    bars = {(bar["metric"], bar["subject"]): bar for bar in data["bars"]}
    bar = bars["snapshot.time", "gvisor"]
    assert bar["value"] == pytest.approx(p50["snapshot.time", "gvisor"] / p50["snapshot.time", "runsc"])
    assert bar["passed"] is (bar["value"] <= 1.5)


@pytest.mark.anyone
@pytest.mark.timeout(120)
@pytest.mark.parametrize("suite", ["restore", "fork"])
def test_live_leaves_nothing_after_ctrl_c(gvisor: dict[str, str], tmp_path: Path, suite: str) -> None:
    before = descendants()
    with adopted_orphans():
        running = subprocess.Popen(
            [*SLOPLET, *_QUICK, "--rounds", "50", "--only", suite], env={**os.environ, **gvisor},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert running.stderr is not None
        assert running.stderr.readline().strip() == suite, "it has begun"
        while not list((tmp_path / "tmp").glob("*/by-hand/images/*")):  # both sides run by then
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(0.02)
            assert running.returncode is None
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=100)
        assert running.returncode not in (0, -signal.SIGINT), "click says that it was aborted"
        assert _left(before, tmp_path) == []
