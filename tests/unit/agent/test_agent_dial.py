"""DIAL: the host's way to a port inside, byte for byte, with half closes and resets, and nothing lost or kept."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_helpers import anonymous_kib, can, connect, eventually

from agentclient import AGENT, AgentClient, Stream, encode, frame
from sloplet.wire.schema import INITIAL_CREDIT, VERSION, FrameType, HelloFlag, Op, Tag

pytestmark = pytest.mark.anyone


#: In a user namespace an ordinary user may look at the descriptors of what he runs.
OWN = ["unshare", "-Ur"]


@pytest.fixture
def box(tmp_path: Path) -> Iterator[AgentClient]:
    client = connect(OWN if can(OWN) else [], tmp_path)
    yield client
    client.close()
    assert client.process.returncode == 0


class Server:
    """A program that listens. What it accepts is closed with it."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.socket.settimeout(20)
        self.port = int(self.socket.getsockname()[1])
        self.accepted: list[socket.socket] = []

    def accept(self) -> socket.socket:
        inner, _ = self.socket.accept()
        inner.settimeout(20)
        self.accepted.append(inner)
        return inner

    def close(self) -> None:
        for each in (self.socket, *self.accepted):
            each.close()


@pytest.fixture
def server() -> Iterator[Server]:
    listening = Server()
    yield listening
    listening.close()


def _dial(box: AgentClient, server: Server) -> tuple[Stream, socket.socket]:
    stream = box.open(Op.DIAL, (Tag.PORT, server.port))
    box.until(lambda: stream.reply is not None)
    return stream, server.accept()


def _fds(box: AgentClient) -> int:
    return len(os.listdir(f"/proc/{box.process.pid}/fd"))


def _reset(inner: socket.socket) -> None:
    inner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    inner.close()


def _silent(box: AgentClient) -> bool:
    return not select.select([box.fro], [], [], 0.15)[0]


def test_both_ways_and_half_closes(box: AgentClient, server: Server) -> None:
    before = _fds(box)
    stream, inner = _dial(box, server)
    box.data(stream, b"question")
    box.end(stream)
    assert inner.recv(100) == b"question"
    assert inner.recv(100) == b"", "the half close arrives"
    inner.sendall(b"answer")
    box.until(lambda: bytes(stream.out) == b"answer")
    assert stream.close is None
    inner.close()
    box.wait(stream)
    assert stream.ended
    assert stream.error is None
    assert _fds(box) == before


def test_the_other_side_may_end_first(box: AgentClient, server: Server) -> None:
    stream, inner = _dial(box, server)
    inner.sendall(b"banner")
    inner.shutdown(socket.SHUT_WR)
    box.until(lambda: stream.ended)
    assert bytes(stream.out) == b"banner"
    box.data(stream, b"x" * 300_000)
    box.end(stream)
    got = b""
    while piece := inner.recv(65536):
        got += piece
        box.receive(0)
    assert got == b"x" * 300_000
    assert box.wait(stream).error is None


def test_what_is_sent_before_the_reply_is_not_lost(box: AgentClient, server: Server) -> None:
    stream = box.unsent()
    fields = encode([(Tag.OP, Op.DIAL), (Tag.PORT, server.port)])
    box.send(
        frame(FrameType.OPEN, stream.number, fields)
        + frame(FrameType.DATA, stream.number, b"early")
        + frame(FrameType.END, stream.number)
    )
    inner = server.accept()
    assert inner.recv(100) == b"early"
    assert inner.recv(100) == b""
    inner.close()
    assert box.wait(stream).error is None


def _hash(inner: socket.socket) -> None:
    got = hashlib.sha256()
    while piece := inner.recv(100_000):
        got.update(piece)
    inner.sendall(got.digest())
    inner.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("way", ["out", "in"])
def test_many_megabytes_arrive_whole(box: AgentClient, server: Server, way: str) -> None:
    stream, inner = _dial(box, server)
    data = os.urandom(1 << 20) * 20
    program = threading.Thread(
        target=_hash if way == "in" else inner.sendall, args=(inner,) if way == "in" else (data,)
    )
    program.start()  # at its own pace
    if way == "in":
        box.data(stream, data)
        box.end(stream)
        box.wait(stream)
        assert bytes(stream.out) == hashlib.sha256(data).digest()
    else:
        box.until(lambda: len(stream.out) == len(data))
        assert bytes(stream.out) == data
    program.join()


def test_nobody_listens(box: AgentClient, server: Server) -> None:
    server.close()
    before = _fds(box)
    stream = box.call(Op.DIAL, (Tag.PORT, server.port))
    assert (stream.error, stream.closed[Tag.WHAT]) == (errno.ECONNREFUSED, b"port")
    assert stream.reply is None
    assert _fds(box) == before


def test_the_sixth_version_is_tried_too(box: AgentClient) -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        port = int(server.getsockname()[1])
        stream = box.open(Op.DIAL, (Tag.PORT, port))
        box.until(lambda: stream.reply is not None)
        direct = box.open(Op.DIAL, (Tag.PORT, port), (Tag.ADDRESS, "::1"))
        box.until(lambda: direct.reply is not None)
        assert box.call(Op.DIAL, (Tag.PORT, port), (Tag.ADDRESS, "127.0.0.1")).error == errno.ECONNREFUSED


@pytest.mark.parametrize(
    "fields",
    [
        [(Tag.PORT, 0)],
        [(Tag.PORT, 65536)],
        [(Tag.PORT, -1)],
        [(Tag.PORT, 2**40 + 80)],
        [(Tag.PORT, 80), (Tag.ADDRESS, "localhost")],
        [(Tag.PORT, 80), (Tag.ADDRESS, "")],
        [(Tag.PORT, 80), (Tag.ADDRESS, "1" * 200)],
        [(Tag.ADDRESS, "127.0.0.1")],
    ],
)
def test_what_cannot_be_dialled(box: AgentClient, fields: list[tuple[Tag, int | str]]) -> None:
    assert box.call(Op.DIAL, *fields).error == errno.EINVAL


def test_a_reset_from_inside(box: AgentClient, server: Server) -> None:
    stream, inner = _dial(box, server)
    inner.sendall(b"last words")
    box.until(lambda: bytes(stream.out) == b"last words")
    _reset(inner)
    assert box.wait(stream).error == errno.ECONNRESET
    assert stream.closed[Tag.WHAT] == b"port"


def test_a_reset_from_outside(box: AgentClient, server: Server) -> None:
    before = _fds(box)
    stream, inner = _dial(box, server)
    box.reset(stream)
    assert box.wait(stream).error == errno.ECANCELED
    with pytest.raises(ConnectionResetError):
        inner.recv(1)
    assert _fds(box) == before


def test_an_early_answer_is_told_before_the_break(box: AgentClient, server: Server) -> None:
    """A server that answers and goes while it is still being written to."""
    stream, inner = _dial(box, server)
    box.data(stream, b"x" * 1000)
    assert inner.recv(10) == b"x" * 10
    inner.sendall(b"too large")
    inner.close()  # unread bytes: this is a reset
    box.until(lambda: stream.close is not None or stream.ended)
    assert bytes(stream.out) in (b"too large", b"")  # the kernel may drop it with the reset; nothing else may happen
    if stream.close is None:
        box.data(stream, b"more")
        box.end(stream)
    assert box.wait(stream).error in (None, errno.ECONNRESET)


def test_a_program_that_does_not_read_holds_the_host(box: AgentClient, server: Server) -> None:
    stream, inner = _dial(box, server)
    before = anonymous_kib(box.process.pid)
    sent = 0
    while True:  # until no credit comes any more: what the kernel took, and one window
        room = min(stream.credit, 65536)
        if not room:
            while stream.credit == 0 and box.receive(0.3):
                pass
            if stream.credit == 0:
                break
            continue
        box.send(frame(FrameType.DATA, stream.number, bytes(room)))
        stream.credit -= room
        sent += room
        assert sent < 64 << 20
    box.ping()
    assert anonymous_kib(box.process.pid) - before < 1500
    box.end(stream)
    got = 0
    while piece := inner.recv(1 << 20):
        got += len(piece)
        box.receive(0)
    assert got == sent
    inner.close()
    assert box.wait(stream).error is None


def test_a_host_that_does_not_read_holds_the_program(box: AgentClient, server: Server) -> None:
    stream, inner = _dial(box, server)
    stream.grants = False
    inner.setblocking(False)
    sent = 0

    def stuck() -> bool:
        nonlocal sent
        try:
            while True:
                sent += inner.send(bytes(65536))
        except BlockingIOError:
            pass
        box.receive(0)
        return len(stream.out) == INITIAL_CREDIT and not select.select([], [inner], [], 0.2)[1]

    eventually(stuck, "the program's wait")
    assert box.process.poll() is None
    ticks = _cpu(box)
    assert _silent(box)
    assert _cpu(box) - ticks <= 2, "it waits, and does not spin"
    box.reset(stream)
    assert box.wait(stream).error == errno.ECANCELED


def _cpu(box: AgentClient) -> int:
    words = Path(f"/proc/{box.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


def test_a_second_hello_resets_what_was_dialled(box: AgentClient, server: Server) -> None:
    before = _fds(box)
    _stream, inner = _dial(box, server)
    box.hello, box.next = None, 1
    box.streams.clear()
    fields = [(Tag.VERSION, VERSION), (Tag.FLAGS, HelloFlag.NO_USERS), (Tag.USER, "root"), (Tag.WORKDIR, "/")]
    box.send(frame(FrameType.HELLO, 0, encode(fields)))
    box.until(lambda: box.hello is not None)
    with pytest.raises(ConnectionResetError):
        inner.recv(1)
    assert _fds(box) == before
    again, inner = _dial(box, server)
    assert again.number == 1
    inner.close()


def test_frozen_nothing_moves(box: AgentClient, server: Server) -> None:
    stream, inner = _dial(box, server)
    assert box.call(Op.FREEZE).error is None
    inner.sendall(b"while frozen")
    box.send(frame(FrameType.DATA, stream.number, b"kept"))
    inner.setblocking(False)
    assert _silent(box)
    with pytest.raises(BlockingIOError):
        inner.recv(1)
    inner.settimeout(20)
    box.call(Op.THAW)
    assert inner.recv(10) == b"kept"
    box.until(lambda: bytes(stream.out) == b"while frozen")


def test_no_descriptors_left(box: AgentClient, server: Server) -> None:
    """What cannot be dialled now is refused, and the agent lives."""
    have = _fds(box)
    resource.prlimit(box.process.pid, resource.RLIMIT_NOFILE, (have + 2, have + 2))
    streams = [box.open(Op.DIAL, (Tag.PORT, server.port)) for _ in range(10)]
    box.until(lambda: all(s.reply is not None or s.close is not None for s in streams))
    refused = [s for s in streams if s.close is not None]
    assert len(refused) >= 8
    assert {s.error for s in refused} == {errno.EMFILE}
    for s in streams:
        if s.close is None:
            box.reset(s)
            box.wait(s)
    for _ in range(len(streams) - len(refused)):
        server.accept()
    stream, inner = _dial(box, server)
    inner.close()
    box.until(lambda: stream.ended)


def test_many_at_once(box: AgentClient, server: Server) -> None:
    before = _fds(box)
    pairs = [_dial(box, server) for _ in range(200)]
    for number, (stream, inner) in enumerate(pairs):
        box.data(stream, b"%d" % number)
        assert inner.recv(10) == b"%d" % number
        inner.sendall(b"%d" % -number)
    for number, (stream, inner) in enumerate(pairs):
        box.until(lambda s=stream, n=number: bytes(s.out) == b"%d" % -n)  # type: ignore[misc]
        inner.close()
        box.end(stream)
    for stream, _ in pairs:
        assert box.wait(stream).error is None
    assert _fds(box) == before


if not AGENT.exists():
    pytest.skip("the agent is not built here", allow_module_level=True)
