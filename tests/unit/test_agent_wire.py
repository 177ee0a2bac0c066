"""The guest agent alone, over its two pipes: every operation of docs/wire.md, and what it must survive."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from agentclient import AGENT, PATIENCE, AgentClient, encode, frame

from sloplet.wire.schema import (
    INITIAL_CREDIT,
    MAX_CREDIT,
    VERSION,
    CtrlKind,
    ExecFlag,
    FileType,
    FrameType,
    HelloFlag,
    ListFlag,
    MkdirFlag,
    MoveFlag,
    Op,
    RemoveFlag,
    SignalFlag,
    StatFlag,
    Tag,
    WatchFlag,
    WatchMask,
    WriteFlag,
)

if not AGENT.exists() and shutil.which("make"):
    subprocess.run(["make", "-s", "-C", str(Path(__file__).parents[2] / "agent")], check=True)
pytestmark = pytest.mark.skipif(not AGENT.exists(), reason="the agent is not built here")

SANITIZED = "sanitize" in str(AGENT)
INIT = ["unshare", "-Urpf", "--mount-proc"]


def can(command: list[str]) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run([*command, "true"], capture_output=True).returncode == 0


def eventually(done: Callable[[], object], what: str = "it") -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.005)  # between polls of other processes' state; no result depends on its length


class Marker:
    """A text in commands' arguments by which their processes can be found from outside."""

    def __init__(self) -> None:
        self.text = f"mark-{uuid.uuid4().hex}"

    def pids(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self.text.encode() in words and state not in "ZX":
                found.append(int(entry.name))
        return found

    def gone(self) -> None:
        eventually(lambda: not self.pids(), "the end of all processes")


@pytest.fixture
def mark() -> Iterator[Marker]:
    marker = Marker()
    yield marker
    for pid in marker.pids():
        os.kill(pid, signal.SIGKILL)


def connect(prefix: list[str], work: Path, **extra: object) -> AgentClient:
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return AgentClient(
        [*prefix, str(AGENT), "agent"],
        [
            (Tag.USER, "root" if prefix or os.getuid() == 0 else str(os.getuid())),
            (Tag.WORKDIR, str(work)),
            (Tag.HOME, str(work / "home")),
            (Tag.FLAGS, HelloFlag.NO_USERS),
            (Tag.ENV, "FROM_HELLO=1"),
        ],
        env=env,
    )


@pytest.fixture(params=["bare", "init"])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AgentClient]:
    """The agent as an ordinary process, and as PID 1 of a namespace with one uid."""
    if request.param == "init" and not can(INIT):
        pytest.skip("no user namespaces here")
    client = connect(INIT if request.param == "init" else [], tmp_path)
    yield client
    client.close()
    assert client.process.returncode == 0


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[AgentClient]:
    client = connect([], tmp_path)
    yield client
    client.close()


USERS_SETUP = """
mount -t tmpfs -o mode=755 t /etc && mount -t tmpfs -o mode=755 t /mnt &&
printf 'root:x:0:0:r:/root:/bin/sh\\nweb:x:1234:1235:w:/mnt/web:/bin/sh\\nbroken:line' > /etc/passwd &&
printf 'root:x:0:\\nweb:x:1235:\\nextra:x:777:root,web\\nalso:x:778:web' > /etc/group && exec "$0" agent
"""


@pytest.fixture
def users() -> Iterator[AgentClient]:
    """PID 1 with real uids, an /etc of its own and a default user that is missing there."""
    if os.getuid() != 0 or not can(["unshare", "-mpf", "--mount-proc"]):
        pytest.skip("several uids need root")
    client = AgentClient(
        ["unshare", "-mpf", "--mount-proc", "/bin/sh", "-c", USERS_SETUP, str(AGENT)],
        [(Tag.USER, "agent"), (Tag.WORKDIR, "/mnt/work"), (Tag.HOME, "/mnt/agent"), (Tag.ENTROPY, os.urandom(64))],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    yield client
    client.close()


def agent_pid(client: AgentClient) -> int:
    """The agent's pid as we see it: unshare's child, or the process itself."""
    pid = client.process.pid
    if os.readlink(f"/proc/{pid}/exe") == str(AGENT.resolve()):
        return pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def anonymous_kib(pid: int) -> int:
    return int(re.search(r"^Anonymous:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[1])


# -- EXEC


def test_exec_output_and_exit_code(box: AgentClient) -> None:
    stream = box.run("echo out; echo err >&2; exit 7")
    assert (stream.out, stream.err) == (b"out\n", b"err\n")
    close = stream.closed
    assert close[Tag.EXIT_CODE] == 7
    assert close[Tag.SIGNUM] is None
    assert close[Tag.TIMED_OUT] == 0
    assert (close[Tag.OUT_TOTAL], close[Tag.ERR_TOTAL]) == (4, 4)
    assert (close[Tag.OUT_LOST], close[Tag.ERR_LOST]) == (0, 0)
    assert close[Tag.WALL_US] > 0
    assert close[Tag.MAXRSS] > 0


def test_numbers_are_never_used_twice(box: AgentClient) -> None:
    numbers = []
    for _ in range(3):
        stream = box.run(["true"])
        assert stream.reply is not None
        numbers.append(stream.reply[Tag.PID])
    assert numbers == [1, 2, 3]


def test_death_by_signal(box: AgentClient) -> None:
    assert box.run("kill -SEGV $$").closed[Tag.SIGNUM] == signal.SIGSEGV


def test_environment(box: AgentClient, tmp_path: Path) -> None:
    lines = box.run(["env"], env=["A=1", "FROM_HELLO", "PATH=/bin:/usr/bin"]).out.decode().splitlines()
    assert "A=1" in lines
    assert not any(line.startswith(("FROM_HELLO", "TERM")) for line in lines)
    assert f"HOME={tmp_path}/home" in lines
    assert "PATH=/bin:/usr/bin" in lines
    assert "FROM_HELLO=1" in box.output(["env"])
    assert (tmp_path / "home").is_dir()


def test_command_posture(box: AgentClient) -> None:
    status = box.output("cat /proc/self/status; umask; ls -l /proc/self/fd; cat /proc/self/oom_score_adj")
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert re.search(rf"{name}:\s+0+\n", status), name
    assert re.search(r"NoNewPrivs:\s+1", status)
    for name in ("SigBlk", "SigIgn"):
        assert re.search(rf"{name}:\s+0+\n", status), name
    assert "\n0022\n" in status
    fds = re.findall(r" (\d+) ->", status)
    assert set(fds) <= {"0", "1", "2", "3"}  # 3 is ls reading the folder
    assert status.rstrip().endswith("500")


def test_default_cwd_is_workdir_and_relative_cwd_is_below(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    assert box.output(["pwd"]).strip() == str(tmp_path)
    assert box.output(["pwd"], (Tag.CWD, "sub")).strip() == str(tmp_path / "sub")


@pytest.mark.parametrize(
    ("cwd", "expected"),
    [
        ("/nonexistent", errno.ENOENT),
        ("/etc/passwd", errno.ENOTDIR),
        ("/proc/self/cwd", errno.ELOOP),
        ("/proc/self/root/tmp", errno.ELOOP),
        ("/proc/1/root", (errno.ELOOP, errno.EACCES)),
        *[(f"/proc/self/fd/{n}", (errno.ELOOP, errno.ENOENT)) for n in range(3, 12)],
        ("/" + "x" * 300, errno.ENAMETOOLONG),
        ("/x" * 2500, errno.ENAMETOOLONG),
        ("", errno.EINVAL),
    ],
)
def test_bad_cwd(bare: AgentClient, cwd: str, expected: int | tuple[int, ...]) -> None:
    stream = bare.run(["pwd"], (Tag.CWD, cwd))
    assert stream.reply is None
    assert stream.error in (expected if isinstance(expected, tuple) else (expected,))
    assert stream.closed[Tag.WHAT] == b"cwd"


def test_nul_in_a_text_is_refused(bare: AgentClient) -> None:
    assert bare.run(["pwd"], (Tag.CWD, b"/tmp\0/etc")).error == errno.EINVAL
    assert bare.run([b"echo", b"a\0b"]).error == errno.EINVAL


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["no-such-command"], errno.ENOENT),
        (["/no/such/command"], errno.ENOENT),
        (["/etc/passwd"], errno.EACCES),
        (["/tmp"], errno.EACCES),
        ([""], errno.ENOENT),
    ],
)
def test_commands_that_cannot_start(box: AgentClient, argv: list[str], expected: int) -> None:
    stream = box.run(argv)
    assert stream.reply is None
    assert stream.error == expected
    assert stream.closed[Tag.WHAT] == b"command"
    assert box.call(Op.PS).records() == []


def test_a_file_without_a_format_is_not_a_script(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("echo hi\n")
    (tmp_path / "plain").chmod(0o755)
    assert box.run(["./plain"]).error == errno.ENOEXEC


def test_path_lookup_skips_what_cannot_run(box: AgentClient, tmp_path: Path) -> None:
    for name, mode in (("a", 0o644), ("b", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tool").write_text("#!/bin/sh\necho found $0\n")
        (tmp_path / name / "tool").chmod(mode)
    stream = box.run(["tool"], env=[f"PATH={tmp_path}/none:{tmp_path}/a:{tmp_path}/b"])
    assert stream.out.decode() == f"found {tmp_path}/b/tool\n"
    assert box.run(["tool"], env=[f"PATH={tmp_path}/a"]).error == errno.EACCES


def test_stdin_is_null_unless_asked_for(box: AgentClient) -> None:
    assert box.output("cat; readlink /proc/self/fd/0") == "/dev/null\n"


def test_stdin_and_its_end(box: AgentClient) -> None:
    data = os.urandom(3_000_000)
    stream = box.run(["cat"], stdin=data)
    assert bytes(stream.out) == data


def test_stdin_nobody_reads(box: AgentClient) -> None:
    stream = box.run("exec 0<&-; sleep 0.05; exit 3", stdin=b"x" * 1_000_000)
    assert stream.closed[Tag.EXIT_CODE] == 3
    box.ping()


def test_merge(box: AgentClient) -> None:
    stream = box.run("echo a; echo b >&2; echo c", flags=ExecFlag.MERGE)
    assert (stream.out, stream.err) == (b"a\nb\nc\n", b"")


def test_unknown_requests_are_refused(bare: AgentClient) -> None:
    assert bare.call(Op.EXEC, (Tag.ARGV, "true"), (Tag.PATH, "/x")).error == errno.EPROTO
    assert bare.call(Op.EXEC, (Tag.FLAGS, 0)).error == errno.EINVAL
    assert bare.call(Op.EXEC, (Tag.ARGV, "true"), (Tag.FLAGS, 1 << 20)).error == errno.EINVAL
    assert bare.call(Op.EXEC, (Tag.ARGV, "true"), (Tag.RING, -1)).error == errno.EINVAL
    assert bare.call(Op.EXEC, (Tag.ARGV, "true"), (Tag.TIMEOUT_MS, -1)).error == errno.EINVAL
    assert bare.call(Op.EXEC, (Tag.ARGV, "true"), (Tag.FLAGS, 0), (Tag.FLAGS, 0)).error == errno.EPROTO
    assert bare.call(Op.EXEC, (Tag.ARGV, "true"), (Tag.ENV, "=x")).error == errno.EINVAL
    assert bare.call(999).error == errno.EOPNOTSUPP
    for payload in (b"", b"\x01", struct.pack("<HI", Tag.FLAGS, 8) + bytes(8), struct.pack("<HI", Tag.OP, 99)):
        stream = bare.unsent()
        bare.send(frame(FrameType.OPEN, stream.number, payload))
        assert bare.wait(stream).error == errno.EPROTO


def test_big_open(box: AgentClient) -> None:
    words = [f"word-{i:06d}" for i in range(40_000)]
    stream = box.run(["sh", "-c", 'echo $# "$1"', "sh", *words])
    assert stream.out == b"40000 word-000000\n"
    assert len(box.call(Op.PS).records()[0][Tag.ARGV]) > 100


# -- output: flow control, rings


def test_slow_reader_loses_nothing_and_agent_stays_small(bare: AgentClient) -> None:
    total = 20_000_000 if SANITIZED else 100_000_000
    stream = bare.spawn(f"head -c {total} /dev/zero")
    stream.grants = False
    bare.until(lambda: len(stream.out) == INITIAL_CREDIT)
    assert not bare.receive(0.2)  # no credit, no DATA
    bare.ping()
    received = 0
    while stream.close is None:
        received += len(stream.out)
        stream.out.clear()
        bare.grant(stream)
        bare.receive(0.05)
        if not SANITIZED:
            assert anonymous_kib(bare.process.pid) < 3000
    assert received + len(stream.out) == total
    assert stream.closed[Tag.OUT_TOTAL] == total
    assert stream.closed[Tag.OUT_LOST] == 0


def test_a_blocked_stream_does_not_hold_up_others(box: AgentClient) -> None:
    blocked = box.spawn("yes")
    blocked.grants = False
    box.until(lambda: len(blocked.out) == INITIAL_CREDIT)
    assert box.output("echo free") == "free\n"
    number = box.started(blocked)
    box.call(Op.SIGNAL, (Tag.PID, number), (Tag.SIGNUM, signal.SIGKILL))
    blocked.grants = True
    box.grant(blocked)
    assert box.wait(blocked).closed[Tag.SIGNUM] == signal.SIGKILL


def test_discard(box: AgentClient) -> None:
    stream = box.spawn("head -c 5000000 /dev/zero; echo done >&2")
    stream.grants = False
    box.until(lambda: len(stream.out) == INITIAL_CREDIT)
    box.ctrl(stream, CtrlKind.DISCARD)
    close = box.wait(stream).closed
    assert close[Tag.OUT_TOTAL] == 5_000_000
    assert close[Tag.OUT_LOST] == 5_000_000 - len(stream.out)
    assert close[Tag.ERR_TOTAL] == 5
    assert close[Tag.ERR_LOST] + len(stream.err) == 5


def test_lossy_never_blocks_the_process(box: AgentClient, tmp_path: Path) -> None:
    stream = box.spawn("head -c 3000000 /dev/zero; echo end; touch finished", flags=ExecFlag.LOSSY)
    stream.grants = False
    eventually((tmp_path / "finished").exists, "the end of the writer")
    stream.grants = True
    box.until(lambda: len(stream.out) == INITIAL_CREDIT)
    box.grant(stream)
    close = box.wait(stream).closed
    assert close[Tag.OUT_TOTAL] == 3_000_004
    assert close[Tag.OUT_LOST] == 3_000_004 - len(stream.out)
    assert stream.out.endswith(b"end\n")


def test_detach_and_attach_again(box: AgentClient) -> None:
    stream = box.spawn("echo one; read line; echo $line; echo two >&2; read line", flags=ExecFlag.STDIN)
    number = box.started(stream)
    box.until(lambda: stream.out == b"one\n")
    box.reset(stream)
    assert box.wait(stream).error == errno.ECANCELED
    again = box.open(Op.ATTACH, (Tag.PID, number), (Tag.FLAGS, 0))
    box.until(lambda: again.out == b"one\n")
    assert again.reply is not None
    assert (again.reply[Tag.OFFSET_OUT], again.reply[Tag.OFFSET_ERR]) == (0, 0)
    box.data(again, b"hello\n")
    box.until(lambda: again.out == b"one\nhello\n" and again.err == b"two\n")
    third = box.open(Op.ATTACH, (Tag.PID, number), (Tag.FROM_OUT, 6), (Tag.FROM_ERR, -1))
    box.until(lambda: third.out == b"llo\n")
    assert third.reply is not None
    assert (third.reply[Tag.OFFSET_OUT], third.reply[Tag.OFFSET_ERR]) == (6, 4)
    box.end(again)
    for each in (again, third):
        close = box.wait(each).closed
        assert close[Tag.EXIT_CODE] == 1  # read at the end of input
        assert (close[Tag.OUT_LOST], close[Tag.ERR_LOST]) == (0, 0)
    after = box.call(Op.ATTACH, (Tag.PID, number))
    assert (after.out, after.err) == (b"one\nhello\n", b"two\n")
    assert box.call(Op.FORGET, (Tag.PID, number)).error is None
    assert box.call(Op.ATTACH, (Tag.PID, number)).error == errno.ESRCH


def test_ring_keeps_the_last_bytes(box: AgentClient) -> None:
    stream = box.spawn("read go; i=0; while [ $i -lt 3000 ]; do echo line-$i; i=$((i+1)); done; read end",
                       (Tag.RING, 4096), flags=ExecFlag.STDIN)  # fmt: skip
    number = box.started(stream)
    box.data(stream, b"\n")
    box.until(lambda: stream.out.endswith(b"line-2999\n"))
    whole = bytes(stream.out)
    box.reset(stream)
    box.wait(stream)
    again = box.open(Op.ATTACH, (Tag.PID, number))
    box.until(lambda: again.out.endswith(b"line-2999\n"))
    assert again.reply is not None
    assert again.reply[Tag.OFFSET_OUT] == len(whole) - 4096
    assert bytes(again.out) == whole[-4096:]
    box.end(again)
    box.wait(again)


def test_output_turns_while_nobody_is_attached(box: AgentClient, tmp_path: Path) -> None:
    stream = box.spawn("read go; head -c 2000000 /dev/zero; echo tail; touch finished; sleep 100", flags=ExecFlag.STDIN)
    number = box.started(stream)
    box.data(stream, b"\n")
    box.reset(stream)
    box.wait(stream)
    eventually((tmp_path / "finished").exists, "the end of the writer")
    again = box.open(Op.ATTACH, (Tag.PID, number))
    box.until(lambda: again.out.endswith(b"tail\n"))
    assert len(again.out) <= 262144
    box.call(Op.SIGNAL, (Tag.PID, number), (Tag.SIGNUM, signal.SIGKILL))
    assert box.wait(again).closed[Tag.SIGNUM] == signal.SIGKILL


def test_background_child_does_not_delay_the_close(box: AgentClient, mark: Marker) -> None:
    stream = box.run(f"(sleep 1000; : {mark.text}) & (yes {mark.text} >&2 &) ; echo main; exit 4", flags=ExecFlag.LOSSY)
    assert stream.closed[Tag.EXIT_CODE] == 4
    assert stream.out == b"main\n"
    number = stream.reply[Tag.PID]
    assert box.call(Op.SIGNAL, (Tag.PID, number), (Tag.SIGNUM, signal.SIGKILL)).closed[Tag.COUNT] >= 2
    mark.gone()


def test_many_exited_processes_are_bounded(bare: AgentClient) -> None:
    for _ in range(80):
        bare.run("head -c 300000 /dev/zero; echo $0")
    eventually(lambda: len(bare.call(Op.PS).records()) <= 64, "eviction")
    records = bare.call(Op.PS).records()
    assert records[-1][Tag.PID] == 80
    if not SANITIZED:
        eventually(lambda: anonymous_kib(bare.process.pid) < 10_000, "giving memory back")


def test_agent_is_tiny_when_idle(bare: AgentClient) -> None:
    if SANITIZED:
        pytest.skip("sanitizers need memory")
    bare.run("head -c 3000000 /dev/zero", flags=ExecFlag.LOSSY)
    number = bare.call(Op.PS).records()[0][Tag.PID]
    bare.call(Op.FORGET, (Tag.PID, number))
    eventually(lambda: anonymous_kib(bare.process.pid) < 300, "giving memory back")


# -- PS, signals, timeouts, trees


def test_ps(box: AgentClient) -> None:
    stream = box.spawn(["sleep", "1000"], (Tag.TAG, "nap"))
    box.started(stream)
    box.run("exit 5")
    running, ended = box.call(Op.PS).records()
    assert running[Tag.TAG] == b"nap"
    assert running[Tag.ARGV] == [b"sleep", b"1000"]
    assert (running[Tag.STATE], ended[Tag.STATE]) == (0, 1)
    assert ended[Tag.EXIT_CODE] == 5
    assert ended[Tag.ARGV] == [b"/bin/sh", b"-c", b"exit 5"]
    assert abs(running[Tag.STARTED_NS] - time.time_ns()) < 60e9
    assert box.call(Op.FORGET, (Tag.PID, running[Tag.PID])).error == errno.EBUSY
    assert box.call(Op.FORGET, (Tag.PID, ended[Tag.PID])).error is None
    assert len(box.call(Op.PS).records()) == 1
    box.call(Op.SIGNAL, (Tag.PID, running[Tag.PID]), (Tag.SIGNUM, signal.SIGTERM))
    assert box.wait(stream).closed[Tag.SIGNUM] == signal.SIGTERM


def test_signal_main_or_tree(box: AgentClient, mark: Marker) -> None:
    script = f"trap 'echo got' USR1; sh -c 'trap \"echo child\" USR1; echo up; while :; do sleep 0.05; done; : {mark.text}' & echo up; while :; do wait; done"
    stream = box.spawn(script)
    number = box.started(stream)
    box.until(lambda: stream.out.count(b"up") == 2)
    one = box.call(Op.SIGNAL, (Tag.PID, number), (Tag.SIGNUM, signal.SIGUSR1), (Tag.FLAGS, SignalFlag.MAIN_ONLY))
    assert one.closed[Tag.COUNT] == 1
    box.until(lambda: b"got" in stream.out)
    assert b"child" not in stream.out
    count = box.call(Op.SIGNAL, (Tag.PID, number), (Tag.SIGNUM, 0)).closed[Tag.COUNT]
    assert count >= 2
    box.ctrl(stream, CtrlKind.SIGNAL, (Tag.SIGNUM, signal.SIGKILL))
    assert box.wait(stream).closed[Tag.SIGNUM] == signal.SIGKILL
    mark.gone()
    assert box.call(Op.SIGNAL, (Tag.PID, 999), (Tag.SIGNUM, 9)).error == errno.ESRCH
    assert box.call(Op.SIGNAL, (Tag.PID, number), (Tag.SIGNUM, 65)).error == errno.EINVAL


def daemon(text: str) -> str:
    """A double-forked process in a session of its own, and a child of it in another."""
    return f"(setsid sh -c '(setsid sh -c \"sleep 1000; : {text}\") & sleep 1000; : {text}' >/dev/null 2>&1 </dev/null &)"


def test_timeout_kills_daemons_too(box: AgentClient, mark: Marker) -> None:
    stream = box.spawn(f"{daemon(mark.text)}; echo up; trap '' TERM INT; sleep 1000; : {mark.text}", (Tag.TIMEOUT_MS, 400))
    eventually(lambda: len(mark.pids()) >= 3, "the daemons' start")
    close = box.wait(stream).closed
    assert close[Tag.TIMED_OUT] == 1
    assert close[Tag.SIGNUM] == signal.SIGKILL
    assert stream.out == b"up\n"
    mark.gone()


def test_stopped_trees_die(box: AgentClient, mark: Marker) -> None:
    stream = box.spawn(f"sh -c 'kill -STOP $$; : {mark.text}' & kill -STOP $$; : {mark.text}", (Tag.TIMEOUT_MS, 300))
    assert box.wait(stream).closed[Tag.TIMED_OUT] == 1
    mark.gone()


def test_no_timeout_after_the_end(box: AgentClient) -> None:
    stream = box.run(["true"], (Tag.TIMEOUT_MS, 60_000))
    assert stream.closed[Tag.TIMED_OUT] == 0


def test_kill_on_reset(box: AgentClient, mark: Marker) -> None:
    stream = box.spawn(f"{daemon(mark.text)}; echo up; sleep 1000; : {mark.text}", flags=ExecFlag.KILL_ON_RESET)
    box.until(lambda: b"up" in stream.out)
    box.reset(stream)
    assert box.wait(stream).closed[Tag.SIGNUM] == signal.SIGKILL
    mark.gone()


def test_fork_bomb_dies(box: AgentClient, mark: Marker, tmp_path: Path) -> None:
    """Every process forks as fast as it can; a counter file bounds it should the kill not work."""
    (tmp_path / "bomb.sh").write_text(f'[ $1 -gt 12 ] && exec sleep 100 {mark.text}\nsh $0 $(($1+1)) {mark.text} & sh $0 $(($1+1)) {mark.text} &\nwait\n')  # noqa: E501
    stream = box.spawn(f"ulimit -u 3000; exec sh {tmp_path}/bomb.sh 1 {mark.text}", (Tag.TIMEOUT_MS, 300))
    close = box.wait(stream, 60).closed
    assert close[Tag.TIMED_OUT] == 1
    mark.gone()
    assert box.output("echo alive") == "alive\n"


def test_shim_killed_by_its_own_command(box: AgentClient, mark: Marker) -> None:
    """With one uid a command can kill its shim: the agent adopts what is left, and can still kill it."""
    stream = box.spawn(f"{daemon(mark.text)}; kill -9 $PPID; echo orphan; sleep 1000; : {mark.text}")
    number = box.started(stream)
    box.until(lambda: b"orphan" in stream.out)
    eventually(lambda: len(mark.pids()) >= 3, "the daemons' start")
    assert box.call(Op.SIGNAL, (Tag.PID, number), (Tag.SIGNUM, signal.SIGKILL)).closed[Tag.COUNT] >= 3
    assert box.wait(stream).closed[Tag.SIGNUM] == signal.SIGKILL
    mark.gone()
    stream = box.run("kill -9 $PPID; sleep 0.05; exit 6")
    assert stream.closed[Tag.EXIT_CODE] == 6


def test_shim_stopped_by_its_own_command(box: AgentClient, mark: Marker) -> None:
    stream = box.spawn(f"kill -STOP $PPID; sleep 1000; : {mark.text}", (Tag.TIMEOUT_MS, 300))
    close = box.wait(stream).closed
    assert close[Tag.TIMED_OUT] == 1
    mark.gone()


@pytest.mark.parametrize("namespace", ["-Urm", "-Urmpf"])
def test_without_proc_trees_die_too(namespace: str, tmp_path: Path, mark: Marker) -> None:
    """Landlock may hide /proc: then the shim finds its children by asking for every pid."""
    prefix = ["unshare", namespace, "sh", "-c"]
    if not can(["unshare", namespace, "sh", "-c", "mount -t tmpfs t /proc"]):
        pytest.skip("no user namespaces here")
    client = connect([*prefix, 'mount -t tmpfs t /proc && exec "$@"', "sh"], tmp_path)
    stream = client.spawn(f"{daemon(mark.text)}; echo up; trap '' TERM; sleep 1000; : {mark.text}", (Tag.TIMEOUT_MS, 500))
    eventually(lambda: len(mark.pids()) >= 3, "the daemons' start")
    assert client.wait(stream, 60).closed[Tag.TIMED_OUT] == 1
    mark.gone()
    stream = client.spawn(f"{daemon(mark.text)}; echo up; sleep 1000; : {mark.text}")
    eventually(lambda: len(mark.pids()) >= 3, "the daemons' start")
    client.close()
    mark.gone()


def test_zombies_are_reaped(box: AgentClient) -> None:
    code = "import os\nfor i in range(200):\n  if os.fork() == 0:\n    if os.fork(): os._exit(0)\n    os._exit(0)\nos._exit(9)"
    assert box.run([sys.executable, "-c", code]).closed[Tag.EXIT_CODE] == 9
    eventually(lambda: box.call(Op.METRICS).closed[Tag.PIDS] <= 2, "reaping")


def test_process_limit_is_an_error_not_a_death(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("root is not held by RLIMIT_NPROC, and others share theirs with everyone")
    prefix = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "prlimit", "--nproc=6"]
    if not can(prefix):
        pytest.skip("setpriv is missing")
    client = AgentClient(
        [*prefix, str(AGENT), "agent"],
        [(Tag.USER, "root"), (Tag.WORKDIR, "/"), (Tag.FLAGS, HelloFlag.NO_USERS)],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    try:
        sleepers = [client.spawn(["sleep", "1000"]) for _ in range(6)]
        refused = []
        client.until(lambda: all(s.reply or s.close for s in sleepers))
        refused = [s for s in sleepers if s.close is not None]
        assert refused
        for stream in refused:
            assert stream.error == errno.EAGAIN
            assert b"process limit" in stream.closed[Tag.MESSAGE]
        assert client.call(Op.STAT, (Tag.PATH, "/etc")).error is None
        for stream in set(sleepers) - set(refused):
            client.ctrl(stream, CtrlKind.SIGNAL, (Tag.SIGNUM, signal.SIGKILL))
            client.wait(stream)
        assert client.run(["true"]).closed[Tag.EXIT_CODE] == 0
    finally:
        client.close()


# -- terminals


def test_terminal(box: AgentClient) -> None:
    stream = box.spawn("stty size; tty; echo $TERM; read line; echo got $line; stty size; exit 3",
                       (Tag.ROWS, 33), (Tag.COLS, 99), flags=ExecFlag.PTY)  # fmt: skip
    box.until(lambda: b"xterm-256color\r\n" in stream.out)
    assert stream.out.startswith(b"33 99\r\n/dev/")
    box.ctrl(stream, CtrlKind.RESIZE, (Tag.ROWS, 44), (Tag.COLS, 111))
    box.data(stream, b"hello\n")
    close = box.wait(stream).closed
    assert stream.out.endswith(b"got hello\r\n44 111\r\n")
    assert stream.err == b""
    assert close[Tag.EXIT_CODE] == 3


def test_terminal_interrupt_and_job_control(box: AgentClient) -> None:
    stream = box.spawn(["bash", "--norc", "-i"], flags=ExecFlag.PTY, env=["PS1=ready> "])
    box.until(lambda: b"ready> " in stream.out)
    assert b"job control" not in stream.out
    job = b"sh -c 'echo be\"\"gun; exec sleep 1000'\n"  # once it prints it is in the foreground
    box.data(stream, job)
    box.until(lambda: stream.out.count(b"begun") == 1)
    box.data(stream, b"\x03")
    box.until(lambda: stream.out.count(b"ready> ") == 2)
    box.data(stream, job)
    box.until(lambda: stream.out.count(b"begun") == 2)
    box.data(stream, b"\x1a")
    box.until(lambda: b"Stopped" in stream.out and stream.out.count(b"ready> ") == 3)
    box.data(stream, b"kill -9 %1; disown -a; exit 9\n")
    assert box.wait(stream).closed[Tag.EXIT_CODE] == 9


def test_terminal_hangup_reaches_jobs(box: AgentClient) -> None:
    stream = box.spawn("trap 'echo size changed; exit 0' WINCH; echo up; while :; do sleep 0.02; done", flags=ExecFlag.PTY)
    box.until(lambda: b"up" in stream.out)
    box.ctrl(stream, CtrlKind.RESIZE, (Tag.ROWS, 10), (Tag.COLS, 20))
    assert box.wait(stream).closed[Tag.EXIT_CODE] == 0
    assert b"size changed" in stream.out


def test_terminal_end_of_input_and_much_output(box: AgentClient) -> None:
    stream = box.spawn("cat >/dev/null; seq 1 20000", flags=ExecFlag.PTY)
    box.started(stream)
    box.end(stream)
    assert box.wait(stream).closed[Tag.EXIT_CODE] == 0
    assert stream.out.endswith(b"19999\r\n20000\r\n")


# -- users


def test_default_user_is_made(users: AgentClient) -> None:
    assert users.hello is not None
    assert users.hello[Tag.UID] == 1000
    assert users.hello[Tag.PID] == 1
    passwd = users.output(["cat", "/etc/passwd"], (Tag.USER, "root"))
    assert re.search(r"^broken:line\nagent:x:1000:1000::/mnt/agent:/bin/(ba)?sh\n\Z", passwd, re.M)
    out = users.output("id -u; id -g; echo $HOME $USER $LOGNAME; pwd; touch mine; stat -c %U . $HOME mine")
    assert out.splitlines() == ["1000", "1000", "/mnt/agent agent agent", "/mnt/work", "agent", "agent", "agent"]


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("web", "1234 1235 1235 777 778"),
        ("root", "0 0 0 777"),
        ("1234", "1234 1235 1235 777 778"),
        ("4321", "4321 0 0"),
        ("4321:99", "4321 99 99"),
        ("web:extra", "1234 777 777 778"),
    ],
)
def test_users(users: AgentClient, user: str, expected: str) -> None:
    assert users.output("echo $(id -u) $(id -g) $(id -G)", (Tag.USER, user)).strip() == expected


def test_users_have_no_capabilities_nor_a_way_to_the_agent(users: AgentClient) -> None:
    for user in ("root", "web"):
        status = users.output("cat /proc/self/status", (Tag.USER, user))
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert re.search(rf"{name}:\s+0+\n", status), (user, name)
        for pid in ("1", "$PPID"):
            probe = users.run(f"cd /proc/{pid}; readlink fd/0 fd/1 fd/3 cwd exe; cat environ mem maps fd/0; echo end", (Tag.USER, user))
            assert probe.out == b"end\n", user
    users.run("kill -9 1 $PPID", (Tag.USER, "web"))
    users.ping()


@pytest.mark.parametrize("user", ["nobody-here", "4294967295", "-1", "web:nogroup", "x" * 300, ""])
def test_missing_users(users: AgentClient, user: str) -> None:
    for stream in (users.run(["true"], (Tag.USER, user)), users.call(Op.STAT, (Tag.PATH, "/"), (Tag.USER, user))):
        assert stream.error == errno.ESRCH
        assert stream.closed[Tag.WHAT] == b"user"


def test_odd_passwd_files(users: AgentClient) -> None:
    for make in ("mkfifo /etc/passwd", "ln -s /dev/zero /etc/passwd", "mkdir /etc/passwd", "truncate -s 1G /etc/passwd"):
        assert users.run(f"rm -rf /etc/passwd; {make}", (Tag.USER, "0:0")).closed[Tag.EXIT_CODE] == 0
        assert users.output(["id", "-u"], (Tag.USER, "agent")).strip() == "1000"  # what HELLO said is remembered
        assert users.run(["true"], (Tag.USER, "web")).error == errno.ESRCH


def test_files_are_touched_as_the_user(users: AgentClient) -> None:
    assert users.write("/mnt/work/a", b"1").error is None
    assert users.write("/mnt/b", b"1").error == errno.EACCES
    assert users.write("/mnt/b", b"1", (Tag.USER, "root"), (Tag.MODE, 0o600)).error is None
    assert users.call(Op.READ, (Tag.PATH, "/mnt/b")).error == errno.EACCES
    assert users.call(Op.READ, (Tag.PATH, "/mnt/b"), (Tag.USER, "root")).out == b"1"
    assert users.call(Op.REMOVE, (Tag.PATH, "/mnt/b")).error == errno.EACCES
    assert users.call(Op.CHOWN, (Tag.PATH, "/mnt/work/a"), (Tag.OWNER, "web")).error == errno.EPERM
    chown = users.call(Op.CHOWN, (Tag.PATH, "/mnt/work/a"), (Tag.OWNER, "web"), (Tag.USER, "root"))
    assert chown.error is None
    close = users.call(Op.STAT, (Tag.PATH, "/mnt/work/a")).closed
    assert (close[Tag.UID], close[Tag.GID]) == (1234, 1235)
    assert users.call(Op.CHOWN, (Tag.PATH, "/mnt/work/a"), (Tag.OWNER, "77"), (Tag.USER, "root")).error is None
    close = users.call(Op.STAT, (Tag.PATH, "/mnt/work/a")).closed
    assert (close[Tag.UID], close[Tag.GID]) == (77, 1235)
    # a group reaches what its members may
    users.run("mkdir /mnt/shared; chown 0:777 /mnt/shared; chmod 770 /mnt/shared", (Tag.USER, "root"))


def test_replacing_needs_the_right_to_write(users: AgentClient) -> None:
    assert users.write("/mnt/work/ro", b"old", (Tag.USER, "root")).error is None
    assert users.write("/mnt/work/ro", b"new").error == errno.EACCES
    assert users.call(Op.READ, (Tag.PATH, "/mnt/work/ro")).out == b"old"
    # and a file that may be written in a folder that may not, is
    assert users.write("/mnt/shared", b"old", (Tag.USER, "root"), (Tag.MODE, 0o666)).error is None
    assert users.write("/mnt/shared", b"new").error is None
    assert users.call(Op.READ, (Tag.PATH, "/mnt/shared")).out == b"new"


def test_stdout_can_be_opened_again(users: AgentClient) -> None:
    assert users.output("echo x > /dev/stdout; echo y > /proc/self/fd/1") == "x\ny\n"


# -- files


def test_write_and_read(box: AgentClient, tmp_path: Path) -> None:
    data = os.urandom(2_500_000)
    stream = box.write("some file", data)
    assert stream.closed[Tag.BYTES] == len(data)
    assert (tmp_path / "some file").read_bytes() == data
    assert stat.S_IMODE((tmp_path / "some file").stat().st_mode) == 0o644
    assert set(os.listdir(tmp_path)) == {"home", "some file"}
    read = box.call(Op.READ, (Tag.PATH, str(tmp_path / "some file")))
    assert bytes(read.out) == data
    assert read.reply is not None
    assert (read.reply[Tag.TYPE], read.reply[Tag.SIZE]) == (FileType.FILE, len(data))
    assert read.closed[Tag.BYTES] == len(data)
    part = box.call(Op.READ, (Tag.PATH, "some file"), (Tag.OFFSET, 1000), (Tag.LENGTH, 77))
    assert bytes(part.out) == data[1000:1077]
    assert box.call(Op.READ, (Tag.PATH, "some file"), (Tag.OFFSET, 10**9)).closed[Tag.BYTES] == 0
    assert box.call(Op.READ, (Tag.PATH, "some file"), (Tag.LENGTH, 0)).closed[Tag.BYTES] == 0
    assert box.call(Op.READ, (Tag.PATH, "some file"), (Tag.OFFSET, -1)).error == errno.EINVAL


def test_write_keeps_the_mode_unless_given(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "f").chmod(0o751)
    box.write("f", b"new")
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o751
    box.write("f", b"newer", (Tag.MODE, 0o600))
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    assert (tmp_path / "f").read_bytes() == b"newer"
    assert box.write("f", b"", (Tag.MODE, 0o10000)).error == errno.EINVAL


def test_reset_or_death_in_a_write_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    client = connect([], tmp_path)
    stream = client.open(Op.WRITE, (Tag.PATH, "f"))
    client.data(stream, b"x" * 100_000)
    client.ping()
    assert (tmp_path / "f").read_bytes() == b"old"
    assert len([name for name in os.listdir(tmp_path) if name.startswith(".sloplet-")]) == 1
    client.reset(stream)
    assert client.wait(stream).error == errno.ECANCELED
    assert sorted(os.listdir(tmp_path)) == ["f", "home"]
    client.close()
    assert (tmp_path / "f").read_bytes() == b"old"


def test_lost_wire_in_a_write_leaves_no_litter(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    client = connect([], tmp_path)
    stream = client.open(Op.WRITE, (Tag.PATH, "f"))
    client.data(stream, b"x" * 100_000)
    client.ping()
    client.close()
    assert sorted(os.listdir(tmp_path)) == ["f", "home"]
    assert (tmp_path / "f").read_bytes() == b"old"


def test_write_flags(box: AgentClient, tmp_path: Path) -> None:
    assert box.write("a/b/c", b"1").error == errno.ENOENT
    assert box.write("a/b/c", b"1", (Tag.FLAGS, WriteFlag.PARENTS)).error is None
    assert box.write("a/b/c", b"2", (Tag.FLAGS, WriteFlag.EXCLUSIVE)).error == errno.EEXIST
    assert box.write("a/b/c", b"2", (Tag.FLAGS, WriteFlag.APPEND)).error is None
    assert (tmp_path / "a/b/c").read_bytes() == b"12"
    assert box.write("new", b"3", (Tag.FLAGS, WriteFlag.APPEND | WriteFlag.EXCLUSIVE)).error is None
    assert box.write("new", b"3", (Tag.FLAGS, WriteFlag.APPEND | WriteFlag.EXCLUSIVE)).error == errno.EEXIST
    assert box.write("a", b"").error == errno.EISDIR
    assert box.write("fresh/", b"").error == errno.EISDIR
    assert box.write("x", b"", (Tag.FLAGS, 64)).error == errno.EINVAL
    # two exclusive writers at once: one wins
    one, two = (box.open(Op.WRITE, (Tag.PATH, "race"), (Tag.FLAGS, WriteFlag.EXCLUSIVE)) for _ in range(2))
    for stream, data in ((one, b"one"), (two, b"two")):
        box.data(stream, data)
        box.end(stream)
    assert box.wait(one).error is None
    assert box.wait(two).error == errno.EEXIST
    assert (tmp_path / "race").read_bytes() == b"one"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".sloplet-")]


def test_write_follows_links_and_replaces_their_target(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/target").write_bytes(b"old")
    (tmp_path / "hop").symlink_to("d/target")
    (tmp_path / "link").symlink_to(tmp_path / "hop")
    assert box.write("link", b"new").error is None
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "d/target").read_bytes() == b"new"
    (tmp_path / "dangling").symlink_to("d/made")
    assert box.write("dangling", b"x").error is None
    assert (tmp_path / "d/made").read_bytes() == b"x"
    (tmp_path / "loop").symlink_to("loop")
    assert box.write("loop", b"x").error == errno.ELOOP
    assert box.call(Op.READ, (Tag.PATH, "loop")).error == errno.ELOOP


def test_magic_links_are_not_followed(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "wire").symlink_to("/proc/self/fd/1")
    for path in ("/proc/self/fd/1", "/proc/self/fd/0", "wire", "/proc/self/root/etc/passwd", "/proc/self/exe"):
        assert box.call(Op.READ, (Tag.PATH, path)).error == errno.ELOOP, path
        assert box.write(path, b"x").error in (errno.ELOOP, errno.EACCES), path
    assert box.call(Op.CHMOD, (Tag.PATH, "wire"), (Tag.MODE, 0)).error == errno.ELOOP
    assert box.call(Op.READ, (Tag.PATH, "/proc/self/status")).out.startswith(b"Name:")


def test_fifos_and_devices_do_not_hang(box: AgentClient, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert box.call(Op.READ, (Tag.PATH, "pipe")).error == errno.EINVAL
    assert box.write("pipe", b"x").error == errno.ENXIO
    assert box.call(Op.READ, (Tag.PATH, "/dev/zero")).error == errno.EINVAL
    assert box.write("/dev/null", b"x").closed[Tag.BYTES] == 1
    reader = box.spawn("wc -c < pipe")
    stream = box.open(Op.WRITE, (Tag.PATH, "pipe"))
    box.ping()
    while stream.close is not None and stream.error == errno.ENXIO:  # the reader has not opened its end yet
        stream = box.open(Op.WRITE, (Tag.PATH, "pipe"))
        box.ping()
    box.data(stream, b"x" * 1_000_000)
    box.end(stream)
    assert box.wait(stream).closed[Tag.BYTES] == 1_000_000
    assert box.wait(reader).out.strip() == b"1000000"


def test_full_disk(tmp_path: Path) -> None:
    if not can(["unshare", "-Urm", "sh", "-c", "mount -t tmpfs t /mnt"]):
        pytest.skip("no user namespaces here")
    client = AgentClient(
        ["unshare", "-Urmpf", "--mount-proc", "sh", "-c", 'mount -t tmpfs -o size=1m t /mnt && exec "$0" agent', str(AGENT)],
        [(Tag.USER, "root"), (Tag.WORKDIR, "/mnt"), (Tag.HOME, "/mnt"), (Tag.FLAGS, HelloFlag.NO_USERS)],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    try:
        client.write("f", b"old")
        assert client.write("f", bytes(3_000_000)).error == errno.ENOSPC
        assert client.call(Op.READ, (Tag.PATH, "f")).out == b"old"
        assert [r[Tag.NAME] for r in client.call(Op.LIST, (Tag.PATH, ".")).records()] == [b"f"]
    finally:
        client.close()


def test_stat(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "f").chmod(0o4751)
    os.utime(tmp_path / "f", ns=(1, 1_234_567_890_123_456_789))
    (tmp_path / "link").symlink_to("f")
    os.mkfifo(tmp_path / "pipe")
    close = box.call(Op.STAT, (Tag.PATH, "link")).closed
    assert (close[Tag.TYPE], close[Tag.SIZE], close[Tag.MODE]) == (FileType.FILE, 5, 0o4751)
    assert close[Tag.MTIME_NS] == 1_234_567_890_123_456_789
    close = box.call(Op.STAT, (Tag.PATH, "link"), (Tag.FLAGS, StatFlag.NOFOLLOW)).closed
    assert (close[Tag.TYPE], close[Tag.LINK]) == (FileType.SYMLINK, b"f")
    assert box.call(Op.STAT, (Tag.PATH, "pipe")).closed[Tag.TYPE] == FileType.OTHER
    assert box.call(Op.STAT, (Tag.PATH, "/")).closed[Tag.TYPE] == FileType.DIR
    assert box.call(Op.STAT, (Tag.PATH, "f/")).error == errno.ENOTDIR
    assert box.call(Op.STAT, (Tag.PATH, "none")).error == errno.ENOENT
    assert box.call(Op.STAT, (Tag.PATH, "")).error == errno.EINVAL
    assert box.call(Op.STAT, (Tag.PATH, "/x" * 3000)).error == errno.ENAMETOOLONG
    assert box.call(Op.STAT, (Tag.PATH, b"a\0b")).error == errno.EINVAL
    assert box.call(Op.STAT, (Tag.FLAGS, 0)).error == errno.EINVAL


def test_mkdir_move_chmod_symlink(box: AgentClient, tmp_path: Path) -> None:
    assert box.call(Op.MKDIR, (Tag.PATH, "a/b")).error == errno.ENOENT
    assert box.call(Op.MKDIR, (Tag.PATH, "a/b/c/"), (Tag.FLAGS, MkdirFlag.PARENTS), (Tag.MODE, 0o700)).error is None
    assert stat.S_IMODE((tmp_path / "a/b/c").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o755
    assert box.call(Op.MKDIR, (Tag.PATH, "a")).error == errno.EEXIST
    assert box.call(Op.MKDIR, (Tag.PATH, "a"), (Tag.FLAGS, MkdirFlag.PARENTS)).error is None
    (tmp_path / "f").write_bytes(b"1")
    (tmp_path / "g").write_bytes(b"2")
    assert box.call(Op.MKDIR, (Tag.PATH, "f/x"), (Tag.FLAGS, MkdirFlag.PARENTS)).error == errno.ENOTDIR
    assert box.call(Op.MOVE, (Tag.PATH, "f"), (Tag.PATH2, "g")).error == errno.EEXIST
    assert box.call(Op.MOVE, (Tag.PATH, "f"), (Tag.PATH2, "g"), (Tag.FLAGS, MoveFlag.REPLACE)).error is None
    assert (tmp_path / "g").read_bytes() == b"1"
    assert box.call(Op.MOVE, (Tag.PATH, "g"), (Tag.PATH2, "a/h")).error is None
    assert box.call(Op.MOVE, (Tag.PATH, "g"), (Tag.PATH2, "a/h")).error == errno.ENOENT
    assert box.call(Op.MOVE, (Tag.PATH, "a/.."), (Tag.PATH2, "z")).error == errno.EINVAL
    assert box.call(Op.CHMOD, (Tag.PATH, "a/h"), (Tag.MODE, 0o640)).error is None
    assert stat.S_IMODE((tmp_path / "a/h").stat().st_mode) == 0o640
    assert box.call(Op.SYMLINK, (Tag.PATH, "s"), (Tag.PATH2, "anything at all")).error is None
    assert os.readlink(tmp_path / "s") == "anything at all"
    assert box.call(Op.SYMLINK, (Tag.PATH, "s"), (Tag.PATH2, "x")).error == errno.EEXIST


def test_list(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/deep").write_bytes(b"123")
    (tmp_path / "d/link").symlink_to("e")
    (tmp_path / os.fsdecode(b"d/\xff\n")).write_bytes(b"")
    names = {r[Tag.NAME]: r for r in box.call(Op.LIST, (Tag.PATH, "d")).records()}
    assert set(names) == {b"e", b"link", b"\xff\n"}
    assert names[b"link"][Tag.LINK] == b"e"
    assert names[b"e"][Tag.TYPE] == FileType.DIR
    deep = box.call(Op.LIST, (Tag.PATH, "."), (Tag.FLAGS, ListFlag.RECURSIVE)).records()
    assert {r[Tag.NAME] for r in deep} == {b"home", b"d", b"d/e", b"d/link", b"d/\xff\n", b"d/e/deep"}
    two = box.call(Op.LIST, (Tag.PATH, "."), (Tag.FLAGS, ListFlag.RECURSIVE), (Tag.DEPTH, 2)).records()
    assert {r[Tag.NAME] for r in two} == {b"home", b"d", b"d/e", b"d/link", b"d/\xff\n"}
    assert box.call(Op.LIST, (Tag.PATH, "d/e/deep")).error == errno.ENOTDIR
    assert box.call(Op.LIST, (Tag.PATH, "none")).error == errno.ENOENT
    assert box.call(Op.LIST, (Tag.PATH, "."), (Tag.DEPTH, 0)).error == errno.EINVAL


def test_ten_thousand_entries(bare: AgentClient, tmp_path: Path) -> None:
    for i in range(10_000):
        (tmp_path / f"many-{i % 10}").mkdir(exist_ok=True)
        (tmp_path / f"many-{i % 10}" / f"file-{i}").touch()
    stream = bare.open(Op.LIST, (Tag.PATH, "."), (Tag.FLAGS, ListFlag.RECURSIVE))
    stream.grants = False
    bare.until(lambda: stream.taken == INITIAL_CREDIT)  # lists are under flow control too
    stream.grants = True
    bare.grant(stream)
    names = {r[Tag.NAME] for r in bare.wait(stream).records()}
    assert len(names) == 10_011
    for i in range(10):
        gone = bare.call(Op.REMOVE, (Tag.PATH, f"many-{i}"), (Tag.FLAGS, RemoveFlag.RECURSIVE))
        assert gone.closed[Tag.COUNT] == 1001
    assert os.listdir(tmp_path) == ["home"]


def make_deep(top: Path, depth: int) -> None:
    top.mkdir()
    here = os.getcwd()
    os.chdir(top)
    try:
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        Path("bottom").touch()
    finally:
        os.chdir(here)


def test_very_deep_trees(bare: AgentClient, tmp_path: Path) -> None:
    make_deep(tmp_path / "deep", 5000)
    records = bare.call(Op.LIST, (Tag.PATH, "deep"), (Tag.FLAGS, ListFlag.RECURSIVE)).records()
    assert len(records) == 5001
    assert records[-1][Tag.NAME] == b"d/" * 5000 + b"bottom"
    gone = bare.call(Op.REMOVE, (Tag.PATH, "deep"), (Tag.FLAGS, RemoveFlag.RECURSIVE))
    assert gone.closed[Tag.COUNT] == 5002
    assert not (tmp_path / "deep").exists()


def test_remove(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/f").touch()
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep/me").touch()
    (tmp_path / "d/link").symlink_to(tmp_path / "keep")
    (tmp_path / "tolink").symlink_to("keep")
    recursive = (Tag.FLAGS, RemoveFlag.RECURSIVE)
    assert box.call(Op.REMOVE, (Tag.PATH, "d")).error == errno.ENOTEMPTY
    assert box.call(Op.REMOVE, (Tag.PATH, "none")).error == errno.ENOENT
    assert box.call(Op.REMOVE, (Tag.PATH, "none"), (Tag.FLAGS, RemoveFlag.MISSING_OK)).closed[Tag.COUNT] == 0
    assert box.call(Op.REMOVE, (Tag.PATH, "tolink/"), recursive).error == errno.ENOTDIR
    assert box.call(Op.REMOVE, (Tag.PATH, "d/.."), recursive).error == errno.EINVAL
    assert box.call(Op.REMOVE, (Tag.PATH, "tolink"), recursive).closed[Tag.COUNT] == 1
    assert box.call(Op.REMOVE, (Tag.PATH, "d"), recursive).closed[Tag.COUNT] == 4
    assert (tmp_path / "keep/me").exists()
    assert sorted(os.listdir(tmp_path)) == ["home", "keep"]


def test_remove_goes_on_past_what_it_cannot(users: AgentClient) -> None:
    users.run("mkdir -p t/a/b/c t/z/y; touch t/a/1 t/a/b/2 t/z/3; mkdir t/a/b/locked; touch t/a/b/locked/x")
    users.run("chown root /mnt/work/t/a/b/locked; chmod 755 /mnt/work/t/a/b/locked", (Tag.USER, "root"))
    users.call(Op.CHOWN, (Tag.PATH, "t/a/b/locked"), (Tag.OWNER, "0:0"), (Tag.USER, "root"))
    gone = users.call(Op.REMOVE, (Tag.PATH, "t"), (Tag.FLAGS, RemoveFlag.RECURSIVE))
    assert gone.error == errno.EACCES
    assert users.output("find t | sort").split() == ["t", "t/a", "t/a/b", "t/a/b/locked", "t/a/b/locked/x"]


def test_remove_of_the_root_is_survived(users: AgentClient) -> None:
    """A tmpfs as root would be needed to let it really happen: here a mount point must stay, and be told."""
    gone = users.call(Op.REMOVE, (Tag.PATH, "/mnt"), (Tag.FLAGS, RemoveFlag.RECURSIVE), (Tag.USER, "root"))
    assert gone.error == errno.EBUSY
    assert users.output("ls -A /mnt | wc -l", (Tag.CWD, "/"), (Tag.USER, "root")).strip() == "0"


# -- WATCH


def watched(client: AgentClient, path: str, flags: int = 0):  # noqa: ANN201
    stream = client.open(Op.WATCH, (Tag.PATH, path), (Tag.FLAGS, flags))
    client.until(lambda: stream.reply is not None or stream.close is not None)
    assert stream.reply is not None, stream.close
    return stream


def seen(stream) -> list[tuple[int, bytes, bytes | None]]:  # noqa: ANN001
    return [(r[Tag.MASK], r[Tag.NAME], r[Tag.NAME2]) for r in stream.records()]


def test_watch(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w/old").touch()
    stream = watched(box, "w")
    (tmp_path / "w/new").write_bytes(b"x")
    (tmp_path / "w/new").chmod(0o600)
    (tmp_path / "w/new").rename(tmp_path / "w/renamed")
    (tmp_path / "w/renamed").rename(tmp_path / "outside")
    (tmp_path / "outside").rename(tmp_path / "w/back")
    (tmp_path / "w/old").unlink()
    box.until(lambda: (WatchMask.REMOVED, b"old", None) in seen(stream))
    assert seen(stream) == [
        (WatchMask.CREATED, b"new", None),
        (WatchMask.MODIFIED, b"new", None),
        (WatchMask.ATTRIBUTES, b"new", None),
        (WatchMask.RENAMED, b"new", b"renamed"),
        (WatchMask.REMOVED, b"renamed", None),
        (WatchMask.CREATED, b"back", None),
        (WatchMask.REMOVED, b"old", None),
    ]
    box.reset(stream)
    assert box.wait(stream).error == errno.ECANCELED
    assert box.call(Op.WATCH, (Tag.PATH, "none")).error == errno.ENOENT


def test_watch_a_single_file(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    stream = watched(box, "f")
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "f").unlink()
    box.until(lambda: (WatchMask.REMOVED, b"", None) in seen(stream))
    assert (WatchMask.MODIFIED, b"", None) in seen(stream)


def test_watch_recursively(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "w/a/b").mkdir(parents=True)
    stream = watched(box, "w", WatchFlag.RECURSIVE)
    (tmp_path / "w/a/b/f").touch()
    box.until(lambda: (WatchMask.CREATED, b"a/b/f", None) in seen(stream))
    (tmp_path / "w/n/m").mkdir(parents=True)
    (tmp_path / "w/n/m/f").touch()
    box.until(lambda: (WatchMask.CREATED, b"n/m/f", None) in seen(stream))
    (tmp_path / "w/n").rename(tmp_path / "w/a/moved")
    box.until(lambda: (WatchMask.RENAMED, b"n", b"a/moved") in seen(stream))
    (tmp_path / "w/a/moved/m/g").touch()
    box.until(lambda: (WatchMask.CREATED, b"a/moved/m/g", None) in seen(stream))
    (tmp_path / "w/a/moved").rename(tmp_path / "gone")
    box.until(lambda: (WatchMask.REMOVED, b"a/moved", None) in seen(stream))
    (tmp_path / "gone/m/unseen").touch()
    shutil.rmtree(tmp_path / "w/a")
    box.until(lambda: (WatchMask.REMOVED, b"a", None) in seen(stream))
    assert not any(b"unseen" in name for _, name, _ in seen(stream))


def test_watch_overflow_is_told(bare: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    stream = watched(bare, "w")
    stream.grants = False
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    names = [tmp_path / "w" / f"{i}" for i in range(200)]
    for _ in range((limit + 20_000) // 400 + 1):
        for name in names:
            name.touch()
        for name in names:
            name.unlink()
    stream.grants = True
    bare.grant(stream)
    bare.until(lambda: any(mask == WatchMask.OVERFLOW for mask, _, _ in seen(stream)), 60)


# -- METRICS, SHUTDOWN, the end


def test_metrics(box: AgentClient, tmp_path: Path) -> None:
    stream = box.spawn("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo done; sleep 1000")
    box.until(lambda: b"done" in stream.out)
    close = box.call(Op.METRICS).closed
    assert close[Tag.CPU_US] > 10_000
    assert close[Tag.MEMORY] > 100_000
    assert 3 <= close[Tag.PIDS] < 10
    assert close[Tag.DISK_TOTAL] >= close[Tag.DISK_USED] > 0
    assert close[Tag.UPTIME_MS] >= 0
    assert shutil.disk_usage(tmp_path).total == close[Tag.DISK_TOTAL]


def test_shutdown_lets_commands_take_their_leave(box: AgentClient, mark: Marker, tmp_path: Path) -> None:
    polite = box.spawn(f"trap 'touch left; exit 0' TERM; echo up; while :; do sleep 0.02; done; : {mark.text}")
    stubborn = box.spawn(f"{daemon(mark.text)}; trap '' TERM; echo up; while :; do sleep 0.02; done; : {mark.text}")
    box.until(lambda: polite.out and stubborn.out)
    before = time.monotonic()
    stream = box.call(Op.SHUTDOWN, (Tag.TIMEOUT_MS, 300))
    assert stream.error is None
    assert time.monotonic() - before < 10
    assert (tmp_path / "left").exists()
    assert box.wait_exit() == 0
    mark.gone()


def test_shutdown_of_an_idle_sandbox_is_quick(box: AgentClient) -> None:
    before = time.monotonic()
    box.call(Op.SHUTDOWN, (Tag.TIMEOUT_MS, 60_000))
    assert box.wait_exit() == 0
    assert time.monotonic() - before < 5


def test_end_of_the_wire_ends_everything(box: AgentClient, mark: Marker) -> None:
    stream = box.spawn(f"{daemon(mark.text)}; trap '' TERM HUP; echo up; while :; do sleep 1; done; : {mark.text}")
    box.until(lambda: b"up" in stream.out)
    assert box.process.stdin
    box.process.stdin.close()
    assert box.wait_exit() == 0
    mark.gone()


def test_dead_agent_takes_its_trees_along(bare: AgentClient, mark: Marker) -> None:
    stream = bare.spawn(f"sleep 1000; : {mark.text}")
    bare.started(stream)
    eventually(mark.pids, "the start")
    bare.process.kill()
    mark.gone()


def test_host_that_stops_reading_is_noticed(bare: AgentClient, mark: Marker) -> None:
    stream = bare.spawn(f"yes {mark.text}")
    bare.started(stream)
    assert bare.process.stdout
    bare.process.stdout.close()
    os.write(bare.to, frame(FrameType.PING, 0, b"x"))
    assert bare.process.wait(PATIENCE) == 0
    mark.gone()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frame(99, 1),
        frame(FrameType.REPLY, 1),
        frame(FrameType.CLOSE, 1),
        frame(FrameType.OPEN, 2, b""),
        frame(FrameType.OPEN, 0, b""),
        frame(FrameType.PING, 0, b"x" * 65),
        frame(FrameType.PING, 1, b"x"),
        frame(FrameType.DATA, 1),
        frame(FrameType.DATA, 1, b"x", channel=1),
        frame(FrameType.DATA, 77, b"x"),
        frame(FrameType.END, 1, b"x"),
        frame(FrameType.CREDIT, 1, b"x"),
        frame(FrameType.OPEN, 1, b"", zero=1),
        struct.pack("<IBBHI", 1 << 30, FrameType.OPEN, 0, 0, 1),
        struct.pack("<IBBHI", 65537, FrameType.DATA, 0, 0, 1),
    ],
)
def test_garbage_ends_the_connection(bare: AgentClient, garbage: bytes) -> None:
    bare.send(garbage)
    assert bare.wait_exit() == 2
    assert b"protocol error" in bare.errors()


def test_rules_with_memory(tmp_path: Path) -> None:
    def broken(play: Callable[[AgentClient, int], None]) -> None:
        client = connect([], tmp_path)
        stream = client.spawn(["sleep", "1000"], flags=ExecFlag.STDIN)
        client.started(stream)
        play(client, stream.number)
        assert client.wait_exit() == 2
        assert b"protocol error" in client.errors()
        client.close()

    broken(lambda c, n: c.send(frame(FrameType.OPEN, n, encode([(Tag.OP, Op.PS)]))))
    broken(lambda c, n: c.send(frame(FrameType.CREDIT, n, struct.pack("<I", MAX_CREDIT))))
    broken(lambda c, n: c.send(frame(FrameType.DATA, n, bytes(65536)) * 5))
    broken(lambda c, n: c.send(frame(FrameType.END, n) + frame(FrameType.DATA, n, b"x")))
    broken(lambda c, n: c.send(frame(FrameType.CTRL, n, encode([(Tag.KIND, 99)]))))


def test_first_frame_must_be_hello() -> None:
    client = AgentClient([str(AGENT), "agent"], greet=False)
    client.send(frame(FrameType.PING, 0, b"x"))
    assert client.wait_exit() == 2
    client.close()


def test_version_mismatch_is_answered() -> None:
    client = AgentClient([str(AGENT), "agent"], greet=False)
    client.send(frame(FrameType.HELLO, 0, encode([(Tag.VERSION, VERSION + 1), (Tag.WORKDIR, "/")])))
    assert client.wait_exit() == 3
    assert client.hello is not None
    assert client.hello[Tag.VERSION] == VERSION
    client.close()


def test_ping_and_late_frames(box: AgentClient) -> None:
    box.ping(b"")
    box.ping(b"y" * 64)
    assert box.pongs == [b"", b"y" * 64]
    stream = box.run(["true"])
    box.send(frame(FrameType.DATA, stream.number, b"late") + frame(FrameType.RESET, stream.number))
    box.ping()


def test_frames_in_small_pieces(box: AgentClient) -> None:
    stream = box.unsent()
    for byte in frame(FrameType.OPEN, stream.number, encode([(Tag.OP, Op.STAT), (Tag.PATH, "/")])):
        box.send(bytes([byte]))
    assert box.wait(stream).error is None


def test_too_many_streams(bare: AgentClient, tmp_path: Path) -> None:
    streams = [bare.open(Op.WRITE, (Tag.PATH, f"f{i}"), (Tag.FLAGS, WriteFlag.APPEND)) for i in range(1030)]
    bare.ping()
    refused = [s for s in streams if s.close is not None]
    assert len(refused) >= 6
    assert {s.error for s in refused} == {errno.EMFILE}
    for stream in streams:
        if stream.close is None:
            bare.reset(stream)
    for stream in streams:
        bare.wait(stream)
    assert bare.output("echo again") == "again\n"


def test_flood_of_requests_without_reading(bare: AgentClient) -> None:
    """Answers pile up to a limit only: then the agent stops taking requests."""
    request = encode([(Tag.OP, Op.STAT), (Tag.PATH, "/nonexistent/" + "x" * 200)])
    streams = [bare.unsent() for _ in range(30_000)]
    bare.send(b"".join(frame(FrameType.OPEN, stream.number, request) for stream in streams))
    bare.until(lambda: streams[-1].close is not None, 60)
    assert all(s.error == errno.ENOENT for s in streams)
    if not SANITIZED:
        eventually(lambda: anonymous_kib(bare.process.pid) < 300, "giving memory back")


def test_a_second_hello_begins_anew(box: AgentClient, tmp_path: Path) -> None:
    """After a restore another host speaks: old streams are forgotten, processes live on."""
    stream = box.spawn("echo before; read x; sleep 1000", flags=ExecFlag.STDIN)
    number = box.started(stream)
    box.until(lambda: b"before" in stream.out)
    box.hello = None
    box.streams.clear()
    box.next = 1
    hello = [(Tag.VERSION, VERSION), (Tag.USER, "root"), (Tag.WORKDIR, str(tmp_path)), (Tag.FLAGS, HelloFlag.NO_USERS)]
    box.send(frame(FrameType.HELLO, 0, encode(hello)))
    box.until(lambda: box.hello is not None)
    again = box.open(Op.ATTACH, (Tag.PID, number), (Tag.FLAGS, ExecFlag.KILL_ON_RESET))
    box.until(lambda: again.out == b"before\n")
    box.reset(again)
    assert box.wait(again).closed[Tag.SIGNUM] == signal.SIGKILL


def test_inherited_sigpipe_and_closed_stderr(tmp_path: Path) -> None:
    """Python ignores SIGPIPE, and a launcher may have closed fd 2: neither may reach commands."""
    command = ["/bin/sh", "-c", f"trap '' PIPE INT; exec {AGENT} agent 2>&-"]
    client = AgentClient(command, [(Tag.USER, "root"), (Tag.WORKDIR, str(tmp_path)), (Tag.FLAGS, HelloFlag.NO_USERS)])
    assert re.search(r"SigIgn:\s+0+\n", client.output(["cat", "/proc/self/status"]))
    assert client.run("yes | head -1; echo e >&2").err == b"e\n"
    client.close()
