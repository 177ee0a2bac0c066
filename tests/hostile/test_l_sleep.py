"""L: who sleeps when nobody uses it, and what a keeper's end does to its sandboxes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_kit import eventually
from live_kit import CHAIN, RUNSC, Chain, box, talk, talk_on

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from keeper_helpers import Keeping, end, keeping, wait_for

pytestmark = [pytest.mark.anyone, pytest.mark.usefixtures("gvisor")]


def test_idle_sleep() -> None:
    """It sleeps when nothing was asked of it, not while somebody follows a command nor while one computes; it wakes
    by a command and by an attach, and goes on where it was."""
    with box(idle=1) as made:
        program, mirror = talk(made, CHAIN), Chain()
        assert program.ask("a") == mirror.add("a")
        computing = made.spawn(
            "end=$(($(date +%s) + 3)); while [ $(date +%s) -lt $end ]; do :; done; echo x", detached=True
        )
        began = time.monotonic()
        program.process.detach()
        computing.detach()
        eventually(lambda: made.info().state == "paused", 30, "it does not sleep")
        assert time.monotonic() - began > 2, "it was put to sleep while it computed"
        program = talk_on(made, program.pid)  # wakes it
        assert program.ask("b") == mirror.add("b")
        assert made.info().state == "running"
        assert made.attach(computing.pid).wait().stdout == "x\n"
        began = time.monotonic()
        while time.monotonic() - began < 2.2:  # followed, though nothing is said
            assert made.info().state == "running"
            time.sleep(0.1)
        program.process.detach()
        eventually(lambda: made.info().state == "paused", 20, "it does not sleep again")
        assert made.run("echo awake").stdout == "awake\n"


def test_a_time_to_live_ends_a_sleeper_too() -> None:
    with box(ttl=2) as made:
        made.pause()
        expires = made.info().expires_at
        assert expires is not None
        eventually(lambda: time.time() > expires, 10)
        with pytest.raises(LookupError):
            made.run("true")


# -- keepers ---------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[Keeping]:
    with keeping(idle=60) as made:
        made.env["SLOPLET_RUNSC"] = os.environ.get("SLOPLET_RUNSC") or os.environ.get(RUNSC, "")
        if not made.env["SLOPLET_RUNSC"]:
            del made.env["SLOPLET_RUNSC"]
        yield made


MAKE = """
import sys
from sloplet import Sandbox
for name, settings in (("plain", {}), ("safe", {"checkpoint_every": 1}), ("asleep", {"ttl": "1h"})):
    made = Sandbox(name, engine="gvisor", **settings)
    made.start()
    program = made.spawn(["python3", "-uc", sys.argv[1]], stdin=True, detached=True)
    program.send("a\\n")
    said = ""
    for _, text in program:
        said += text
        if "\\n" in said: break
    print(name, program.pid)
Sandbox.connect("asleep").pause()
import time
before = Sandbox.connect("safe").info().saved_at
until = time.monotonic() + 30
while (now := Sandbox.connect("safe").info().saved_at) in (None, before) and time.monotonic() < until:
    time.sleep(0.05)
print(now is not None)
"""

LOOK = """
import sys
from sloplet import Sandbox, errors
for name, pid in zip(sys.argv[1::2], sys.argv[2::2]):
    settings = {"plain": {}, "safe": {"checkpoint_every": 1}, "asleep": {"ttl": "1h"}}[name]
    try:
        Sandbox(name, engine="gvisor", memory="333m", **settings).start()
        print(name, "MISMATCH IGNORED")
    except errors.SandboxMismatch:
        pass
    try:
        made = Sandbox(name, engine="gvisor", **settings)
        info = made.start()
        program = made.attach(int(pid), replay=False)
        program.send("b\\n")
        said = ""
        for _, text in program:
            said += text
            if "\\n" in said: break
        print(name, said.split()[0], "recovered" if info.recovered_from else "resumed")
    except errors.SlopletError as error:
        print(name, type(error).__name__, "keeper" in str(error))
"""


@pytest.mark.parametrize("how", ["TERM", "KILL"])
def test_a_keeper_that_ends(how: str, world: Keeping) -> None:
    """Asked to end, it pauses what has a name. Killed: what slept sleeps, what has a checkpoint is recovered and says
    so, the rest is reported dead. Other settings than a sandbox has are refused before it is woken."""
    lines = world.run(MAKE, CHAIN).splitlines()
    assert lines[-1] == "True", "control: it was checkpointed"
    known = [word for line in lines[:-1] for word in line.split()]
    keeper = world.keeper()
    assert keeper is not None
    end(keeper, signal.SIGTERM if how == "TERM" else signal.SIGKILL)
    looked = world.run(LOOK, *known).splitlines()
    if how == "TERM":
        assert looked == ["plain 2 resumed", "safe 2 resumed", "asleep 2 resumed"]
    else:
        assert looked == ["plain SandboxDead True", "safe 2 recovered", "asleep 2 resumed"]
    wait_for(lambda: world.keeper() != keeper)
    world.run("from sloplet import Sandbox\nfor info in Sandbox.list(): Sandbox.connect(info.id).kill()")


def test_two_programs_one_name(world: Keeping) -> None:
    """The end of one program's block does not put to sleep what another uses."""
    hold = world.begin(
        "import sys\nfrom sloplet import Sandbox\n"
        "with Sandbox('dev', engine='gvisor') as made:\n"
        "    print(made.run('echo 1 > note; cat note').stdout, flush=True)\n    sys.stdin.readline()\n"
        "    print(made.run('cat note').stdout, made.info().state, flush=True)\n"
    )
    assert hold.stdout is not None
    assert hold.stdin is not None
    assert hold.stdout.readline() == "1\n"
    state = "print(Sandbox.connect('dev').info().state)"
    world.run("from sloplet import Sandbox\nwith Sandbox('dev', engine='gvisor') as made: made.run('true')")
    assert world.run(f"from sloplet import Sandbox\n{state}") == "running"
    out, _ = hold.communicate("\n", timeout=30)
    assert "running" in out
    assert world.run(f"from sloplet import Sandbox\n{state}") == "paused"
    assert world.run("from sloplet import Sandbox\nprint(Sandbox.connect('dev').run('cat note').stdout)") == "1"
    world.run("from sloplet import Sandbox\nSandbox.connect('dev').kill()")


RACE = """
import random, sys
from sloplet import Sandbox, errors
dice = random.Random(int(sys.argv[1]))
acts = {
    "run": lambda box: box.run("echo on", timeout=30),
    "pause": lambda box: box.pause(),
    "resume": lambda box: box.resume(),
    "snapshot": lambda box: box.snapshot(),
    "rollback": lambda box: [box.rollback(each) for each in box.snapshots()[-1:]],
    "fork": lambda box: [child.kill() for child in box.fork(1)],
    "undo": lambda box: box.undo(),
    "kill": lambda box: box.kill() if dice.random() < 0.4 else None,
    "close": lambda box: box.close(),
}
for _ in range(10):
    name = dice.choice(list(acts))
    try:
        box = Sandbox("dev", engine="gvisor", undo=1)
        box.start()
        acts[name](box)
        print(name, "ok")
    except errors.SlopletError as error:
        print(name, type(error).__name__)
"""
AFTERWARDS = """
from sloplet import Sandbox
with Sandbox("dev", engine="gvisor", undo=1) as box:
    print(box.run("echo on").stdout)
for info in Sandbox.list():
    Sandbox.connect(info.id).kill()
assert Sandbox.list() == []
"""
EXPECTED = {"SandboxDead", "SandboxNotFound", "SandboxPaused", "SnapshotNotFound", "SandboxExists", "SnapshotInUse"}


def test_three_programs_at_one_sandbox(world: Keeping) -> None:
    """They open, use, pause, roll back, copy and end it as they like: each call ends, with a result or a word that
    fits, and afterwards nothing is left."""
    programs = [world.begin(RACE, str(seed)) for seed in range(3)]
    told: list[str] = []
    for program in programs:
        out, err = program.communicate(timeout=80)
        assert program.returncode == 0, err
        told += out.splitlines()
    assert len(told) == 30
    assert {line.split()[1] for line in told} <= EXPECTED | {"ok"}, told
    assert sum(line.endswith(" ok") for line in told) > 10, told
    assert world.run(AFTERWARDS) == "on"
    assert list((world.home / "snapshots").iterdir()) == []
    assert list((world.home / "sandboxes").glob("*/*")) == []
