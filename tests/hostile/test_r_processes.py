"""R-01: processes without number and without manners. A time limit ends all of them; the neighbour notices nothing."""

from __future__ import annotations

import os
import signal
import time

import pytest
from hostile_kit import Target, Waiting, eventually, host_pids, install, name_of, patience

from sloplet import Sandbox
from sloplet.errors import ProcessLimit, SandboxDead

BOMBS = ("fork", "vfork", "threads", "zombies", "stopped", "daemons", "deaf", "respawn")


def _hostile(box: Sandbox) -> list[int]:
    return [pid for pid in host_pids(box) if name_of(pid) in ("bombs", "hostile-daemon")]


@pytest.mark.parametrize("kind", BOMBS)
def test_r01_bombs(target: Target, neighbour: Sandbox, kind: str) -> None:
    target.need_controls("pids")
    with target.box(pids=128) as box:
        _bomb(target, box, neighbour, kind)


def _bomb(target: Target, box: Sandbox, neighbour: Sandbox, kind: str) -> None:
    path = install(box, "bombs")
    usual = _slowest(neighbour)
    bomb = box.spawn([path, kind], timeout=1)
    if kind in ("daemons", "stopped", "deaf"):
        eventually(lambda: len(_hostile(box)) >= 8, 5, "positive control: the bomb is at work")
    during = _slowest(neighbour)
    # without cgroups nothing shares the processors out between sandboxes: then it is only not starved
    most = max(2 * usual, usual + 1.0) if target.enforces("cpus") else 15.0
    assert during < most, f"the neighbour took {during:.3f} s instead of {usual:.3f} s"
    start = time.monotonic()
    result = bomb.wait()
    assert time.monotonic() - start < 15
    assert result.timed_out or kind == "respawn", result.describe()
    if kind != "respawn":  # its main process ends by itself, its descendants live on until the sandbox ends
        eventually(lambda: _hostile(box) == [], 30, "the time limit ends all, however far they ran")
        assert box.run("echo alive", timeout=10).stdout == "alive\n"


def test_r01_others_are_left_alone(target: Target) -> None:
    """Ending a bomb stops the whole sandbox for a moment: who ran goes on, who was stopped stays so."""
    target.need("private_processes")
    target.need_controls("pids")
    with target.box() as box:
        counter = box.spawn(["python3", "-uc", _COUNTER])  # a shell would have to fork for each of its sleeps
        halted = box.spawn("echo $$; kill -STOP $$; echo went on")
        pid = int(next(iter(halted))[1])
        eventually(lambda: _state(box, pid) == "T", 5, "positive control: it has stopped itself")
        assert box.run([install(box, "bombs"), "fork"], timeout=0.5).timed_out
        lines = iter(counter)
        seen = ""
        while "\n60\n" not in seen:
            seen += next(lines)[1]
        assert seen.startswith("".join(f"{number}\n" for number in range(1, 61)))
        if target.enforces("cpus"):  # else the agent may be too starved to look first who was stopped
            assert _state(box, pid) == "T"
        counter.kill()
        halted.kill()


_COUNTER = """
import itertools, time
for number in itertools.count(1):
    print(number)
    time.sleep(0.05)
"""


def _state(box: Sandbox, pid: int) -> str:
    return box.run(["cat", f"/proc/{pid}/stat"]).stdout.rpartition(") ")[2][:1]


def _slowest(box: Sandbox) -> float:
    worst = 0.0
    for _ in range(5):
        start = time.monotonic()
        assert box.run("true").ok
        worst = max(worst, time.monotonic() - start)
    return worst


@pytest.mark.parametrize("kind", ["fork", "respawn", "deaf", "stopped", "threads", "daemons"])
def test_r01_closing_ends_everything(target: Target, kind: str) -> None:
    target.need_controls("pids")
    with target.box(pids=64) as box:
        box.spawn([install(box, "bombs"), kind], detached=True)
        eventually(lambda: len(_hostile(box)) >= 1 or kind == "respawn", 5)
        pids = host_pids(box)
        start = time.monotonic()
        box.kill()
        assert time.monotonic() - start < 5
    eventually(lambda: not [pid for pid in pids if name_of(pid) in ("bombs", "hostile-daemon")], 2)


def test_r01_the_limit_holds(target: Target) -> None:
    """As many as were asked for and a handful for the agent's own, never more; and the caller learns why."""
    target.need_controls("pids")
    with target.box(pids=40) as box:
        bomb = box.spawn([install(box, "bombs"), "fork"])  # no time limit: it is to be there until the last line
        eventually(lambda: len(_hostile(box)) > 30, 3, "positive control")
        most = max(len(host_pids(box)) for _ in range(20))
        assert most <= 40 + 16 + 2, "the agent and its supervisor are beside them"
        with pytest.raises(ProcessLimit):
            _spawn_many(box)
        bomb.kill()
        bomb.wait()


def _spawn_many(box: Sandbox) -> None:
    for _ in range(30):
        box.spawn("sleep 5", detached=True)


def test_r01_a_wedged_agent(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that a command keeps locked holds the agent up in the kernel. Time limits hold all the same."""
    patience(monkeypatch, overdue=0.3, pulse=0.7)
    with target.box() as box:
        path = install(box, "bombs")
        try:
            result = box.run([path, "wedge"], timeout=0.5)
            assert result.timed_out or not result.ok  # without terminals it does not get that far
        except SandboxDead as error:
            said = error.message
            assert "does not answer" in said
    with target.box() as box:
        waiting = Waiting(lambda: box.spawn([install(box, "bombs"), "wedge"], detached=True))
        eventually(lambda: _hostile(box), 5)
        start = time.monotonic()
        box.kill()
        assert time.monotonic() - start < 2
        waiting.error(5)


def test_r01_no_call_hangs_for_ever(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, without a time limit: whoever asks something of a sandbox that says nothing gets an error."""
    patience(monkeypatch, quiet=0.3, last=1.0)
    with target.box() as box:
        quiet = Waiting(lambda: box.run("sleep 1.6; echo fine"))
        assert quiet.result(20).stdout == "fine\n", "positive control: a quiet command is left alone"
    with target.box() as box:
        os.kill(host_pids(box)[1], signal.SIGSTOP)
        error = Waiting(lambda: box.files.list("/")).error(10)
        assert isinstance(error, SandboxDead)
        assert "does not answer" in error.message
