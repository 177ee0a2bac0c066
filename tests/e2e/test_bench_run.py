"""The benchmark itself runs, small, and says what it could not measure."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sloplet.testing.bench.measures import BrokenRun, must
from sloplet.testing.bench.run import Plan, run

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


@pytest.mark.timeout(120)
def test_every_suite_gives_numbers(engine: str) -> None:
    report = run(Plan(engines=(engine,), against=("subprocess",), **SMALL))  # type: ignore[arg-type]
    data = report.to_dict()
    measured = {series["metric"] for series in data["series"] if series["subject"] in (engine, "sloplet")}
    assert measured == {
        "start.first_result", "start.whole_life", "exec.round_trip", "cli.run", "import.sloplet", "import.sandbox",
        "rate.sandboxes", "files.write_1m", "files.read_1m", "files.write_100m", "files.read_100m", "output.stdout",
        "output.host_memory", "live.count", "live.pss", "live.machine",
    }  # fmt: skip
    live = report.get("live.pss", engine)
    assert live is not None
    assert 0 < live.p50 < 50
    assert data["skipped"] == {}


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
