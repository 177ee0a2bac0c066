"""runsc as somebody would use it by hand: the bare cost of what the gvisor rung does. Same platform, same root (the
host's), written to the same disk; no jail around it, no limits, nothing hashed, nothing made durable."""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....engines.verbs import PLATFORM
from ..measures import BrokenRun, must

_ANSWER_SECONDS = 60
_VERB_SECONDS = 120
_END_SECONDS = 10
_ENDED = "the sandbox made by hand has ended"
_SHARED_MEMORY = "size=128m"


@dataclass(frozen=True)
class Image:
    """A checkpoint, and the bundle that it goes on in."""

    folder: Path
    bundle: Path

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class RawBox:
    """A running container. The two ends of its answerer's pipes are ours."""

    name: str
    bundle: Path
    pid_file: Path
    ask_fd: int
    answer_fd: int
    _heard: bytes = field(default=b"", repr=False)

    def ask(self, word: str = "") -> None:
        """Until it has answered; to "run" it does so after it has run a command."""
        self.send(word)
        self.hear()

    def send(self, word: str = "") -> None:
        try:
            os.write(self.ask_fd, word.encode() + b"\n")
        except OSError as error:
            raise BrokenRun(_ENDED) from error

    def hear(self, wanted: bytes = b"ok") -> None:
        line = self._line()
        must(line.startswith(wanted), f"the sandbox made by hand said {line[:80]!r}, not {wanted!r}")

    def _line(self) -> bytes:
        while b"\n" not in self._heard:
            if not select.select([self.answer_fd], [], [], _ANSWER_SECONDS)[0]:
                raise BrokenRun(f"the sandbox made by hand did not answer within {_ANSWER_SECONDS} s")
            data = os.read(self.answer_fd, 65536)
            must(bool(data), _ENDED)
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def let_go(self) -> None:
        for fd in (self.ask_fd, self.answer_fd):
            with suppress(OSError):
                os.close(fd)


class RawRunsc:
    """All that is made by hand in one run, below ``scratch``; ``close`` ends and removes it. A sandbox of it ends by
    itself when this process does: nobody holds the other end of its input then."""

    def __init__(self, program: Path, scratch: Path) -> None:
        self.scratch = scratch
        self._numbers = itertools.count(1)
        self._boxes: dict[str, RawBox] = {}
        for name in ("state", "store", "images", "bundles"):
            (scratch / name).mkdir(parents=True)
        own_namespace = [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
        self._common = [
            *own_namespace, str(program), f"--root={scratch}/state", f"--log={scratch}/log", "--network=none",
            "--ignore-cgroups", f"--platform={PLATFORM}", f"--overlay2=root:dir={scratch}/store",
        ]  # fmt: skip

    def start(self, argv: Sequence[str], *, holds: bool = False) -> RawBox:
        """A new sandbox whose answerer has answered; with ``holds``, once its holder has its memory."""
        bundle = self.scratch / "bundles" / str(next(self._numbers))
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(_config(argv)))
        box = self._bring_up(bundle, ["run"])
        if holds:
            box.hear(b"ready")
        box.ask()
        return box

    def checkpoint(self, box: RawBox) -> Image:
        folder = self.scratch / "images" / str(next(self._numbers))
        self._run(
            [*self._common, "checkpoint", "--leave-running", "--compression=none", f"--image-path={folder}", box.name]
        )
        return Image(folder, box.bundle)

    def restore(self, image: Image) -> RawBox:
        """When ``runsc restore`` has returned."""
        return self._bring_up(image.bundle, ["restore", f"--image-path={image.folder}"])

    def restore_many(self, image: Image, count: int) -> list[RawBox]:
        """The same ``count`` times, side by side; when all have returned."""
        begun: list[tuple[RawBox, subprocess.Popen[bytes]]] = []
        try:
            for _ in range(count):
                begun.append(self._begin(image.bundle, ["restore", f"--image-path={image.folder}"]))
        finally:
            with ExitStack() as stack:  # each of them, also when one fails
                for _, verb in begun:
                    stack.callback(_finish, verb)
        return [box for box, _ in begun]

    def _bring_up(self, bundle: Path, verb: list[str]) -> RawBox:
        box, process = self._begin(bundle, verb)
        _finish(process)
        return box

    def _begin(self, bundle: Path, verb: list[str]) -> tuple[RawBox, subprocess.Popen[bytes]]:
        name = f"bench-{next(self._numbers)}"
        stdin, ask = os.pipe()
        answer, stdout = os.pipe()
        box = self._boxes[name] = RawBox(name, bundle, self.scratch / f"{name}.pid", ask, answer)
        try:
            process = subprocess.Popen(
                [*self._common, *verb, "--detach", f"--pid-file={box.pid_file}", f"--bundle={bundle}", name],
                stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(stdin)
            os.close(stdout)
        return box, process

    def _run(self, command: list[str]) -> None:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        _finish(process)

    def end(self, *boxes: RawBox) -> None:
        """End them and forget them. (``runsc delete`` does it too, and takes a second.)"""
        for box in boxes:
            box.let_go()
            states = list((self.scratch / "state").glob(f"{box.name}_*"))
            _kill(_number(box.pid_file, rb"(\d+)"))
            for state in states:
                _kill(_number(state, rb'"goferPid":\s*(\d+)'))  # its helper for files ends by itself, a little later
                state.unlink(missing_ok=True)
            box.pid_file.unlink(missing_ok=True)
            self._boxes.pop(box.name, None)

    def close(self) -> None:
        self.end(*list(self._boxes.values()))
        shutil.rmtree(self.scratch, ignore_errors=True)


def _finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for it by its descriptor: ``Popen.wait(timeout)`` looks every 50 ms only, which would be in the sample.
    After Ctrl-C too it gets to its end, if that is near: what it starts can be ended only when its pid is known."""
    handle = os.pidfd_open(process.pid)
    try:
        try:
            select.select([handle], [], [], _VERB_SECONDS)
        except BaseException:
            select.select([handle], [], [], _END_SECONDS)
            raise
    finally:
        os.close(handle)
        if process.poll() is None:
            process.kill()
            process.wait()
    must(process.returncode == 0, f"`{' '.join(process.args)[:2000]}` failed")  # type: ignore[arg-type]


def _number(file: Path, pattern: bytes) -> int | None:
    try:
        found = re.search(pattern, file.read_bytes())
    except OSError:
        return None
    return int(found[1]) if found else None


def _kill(pid: int | None) -> None:
    """End a process and wait until it is gone: what still dies would be in the next sample."""
    if not pid:
        return
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], _END_SECONDS)
    finally:
        os.close(process)


def _config(argv: Sequence[str]) -> dict[str, Any]:
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0}, "args": list(argv), "cwd": "/", "env": ["PATH=/usr/bin:/bin"],
            "noNewPrivileges": True,
        },
        "root": {"path": "/", "readonly": False},
        "hostname": "bench",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777", _SHARED_MEMORY]},
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }  # fmt: skip
