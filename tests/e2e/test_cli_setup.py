"""doctor and setup on the machine the tests run on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_helpers import sloplet


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLOPLET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_doctor_proves_what_it_says(home: Path) -> None:
    done = sloplet("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 125)
    works = [rung for rung in report["rungs"] if rung["state"] == "works"]
    assert report["ok"] == bool(works)
    for rung in works:
        assert rung["proof"]["ok"]
        assert sloplet("run", "--engine", rung["engine"], "true").returncode == 0
    assert report["auto"] in [rung["engine"] for rung in works]
    for rung in report["rungs"]:
        assert rung["needs"]
        assert rung["state"] in ("works", "missing", "broken", "later")
    assert sloplet("doctor").stdout.decode().count("\n") > 15


def test_doctor_tells_of_a_home_that_cannot_be_used() -> None:
    done = sloplet("doctor", "--json", env={"SLOPLET_HOME": "/proc/nosuch"})
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["home"]["state"] == "failed"
    assert done.returncode == 125


def test_dry_run_does_nothing(home: Path) -> None:
    done = sloplet("setup", "all", "--dry-run", "--json")
    assert done.returncode == 0
    assert {step["target"] for step in json.loads(done.stdout)["steps"]} == {"container", "gvisor", "microvm"}
    assert not home.exists()


def test_setup_asks_and_nobody_answers(home: Path) -> None:
    done = sloplet("setup", "gvisor")
    if done.returncode == 0:
        assert b"is here" in done.stderr  # this machine has a runsc of its own
        return
    assert done.returncode == 125
    assert b"--yes" in done.stderr
    assert not (home / "bin").exists()


@pytest.mark.skipif("SLOPLET_TEST_SETUP" not in os.environ, reason="downloads; SLOPLET_TEST_SETUP=1 runs it")
@pytest.mark.timeout(600)
def test_setup_gvisor_for_real(home: Path) -> None:
    before = _apt_state()
    for _ in range(2):
        assert sloplet("setup", "gvisor", "--yes", timeout=500).returncode == 0
    said = subprocess.run([home / "bin" / "runsc", "--version"], capture_output=True, text=True, check=True)
    assert "runsc version" in said.stdout
    assert _apt_state() == before


def _apt_state() -> dict[str, float]:
    folders = [Path("/var/lib/apt"), Path("/var/cache/apt"), Path("/var/lib/dpkg")]
    return {str(path): path.stat().st_mtime for folder in folders if folder.exists() for path in folder.rglob("*")}
