"""Where the agent's program is: inside the installed package, or built from ``agent/`` in a source checkout."""

from __future__ import annotations

import fcntl
import os
from functools import cache
from pathlib import Path

from ..errors import EngineUnavailable

_NAME = "sloplet-agent"
_PACKAGE = Path(__file__).resolve().parent.parent


def _stale(program: Path, sources: Path) -> bool:
    try:
        built = program.stat().st_mtime
    except OSError:
        return True
    return any(path.stat().st_mtime > built for path in sources.glob("*.[ch]"))


def _checkout() -> Path | None:
    """The root of the source checkout this package lies in, if it does."""
    root = _PACKAGE.parent.parent
    parts = (root / "agent" / "proto.h", root / "scripts" / "compile_agent.py")
    return root if all(part.is_file() for part in parts) else None


def _build(root: Path) -> None:
    import subprocess
    import sys

    script = root / "scripts" / "compile_agent.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EngineUnavailable(
            f"the agent could not be compiled: {(done.stderr or done.stdout).strip()[-2000:]}",
            hint="install a C compiler, for example `apt-get install musl-tools`",
        )


@cache
def agent_path() -> Path:
    """The program's file. Raises EngineUnavailable."""
    program = _PACKAGE / "bin" / _NAME
    root = _checkout()
    if root is not None and _stale(program, root / "agent") and os.access(_PACKAGE, os.W_OK):
        _build(root)
    if not os.access(program, os.X_OK):
        raise EngineUnavailable(
            f"the agent's program is missing from this installation ({program})",
            hint="reinstall with `pip install --force-reinstall sloplet`; from source it needs a C compiler",
        )
    return program


def _memory_is_not_executable() -> bool:
    """The sysctl vm.memfd_noexec (Linux 6.3): 1 and 2 take the right to execute from what we make."""
    try:
        return Path("/proc/sys/vm/memfd_noexec").read_text().strip() != "0"
    except OSError:
        return False


@cache
def agent_fd() -> int:
    """A sealed copy of the program in memory, made once per process: what a sandbox runs can be written by nobody,
    and is the same whatever happens to the installed file. -1 where memory cannot be executed."""
    data = agent_path().read_bytes()
    if _memory_is_not_executable():
        return -1
    try:
        low = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return -1
    # Above the standard descriptors, which a program may have closed: those are replaced before the exec.
    fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(low)
    os.write(fd, data)
    os.fchmod(fd, 0o555)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    return fd


def agent_program() -> str:
    """What to hand to spawn."""
    fd = agent_fd()
    return f"/proc/self/fd/{fd}" if fd >= 0 else str(agent_path())
