"""C-07 and C-10: sandboxes whose processes are killed or stopped from outside, and ends that come all at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import hostile_kit
import pytest
from hostile_kit import Target, eventually, host_pids, name_of, patience, runtime

from sloplet import AsyncSandbox, Sandbox
from sloplet.errors import SandboxClosed, SandboxDead, SlopletError
from sloplet.portal import portal
from sloplet.testing.leaks import settled, snapshot


def _running(box: Sandbox) -> hostile_kit.Waiting:
    """A command that runs for long, and its result to come."""
    waiting = hostile_kit.Waiting(lambda: box.run(["sleep", "300"]))
    eventually(lambda: [pid for pid in host_pids(box) if name_of(pid) == "sleep"], 5)
    return waiting


@pytest.mark.parametrize("victim", ["supervisor", "agent"])
def test_c07_killed_from_outside(target: Target, victim: str) -> None:
    """The call fails within two seconds, with the reason; the sandbox is dead and stays so."""
    with target.box() as box:
        waiting = _running(box)
        pids = host_pids(box)
        start = time.monotonic()
        os.kill(pids[0] if victim == "supervisor" else pids[1], signal.SIGKILL)
        error = waiting.error(5)
        assert time.monotonic() - start < 2
        assert isinstance(error, SandboxDead)
        assert "signal 9" in error.message
        for _ in range(3):
            with pytest.raises(SandboxDead, match="signal 9"):
                box.run("echo a fresh one?")
        with pytest.raises(SlopletError):
            box.files.read("anything")
    eventually(lambda: not [pid for pid in pids if name_of(pid)], 3, "nothing of it is left")


def test_c07_stopped_from_outside(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped agent enforces no time limit; the holder does then. And closing works."""
    patience(monkeypatch, overdue=0.2, pulse=0.5)
    with target.box() as box:
        os.kill(host_pids(box)[1], signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(SandboxDead, match="does not answer"):
            box.run("echo never", timeout=0.3)
        assert time.monotonic() - start < 4


@pytest.mark.parametrize("victim", [0, 1])
def test_c07_closing_what_is_stopped(target: Target, victim: int) -> None:
    with target.box() as box:
        box.spawn("sleep 300", detached=True)
        pids = host_pids(box)
        os.kill(pids[victim], signal.SIGSTOP)
        start = time.monotonic()
        box.kill()
        assert time.monotonic() - start < 4
    eventually(lambda: not [pid for pid in pids if name_of(pid)], 3)


def test_c07_a_command_that_dies_is_no_dead_sandbox(target: Target, box: Sandbox) -> None:
    """Positive control: the same signal to a command is that command's result."""
    waiting = _running(box)
    pid = next(pid for pid in host_pids(box) if name_of(pid) == "sleep")
    os.kill(pid, signal.SIGKILL)
    result = waiting.result(5)
    assert (result.exit_code, result.signal) == (137, 9)
    assert box.run("echo alive").stdout == "alive\n"


def test_c10_closing_from_all_sides(target: Target) -> None:
    home = runtime().home.path
    with target.box() as warm:
        warm.run("true")
    before = snapshot(home)
    for close in ("close", "kill"):
        with target.box() as box:
            box.spawn("sleep 300", detached=True)
            threads = [threading.Thread(target=getattr(box, close)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive()
            getattr(box, close)()
            with pytest.raises(SandboxClosed):
                box.start()
    assert settled(before, home) == []


def test_c10_cancelled_anywhere(target: Target) -> None:
    """A caller that gives up at any await, while starting or in the middle of a command, leaves nothing."""
    home = runtime().home.path

    async def life(name: str) -> None:
        async with AsyncSandbox(engine=name) as box:
            await box.run("true")
            await box.files.write("x", b"y" * 1000)
            await box.run("cat x; sleep 0.01")

    async def cut(name: str, after: float) -> None:
        task = asyncio.ensure_future(life(name))
        await asyncio.wait([task], timeout=after)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with target.in_use():
        portal().call(life(target.name))
        before = snapshot(home)
        for step in range(40):
            portal().call(cut(target.name, step * 0.0008))
        portal().call(_several(cut, target.name))
    eventually(lambda: runtime().held == 0, 5)
    assert settled(before, home) == []


async def _several(cut: object, name: str) -> None:
    await asyncio.gather(*(cut(name, 0.002 * number) for number in range(20)))  # type: ignore[operator]


def test_c10_killed_while_starting(target: Target) -> None:
    home = runtime().home.path
    with target.box() as warm:
        warm.run("true")
    before = snapshot(home)

    async def race(name: str, after: float) -> None:
        box = AsyncSandbox(engine=name)
        starting = asyncio.ensure_future(box.start())
        await asyncio.wait([starting], timeout=after)
        await box.kill()
        await asyncio.gather(starting, return_exceptions=True)
        await box.kill()

    with target.in_use():
        for step in range(25):
            portal().call(race(target.name, step * 0.0007))
    eventually(lambda: runtime().held == 0, 5, "a sandbox that was killed while it started lives on")
    assert settled(before, home) == []
