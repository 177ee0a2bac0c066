"""The other tools, each as users would start it. A rival that cannot run here says why and is left out.

Every rival is started by this same Python process with ``subprocess.run``, so the cost of forking from Python is in all
of them alike.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ...setup import runsc
from .rootfs import make_rootfs

BWRAP = ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev")


class Unavailable(Exception):
    """This rival cannot be measured here; the message says why."""


class Rival:
    """One way to run ``true``. ``once`` is what gets timed: a whole run, from nothing to nothing."""

    name = ""

    def prepare(self, scratch: Path) -> None:
        """Make what it needs in ``scratch`` and try it once. Raises Unavailable."""

    def command(self, *argv: str) -> list[str]:
        raise NotImplementedError

    def once(self) -> None:
        subprocess.run(self.command("true"), check=True, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """Undo ``prepare``. Idempotent."""

    def version(self) -> str:
        return _said([self.command()[0], "--version"])


class BareSubprocess(Rival):
    """No isolation at all: the floor."""

    name = "subprocess"

    def command(self, *argv: str) -> list[str]:
        return list(argv)

    def once(self) -> None:
        subprocess.run(["true"], check=True)

    def version(self) -> str:
        return "subprocess.run of this Python"


class Bwrap(Rival):
    """bubblewrap with every namespace, the host's root read-only. Nothing in it limits or filters."""

    name = "bwrap"

    def prepare(self, scratch: Path) -> None:
        _need("bwrap", "apt-get install bubblewrap")
        _try(self)

    def command(self, *argv: str) -> list[str]:
        return [*BWRAP, *argv]


class Docker(Rival):
    """``docker run --rm --network none``: the usual way, a daemon and its containerd already running."""

    name = "docker"

    def __init__(self, host: str | None = None) -> None:
        self._options = ["--host", host] if host else []
        self._image = ""

    def prepare(self, scratch: Path) -> None:
        _need("docker", "apt-get install docker.io")
        try:
            self._docker("version", timeout=10)
        except (subprocess.SubprocessError, OSError):
            raise Unavailable("no docker daemon answers: start one, or (as root) use --with-dockerd") from None
        root = make_rootfs(scratch / "docker-root")
        tag = f"sloplet-bench:{secrets.token_hex(4)}"
        tar = subprocess.run(["tar", "-C", str(root), "-c", "."], check=True, capture_output=True).stdout
        try:
            self._docker("import", "-", tag, data=tar)
        except (subprocess.SubprocessError, OSError) as error:
            raise Unavailable(f"docker import failed: {_words(error)}") from None
        self._image = tag
        _try(self)

    def command(self, *argv: str) -> list[str]:
        return ["docker", *self._options, "run", "--rm", "--network", "none", self._image, *argv]

    def close(self) -> None:
        image, self._image = self._image, ""
        if image:
            subprocess.run(["docker", *self._options, "rmi", "-f", image], capture_output=True, check=False)

    def version(self) -> str:
        return self._docker("version", "--format", "client {{.Client.Version}}, server {{.Server.Version}}")

    def _docker(self, *argv: str, data: bytes = b"", timeout: float = 120) -> str:
        command = ["docker", *self._options, *argv]
        done = subprocess.run(command, check=True, capture_output=True, timeout=timeout, input=data)
        return done.stdout.decode("utf-8", "replace").strip()


class Runsc(Rival):
    """gVisor's own command line: ``runsc run`` of a small OCI bundle, no network."""

    name = "runsc"

    def prepare(self, scratch: Path) -> None:
        found = runsc.find()
        if found is None:
            raise Unavailable("runsc is not installed (sloplet setup gvisor)")
        self._program = str(found.path)
        self._bundle = scratch / "runsc"
        self._state = scratch / "runsc-state"
        make_rootfs(self._bundle / "rootfs")
        (self._bundle / "config.json").write_text(json.dumps(_OCI))
        _try(self)

    def command(self, *argv: str) -> list[str]:
        options = [f"--root={self._state}", "--network=none", "--ignore-cgroups"]
        if os.geteuid() != 0:
            options.append("--rootless")
        return [self._program, *options, "run", f"--bundle={self._bundle}", f"bench-{secrets.token_hex(6)}"]

    def version(self) -> str:
        return _said([self._program, "--version"])


_OCI = {
    "ociVersion": "1.0.0",
    "process": {
        "user": {"uid": 0, "gid": 0}, "args": ["/bin/true"], "cwd": "/",
        "env": ["PATH=/usr/bin:/bin"], "noNewPrivileges": True,
    },
    "root": {"path": "rootfs", "readonly": True},
    "hostname": "bench",
    "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
    "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
}  # fmt: skip

RIVALS: dict[str, Callable[[], Rival]] = {
    "subprocess": BareSubprocess,
    "bwrap": Bwrap,
    "docker": Docker,
    "runsc": Runsc,
}


class Rivals:
    """The rivals that were asked for and work here, with a scratch folder, for the length of a run."""

    def __init__(self, names: list[str], docker_host: str | None = None) -> None:
        self.skipped: dict[str, str] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="sloplet-bench-")
        self._all: list[Rival] = []
        for name in names:
            rival = Docker(docker_host) if name == "docker" else RIVALS[name]()
            try:
                rival.prepare(Path(self._scratch.name))
            except Unavailable as error:
                self.skipped[name] = str(error)
                rival.close()
            else:
                self._all.append(rival)

    def __iter__(self) -> Iterator[Rival]:
        return iter(self._all)

    def close(self) -> None:
        for rival in self._all:
            rival.close()
        self._scratch.cleanup()


def _need(program: str, fix: str) -> None:
    if shutil.which(program) is None:
        raise Unavailable(f"{program} is not installed ({fix})")


def _try(rival: Rival) -> None:
    try:
        subprocess.run(rival.command("true"), check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    except (subprocess.SubprocessError, OSError) as error:
        rival.close()
        raise Unavailable(f"it does not work here: {_words(error)}") from None


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout or done.stderr).strip().split("\n")[0]


def _words(error: Exception) -> str:
    said = getattr(error, "stderr", None) or b""
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
    return (text.strip().split("\n")[-1] or str(error))[:300]
