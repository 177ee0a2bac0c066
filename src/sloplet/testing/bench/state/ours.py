"""Sloplet's side: sandboxes through the public API, all held by one runtime that ends with the suite."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....controller import Snapshot
from ....errors import SlopletError
from ....portal import portal
from ....runtime import Runtime
from ....sandbox import AsyncSandbox
from ....state.home import Home
from ....sync import Sandbox
from ..measures import BrokenRun, must
from . import guests

_READY_SECONDS = 60
_ROOM = 320  # MiB beside what a holder holds: the interpreter, the agent


class Ours:
    """One suite's sandboxes."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def box(self, engine: str = "gvisor", **settings: Any) -> Sandbox:
        box: Sandbox = Sandbox(engine=engine, controller=self.runtime, **settings)
        return box

    def free_box(self, **settings: Any) -> Sandbox:
        """One that may use all processors, as runsc by hand does. (By default a sandbox may use one.)"""
        return self.box(cpus=len(os.sched_getaffinity(0)), allow_weaker=True, **settings)

    def from_template(self, name: str) -> Sandbox:
        box: Sandbox = Sandbox(template=name, controller=self.runtime, allow_weaker=True)
        return box

    def holding(self, python: str, mebibytes: int) -> tuple[Sandbox, str]:
        """A sandbox with a process in it that holds that much; and the checksum of it."""
        box = self.free_box(memory=(mebibytes + _ROOM) * 2**20)
        process = box.spawn(guests.holder(python, mebibytes), detached=True)
        said = ""
        for _, text in process:
            said += str(text)
            if "\n" in said:
                break
        process.detach()
        word, _, digest = said.strip().partition(" ")
        must(word == "ready", f"the process that is to hold memory said {said[:200]!r}")
        return box, digest

    def forget_checks(self, snapshot: Snapshot) -> None:
        """A state is hashed once in a process for as long as its files look the same: let them look newer."""
        for file in (self.runtime.home.snapshots / snapshot.id).iterdir():
            os.utime(file)

    def wait_for_pool(self, box: Sandbox) -> None:
        """Until as many are ready as its settings ask for."""
        give_up = time.monotonic() + _READY_SECONDS
        while self.runtime.pools.count(box.spec) < box.spec.pool:
            if time.monotonic() > give_up:
                raise BrokenRun(f"no pool of {box.spec.pool} was ready within {_READY_SECONDS} s")
            time.sleep(0.005)


@contextmanager
def holding_runtime(home: Path) -> Iterator[Ours]:
    """A runtime for the length of a suite; whatever it holds then ends."""

    async def make() -> Runtime:
        return Runtime(Home(home))

    runtime = portal().call(make())
    try:
        yield Ours(runtime)
    finally:
        portal().call(runtime.aclose())


def python_inside(box: Sandbox) -> str | None:
    """Where a Python is that both sides can run."""
    found = box.run("command -v python3").stdout
    path = str(found).strip()
    return path if path and Path(path).exists() else None


def digest_now(box: Sandbox) -> str:
    """What the holder computes out of its memory as it is now."""
    return str(box.run(guests.ASK, check=True, timeout=120).stdout).strip()


def first_result(box: Sandbox) -> None:
    result = box.run(["true"])
    must(result.exit_code == 0, result.describe())


def first_results(boxes: Sequence[Sandbox]) -> None:
    """One command in each of them, all at once."""

    async def one(inner: AsyncSandbox) -> None:
        result = await inner.run(["true"])
        must(result.exit_code == 0, result.describe())

    async def everyone() -> None:
        await asyncio.gather(*(one(box._inner) for box in boxes))

    portal().call(everyone())


def close_all(boxes: Sequence[Sandbox]) -> None:
    async def everyone() -> None:
        await asyncio.gather(*(box._inner.close() for box in boxes), return_exceptions=True)

    portal().call(everyone())


def works(home: Path, engine: str) -> str:
    """Why this engine cannot run here; "" if it can."""
    try:
        with holding_runtime(home) as ours, ours.box(engine) as box:
            first_result(box)
    except SlopletError as error:
        return str(error)
    return ""
