"""The connection itself: its beginning, its rules, its end."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_helpers import SANITIZED, Marker, anonymous_kib, connect, daemon, eventually

from agentclient import AGENT, PATIENCE, AgentClient, encode, frame
from sloplet.wire.schema import MAX_CREDIT, VERSION, ExecFlag, FrameType, HelloFlag, Op, Tag, WriteFlag

pytestmark = pytest.mark.skipif(not AGENT.exists(), reason="the agent is not built here")


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
    hello = [
        (Tag.VERSION, VERSION),
        (Tag.TAG, "by this it is known"),
        (Tag.USER, "root"),
        (Tag.WORKDIR, str(tmp_path)),
        (Tag.FLAGS, HelloFlag.NO_USERS),
    ]
    box.send(frame(FrameType.HELLO, 0, encode(hello)))
    box.until(lambda: box.hello is not None)
    assert box.hello is not None
    assert box.hello[Tag.TAG] == b"by this it is known"
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


def test_no_descriptors_are_left_open(bare: AgentClient, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("the agent hides its descriptors, as it must")

    def count() -> int:
        return len(os.listdir(f"/proc/{bare.process.pid}/fd"))

    bare.run(["true"])
    eventually(lambda: bare.call(Op.METRICS).closed[Tag.PIDS] == 1, "the shim's end")
    before = count()
    (tmp_path / "d/e").mkdir(parents=True)
    for _ in range(3):
        bare.run("echo x", stdin=b"y")
        bare.run(["no-such-command"], flags=ExecFlag.STDIN)
        bare.run(["true"], (Tag.CWD, "/none"))
        bare.run(["true"], flags=ExecFlag.PTY)
        bare.run(["true"], flags=ExecFlag.MERGE)
        bare.write("f", b"1")
        bare.write("d", b"1")
        bare.reset(bare.open(Op.WRITE, (Tag.PATH, "g")))
        bare.call(Op.READ, (Tag.PATH, "f"))
        bare.call(Op.READ, (Tag.PATH, "d"))
        bare.call(Op.LIST, (Tag.PATH, "."), (Tag.FLAGS, 1))
        for path in (".", "f"):
            watch = bare.open(Op.WATCH, (Tag.PATH, path), (Tag.FLAGS, 1))
            bare.until(lambda watch=watch: watch.reply is not None)
            bare.reset(watch)
        bare.call(Op.STAT, (Tag.PATH, "f"))
        bare.call(Op.MOVE, (Tag.PATH, "f"), (Tag.PATH2, "h"), (Tag.FLAGS, 1))
        bare.call(Op.REMOVE, (Tag.PATH, "none"), (Tag.FLAGS, 3))
        bare.call(Op.MKDIR, (Tag.PATH, "d/e/f"), (Tag.FLAGS, 1))
        bare.call(Op.REMOVE, (Tag.PATH, "d/e"), (Tag.FLAGS, 1))
    bare.ping()
    eventually(lambda: count() == before, "closing")
