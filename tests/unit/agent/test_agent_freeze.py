"""FREEZE, THAW and the HELLO that ends a freeze: nobody runs, nothing is said, and nothing is lost."""

from __future__ import annotations

import errno
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_helpers import INIT, Marker, can, connect, daemon, eventually

from agentclient import AGENT, AgentClient, Answer, encode, frame
from sloplet.wire.schema import VERSION, ExecFlag, FrameType, FreezeFlag, HelloFlag, Op, Tag

pytestmark = pytest.mark.anyone

TICKS = "i=0; while :; do i=$((i+1)); echo $i; done"


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _states(mark: Marker) -> set[str]:
    return {_state(pid) for pid in mark.pids()}


def _silent(box: AgentClient) -> bool:
    """Whether nothing comes for a while: long for an agent that runs, as its positive control shows."""
    return not select.select([box.fro], [], [], 0.15)[0]


def _again(box: AgentClient, *pairs: tuple[Tag, int | bytes | str]) -> None:
    """A second HELLO, as whoever restored the sandbox sends it."""
    box.hello, box.next = None, 1
    box.streams.clear()
    fields = [(Tag.VERSION, VERSION), (Tag.FLAGS, HelloFlag.NO_USERS), (Tag.USER, "root"), (Tag.WORKDIR, "/"), *pairs]
    box.send(frame(FrameType.HELLO, 0, encode(fields)))
    box.until(lambda: box.hello is not None)


def test_nobody_runs_and_nothing_is_said_until_the_thaw(box: AgentClient, mark: Marker) -> None:
    loud = box.spawn(f"{TICKS}; : {mark.text}")
    loud.grants = False
    box.spawn(daemon(mark.text))
    box.until(lambda: len(loud.out) > 1000)
    eventually(lambda: len(mark.pids()) >= 3, "the daemon")
    frozen = box.call(Op.FREEZE)
    assert frozen.closed[Tag.PIDS] == 0
    assert frozen.closed[Tag.COUNT] >= len(mark.pids()) >= 3
    assert _states(mark) == {"T"}
    box.send(frame(FrameType.PING, 0, b"later"))
    size = len(loud.out)
    assert _silent(box)
    assert len(loud.out) == size
    thawed = box.call(Op.THAW)
    assert thawed.closed[Tag.COUNT] == frozen.closed[Tag.COUNT]
    assert box.pongs == [b"later"]
    assert "T" not in _states(mark)
    loud.grants = True
    box.grant(loud)
    box.until(lambda: len(loud.out) > size + 300_000)  # it goes on, and no byte is missing
    numbers = bytes(loud.out[: loud.out.rindex(b"\n")]).split(b"\n")
    assert numbers == [b"%d" % (i + 1) for i in range(len(numbers))]


def test_who_was_stopped_before_stays_stopped(box: AgentClient, mark: Marker) -> None:
    box.spawn(f"kill -STOP $$; : {mark.text}")
    eventually(lambda: _states(mark) == {"T"}, "the stop")
    other = box.spawn("read x; echo $x", flags=ExecFlag.STDIN)
    box.started(other)
    assert box.call(Op.FREEZE).closed[Tag.COUNT] == 1
    assert box.call(Op.THAW).closed[Tag.COUNT] == 1
    assert _states(mark) == {"T"}
    box.data(other, b"goes on\n")
    assert box.wait(other).out == b"goes on\n"


def test_a_shell_does_not_see_its_job_stopped(box: AgentClient, mark: Marker) -> None:
    """An interactive shell that waits for a job would take the terminal back and say so."""
    if not shutil.which("bash"):
        pytest.skip("no bash")
    shell = box.spawn(["bash", "--norc", "-i", "-c", f"cat; echo over; : {mark.text}"], flags=ExecFlag.PTY)
    box.started(shell)
    box.data(shell, b"one\n")
    box.until(lambda: shell.out.count(b"one") == 2)
    for number in range(20):
        assert box.call(Op.FREEZE).closed[Tag.PIDS] == 0
        box.call(Op.THAW)
        box.data(shell, b"round %d\n" % number)
        box.until(lambda n=number: shell.out.count(b"round %d\r" % n) == 2)
    box.end(shell)
    box.wait(shell)
    assert b"over" in shell.out
    assert b"topped" not in shell.out


def test_a_process_of_many_threads_stands_still(box: AgentClient, mark: Marker) -> None:
    if not shutil.which("python3"):
        pytest.skip("no python3")
    code = """if 1:
    import threading, time, sys
    def work(path):
        n = 0
        while True:
            n += 1
            open(path, "w").write(str(n))
    for name in sys.argv[2:]:
        threading.Thread(target=work, args=(name,)).start()
    print("ready", flush=True)
    """
    work = Path(box.output("pwd").strip())
    files = [work / f"count{i}" for i in range(4)]
    threads = box.spawn(["python3", "-c", code, mark.text, *map(str, files)])
    box.until(lambda: b"ready" in threads.out)
    eventually(lambda: all(f.exists() for f in files))
    assert box.call(Op.FREEZE).closed[Tag.PIDS] == 0
    before = [(f.stat().st_mtime_ns, f.read_bytes()) for f in files]
    assert _silent(box)
    assert [(f.stat().st_mtime_ns, f.read_bytes()) for f in files] == before
    box.call(Op.THAW)
    eventually(lambda: all((f.stat().st_mtime_ns, f.read_bytes()) != b for f, b in zip(files, before, strict=True)))


def test_a_child_of_vfork_stopped_before_its_exec(box: AgentClient) -> None:
    """Its parent cannot stop; it waits all the same."""
    if not shutil.which("python3"):
        pytest.skip("no python3")
    code = "import os\nwhile True: os.posix_spawn('/bin/true', ['true'], {}); os.wait()"
    for _ in range(4):
        box.started(box.spawn(["python3", "-c", code]))
    waited = 0.0
    for _ in range(30):
        begun = time.monotonic()
        assert box.call(Op.FREEZE, (Tag.TIMEOUT_MS, 10_000)).closed[Tag.PIDS] == 0
        waited = max(waited, time.monotonic() - begun)
        box.call(Op.THAW)
    assert waited < 9


def test_a_fork_bomb_is_frozen(box: AgentClient, mark: Marker) -> None:
    box.spawn(f"f() {{ while :; do (sleep 0.02); done; }}; f & f & f & f & f & f; : {mark.text}")
    eventually(lambda: len(mark.pids()) >= 6, "the bomb")
    frozen = box.call(Op.FREEZE)
    assert frozen.closed[Tag.PIDS] == 0
    pids = set(mark.pids())
    assert _states(mark) == {"T"}
    assert _silent(box)
    assert set(mark.pids()) == pids
    box.call(Op.THAW)


def test_what_is_asked_meanwhile_is_served_after_the_thaw_in_its_order(box: AgentClient, tmp_path: Path) -> None:
    assert box.call(Op.FREEZE).error is None
    early = box.spawn("echo early")
    upload = box.open(Op.WRITE, (Tag.PATH, str(tmp_path / "big")))
    box.send(frame(FrameType.DATA, upload.number, b"x" * 65536) * 4)  # all its credit
    twice = box.open(Op.FREEZE)
    assert _silent(box)
    thaw = box.open(Op.THAW)
    late = box.spawn("echo late")
    box.end(upload)
    for stream in (early, upload, thaw, late, twice):
        box.wait(stream)
    assert (early.out, late.out) == (b"early\n", b"late\n")
    assert (tmp_path / "big").stat().st_size == 4 * 65536
    assert twice.error == errno.EBUSY
    assert thaw.closed[Tag.COUNT] == 0
    assert box.call(Op.THAW).error == errno.EINVAL


def test_frozen_but_served(box: AgentClient, mark: Marker, tmp_path: Path) -> None:
    """For a look at the files at one moment."""
    count = tmp_path / "count"
    busy = box.spawn(
        f"i=0; while :; do i=$((i+1)); echo $i > {count}; done; : {mark.text}", (Tag.TIMEOUT_MS, 3_600_000)
    )
    box.started(busy)
    eventually(count.exists)
    assert box.call(Op.FREEZE, (Tag.FLAGS, FreezeFlag.SERVE)).closed[Tag.COUNT] == 1
    box.ping()
    told = [box.call(Op.CHANGES, (Tag.PATH, str(tmp_path)), (Tag.FLAGS, 1)).out for _ in range(3)]
    assert told[0] == told[1] == told[2]
    assert _states(mark) == {"T"}
    assert box.run("echo no").error == errno.EBUSY
    assert box.call(Op.FREEZE).error == errno.EBUSY
    assert box.call(Op.THAW).closed[Tag.COUNT] == 1
    before = count.read_bytes()
    eventually(lambda: count.read_bytes() not in (before, b""), "the count goes on")
    box.call(Op.FREEZE, (Tag.FLAGS, FreezeFlag.SERVE))
    _again(box)
    assert "T" not in _states(mark)
    assert box.call(Op.FREEZE, (Tag.FLAGS, 2)).error == errno.EINVAL


def test_much_is_kept_until_the_thaw(bare: AgentClient, tmp_path: Path) -> None:
    """Uploads that were under way, all with their credit used up."""
    uploads = [bare.open(Op.WRITE, (Tag.PATH, str(tmp_path / f"up{i}"))) for i in range(20)]
    bare.ping()
    bare.call(Op.FREEZE)
    for i, upload in enumerate(uploads):
        bare.send(frame(FrameType.DATA, upload.number, bytes([i]) * 65536) * 4)
    assert _silent(bare)
    bare.call(Op.THAW)
    for i, upload in enumerate(uploads):
        bare.end(upload)
        assert bare.wait(upload).closed[Tag.BYTES] == 262144
        assert (tmp_path / f"up{i}").read_bytes() == bytes([i]) * 262144


def test_too_much_to_be_kept(bare: AgentClient) -> None:
    """A host that goes on asking and asking loses the connection, the agent not its head."""
    bare.call(Op.FREEZE)
    big = frame(FrameType.OPEN, bare.next, encode([(Tag.OP, Op.EXEC), *((Tag.ARGV, b"x" * 65536) for _ in range(15))]))
    with pytest.raises(BrokenPipeError):
        bare.send(big * 40)
    assert bare.wait_exit() == 2


@pytest.mark.parametrize("limit", [-1, 60_001, 2**62])
def test_a_time_limit_out_of_range(box: AgentClient, limit: int) -> None:
    assert box.call(Op.FREEZE, (Tag.TIMEOUT_MS, limit)).error == errno.EINVAL
    box.ping()


def test_time_spent_frozen_counts_against_no_timeout(box: AgentClient) -> None:
    command = box.spawn("read x; echo $x", (Tag.TIMEOUT_MS, 1500), flags=ExecFlag.STDIN)
    box.started(command)
    box.call(Op.FREEZE)
    begun = time.monotonic()
    while time.monotonic() - begun < 1.6:
        assert not select.select([box.fro], [], [], 0.1)[0]
    box.call(Op.THAW)
    box.data(command, b"in time\n")
    answer = box.wait(command).closed
    assert (command.out, answer[Tag.TIMED_OUT]) == (b"in time\n", 0)
    assert answer[Tag.WALL_US] < 1_500_000
    overdue = box.run("sleep 100", (Tag.TIMEOUT_MS, 50))  # positive control: the clock runs again
    assert overdue.closed[Tag.TIMED_OUT] == 1


def test_a_kill_while_frozen_is_told_after_the_thaw(box: AgentClient, mark: Marker) -> None:
    victim = box.spawn(f"sleep 1000; : {mark.text}")
    eventually(mark.pids)
    box.call(Op.FREEZE)
    for pid in mark.pids():
        os.kill(pid, signal.SIGKILL)
    assert _silent(box)
    box.call(Op.THAW)
    assert box.wait(victim).closed[Tag.SIGNUM] == signal.SIGKILL


def test_hello_thaws_and_the_missed_output_can_be_had(box: AgentClient, mark: Marker) -> None:
    """The old host's stream neither holds the process back any more nor kills it."""
    kept = box.spawn(f"read x; {TICKS}; : {mark.text}", (Tag.RING, 4096), flags=ExecFlag.KILL_ON_RESET | ExecFlag.STDIN)
    kept.grants = False
    pid = box.started(kept)
    box.data(kept, b"go\n")
    box.until(lambda: kept.taken > 262144 - 20)  # no credit is left: the writer is held up
    box.call(Op.FREEZE)
    old = bytes(kept.out)
    box.send(frame(FrameType.OPEN, box.next, encode([(Tag.OP, Op.EXEC), (Tag.ARGV, "/never/run")])))
    _again(box, (Tag.TAG, "mine"))
    assert box.hello is not None
    assert box.hello[Tag.TAG] == b"mine"
    assert "T" not in _states(mark)
    table = box.call(Op.PS).records()
    assert [(row[Tag.PID], row[Tag.STATE]) for row in table] == [(pid, 0)]
    attached = box.open(Op.ATTACH, (Tag.PID, pid), (Tag.FROM_OUT, len(old)))
    box.until(lambda: len(attached.out) > 100_000)
    assert attached.reply is not None
    assert attached.reply[Tag.OFFSET_OUT] >= len(old)
    text = bytes(attached.out)
    numbers = [int(word) for word in text[text.index(b"\n") : text.rindex(b"\n")].split()]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert numbers[0] > int(old[: old.rindex(b"\n")].rpartition(b"\n")[2])


def test_hello_without_a_freeze_still_begins_anew(box: AgentClient) -> None:
    box.run("true")
    _again(box)
    assert box.output("echo anew") == "anew\n"
    assert box.call(Op.THAW).error == errno.EINVAL


def test_a_frozen_sandbox_ends_with_its_holder(tmp_path: Path, mark: Marker) -> None:
    client = connect([], tmp_path)
    client.spawn(daemon(mark.text))
    eventually(lambda: len(mark.pids()) >= 2)
    client.call(Op.FREEZE)
    client.close()
    mark.gone()


NAMED = """
mount -t tmpfs -o mode=755 t /run && mount -t tmpfs -o mode=755 t /etc && hostname first.name &&
echo first.name > /etc/hostname && printf '127.0.0.1\\tlocalhost\\n127.0.1.1\\tfirst.name first\\n' > /etc/hosts &&
echo root:x:0:0:r:/:/bin/sh > /etc/passwd && exec "$0" agent
"""


@pytest.fixture
def named(tmp_path: Path) -> Iterator[AgentClient]:
    """PID 1 with a host name, an /etc and a /run of its own, frozen and asked nothing yet."""
    if not can([*INIT, "-mu"]):
        pytest.skip("no user namespaces here")
    client = AgentClient(
        [*INIT, "-mu", "/bin/sh", "-c", NAMED, str(AGENT)],
        [(Tag.USER, "root"), (Tag.WORKDIR, "/run"), (Tag.FLAGS, HelloFlag.NO_USERS), (Tag.GENERATION, "g-1")],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    yield client
    client.close()


def test_the_new_identity_comes_before_anyone_goes_on(named: AgentClient) -> None:
    watch = """
    while :; do
        read g < /run/sloplet/generation; now="$g $(hostname)"
        [ "$now" = "$old" ] || echo "$now"
        old=$now
    done"""
    seen = named.spawn(watch)
    pid = named.started(seen)
    named.until(lambda: seen.out == b"1 g-1 first.name\n")
    inode = named.output("stat -c '%i %a' /run/sloplet/generation")
    assert named.output("stat -c %a /run/sloplet") == "755\n"
    assert named.output("echo $SLOPLET_GENERATION_FILE") == "/run/sloplet/generation\n"
    named.call(Op.FREEZE)
    _again(named, (Tag.GENERATION, "second"), (Tag.HOSTNAME, "other"), (Tag.ENTROPY, os.urandom(64)))
    missed = named.open(Op.ATTACH, (Tag.PID, pid), (Tag.FROM_OUT, 0))
    named.until(lambda: b"2 second" in missed.out)
    # a pass that read the generation before the freeze may have read the name after it; never the other way round
    assert re.fullmatch(rb"1 g-1 first.name\n(1 g-1 other\n)?2 second other\n", bytes(missed.out)), missed.out
    assert named.output("stat -c '%i %a' /run/sloplet/generation") == inode
    assert named.output("cat /etc/hostname; hostname; cat /etc/hosts") == (
        "other\nother\n127.0.0.1\tlocalhost\n127.0.1.1\tother first\n"
    )
    _again(named, (Tag.GENERATION, "second"))  # the same again is no new generation
    assert named.output("cat $SLOPLET_GENERATION_FILE") == "2 second\n"
    _again(named, (Tag.GENERATION, "3rd"))
    assert named.output("cat $SLOPLET_GENERATION_FILE") == "3 3rd\n"


@pytest.mark.parametrize("text", [b"", b"two words", b"x" * 65, b"line\n", b"\xc3\xa9"])
def test_a_generation_that_is_no_word(named: AgentClient, text: bytes) -> None:
    named.hello = None
    named.send(frame(FrameType.HELLO, 0, encode([(Tag.VERSION, VERSION), (Tag.GENERATION, text)])))
    assert named.wait_exit() == 2


def test_an_agent_that_is_not_init_publishes_nothing(bare: AgentClient) -> None:
    _again(bare, (Tag.GENERATION, "mine"))
    assert bare.output("echo x$SLOPLET_GENERATION_FILE") == "x\n"
    assert isinstance(bare.hello, Answer)
    assert subprocess.run(["grep", "-qs", "mine", "/run/sloplet/generation"]).returncode != 0
