"""N-14: a sandbox that opens all it can, and reads as slowly as it can, costs its own share and no more."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostile_kit import eventually, rss, runtime
from live_kit import SOAK, talk
from net_kit import GOOD, HELLO, Rung, attempt, http, set_network

from netkit import Internet
from sloplet import Network, Sandbox

pytestmark = pytest.mark.anyone

LIMIT = 64

#: Opens connections for ever, keeps as many as it may, sends nothing.
OPENS = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept, tried = [], 0
while tried < %d:
    line = socket.socket()
    line.setblocking(False)
    try:
        line.connect(("%s", %d))
    except BlockingIOError:
        pass
    except OSError:
        line.close()
        line = None
    tried += 1
    if line is not None:
        kept.append(line)
    if len(kept) > 800:
        for old in kept[:400]:
            old.close()
        del kept[:400]
    if tried %% 1000 == 0:
        print(tried, flush=True)
print("done", flush=True)
"""

#: Asks for far more than it reads.
SLOW = """
import socket, sys
lines = []
for _ in range(20):
    line = socket.create_connection(("%s", 19))
    lines.append(line)
print("up", flush=True)
sys.stdin.readline()
for line in lines:
    got = 0
    while got < 300000:
        got += len(line.recv(65536))
print("read", flush=True)
"""

UDP = """
import socket, time
line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sent = failed = 0
until = time.monotonic() + 1
while time.monotonic() < until:
    try:
        line.sendto(bytes(1400), ("5.5.5.5", 9999))
        sent += 1
    except OSError:
        failed += 1
print(sent + failed)
"""


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def latency(box: Sandbox) -> float:
    """The median of some commands."""
    taken = []
    for _ in range(15):
        start = time.monotonic()
        box.run(["true"])
        taken.append(time.monotonic() - start)
    return statistics.median(taken)


@contextmanager
def computing(box: Sandbox) -> Iterator[None]:
    """Two processes of it use the processor, and nothing else."""
    burning = [box.spawn("while :; do :; done") for _ in range(2)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()


@pytest.fixture(scope="module")
def neighbour_box(rung: Rung, whole_internet: Internet) -> object:
    with rung.box(network=Network(allow=[GOOD])) as made:
        yield made


def test_n14_connections(shared: Sandbox, neighbour_box: Sandbox, net: Internet) -> None:
    """Of 100,000 connections (SLOPLET_SOAK; else 4,000) only so many are there at once, and a neighbour works on."""
    count = 50_000 if SOAK else 2_000
    set_network(shared, Network(allow=[f"{GOOD}:7"], connections=LIMIT))
    with computing(shared):
        quiet = latency(neighbour_box)
    before, memory = fds(), rss()
    flood = talk(shared, OPENS % (count, "5.5.5.5", 7))
    by_name = talk(shared, OPENS % (count, GOOD, 7))
    try:
        most = 0
        busy = latency(neighbour_box)
        while by_name.line() != "done":
            most = max(most, fds() - before)
        assert most <= 2 * LIMIT + 64, f"{most} descriptors more in the holder"
        assert rss() - memory < 64 * 2**20
        # beside one that only computes as much; and what a scheduler's turn takes
        assert busy < 2 * quiet + 0.05, f"a command of the neighbour's took {busy:.3f} s, {quiet:.3f} s before"
        assert HELLO in attempt(neighbour_box, http(GOOD)).one.data
    finally:
        for each in (flood, by_name):
            each.process.kill()
    eventually(lambda: fds() <= before + 8, 20, "descriptors are not given back")
    assert HELLO in attempt_later(shared, net)


def attempt_later(box: Sandbox, net: Internet) -> str:
    """Once its connections are gone, the sandbox that flooded can connect again."""
    set_network(box, Network(allow=[GOOD], connections=LIMIT))
    data = ""

    def works() -> bool:
        nonlocal data
        data = attempt(box, http(GOOD)).one.data
        return bool(data)

    eventually(works, 20)
    return data


def test_n14_who_does_not_read(shared: Sandbox, neighbour_box: Sandbox, net: Internet) -> None:
    """What is not read is not fetched: the holder's memory stays flat, and it goes on when it is read."""
    set_network(shared, Network(allow=[f"{GOOD}:19"]))
    memory = rss()
    slow = talk(shared, SLOW % GOOD)
    try:
        assert slow.line() == "up"
        eventually(lambda: sum(event["port"] == 19 for event in net.seen("tcp")) == 20, 20)
        busy = latency(neighbour_box)
        assert busy < 1
        assert rss() - memory < 64 * 2**20
        assert slow.ask("go") == "read"
    finally:
        slow.process.kill()


def test_n14_datagrams(shared: Sandbox, neighbour_box: Sandbox, net: Internet) -> None:
    result = shared.run(["python3", "-c", UDP], timeout=30)
    assert int(result.stdout) > 100, "none of them kept its sender waiting"
    assert net.packets() == []
    assert HELLO in attempt(neighbour_box, http(GOOD)).one.data


def test_n14_half_open(shared: Sandbox, net: Internet) -> None:
    """Programs that end, and are killed, with connections in every state leave none in the holder."""
    set_network(shared, Network(allow=[f"{GOOD}:7", GOOD]))
    before = fds()
    for ending in ("kill -9 $$", "exit 0", "exec sleep 1000"):
        script = f"exec 3<>/dev/tcp/{GOOD}/7; exec 4<>/dev/tcp/{GOOD}/80; printf GET >&4; printf x >&3; {ending}"
        process = shared.spawn(["bash", "-c", script])
        if "sleep" in ending:
            eventually(lambda: fds() > before, 10)
            process.kill()
        process.wait()
    eventually(lambda: fds() <= before, 20, "descriptors are not given back")
    assert Path(f"/proc/{os.getpid()}").exists()
    assert runtime().held
