"""What lies in deploy/: units that systemd understands, a Dockerfile that our own builder reads, flags that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from sloplet.build.dockerfile import parse
from sloplet.cli.serve import serve

pytestmark = pytest.mark.anyone

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_units(tmp_path: Path) -> None:
    for path in DEPLOY.glob("*.service"):
        text = re.sub(r"/opt/sloplet/bin/\w+", sys.executable, path.read_text())
        (tmp_path / path.name).write_text(text)
    units = sorted(str(path) for path in tmp_path.iterdir())
    assert len(units) == 2
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_restart_leaves_the_keepers() -> None:
    text = (DEPLOY / "sloplet-serve.service").read_text()
    assert "\nKillMode=process\n" in text


def test_dockerfile() -> None:
    recipe = parse((DEPLOY / "Dockerfile").read_text())
    words = [step.line.keyword for step in recipe.stages[-1].steps]
    assert words.index("USER") < words.index("ENTRYPOINT")  # not as root
    assert {"COPY", "RUN", "HEALTHCHECK", "STOPSIGNAL"} <= set(words)


@pytest.mark.parametrize("name", ["sloplet-serve.service", "Dockerfile", "nginx.conf", "Caddyfile"])
def test_flags_exist(name: str) -> None:
    known = {flag for option in serve.params if isinstance(option, click.Option) for flag in option.opts}
    text = (DEPLOY / name).read_text()
    calls = re.findall(r"sloplet serve((?:[^\n`]|\\\n)*)|ENTRYPOINT (.*)|CMD (\[\"--.*)", text)
    used = {flag for call in calls for part in call for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", part)}
    assert used
    assert used <= known
