"""A root filesystem of a few files with a ``true`` in it, for the rivals that need an image. No download."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path


def make_rootfs(folder: Path) -> Path:
    """Fill ``folder`` with a minimal root: busybox if this machine has one, else the host's own ``true``."""
    for name in ("bin", "dev", "etc", "proc", "sys", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    busybox = shutil.which("busybox")
    if busybox is not None and not _libraries(busybox):
        shutil.copy(busybox, folder / "bin" / "busybox")
        for name in ("true", "sh"):
            (folder / "bin" / name).symlink_to("busybox")
        return folder
    program = os.path.realpath(shutil.which("true") or "/bin/true")
    shutil.copy(program, folder / "bin" / "true")
    for library in _libraries(program):
        target = folder / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(library), target)
    return folder


def _libraries(program: str) -> list[str]:
    """The shared libraries (and loader) a program needs, by ldd; none if it is static."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    return re.findall(r"(/[^\s:]+\.so[^\s:]*)", listed.stdout) if listed.returncode == 0 else []
