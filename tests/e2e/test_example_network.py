"""What scripts/try shows of the network; it checks by itself what it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_show(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "network.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        env={**os.environ, "SLOPLET_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 5, done.stdout
