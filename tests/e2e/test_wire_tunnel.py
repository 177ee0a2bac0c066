"""The tunnel by its bytes: what a client may say, whose a session is, and what becomes of one that does not behave."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from remote_kit import goodbye, until
from server_kit import Served, served
from sloplet import Sandbox
from sloplet.keeper import error_of
from sloplet.wire.fields import Fields, decode_fields
from sloplet.wire.frames import FROM_AGENT, Frame, FrameDecoder, encode_frame
from sloplet.wire.schema import VERSION, FrameType, Op, Tag

pytestmark = pytest.mark.anyone

HELLO = encode_frame(FrameType.HELLO, 0, Fields((Tag.VERSION, VERSION), (Tag.MESSAGE, "test")).encode())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("tunnel") / "home", "--grace", "3") as running:
        yield running
        goodbye(running.url, running.key)


@pytest.fixture(scope="module")
def box(server: Served) -> Iterator[Sandbox]:
    with Sandbox(engine="fake", server=server.url, key=server.key) as made:
        yield made


class Peer:
    """One WebSocket, greeted."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.hello: dict[str, Any] = json.loads(socket.recv(10))
        self.received = 0
        self.acked = 0
        self._decoder = FrameDecoder(FROM_AGENT)
        self._frames: list[Frame] = []

    def frame(self) -> Frame:
        """The next, other messages aside."""
        while not self._frames:
            message = self.socket.recv(10)
            if isinstance(message, bytes):
                self.received += len(message)
                self._frames += self._decoder.feed(message)
            else:
                self.acked = json.loads(message)["ack"]
        return self._frames.pop(0)

    def ask(self, stream: int, *fields: tuple[Tag, Any]) -> Frame:
        self.socket.send(encode_frame(FrameType.OPEN, stream, Fields(*fields).encode()))
        while (frame := self.frame()).stream != stream or frame.type is not FrameType.CLOSE:
            pass
        return frame


@contextmanager
def tunnel(server: Served, query: str = "attempt=1", key: str | None = None, client: str = "") -> Iterator[Peer]:
    url = server.url.replace("http://", "ws://") + f"/v1/wire?{query}"
    headers = {"Authorization": f"Bearer {key or server.key}", "Sloplet-Client": client}
    with connect(url, additional_headers=headers, compression=None, proxy=None, close_timeout=2) as socket:
        yield Peer(socket)


def closed_with(socket: ClientConnection) -> int:
    """The code that the server ends it with."""
    while True:
        try:
            socket.recv(10)
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd is not None else 0


def exec_of(box: Sandbox, *argv: str) -> list[tuple[Tag, Any]]:
    return [(Tag.OP, int(Op.EXEC)), *((Tag.ARGV, word) for word in argv), (Tag.SANDBOX, box.id)]


def test_a_command_by_hand(server: Served, box: Sandbox) -> None:
    with tunnel(server) as peer:
        assert peer.hello.keys() == {"session", "received", "grace", "window", "version"}
        assert (peer.hello["received"], peer.hello["grace"]) == (0, 3)
        peer.socket.send(HELLO)
        theirs = peer.frame()
        assert theirs.type is FrameType.HELLO
        assert decode_fields(theirs.payload).integer(Tag.VERSION) == VERSION
        close = peer.ask(1, *exec_of(box, "echo", "x"))
        assert decode_fields(close.payload).integer(Tag.EXIT_CODE) == 0
        peer.socket.send(encode_frame(FrameType.PING, 0, b"12345678"))
        assert peer.frame() == Frame(FrameType.PONG, 0, 0, b"12345678")
        # What is sent is acknowledged after a second of quiet.
        until(lambda: isinstance(message := peer.socket.recv(10), str) and json.loads(message)["ack"] > 0)


@pytest.mark.parametrize("op", [Op.CONTROL, Op.SHUTDOWN, Op.FREEZE, Op.THAW, Op.CHANGES, Op.UNPACK, Op.CONNECT, 77])
def test_operations_that_are_not_for_clients(server: Served, box: Sandbox, op: int) -> None:
    with tunnel(server) as peer:
        peer.socket.send(HELLO)
        with_body = (Tag.BODY, json.dumps({"method": "list", "params": {}}))
        for stream, fields in (
            (1, [(Tag.SANDBOX, box.id)]),
            (3, []),
            (5, [with_body]),
            (7, [with_body, (Tag.SANDBOX, box.id)]),
        ):
            answer = error_of(decode_fields(peer.ask(stream, (Tag.OP, int(op)), *fields).payload))
            assert answer is not None
            assert type(answer).__name__ == "NotAllowed"
        # Frames for a stream that was refused, which crossed the answer on the way, do no harm.
        peer.socket.send(encode_frame(FrameType.DATA, 7, b"late") + encode_frame(FrameType.RESET, 7))
        assert decode_fields(peer.ask(9, *exec_of(box, "true")).payload).integer(Tag.EXIT_CODE) == 0


def test_no_sandbox_and_none_of_ours(server: Served, box: Sandbox) -> None:
    other = server.new_key("stranger")
    with tunnel(server, key=other) as peer:
        peer.socket.send(HELLO)
        first = error_of(decode_fields(peer.ask(1, (Tag.OP, int(Op.PS))).payload))
        second = error_of(decode_fields(peer.ask(3, *exec_of(box, "true")).payload))
        assert [type(error).__name__ for error in (first, second)] == ["KeeperError", "SandboxNotFound"]
        assert str(server.home) not in f"{first} {second}"


@pytest.mark.parametrize(
    "said",
    [
        encode_frame(FrameType.OPEN, 1, Fields((Tag.OP, int(Op.PS))).encode()),  # before HELLO
        HELLO + HELLO,
        HELLO + encode_frame(FrameType.OPEN, 2, b""),
        HELLO + encode_frame(FrameType.OPEN, 1, b"\xff" * 20),
        HELLO + b"\0" * 64,
        HELLO + b"\xff" * 12,
        encode_frame(FrameType.HELLO, 0, Fields((Tag.VERSION, 99)).encode()),
        HELLO + encode_frame(FrameType.CLOSE, 1, b""),  # not an opener's
    ],
)
def test_what_breaks_the_protocol(server: Served, said: bytes) -> None:
    with tunnel(server) as peer:
        peer.socket.send(said)
        assert closed_with(peer.socket) == 1002
    with tunnel(server, f"session={peer.hello['session']}&received=0&attempt=2") as again:
        assert again.hello["session"] != peer.hello["session"]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "nonsense", '{"ack": "1"}', '{"ack": 1e9}', '{"ack": -1}', '{"ack": 99999999}', '{"ack": true}'],
)
def test_messages_that_make_no_sense(server: Served, text: str) -> None:
    with tunnel(server) as peer:
        peer.socket.send(HELLO)
        peer.frame()
        peer.socket.send(text)
        assert closed_with(peer.socket) == 1002


def test_taken_up_where_it_was(server: Served, box: Sandbox) -> None:
    """What the client has not received comes again, and only that; what the server has received it does not want."""
    with tunnel(server) as peer:
        peer.socket.send(HELLO)
        peer.frame()
        close = peer.ask(1, *exec_of(box, "echo", "once"))
        session, received = peer.hello["session"], peer.received
        whole = len(encode_frame(FrameType.CLOSE, 1, close.payload))
        peer.socket.socket.shutdown(2)  # no goodbye
    with tunnel(server, f"session={session}&received={received - whole}&attempt=2") as again:
        assert again.hello["session"] == session
        assert again.hello["received"] == len(HELLO) + len(
            encode_frame(FrameType.OPEN, 1, Fields(*exec_of(box, "echo", "once")).encode())
        )
        assert again.frame() == Frame(FrameType.CLOSE, 0, 1, close.payload)
        # Part of a frame in one connection, the rest in the next.
        request = encode_frame(FrameType.OPEN, 3, Fields(*exec_of(box, "echo", "twice")).encode())
        again.socket.send(request[:30])
        received = received - whole + again.received
        until(lambda: _ack_is(again, again.hello["received"] + 30))
        again.socket.socket.shutdown(2)
    with tunnel(server, f"session={session}&received={received}&attempt=3") as third:
        third.socket.send(request[30:])
        while third.frame().type is not FrameType.CLOSE:
            pass
    # Said goodbye: nobody comes back to it.
    with tunnel(server, f"session={session}&received=0&attempt=4") as fourth:
        assert fourth.hello["session"] != session


def _ack_is(peer: Peer, wanted: int) -> bool:
    message = peer.socket.recv(10)
    return isinstance(message, str) and json.loads(message)["ack"] == wanted


def test_a_session_is_its_keys_own(server: Served) -> None:
    other = server.new_key("thief")
    with tunnel(server) as peer:
        peer.socket.send(HELLO)
        peer.frame()
        with tunnel(server, f"session={peer.hello['session']}&received=0&attempt=2", key=other) as theirs:
            assert theirs.hello["session"] != peer.hello["session"]
        peer.socket.send(encode_frame(FrameType.PING, 0, b"still"))
        assert peer.frame().payload == b"still"


@pytest.mark.parametrize(
    "query", ["received=5&attempt=2", "received=0&attempt=1", "received=-1&attempt=3", "received=x"]
)
def test_resumptions_that_cannot_be(server: Served, query: str) -> None:
    """More than was sent; an attempt that another has overtaken. The one that is there stays."""
    with tunnel(server) as peer:
        peer.socket.send(HELLO)
        peer.frame()
        more = query.replace("received=5", "received=500000")
        with (
            pytest.raises((InvalidStatus, ConnectionClosed)),
            tunnel(server, f"session={peer.hello['session']}&{more}"),
        ):
            pass
        peer.socket.send(encode_frame(FrameType.PING, 0, b"still"))
        assert peer.frame().payload == b"still"


def test_the_newest_connection_has_it(server: Served) -> None:
    with tunnel(server) as peer:
        peer.socket.send(HELLO)
        peer.frame()
        with tunnel(server, f"session={peer.hello['session']}&received={peer.received}&attempt=2") as newer:
            assert newer.hello["session"] == peer.hello["session"]
            assert closed_with(peer.socket) == 4000
            newer.socket.send(encode_frame(FrameType.PING, 0, b"here"))
            assert newer.frame().payload == b"here"


def test_asking_without_reading(server: Served) -> None:
    """Answers that nobody acknowledges are kept up to a bound; then the session ends."""
    with tunnel(server) as peer:
        peer.socket.send(HELLO)
        ping = encode_frame(FrameType.PING, 0, bytes(64)) * 1000
        try:
            for _ in range(200):  # 15 MB
                peer.socket.send(ping)
                drained(peer.socket)
        except ConnectionClosed:
            pass
        assert closed_with(peer.socket) == 1002


def drained(socket: ClientConnection) -> int:
    """Read what is there; how many bytes that were."""
    size = 0
    while True:
        try:
            message = socket.recv(0)
        except TimeoutError:
            return size
        size += len(message) if isinstance(message, bytes) else 0


def test_a_sandbox_that_nobody_reads(server: Served, box: Sandbox) -> None:
    """Its output stays with it: the server keeps a window of it at most, however long nobody acknowledges."""
    with tunnel(server) as peer:
        peer.socket.send(HELLO)
        peer.frame()
        for stream in range(1, 41, 2):
            peer.socket.send(encode_frame(FrameType.OPEN, stream, Fields(*exec_of(box, "yes")).encode()))
        size = 0
        try:
            while True:
                message = peer.socket.recv(2)
                size += len(message) if isinstance(message, bytes) else 0
        except TimeoutError:
            pass
        assert 20_000 < size <= 2 * peer.hello["window"]


def test_names_of_no_sandbox_are_not_remembered(server: Served) -> None:
    """A program's uses are kept as long as its tunnel: not what it makes up."""
    with tunnel(server, client="liar") as peer:
        peer.socket.send(HELLO)
        before = rss(server)
        for stream in range(1, 81, 2):
            name = b"%08d" % stream + b"x\xff" * 250_000
            close = peer.ask(stream, (Tag.OP, int(Op.PS)), (Tag.SANDBOX, name))
            assert type(error_of(decode_fields(close.payload))).__name__ == "SandboxNotFound"
            peer.socket.send(json.dumps({"ack": peer.received}))
        assert rss(server) - before < 20 << 20


def test_taken_up_again_and_again_without_reading(server: Served) -> None:
    """What is not acknowledged is kept once, not for each connection."""
    with tunnel(server) as peer:
        peer.socket.send(HELLO)
        for _ in range(50):
            peer.socket.send(encode_frame(FrameType.PING, 0, bytes(64)) * 1000)
            drained(peer.socket)
        session, before = peer.hello["session"], rss(server)
        with ExitStack() as stack:
            for attempt in range(2, 42):
                mute = stack.enter_context(socket_of(server, f"attempt={attempt}&session={session}&received=0"))
                assert mute.recv(12) == b"HTTP/1.1 101"
            assert rss(server) - before < 40 << 20


def rss(server: Served) -> int:
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def socket_of(server: Served, query: str) -> Iterator[socket.socket]:
    """A connection to the tunnel that takes next to nothing of what is sent."""
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        opened.settimeout(10)
        opened.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        opened.sendall(
            f"GET /v1/wire?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.key}\r\n"
            "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: MDAwMDAwMDAwMDAwMDAwMA==\r\n\r\n".encode()
        )
        yield opened


def test_a_key_is_needed(server: Served) -> None:
    for key in ("slp_wrong", "x"):
        with pytest.raises(InvalidStatus) as caught, tunnel(server, key=key):
            pass
        assert caught.value.response.status_code == 401
        assert json.loads(caught.value.response.body)["error"] == "KeyRefused"
