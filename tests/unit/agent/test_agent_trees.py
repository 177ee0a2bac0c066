"""Processes and their trees: PS, signals, timeouts, shims, terminals."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from agent_helpers import Marker, can, connect, daemon, eventually

from agentclient import AGENT, AgentClient
from sloplet.wire.schema import CtrlKind, ExecFlag, HelloFlag, Op, SignalFlag, Tag

pytestmark = pytest.mark.skipif(not AGENT.exists(), reason="the agent is not built here")


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
    child = f"trap 'echo child' USR1; echo up; while :; do sleep 0.05; done; : {mark.text}"
    script = f'trap "echo got" USR1; sh -c "{child}" & echo up; while :; do wait; done'
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


def test_timeout_kills_daemons_too(box: AgentClient, mark: Marker) -> None:
    stream = box.spawn(
        f"{daemon(mark.text)}; echo up; trap '' TERM INT; sleep 1000; : {mark.text}", (Tag.TIMEOUT_MS, 400)
    )
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
    """Every process forks as fast as it can; its depth is bounded, should the kill not work."""
    again = f"sh $0 $(($1+1)) {mark.text} &"
    (tmp_path / "bomb.sh").write_text(f"[ $1 -gt 12 ] && exec sleep 100 {mark.text}\n{again} {again}\nwait\n")
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
    stream = client.spawn(
        f"{daemon(mark.text)}; echo up; trap '' TERM; sleep 1000; : {mark.text}", (Tag.TIMEOUT_MS, 500)
    )
    eventually(lambda: len(mark.pids()) >= 3, "the daemons' start")
    assert client.wait(stream, 60).closed[Tag.TIMED_OUT] == 1
    mark.gone()
    stream = client.spawn(f"{daemon(mark.text)}; echo up; sleep 1000; : {mark.text}")
    eventually(lambda: len(mark.pids()) >= 3, "the daemons' start")
    client.close()
    mark.gone()


def test_zombies_are_reaped(box: AgentClient) -> None:
    code = "import os\nfor i in range(200):\n  if os.fork() == 0:\n    os.fork()\n    os._exit(0)\nos._exit(9)"
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
    stream = box.spawn(
        "trap 'echo size changed; exit 0' WINCH; echo up; while :; do sleep 0.02; done", flags=ExecFlag.PTY
    )
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
