"""The memory watchdog: who is killed, who is not, what is said of it, and what it costs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_helpers import INIT, SANITIZED, can

from agentclient import AGENT, AgentClient, encode, frame
from sloplet.wire.schema import VERSION, FrameType, HelloFlag, Op, Tag

pytestmark = [
    pytest.mark.skipif(not AGENT.exists(), reason="the agent is not built here"),
    pytest.mark.skipif(not can(INIT), reason="no user namespaces here"),
]

MIB = 2**20
LIMIT = 128 * MIB
TOUCH = "def touch(mib):\n  b = bytearray(mib << 20)\n  b[::4096] = bytes([1]) * (mib * 256)\n  return b\n"
#: so many children, each with so many MiB of its own, who all wait until the last one has it or is dead, and then until
#: so many are dead (or, if that never comes, for long)
SPREAD = (
    "import os, sys, signal\n" + TOUCH + "n, mib, inherited, dead = map(int, sys.argv[1:])\n"
    "kept = touch(inherited)\n"
    "r, w = os.pipe()\nhold, release = os.pipe()\nkids = []\n"
    "for i in range(n):\n"
    "  pid = os.fork()\n"
    "  if pid == 0:\n"
    "    os.close(r); os.close(release)\n"
    "    mine = touch(mib); os.close(w); os.read(hold, 1); os._exit(0)\n"
    "  kids.append(pid)\n"
    "os.close(w); os.read(r, 1)\n"
    "import time; until = time.monotonic() + (20 if dead else 0.3)\n"  # 0.3 s: several looks at the whole of it
    "gone = []\n"
    "while time.monotonic() < until and (len(gone) < dead or not dead):\n"
    "  pid, status = os.waitpid(-1, os.WNOHANG)\n"
    "  gone += [status] if pid else []\n"
    "  time.sleep(0 if pid else 0.005)\n"
    "os.close(hold); os.close(release)\n"
    "gone += [os.waitpid(-1, 0)[1] for _ in kids[len(gone):]]\n"
    "print(gone.count(signal.SIGKILL))\n"
)


@contextmanager
def agent(limit: int = LIMIT, prefix: list[str] = INIT, setup: str = "") -> Iterator[AgentClient]:
    command = [*prefix, "/bin/sh", "-c", f'{setup} exec "$0" agent', str(AGENT)]
    client = AgentClient(
        command,
        [
            (Tag.USER, "root" if prefix or os.getuid() == 0 else str(os.getuid())),
            (Tag.WORKDIR, "/"), (Tag.FLAGS, HelloFlag.NO_USERS), (Tag.MEMORY, limit),
        ],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )  # fmt: skip
    try:
        yield client
        assert client.output("echo alive") == "alive\n"
    finally:
        client.close()
    assert client.process.returncode == 0


def kills(box: AgentClient) -> int:
    return int(box.call(Op.METRICS).closed[Tag.COUNT])


#: With a /dev/shm of its own: what lies in the host's is not the sandbox's, and would count.
ALONE = [*INIT, "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]


@pytest.fixture(params=["init", "bare"])
def box(request: pytest.FixtureRequest) -> Iterator[AgentClient]:
    """As PID 1, where all of /proc is the sandbox's, and as an ordinary process, which looks at its descendants."""
    with agent(prefix=ALONE if request.param == "init" else []) as client:
        yield client


def test_a_bomb_in_one_process(box: AgentClient) -> None:
    bomb = box.run([sys.executable, "-c", TOUCH + "kept = []\nwhile True: kept.append(touch(4))"])
    assert bomb.closed[Tag.SIGNUM] == signal.SIGKILL
    assert bomb.closed[Tag.OOM] == 1
    assert bomb.closed[Tag.MAXRSS] >= LIMIT // 2
    after = box.run(["true"])
    assert after.closed[Tag.OOM] is None
    assert [record[Tag.OOM] for record in box.call(Op.PS).records()] == [1, None]
    assert kills(box) == 1


def test_a_bomb_of_many_small_ones(box: AgentClient) -> None:
    """30 x 12 MiB, each far below the limit: at least those that do not fit are killed, nobody who is small is, and the
    command that lost some says so. (The dying count for a while: where they are slow, more go than had to.)"""
    bystander = box.spawn(["sleep", "1000"])
    box.started(bystander)
    bomb = box.run([sys.executable, "-c", SPREAD, "30", "12", "0", "18"])
    assert bomb.closed[Tag.OOM] == 1
    assert 18 <= int(bomb.out) <= 30, bytes(bomb.err)
    assert bomb.closed[Tag.EXIT_CODE] == 0
    assert kills(box) == int(bomb.out)
    assert bystander.close is None
    assert next(record for record in box.call(Op.PS).records() if record[Tag.STATE] == 0)[Tag.OOM] is None


def test_workers_that_share_their_memory_are_no_bomb(box: AgentClient) -> None:
    workers = box.run([sys.executable, "-c", SPREAD, "50", "0", "70", "0"])
    assert (workers.out, workers.closed[Tag.OOM]) == (b"0\n", None), bytes(workers.err)
    assert kills(box) == 0


def test_workers_that_stop_sharing_are(box: AgentClient) -> None:
    """Breaking copy-on-write makes no process larger: only shares tell."""
    code = SPREAD.replace("mine = touch(mib)", "kept[::4096] = bytes([2]) * (inherited * 256)")
    workers = box.run([sys.executable, "-c", code, "6", "0", "60", "4"])
    assert workers.closed[Tag.OOM] == 1
    assert kills(box) >= 4


def test_shared_memory_of_no_file_counts(box: AgentClient) -> None:
    code = "import mmap\nm = mmap.mmap(-1, 400 << 20)\nfor at in range(0, len(m), 4096): m[at] = 1"
    assert box.run([sys.executable, "-c", code]).closed[Tag.OOM] == 1


def test_who_hides_counts_in_full(box: AgentClient) -> None:
    hide = "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
    bomb = box.run([sys.executable, "-c", hide + TOUCH + "kept = []\nwhile True: kept.append(touch(4))"])
    assert bomb.closed[Tag.OOM] == 1


MEMORY_DISK = "mount -t tmpfs -o size=1g t /dev/shm &&"


def test_files_in_memory_count() -> None:
    with agent(prefix=["unshare", "-Urmpf", "--mount-proc"], setup=MEMORY_DISK) as box:
        assert box.run("head -c 90m /dev/zero > /dev/shm/big").closed[Tag.OOM] is None
        assert box.run([sys.executable, "-c", TOUCH + "b = touch(20)"]).closed[Tag.OOM] is None
        both = box.run([sys.executable, "-c", TOUCH + "import time\nb = touch(80); time.sleep(60)"])
        assert both.closed[Tag.OOM] == 1
        assert box.run("rm /dev/shm/big").closed[Tag.EXIT_CODE] == 0
        alone = box.run([sys.executable, "-c", TOUCH + "import time\nb = touch(80); time.sleep(0.2)"])
        assert alone.closed[Tag.OOM] is None


def test_files_alone_over_the_limit_kill_who_writes_not_who_cleans_up() -> None:
    with agent(prefix=["unshare", "-Urmpf", "--mount-proc"], setup=MEMORY_DISK) as box:
        script = "i=0; while [ $i -lt 300 ]; do head -c 2m /dev/zero >> /dev/shm/big; sleep 0.01; i=$((i+1)); done"
        assert box.run(script).closed[Tag.OOM] == 1
        assert int(box.output("stat -c %s /dev/shm/big")) < 400 * MIB
        assert box.output("sleep 0.2; rm /dev/shm/big; echo clean") == "clean\n"


def test_orphans_of_a_killed_shim_are_watched(box: AgentClient) -> None:
    code = "import os, signal, sys\n" + TOUCH
    code += "os.kill(os.getppid(), signal.SIGKILL)\nkept = []\nwhile True: kept.append(touch(4))"
    bomb = box.run([sys.executable, "-c", code])
    assert (bomb.closed[Tag.SIGNUM], bomb.closed[Tag.OOM]) == (signal.SIGKILL, 1)


def test_idle_costs_nothing() -> None:
    """No command, no timer: the agent sleeps in the kernel until someone speaks to it."""
    with agent() as box:
        box.run(["true"])
        (pid,) = (int(word) for word in _children(box.process.pid))

        def switches() -> int:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("voluntary")).split()[1])

        box.receive(0.5)  # its last timer gives memory back
        before = switches()
        box.receive(0.5)
        assert switches() == before
        nap = box.spawn(["sleep", "1000"])
        box.started(nap)
        before = switches()
        box.receive(0.5)
        assert 4 <= switches() - before <= 30
        box.call(Op.SIGNAL, (Tag.PID, 2), (Tag.SIGNUM, signal.SIGKILL))


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.skipif(SANITIZED, reason="a sanitizer's pace is no measure")
def test_a_look_at_many_processes_is_bounded() -> None:
    """Looking takes at most an eighth of a processor, however many there are to look at."""
    with agent(limit=2**40) as box:
        box.started(sleepers := box.spawn("i=0; while [ $i -lt 400 ]; do sleep 1000 & i=$((i+1)); done; echo up; wait"))
        box.until(lambda: b"up" in sleepers.out)
        (pid,) = _children(box.process.pid)

        def cpu() -> float:
            return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9

        before = cpu()
        box.receive(1.0)
        assert cpu() - before < 0.25


def test_a_limit_out_of_range_is_refused() -> None:
    client = AgentClient([*INIT, str(AGENT), "agent"], greet=False)
    client.send(frame(FrameType.HELLO, 0, encode([(Tag.VERSION, VERSION), (Tag.USER, "root"), (Tag.MEMORY, 0)])))
    assert client.wait_exit() == 2
    client.close()
