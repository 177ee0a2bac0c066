"""Commands: how they start, what they see, and their output under flow control."""

from __future__ import annotations

import errno
import os
import re
import signal
import struct
from pathlib import Path

import pytest
from agent_helpers import SANITIZED, Marker, anonymous_kib, eventually

from agentclient import AGENT, AgentClient, frame
from sloplet.wire.schema import INITIAL_CREDIT, CtrlKind, ExecFlag, FrameType, Op, Tag

pytestmark = pytest.mark.skipif(not AGENT.exists(), reason="the agent is not built here")


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
    # An unprivileged agent cannot empty the bounding set nor open its own oom_score_adj: no_new_privs and
    # its small size make up for that.
    privileged = box.hello is not None and box.hello[Tag.UID] == 0
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb", *(["CapBnd"] if privileged else [])):
        assert re.search(rf"{name}:\s+0+\n", status), name
    assert re.search(r"NoNewPrivs:\s+1", status)
    for name in ("SigBlk", "SigIgn"):
        assert re.search(rf"{name}:\s+0+\n", status), name
    assert "\n0022\n" in status
    fds = re.findall(r" (\d+) ->", status)
    assert set(fds) <= {"0", "1", "2", "3"}  # 3 is ls reading the folder
    assert not privileged or status.rstrip().endswith("500")


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
