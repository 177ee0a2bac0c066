"""The loop thread behind the sync API: refuses itself, survives fork and Ctrl-C, closes iterators."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import sloplet
from sloplet.portal import Portal, portal

pytestmark = pytest.mark.anyone

SOURCE = str(Path(sloplet.__file__).parents[1])


async def _answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_one_for_all_threads() -> None:
    seen: list[Portal] = []
    threads = [threading.Thread(target=lambda: seen.append(portal())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {portal()}
    assert portal().call(_answer(7)) == 7


def test_errors_pass_through() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        portal().call(fail())


def test_refuses_its_own_thread() -> None:
    async def inside() -> None:
        portal().call(_answer(1))

    with pytest.raises(RuntimeError, match="AsyncSandbox"):
        portal().call(inside())


def test_works_inside_another_loop() -> None:
    async def main() -> int:
        return portal().call(_answer(3))  # blocks that loop, as any sync call does, but ends

    assert asyncio.run(main()) == 3


def test_iterators_are_closed_when_left() -> None:
    closed = threading.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(100):
                yield number
        finally:
            await asyncio.sleep(0)
            closed.set()

    assert list(portal().iterate(_first_three())) == [0, 1, 2]
    iterator = portal().iterate(numbers())
    assert next(iterator) == 0
    iterator.close()  # type: ignore[attr-defined]
    assert closed.is_set()


async def _first_three() -> AsyncIterator[int]:
    for number in range(3):
        yield number


def _run(script: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": SOURCE, "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=env, check=False
    )


def test_a_forked_child_gets_its_own() -> None:
    done = _run("""
import os
from sloplet import Sandbox
box = Sandbox(engine="fake"); box.start()
print(box.run("echo parent").stdout, end="", flush=True)
pid = os.fork()
if pid == 0:
    with Sandbox(engine="fake") as other:
        print(other.run("echo child").stdout, end="", flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(box.run("echo parent still").stdout, end="", flush=True)
box.close()
""")
    assert (done.stdout, done.stderr) == ("parent\nchild\nparent still\n", "")
    assert done.returncode == 0


@pytest.mark.parametrize("early", [False, True], ids=["waited for", "only just begun"])
def test_control_c_ends_the_command(early: bool) -> None:
    script = (
        f"early = {early}"
        + """
import asyncio, os, signal, threading, time
from sloplet import Sandbox
box = Sandbox(engine="fake"); box.start()
def interrupt(piece):
    os.kill(os.getpid(), signal.SIGINT)
if early:  # whoever called has no future yet when it comes
    begin = asyncio.run_coroutine_threadsafe
    def slowly(*arguments):
        asyncio.run_coroutine_threadsafe = begin
        future = begin(*arguments)
        while True: time.sleep(0.01)
    asyncio.run_coroutine_threadsafe = slowly
try:
    box.run("echo up; sleep 1000", on_stdout=interrupt)
except KeyboardInterrupt:
    print("interrupted", flush=True)
while any(info.running for info in box.processes()):
    pass
print("gone", box.run("echo fine").stdout, end="", flush=True)
box.close()
"""
    )
    done = _run(script)
    assert (done.stdout, done.returncode) == ("interrupted\ngone fine\n", 0), done.stderr


def test_exit_without_closing() -> None:
    done = _run("""
from sloplet import Sandbox
box = Sandbox(engine="fake"); box.start()
process = box.spawn("sleep 1000")
print("leaving")
""")
    assert (done.stdout, done.stderr, done.returncode) == ("leaving\n", "", 0)


def test_stopping_twice() -> None:
    own = Portal()
    assert own.call(_answer(1)) == 1
    own.stop()
    own.stop()
    assert not own.thread.is_alive()


def test_an_iterator_that_is_collected_on_the_loop() -> None:
    """Whichever thread the garbage collector runs in, what it was reading is closed."""
    closed = threading.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(100):
                yield number
        finally:
            closed.set()

    held = [portal().iterate(numbers())]
    assert next(held[0]) == 0

    async def drop() -> None:
        held.clear()

    portal().call(drop())
    assert closed.wait(10)
