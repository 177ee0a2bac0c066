"""Fixtures and helpers of the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from ...controller import Controller
from ...engines import registry
from ...engines.base import Capabilities
from ...portal import portal
from ...sandbox import AsyncSandbox
from ...sync import Process, Sandbox

T = TypeVar("T")
MakeBox = Callable[..., Sandbox]


@pytest.fixture
def controller() -> Controller | None:
    """Who holds the sandboxes; None: this process. Override it to test another Controller."""
    return None


@pytest.fixture
def capabilities(engine: str) -> Capabilities:
    """What the engine under test can do on this machine."""
    return registry.load(engine).probe().capabilities


@pytest.fixture
def make_box(engine: str, controller: Controller | None) -> Iterator[MakeBox]:
    """Makes started sandboxes of the engine under test; all are gone after the test."""
    made: list[Sandbox] = []

    def make(name: str | None = None, **options: Any) -> Sandbox:
        options.setdefault("engine", engine)
        options.setdefault("controller", controller)
        fresh: Sandbox = Sandbox(name, **options)
        made.append(fresh)
        fresh.start()
        return fresh

    yield make
    for sandbox in made:
        sandbox.kill()


@pytest.fixture
def box(make_box: MakeBox) -> Sandbox:
    """A sandbox with default settings."""
    return make_box()


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine where the sandboxes live."""
    return portal().call(work)


def inner(sandbox: Sandbox) -> AsyncSandbox:
    """The async object behind a sandbox, for use inside ``run_async``."""
    return sandbox._inner


def needs_control(capabilities: Capabilities, control: str) -> None:
    if control not in capabilities.controls:
        pytest.skip(f"capability: no way to limit {control} here")


def needs(value: bool, what: str) -> None:
    if not value:
        pytest.skip(f"capability: {what}")


def needs_command(sandbox: Sandbox, name: str) -> None:
    if not sandbox.run(["/bin/sh", "-c", f"command -v {name}"]).ok:
        pytest.skip(f"capability: the image has no {name}")


def gone(sandbox: Sandbox, os_pid: str) -> bool:
    """Wait until a process of the sandbox (its kernel's number) is no more."""
    script = f"while kill -0 {int(os_pid)} 2>/dev/null; do :; done; echo gone"
    return sandbox.run(script, timeout=20).stdout == "gone\n"


def read_until(process: Process, wanted: str) -> str:
    """Read a process's output until ``wanted`` was seen; returns what was read so far."""
    seen = ""
    for _, piece in process:
        seen += str(piece)
        if wanted in seen:
            return seen
    raise AssertionError(f"the output ended without {wanted!r}: {seen!r}")


def wait_ended(sandbox: Sandbox, pid: int) -> Any:
    """Ask until the process of that number has ended; its ProcessInfo."""
    while True:
        info = next(item for item in sandbox.processes() if item.pid == pid)
        if not info.running:
            return info
