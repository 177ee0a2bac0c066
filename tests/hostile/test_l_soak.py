"""L: 50 rounds of pausing and 100 forks. No byte is lost, no random number comes twice, nothing is left."""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any

import pytest
from live_kit import CHAIN, Chain, Traces, all_ended, box, json_line, saved_states, talk, talk_on

from sloplet import Sandbox

pytestmark = [pytest.mark.anyone, pytest.mark.usefixtures("gvisor"), pytest.mark.timeout(300)]

ROUNDS = 50
BATCHES = 10
BATCH = 10


@pytest.fixture(scope="module", autouse=True)
def _warm(gvisor: None) -> None:
    """What is made once in a process and a home is there."""
    with box() as made:
        made.pause()
        made.resume()


def test_write_pause_resume_verify() -> None:
    """Files and the memory of a process, through round after round."""
    before = Traces()
    with box() as made:
        files: dict[str, str] = {}
        mirror = Chain()
        program = talk(made, CHAIN)
        pid, dice = program.pid, random.Random(3)
        for number in range(ROUNDS):
            name = f"file{dice.randrange(8)}"
            content = os.urandom(dice.choice((0, 1, 4095, 4096, 70_001, 300_000)))
            made.files.write(name, content)
            files[name] = hashlib.sha256(content).hexdigest()
            line = os.urandom(8).hex()
            assert program.ask(line) == mirror.add(line)
            assert made.pause().state == "paused"
            if number % 3 == 0:
                made.resume()  # the others wake by being used
            program = talk_on(made, pid)
            assert program.ask("again") == mirror.add("again"), f"memory was lost in round {number}"
            assert _sums(made) == files, f"a file was lost in round {number}"
        assert made.info().state == "running"
    assert saved_states() == []
    assert before.left() == []


def _sums(made: Sandbox) -> dict[str, str]:
    lines = made.run("sha256sum file*", check=True).stdout.splitlines()
    return {line.split()[1]: line.split()[0] for line in lines}


#: Notices who it is, as often as it can, and counts how often it was whom. Draws when asked.
WITNESS = """
import json, os, random, sys, threading, uuid
file = os.open(os.environ["SLOPLET_GENERATION_FILE"], os.O_RDONLY)
generation = lambda: os.pread(file, 128, 0).decode().strip()
seen, hot = {}, threading.Event()

def watch():
    while True:
        hot.wait()
        born, left = generation(), 500
        while hot.is_set() and left:
            key = os.uname().nodename + " " + generation()
            seen[key] = seen.get(key, 0) + 1
            left -= not key.endswith(born)
        hot.clear()

threading.Thread(target=watch, daemon=True).start()
copied, watched, known = random.Random(os.urandom(8)), random.Random(os.urandom(8)), generation()
for line in sys.stdin:
    if line.strip() == "hot":
        hot.set()
        print("hot", flush=True)
        continue
    if line.strip() == "cool":
        hot.clear()
    if generation() != known:
        known = generation()
        watched.seed(os.urandom(32))
    print(json.dumps({
        "hostname": os.uname().nodename, "file": open("/etc/hostname").read().strip(), "generation": generation(),
        "urandom": os.urandom(16).hex(), "getrandom": os.getrandom(16).hex(),
        "device": open("/dev/urandom", "rb", 0).read(16).hex(), "uuid": str(uuid.uuid4()),
        "watched": watched.random(), "copied": copied.random(), "seen": seen,
    }), flush=True)
"""
DISTINCT = ("hostname", "file", "generation", "urandom", "getrandom", "device", "uuid", "watched")


def test_forks_share_nothing_but_their_past() -> None:
    """Every copy is somebody else before anything in it goes on, and draws random numbers of its own."""
    before = Traces()
    drawn: list[dict[str, Any]] = []
    ids: list[str] = []
    with box() as made:
        program = talk(made, WITNESS)
        for _ in range(BATCHES):
            program.ask("hot")
            with all_ended(made.fork(BATCH)) as children:
                parent = json_line(program.ask("cool"))
                told = [json_line(talk_on(child, program.pid).ask("draw")) for child in children]
                ids += [child.id for child in children]
            assert [each["hostname"] for each in told] == ids[-BATCH:]
            _check_batch(parent, told)
            drawn += [parent, *told]
        assert saved_states() == [], "what a fork saves for itself goes with it"
    for what in set(DISTINCT) - {"hostname", "file", "generation"}:
        values = [each[what] for each in drawn]
        assert len(set(values)) == len(values), f"{what} came twice"
    assert len(set(ids)) == BATCHES * BATCH
    assert before.left() == []


def _check_batch(parent: dict[str, Any], children: list[dict[str, Any]]) -> None:
    for what in DISTINCT:
        values = [each[what] for each in (parent, *children)]
        assert len(set(values)) == len(values), f"{what} is the same in two: {values}"
    assert len({child["copied"] for child in children}) == 1, "control: they are copies, of one moment"
    who = f"{parent['hostname']} {parent['generation']}"
    counts = {child["seen"][who] for child in children}
    assert len(counts) == 1, f"some of them went on as their parent: {counts}"
    assert parent["seen"][who] > min(counts), "control: to go on as the parent is noticed"
    for child in children:
        mixed = [key for key in child["seen"] if parent["hostname"] in key.split() and key != who]
        assert sum(child["seen"][key] for key in mixed) <= 1, "new generation, old name"
        assert child["seen"].get(f"{child['hostname']} {child['generation']}", 0) > 0, "control: the copy watches on"
