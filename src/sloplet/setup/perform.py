"""Carrying out the steps of plan.py. Each is idempotent, says what it does, and answers honestly whether it worked."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SlopletError
from ..state.home import Home
from . import tools
from .apt import AptFailed, private_apt
from .facts import Facts
from .plan import DEBIAN_ARCH, Step
from .release import DownloadFailed, fetch_runsc

Say = Callable[[str], None]
_SUITE = "trixie"  # Debian 13: the first whose runsc is new enough


@dataclass(frozen=True)
class Outcome:
    """What became of a step: done, installed, failed, manual (left to the administrator)."""

    step: Step
    state: str
    message: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**self.step.to_dict(), "state": self.state, "message": self.message}


def perform(step: Step, facts: Facts, say: Say, home: Home | None = None) -> Outcome:
    """Do one step. Never raises for what can go wrong: that is the outcome's message."""
    home = home or Home()
    try:
        if step.kind == "done":
            return Outcome(step, "done", step.title)
        if step.kind == "manual":
            return Outcome(step, "manual", step.title)
        if step.kind == "package":
            return _package(step, say)
        recipe = {"runsc": _runsc, "kernel": _kernel}[step.name]
        return Outcome(step, "installed", recipe(facts, home, say))
    except (SlopletError, OSError) as error:
        return Outcome(step, "failed", str(error))


def _package(step: Step, say: Say) -> Outcome:
    say(step.command)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    last: list[str] = []
    with subprocess.Popen(
        shlex.split(step.command), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                last = [*last[-7:], line.strip()]
                say(line.strip())
    if process.returncode != 0:
        errors = [line for line in last if line.startswith(("E:", "error", "Error"))] or last[-2:]
        hint = "; `apt-get update` first?" if step.command.startswith("apt-get") else ""
        return Outcome(step, "failed", " ".join(errors) + hint)
    return Outcome(step, "installed", step.title)


def _runsc(facts: Facts, home: Home, say: Say) -> str:
    """Debian 13's package, else gVisor's own release."""
    home.open()
    folder = tools.bin_folder(home)
    folder.mkdir(mode=0o755, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as temporary:
        fresh = Path(temporary, "runsc")
        try:
            source = _runsc_of_debian(facts, fresh, say)
        except AptFailed as error:
            say(f"{error.message}; taking gVisor's own release instead")
            try:
                fetch_runsc(facts.arch, fresh, say)
            except DownloadFailed as second:
                raise SlopletError(f"{error.message}; {second.message}", hint=second.hint) from second
            source = "gVisor's release"
        date = tools.runsc_date(tools.version_text(fresh))
        if date is None:
            raise SlopletError(f"the runsc of {source} does not run here")
        if date < tools.RUNSC_OLDEST:
            raise SlopletError(f"the runsc of {source} is of {date}: too old, at least {tools.RUNSC_OLDEST} is needed")
        os.replace(fresh, folder / "runsc")
    return f"runsc of {date}, from {source}: {folder / 'runsc'}"


def _runsc_of_debian(facts: Facts, target: Path, say: Say) -> str:
    with private_apt(_SUITE, DEBIAN_ARCH[facts.arch], say) as apt:
        program = apt.unpack("runsc") / "usr" / "bin" / "runsc"
        if not program.is_file():
            raise AptFailed("Debian's package runsc holds no runsc")
        shutil.copyfile(program, target)
        target.chmod(0o755)
    return f"Debian {_SUITE}'s package"


def _kernel(facts: Facts, home: Home, say: Say) -> str:
    """The kernel image and modules of Debian's cloud kernel, unpacked; the system's own kernel is not touched."""
    architecture = DEBIAN_ARCH[facts.arch]
    meta = f"linux-image-cloud-{architecture}"
    home.open()
    folder = tools.kernel_folder(home)
    with private_apt(_SUITE, architecture, say) as apt:
        pattern = re.compile(rf"linux-image-\d\S*-cloud-{architecture}$")
        names = [name for name in apt.depends(meta) if pattern.match(name)]
        if not names:
            raise AptFailed(f"{meta} names no kernel package")
        files = apt.unpack(names[0])
        images = sorted((files / "boot").glob("vmlinuz-*"))
        modules = next((path for path in (files / "usr/lib/modules", files / "lib/modules") if path.is_dir()), None)
        if not images or modules is None:
            raise AptFailed(f"{names[0]} holds no kernel")
        fresh = folder.with_name(".new-kernel")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o755)
        shutil.copyfile(images[-1], fresh / "vmlinuz")
        shutil.copytree(modules, fresh / "modules", symlinks=True)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(fresh, folder)
    return f"{names[0]}: {folder / 'vmlinuz'}"
