"""Sloplet itself, measured through its public API as a user would call it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ...portal import portal
from ...sandbox import AsyncSandbox
from ...sync import Sandbox
from .clock import timed
from .memory import MIB, descendants, machine_available, peak_resident, pss, reset_peak, resident, total_pss

_OUTPUT = "cat /dev/zero | head -c {size}"


class BrokenRun(Exception):
    """A measured command did not do what it should: a number of it would be a lie."""


def start_once(engine: str) -> tuple[float, float]:
    """A new sandbox, its first command, its end. Seconds to the first result, and to the end of all."""
    began = time.perf_counter()
    box = Sandbox(engine=engine)
    try:
        result = box.run(["true"])
        first = time.perf_counter() - began
    finally:
        box.close()
    whole = time.perf_counter() - began
    _must(result.exit_code == 0, result.describe())
    return first, whole


def exec_once(box: Sandbox) -> float:
    began = time.perf_counter()
    result = box.run(["true"])
    took = time.perf_counter() - began
    _must(result.exit_code == 0, result.describe())
    return took


def rate(engine: str, count: int, at_once: int) -> float:
    """Sandboxes per second: each made, used for one command and destroyed; ``at_once`` of them at a time."""

    async def life() -> None:
        async with AsyncSandbox(engine=engine) as box:
            result = await box.run(["true"])
            _must(result.exit_code == 0, result.describe())

    took = timed(lambda: portal().call(_many(life, count, at_once)))
    return count / took


async def _many(life: Callable[[], object], count: int, at_once: int) -> None:
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await life()  # type: ignore[misc]

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, count)):
            group.create_task(worker())


class Live:
    """Many sandboxes at once, held by this process."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.boxes: list[AsyncSandbox] = []

    def measure(self, count: int, at_once: int) -> tuple[float, float]:
        """Start ``count``, use each once, and weigh them: MiB each by PSS, MiB each that the machine lost."""
        portal().call(self._start(1, 1))  # what only the first one costs is not theirs
        portal().call(self._close())
        others, own, free = descendants(), pss(), machine_available()
        portal().call(self._start(count, at_once))
        mine = descendants() - others
        weight = total_pss(mine) + max(0, pss() - own)
        lost = free - machine_available()
        portal().call(self._use(at_once))
        return weight / count / MIB, lost / count / MIB

    def close(self) -> None:
        portal().call(self._close())

    async def _start(self, count: int, at_once: int) -> None:
        async def one() -> None:
            box = AsyncSandbox(engine=self.engine)
            self.boxes.append(box)
            await box.start()
            _must((await box.run(["true"])).exit_code == 0, "a live sandbox did not run its command")

        await _many(one, count, at_once)

    async def _use(self, at_once: int) -> None:
        """They are all still alive, also now that there are so many."""
        left = iter(list(self.boxes))

        async def one() -> None:
            _must((await next(left).run(["true"])).exit_code == 0, "a live sandbox stopped answering")

        await _many(one, len(self.boxes), at_once)

    async def _close(self) -> None:
        boxes, self.boxes = self.boxes, []
        await asyncio.gather(*(box.close() for box in boxes))


def file_write(box: Sandbox, data: bytes) -> float:
    """MiB per second into a file of the sandbox."""
    took = timed(lambda: _must(box.files.write("bench.bin", data) == len(data), "a file was written short"))
    return len(data) / MIB / took


def file_read(box: Sandbox, size: int) -> float:
    took = timed(lambda: _must(len(box.files.read("bench.bin")) == size, "a file was read short"))
    return size / MIB / took


def bare_file_write(folder: Path, data: bytes) -> float:
    """The same way without a sandbox: through a pipe into another process that writes the file."""
    target = str(folder / "bench.bin")
    took = timed(lambda: subprocess.run(["dd", "bs=64k", "status=none", f"of={target}"], input=data, check=True))
    return len(data) / MIB / took


def bare_file_read(folder: Path, size: int) -> float:
    target = str(folder / "bench.bin")

    def read() -> None:
        _must(len(subprocess.run(["cat", target], capture_output=True, check=True).stdout) == size, "cat read short")

    return size / MIB / timed(read)


def output(box: Sandbox, size: int) -> tuple[float, float]:
    """MiB per second of stdout that arrive at a reader that only counts, and the MiB this process grew by."""

    async def count() -> int:
        process = await box._inner.spawn(["sh", "-c", _OUTPUT.format(size=size)], text=False, max_output=1)
        seen = 0
        async for _, data in process:
            seen += len(data)
        await process.wait()
        return seen

    reset_peak()
    before = resident()
    began = time.perf_counter()
    seen = portal().call(count())
    took = time.perf_counter() - began
    _must(seen == size, f"{seen} of {size} bytes of output arrived")
    return size / MIB / took, max(0, peak_resident() - before) / MIB


def bare_output(size: int, prefix: list[str] | None = None) -> float:
    began = time.perf_counter()
    command = [*(prefix or []), "sh", "-c", _OUTPUT.format(size=size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        seen = 0
        while data := process.stdout.read(65536):
            seen += len(data)
    took = time.perf_counter() - began
    _must(seen == size, f"{seen} of {size} bytes of output arrived")
    return size / MIB / took


def python_process(*argv: str) -> float:
    """A fresh Python, from nothing to its exit."""
    return timed(lambda: subprocess.run([sys.executable, *argv], check=True, stdin=subprocess.DEVNULL))


def sloplet_command() -> list[str]:
    """The installed ``sloplet``, or the module where it is not installed as a script."""
    script = Path(sys.executable).parent / "sloplet"
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-m", "sloplet.cli"]


def cli_once(engine: str) -> float:
    command = [*sloplet_command(), "run", "--engine", engine, "--", "true"]
    return timed(lambda: subprocess.run(command, check=True, stdin=subprocess.DEVNULL))


def _must(held: bool, what: str) -> None:
    if not held:
        raise BrokenRun(what)
