"""A Docker daemon of our own for the length of a benchmark: its own data, its own socket, no bridge, no iptables."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from .rivals import Unavailable

_START_TIMEOUT = 60.0


class PrivateDockerd:
    """``with PrivateDockerd() as host:`` gives a value for ``docker --host``. Needs root. Raises Unavailable."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> str:
        if os.geteuid() != 0:
            raise Unavailable("--with-dockerd needs root")
        for program in ("dockerd", "docker"):
            if shutil.which(program) is None:
                raise Unavailable(f"{program} is not installed (apt-get install docker.io)")
        self._folder = Path(tempfile.mkdtemp(prefix="sloplet-dockerd-"))
        host = f"unix://{self._folder}/docker.sock"
        with open(self._folder / "log", "wb") as log:
            self._daemon = subprocess.Popen(
                ["dockerd", "--iptables=false", "--bridge=none", f"--host={host}", f"--data-root={self._folder}/data",
                 f"--exec-root={self._folder}/exec", f"--pidfile={self._folder}/pid"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait(host)
        except BaseException:
            self.close()
            raise
        return host

    def _wait(self, host: str) -> None:
        assert self._daemon is not None
        assert self._folder is not None
        give_up = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < give_up:
            if self._daemon.poll() is not None:
                last = (self._folder / "log").read_text("utf-8", "replace").strip().split("\n")[-1]
                raise Unavailable(f"dockerd did not start: {last[:300]}")
            asked = subprocess.run(["docker", "--host", host, "version"], capture_output=True, check=False)
            if asked.returncode == 0:
                return
            time.sleep(0.2)
        raise Unavailable(f"dockerd did not answer within {_START_TIMEOUT:g} s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the daemon (it stops its containerd) and remove its data. Idempotent."""
        daemon, self._daemon = self._daemon, None
        folder, self._folder = self._folder, None
        if daemon is not None:
            daemon.terminate()
            try:
                daemon.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)  # a session of its own: only the daemon and its containerd
                daemon.wait()
        if folder is not None:
            for mounted in _mounts_below(folder):
                subprocess.run(["umount", "-l", mounted], capture_output=True, check=False)
            shutil.rmtree(folder, ignore_errors=True)


def _mounts_below(folder: Path) -> list[str]:
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as table:
        points = [line.split()[1] for line in table]
    return sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True)
