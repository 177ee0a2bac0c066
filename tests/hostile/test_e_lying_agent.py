"""E-14: a guest agent that lies. The host drops it with an error of ours, at little cost, and the others live on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hostile_kit import Target, eventually, patience, probe, rss

from sloplet import Sandbox
from sloplet.engines import registry
from sloplet.engines.base import (
    Capabilities,
    Exit,
    Guarantee,
    HelloConfig,
    HostStats,
    Instance,
    Probe,
    StartRequest,
)
from sloplet.errors import SandboxDead, SlopletError, StartFailed
from sloplet.portal import portal
from sloplet.wire.fields import Fields
from sloplet.wire.frames import encode_frame
from sloplet.wire.schema import VERSION, FrameType, Tag

MOST_GROWTH = 64 * 2**20
AT_START = (
    "hello-silence",
    "hello-end",
    "hello-garbage",
    "hello-data-first",
    "hello-huge",
    "hello-endless",
    "wrong-version",
)
ENDED_BY = (
    "hello-twice", "huge-length", "over-limit", "unknown-type", "hosts-type", "reserved", "bad-channel",
    "request-channel", "empty-data", "foreign-stream", "even-stream", "stream-zero", "cut-fields",
    "unknown-tag", "random-fields", "two-replies", "close-twice", "data-after-end", "much-credit", "hang-up",
    "open-again", "open-flood", "reset-unopened", "reply-own", "data-unopened",
)  # fmt: skip
SLOW = ("endless-frame", "silence")
FLOODS = ("ping-flood", "pong-flood", "end-flood", "tiny-flood", "credit-flood", "data-flood")


class LiarInstance:
    """A process of the test's own as a sandbox."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.read_fd, self.write_fd = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        process.stdin.close()
        process.stdout.close()
        self.hello = HelloConfig(user="agent", workdir="/", home=None, env=())
        self.guarantees: tuple[Guarantee, ...] = ()

    async def wait(self) -> Exit:
        while self.process.poll() is None:
            await asyncio.sleep(0.005)
        return Exit("it ended")

    def kill(self) -> None:
        with suppress(OSError):
            self.process.send_signal(signal.SIGKILL)

    def cleanup(self) -> None:
        self.process.wait()

    def oom_kills(self) -> int | None:
        return None

    def stats(self) -> HostStats:
        return HostStats()

    def pids(self) -> tuple[int, ...]:
        return (self.process.pid,)


class LiarEngine:
    name = rung = "process"

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.started: list[LiarInstance] = []

    def probe(self) -> Probe:
        return Probe(self.name, self.rung, True, capabilities=Capabilities())

    def check(self, request: StartRequest) -> tuple[Guarantee, ...]:
        return ()

    async def start(self, request: StartRequest) -> Instance:
        version = VERSION + (self.mode == "wrong-version")
        hello = encode_frame(FrameType.HELLO, 0, Fields((Tag.VERSION, version), (Tag.PID, 1), (Tag.UID, 0)).encode())
        command = [probe("liar"), self.mode, hello.hex()]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.started.append(LiarInstance(process))
        return self.started[-1]

    def reap(self, sandbox_id: str) -> None:
        pass


@contextmanager
def liar(mode: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    engine = LiarEngine(mode)
    with monkeypatch.context() as patch:
        patch.setitem(registry._loaded, "liar", engine)
        patch.setitem(registry._ENGINES, "liar", "none:None")
        box = Sandbox(engine="liar")
        try:
            yield box
        finally:
            box.kill()
    for instance in engine.started:
        eventually(lambda instance=instance: instance.process.poll() is not None, 5, "the liar was left running")


@pytest.fixture
def bystander() -> Iterator[Sandbox]:
    """An honest sandbox beside it."""
    with Sandbox() as box:
        yield box
        assert box.run("echo unharmed").stdout == "unharmed\n"


@pytest.mark.parametrize("mode", AT_START)
def test_e14_lies_at_the_start(mode: str, bystander: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, start=1.0)
    with liar(mode, monkeypatch) as box:
        before, start = rss(), time.monotonic()
        with pytest.raises(StartFailed):
            box.start()
        assert time.monotonic() - start < 5
        assert rss() - before < MOST_GROWTH


def _run_twice(box: Sandbox) -> None:
    """What comes after a command's end is only noticed by the next."""
    box.run("true")
    box.run("true")


@pytest.mark.parametrize("mode", ENDED_BY)
def test_e14_lies_during_a_command(mode: str, bystander: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with liar(mode, monkeypatch) as box:
        before, start = rss(), time.monotonic()
        with pytest.raises(SlopletError) as caught:
            _run_twice(box)
        assert isinstance(caught.value, SandboxDead) or "WireError" in str(type(caught.value).__mro__), caught.value
        assert time.monotonic() - start < 5
        assert rss() - before < MOST_GROWTH
        with pytest.raises(SlopletError):
            box.run("true")


@pytest.mark.parametrize("mode", SLOW)
def test_e14_says_nothing_any_more(mode: str, bystander: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit holds although it is the agent's to enforce."""
    patience(monkeypatch, overdue=0.2, pulse=0.5)
    with liar(mode, monkeypatch) as box:
        with pytest.raises(SandboxDead, match="does not answer"):
            box.run("true", timeout=0.2)


@pytest.mark.parametrize("mode", FLOODS)
def test_e14_floods(mode: str, bystander: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million frames a second: memory stays, and a neighbour of the same process is served in between."""
    with liar(mode, monkeypatch) as box:
        box.start()
        before = rss()
        waiting = asyncio.run_coroutine_threadsafe(box._inner.run("true"), portal().loop)
        worst = 0.0
        for _ in range(10):
            start = time.monotonic()
            assert bystander.run("true").ok
            worst = max(worst, time.monotonic() - start)
        assert worst < 1.0, f"a neighbour waited for {worst:.2f} s"
        assert rss() - before < MOST_GROWTH
        box.kill()
        assert isinstance(waiting.exception(timeout=5), SlopletError)


def test_e14_positive_control(target: Target) -> None:
    """An honest agent behind the same calls is believed."""
    with target.box() as box:
        assert box.run("true", timeout=5).ok
