"""The programs that stronger engines run: where they are looked for, and which version they are.

``SLOPLET_HOME/bin`` comes first: what `sloplet setup` put there was checked, and touches nothing of the system's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from ..state.home import Home

#: The oldest runsc that checkpoints without losing the sandbox (and has systrap): the first of 2024.
RUNSC_OLDEST = 20240101
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def bin_folder(home: Home | None = None) -> Path:
    """Where `sloplet setup` puts programs."""
    return (home or Home()).path / "bin"


def kernel_folder(home: Home | None = None) -> Path:
    """Where `sloplet setup` puts the kernel of microVMs: ``vmlinuz`` and ``modules/``."""
    return (home or Home()).path / "kernel"


def find_tool(name: str, home: Home | None = None) -> Path | None:
    """A program: ours, else the PATH's, else the system's. None if there is none."""
    home = home or Home()
    for ours in (home, home.main):  # a tenant's, and its server's
        if ours is not None and os.access(own := bin_folder(ours) / name, os.X_OK):
            return own
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":" + _SYSTEM_PATH)
    return Path(found) if found else None


def version_text(program: Path, *arguments: str) -> str:
    """What a program says its version is; empty if it does not run."""
    try:
        done = subprocess.run(
            [program, *(arguments or ("--version",))], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def runsc_date(text: str) -> int | None:
    """The date in ``runsc --version`` or in a package's version: release-20240729.0, 0.0~20240729.0-1."""
    match = re.search(r"(?<!\d)(20\d{6})(?!\d)", text)
    return int(match[1]) if match else None
