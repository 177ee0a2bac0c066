"""Sloplet itself, measured through its public API as a user would call it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ...portal import portal
from ...sandbox import AsyncSandbox
from ...sync import Sandbox
from .clock import timed
from .memory import MIB, peak_resident, reset_peak, rss

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
    must(result.exit_code == 0, result.describe())
    return first, whole


def exec_once(box: Sandbox) -> float:
    began = time.perf_counter()
    result = box.run(["true"])
    took = time.perf_counter() - began
    must(result.exit_code == 0, result.describe())
    return took


def code_once(box: Sandbox) -> float:
    """A cell in a kernel that is there: sent, run, its value back."""
    began = time.perf_counter()
    result = box.code("1 + 1")
    took = time.perf_counter() - began
    must(result.text == "2", f"1 + 1 gave {result.text}: {result.error}")
    return took


def stat_once(box: Sandbox) -> float:
    """The least that a question to a sandbox can take."""
    return timed(lambda: must(box.files.stat("/").is_dir, "/ is no folder"))


def rate(engine: str, count: int, at_once: int) -> float:
    """Sandboxes per second: each made, used for one command and destroyed; ``at_once`` of them at a time."""

    async def life() -> None:
        async with AsyncSandbox(engine=engine) as box:
            result = await box.run(["true"])
            must(result.exit_code == 0, result.describe())

    took = timed(lambda: portal().call(many(life, count, at_once)))
    return count / took


async def many(life: Callable[[], Awaitable[None]], count: int, at_once: int) -> None:
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await life()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, count)):
            group.create_task(worker())


def live_in_a_fresh_process(engine: str, count: int, at_once: int) -> tuple[int, float, float, int]:
    """What live.py prints. Another process holds them: this one has room left over from earlier suites, which would
    hide what they cost their holder."""
    command = [sys.executable, "-m", "sloplet.testing.bench.live", engine, str(count), str(at_once)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BrokenRun((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    number, by_pss, by_machine, guessed = json.loads(done.stdout)
    return number, by_pss, by_machine, guessed


def file_write(box: Sandbox, data: bytes) -> float:
    """MiB per second into a file of the sandbox."""
    took = timed(lambda: must(box.files.write("bench.bin", data) == len(data), "a file was written short"))
    return len(data) / MIB / took


def file_read(box: Sandbox, size: int) -> float:
    took = timed(lambda: must(len(box.files.read("bench.bin")) == size, "a file was read short"))
    return size / MIB / took


def bare_file_write(folder: Path, data: bytes) -> float:
    """The same way without a sandbox: through a pipe into another process that writes the file."""
    target = str(folder / "bench.bin")
    took = timed(lambda: subprocess.run(["dd", "bs=64k", "status=none", f"of={target}"], input=data, check=True))
    return len(data) / MIB / took


def bare_file_read(folder: Path, size: int) -> float:
    target = str(folder / "bench.bin")

    def read() -> None:
        must(len(subprocess.run(["cat", target], capture_output=True, check=True).stdout) == size, "cat read short")

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
    before = rss()
    began = time.perf_counter()
    seen = portal().call(count())
    took = time.perf_counter() - began
    must(seen == size, f"{seen} of {size} bytes of output arrived")
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
    must(seen == size, f"{seen} of {size} bytes of output arrived")
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


def must(held: bool, what: str) -> None:
    if not held:
        raise BrokenRun(what)
