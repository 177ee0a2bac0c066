"""The suite ``e2b``: E2B's own Python client makes a sandbox and runs a command in it, over loopback.

The client is a program of its own, by a Python that has the package ``e2b``: this one, or the one that
SLOPLET_BENCH_E2B names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ....errors import ServerError
from ....server.e2b.keys import to_e2b
from ..run import Say
from .plan import Bench

IMAGE = "sloplet/e2b-base"
FRESH, POOLED = "e2b", "e2b, pool"
_POOL = 4
_SECONDS = 900
_PROGRAM = """
import json, sys, time
from e2b import Sandbox

rounds, pause = int(sys.argv[1]), float(sys.argv[2])

def once():
    begin = time.perf_counter()
    box = Sandbox.create(timeout=60)
    box.commands.run("true")
    took = time.perf_counter() - begin
    box.kill()
    time.sleep(pause)  # for the pool to be full again
    return took

once(), once(), time.sleep(1.0)
print(json.dumps([once() for _ in range(rounds)]))
"""


def e2b(bench: Bench, say: Say) -> None:
    python = os.environ.get("SLOPLET_BENCH_E2B") or sys.executable
    if subprocess.run([python, "-c", "import e2b"], capture_output=True, check=False).returncode:
        bench.report.skipped["e2b"] = "E2B's client is not installed (pip install e2b, or SLOPLET_BENCH_E2B=PYTHON)"
        return
    if not _bring_image(bench):
        bench.report.skipped["e2b"] = f"there is no {IMAGE} (sloplet image build {IMAGE})"
        return
    engine = ["--e2b-engine", bench.plan.engine]
    for subject, more, pause in ((FRESH, [], 0.05), (POOLED, ["--e2b-pool", str(_POOL)], 0.3)):
        bench.server.restart([*engine, *more])
        for took in _measure(bench, python, pause):
            bench.report.add("e2b.first", subject, took)
    bench.server.restart([])


def _bring_image(bench: Bench) -> bool:
    """The image that the user has built goes into the home that is measured."""
    sloplet = [sys.executable, "-m", "sloplet.cli", "image"]
    with tempfile.TemporaryDirectory(prefix="sloplet-bench-") as folder:
        layout = Path(folder) / "image.tar"
        before = {**os.environ, "SLOPLET_HOME": bench.users_home}
        exported = subprocess.run([*sloplet, "export", "-q", IMAGE, str(layout)], env=before, capture_output=True)
        if exported.returncode:
            return False
        subprocess.run([*sloplet, "import", "-q", str(layout), IMAGE], capture_output=True, check=True)
    return True


def _measure(bench: Bench, python: str, pause: float) -> list[float]:
    url = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL"), bench.server.url)
    env = {**os.environ, **url, "E2B_API_KEY": to_e2b(bench.server.key), "NO_PROXY": "*"}
    command = [python, "-c", _PROGRAM, str(bench.plan.rounds), str(pause)]
    done = subprocess.run(command, env=env, capture_output=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise ServerError(f"E2B's client failed: {done.stderr.decode(errors='replace')[-500:]}")
    return [float(value) for value in json.loads(done.stdout)]
