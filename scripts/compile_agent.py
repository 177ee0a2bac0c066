"""Compile agent/ into the one static program that the wheel carries. Standard library only.

    python scripts/compile_agent.py [OUTPUT]

The first compiler that makes a static program is taken: $CC, musl-gcc, gcc, clang, zig (``pip install ziglang``).
Whoever sets $CC gets that one or an error. The build hook (hatch_build.py) calls ``compile_agent``.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "agent"
OUTPUT = ROOT / "src" / "sloplet" / "bin" / "sloplet-agent"
_FLAGS = ("STD", "CFLAGS", "HARDEN", "WARN", "LDFLAGS_STATIC")  # variables of agent/Makefile, the one place for flags
_HELP = "apt-get install musl-tools | apk add gcc musl-dev | dnf install gcc glibc-static | pip install ziglang"


class NoCompiler(RuntimeError):
    """Nothing here compiles the agent. The message says what was tried and what to install."""


def machine() -> str:
    """This machine's architecture as the kernel calls it."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def zig_command() -> list[str]:
    """The C compiler inside the ziglang wheel, or nothing if that is not installed."""
    if importlib.util.find_spec("ziglang") is None:
        return []
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine()}-linux-musl"]


def candidates(environment: dict[str, str] | None = None) -> list[list[str]]:
    """Compiler commands to try, best first."""
    given = (os.environ if environment is None else environment).get("CC", "").strip()
    if given:
        return [shlex.split(given)]
    found = [[name] for name in ("musl-gcc", "gcc", "clang") if shutil.which(name)]
    zig = zig_command()
    return [*found, zig] if zig else found


def flags() -> list[str]:
    """The flags that agent/Makefile uses for the static program."""
    text = (SOURCES / "Makefile").read_text()
    found: list[str] = []
    for name in _FLAGS:
        match = re.search(rf"^{name} [:?]?= (.*)$", text, re.MULTILINE)
        if match is None:
            raise NoCompiler(f"agent/Makefile does not set {name}: scripts/compile_agent.py must follow it")
        found += match[1].split()
    return [*found, "-s"]


def compile_agent(output: Path = OUTPUT) -> str:
    """Compile to ``output``, replaced in one step. Returns the compiler that did it; raises NoCompiler."""
    files = sorted(SOURCES.glob("*.c"))  # its tests and fuzzers are in a folder below
    if not files:
        raise NoCompiler(f"there are no C sources in {SOURCES}: the source distribution is incomplete")
    output.parent.mkdir(parents=True, exist_ok=True)
    tried: list[str] = []
    for command in candidates():
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as folder:
            made = Path(folder, output.name)
            said = _compile(command, files, made)
            if said is None:
                said = None if is_static(made) else "it made a program that is not static"
            if said is None:
                made.chmod(0o755)
                os.replace(made, output)
                return shlex.join(command)
            tried.append(f"{shlex.join(command)}: {said}")
    what = "\n".join(tried) if tried else "none of musl-gcc, gcc, clang and zig is installed"
    raise NoCompiler(f"Sloplet's agent could not be compiled.\n{what}\nOne of these helps: {_HELP}")


def _compile(command: list[str], files: list[Path], output: Path) -> str | None:
    """What went wrong, or None."""
    names = [os.path.relpath(path, ROOT) for path in files]  # relative: builds are the same in any folder
    try:
        done = subprocess.run(
            [*command, *flags(), *names, "-o", str(output)], cwd=ROOT, capture_output=True, text=True, timeout=600
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return "\n".join((done.stderr or done.stdout).strip().splitlines()[:20]) or f"exit code {done.returncode}"
    return None


def is_static(program: Path) -> bool:
    """Whether an ELF program asks for no dynamic loader (has no PT_INTERP)."""
    data = program.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return False
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    return all(struct.unpack_from("<I", data, table + index * size)[0] != 3 for index in range(count))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    try:
        print(f"{target}: compiled with {compile_agent(target)}")
    except NoCompiler as error:
        sys.exit(str(error))
