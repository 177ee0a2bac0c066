"""A tiny blocking client of the wire, for tests of the agent alone: no asyncio, only the schema is shared."""

from __future__ import annotations

import os
import select
import struct
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sloplet.wire.schema import (
    HEADER_SIZE,
    INITIAL_CREDIT,
    INTEGER_TAGS,
    VERSION,
    CtrlKind,
    ExecFlag,
    FrameType,
    Op,
    Tag,
)

AGENT = Path(os.environ.get("SLOPLET_AGENT", Path(__file__).parents[1] / "agent/build/sloplet-agent"))
PATIENCE = float(os.environ.get("SLOPLET_TEST_PATIENCE", "20"))

Pairs = Iterable[tuple[Tag, int | bytes | str]]


def encode(pairs: Pairs) -> bytes:
    out = b""
    for tag, value in pairs:
        body = struct.pack("<q", value) if isinstance(value, int) else os.fsencode(value)
        out += struct.pack("<HI", tag, len(body)) + body
    return out


def decode(payload: bytes) -> list[tuple[Tag, Any]]:
    pairs: list[tuple[Tag, Any]] = []
    at = 0
    while at < len(payload):
        number, length = struct.unpack_from("<HI", payload, at)
        body = payload[at + 6 : at + 6 + length]
        assert len(body) == length
        tag = Tag(number)
        pairs.append((tag, struct.unpack("<q", body)[0] if tag in INTEGER_TAGS else body))
        at += 6 + length
    return pairs


def frame(kind: int, stream: int, payload: bytes = b"", channel: int = 0, zero: int = 0) -> bytes:
    return struct.pack("<IBBHI", len(payload), kind, channel, zero, stream) + payload


class Answer(dict[Tag, Any]):
    """Fields of a REPLY or CLOSE; a missing tag is None."""

    def __missing__(self, tag: Tag) -> None:
        return None


class Stream:
    def __init__(self, number: int) -> None:
        self.number = number
        self.out = bytearray()
        self.err = bytearray()
        self.reply: Answer | None = None
        self.close: Answer | None = None
        self.credit = INITIAL_CREDIT  # what we may send
        self.taken = 0  # received and not granted back yet
        self.grants = True  # give credit back as a reader does
        self.ended = False  # the agent said END

    @property
    def closed(self) -> Answer:
        assert self.close is not None
        return self.close

    @property
    def error(self) -> int | None:
        return self.closed[Tag.ERRNO]

    def records(self) -> list[Answer]:
        found, at = [], 0
        data = bytes(self.out)
        while at + 4 <= len(data):
            (length,) = struct.unpack_from("<I", data, at)
            if at + 4 + length > len(data):
                break
            answer = Answer()
            pairs = decode(data[at + 4 : at + 4 + length])
            answer.update(pairs)
            for tag in (Tag.ARGV, Tag.ENTRY, Tag.ATTRIBUTE):
                if tag in answer:
                    answer[tag] = [v for t, v in pairs if t is tag]
            found.append(answer)
            at += 4 + length
        return found


class Asked(Stream):
    """A stream that the agent opened: CONNECT or RESOLVE. What it sends is in ``out``."""

    def __init__(self, number: int, request: list[tuple[Tag, Any]]) -> None:
        super().__init__(number)
        self.request = Answer(request)
        self.was_reset = False
        self.finished = False  # we have sent CLOSE

    @property
    def op(self) -> int:
        return int(self.request[Tag.OP])


class WireClient:
    """The host's side over two descriptors."""

    def __init__(self, to: int, fro: int, hello: Pairs = (), greet: bool = True) -> None:
        self.to, self.fro = to, fro
        os.set_blocking(self.fro, False)
        os.set_blocking(self.to, False)
        self.buffer = bytearray()
        self.outgoing = bytearray()
        self.sending = False
        self.streams: dict[int, Stream] = {}
        self.asked: list[Asked] = []  # all of them, in their order
        self.on_asked: Callable[[Asked], None] | None = None
        self.pongs: list[bytes] = []
        self.hello: Answer | None = None
        self.next = 1
        self.eof = False
        if greet:
            self.send(frame(FrameType.HELLO, 0, encode([(Tag.VERSION, VERSION), *hello])))
            self.until(lambda: self.hello is not None)

    # -- bytes

    def send(self, data: bytes) -> None:
        """Writes all, reading meanwhile, so that neither side waits for the other forever."""
        self.outgoing += data
        if self.sending:  # called while reading within the loop below: it goes behind
            return
        self.sending = True
        deadline = time.monotonic() + PATIENCE
        while self.outgoing:
            assert time.monotonic() < deadline, "the agent does not read"
            _, writable, _ = select.select([], [self.to], [], 0.05)
            if writable:
                try:
                    del self.outgoing[: os.write(self.to, self.outgoing)]
                except BlockingIOError:
                    pass
            if self.outgoing:
                self.receive(0)
        self.sending = False

    def receive(self, timeout: float) -> bool:
        readable, _, _ = select.select([self.fro], [], [], timeout)
        if not readable:
            return False
        data = os.read(self.fro, 1 << 18)
        if not data:
            self.eof = True
            return False
        self.buffer += data
        while len(self.buffer) >= HEADER_SIZE:
            length, kind, channel, zero, stream = struct.unpack_from("<IBBHI", self.buffer)
            assert zero == 0
            assert length <= 65536
            if len(self.buffer) < HEADER_SIZE + length:
                break
            payload = bytes(self.buffer[HEADER_SIZE : HEADER_SIZE + length])
            del self.buffer[: HEADER_SIZE + length]
            self.take(FrameType(kind), channel, stream, payload)
        return True

    def take(self, kind: FrameType, channel: int, number: int, payload: bytes) -> None:
        if kind is FrameType.HELLO:
            self.hello = Answer(decode(payload))
            return
        if kind is FrameType.PONG:
            self.pongs.append(payload)
            return
        if kind is FrameType.OPEN:
            self.take_open(number, payload)
            return
        stream = self.streams[number]
        if isinstance(stream, Asked) and stream.finished:
            return
        assert stream.close is None, f"a frame after CLOSE: {kind!r}"
        if kind is FrameType.DATA:
            assert payload
            assert (channel == 0) == isinstance(stream, Asked)
            (stream.err if channel == 2 else stream.out).extend(payload)
            stream.taken += len(payload)
            assert stream.taken <= INITIAL_CREDIT, "DATA without credit"
            if stream.grants and stream.taken >= INITIAL_CREDIT // 2:
                self.grant(stream)
        elif kind is FrameType.CREDIT:
            stream.credit += struct.unpack("<I", payload)[0]
        elif kind is FrameType.END:
            assert not stream.ended
            stream.ended = True
        elif isinstance(stream, Asked):
            assert kind is FrameType.RESET
            stream.was_reset = True
        elif kind is FrameType.REPLY:
            assert stream.reply is None
            stream.reply = Answer(decode(payload))
        elif kind is FrameType.CLOSE:
            stream.close = Answer(decode(payload))
        else:
            raise AssertionError(f"unexpected {kind!r}")

    def take_open(self, number: int, payload: bytes) -> None:
        assert self.hello is not None, "OPEN before HELLO"
        assert number % 2 == 0
        assert not self.asked or number > self.asked[-1].number
        stream = Asked(number, decode(payload))
        self.streams[number] = stream
        self.asked.append(stream)
        if self.on_asked is not None:
            self.on_asked(stream)

    def until(self, done: Callable[[], Any], patience: float = PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while not done():
            assert time.monotonic() < deadline, "no answer in time"
            assert not self.eof, f"the agent hung up: {self.errors()!r}"
            self.receive(0.05)

    def errors(self) -> bytes:
        """What the agent said besides."""
        return b""

    # -- streams

    def grant(self, stream: Stream) -> None:
        taken, stream.taken = stream.taken, 0
        if taken:
            self.send(frame(FrameType.CREDIT, stream.number, struct.pack("<I", taken)))

    def unsent(self) -> Stream:
        """A stream with a number of its own whose OPEN the caller sends."""
        stream = Stream(self.next)
        self.next += 2
        self.streams[stream.number] = stream
        return stream

    def open(self, op: int, *pairs: tuple[Tag, int | bytes | str]) -> Stream:
        stream = self.unsent()
        self.send(frame(FrameType.OPEN, stream.number, encode([(Tag.OP, op), *pairs])))
        return stream

    def call(self, op: int, *pairs: tuple[Tag, int | bytes | str]) -> Stream:
        stream = self.open(op, *pairs)
        self.until(lambda: stream.close is not None)
        return stream

    @staticmethod
    def is_over(stream: Stream) -> bool:
        return stream.close is not None or (isinstance(stream, Asked) and stream.was_reset)

    def data(self, stream: Stream, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self.until(lambda: stream.credit > 0 or self.is_over(stream))
            if self.is_over(stream):
                return
            n = min(len(view), stream.credit, 65536)
            stream.credit -= n
            channel = int(isinstance(stream, Asked))
            self.send(frame(FrameType.DATA, stream.number, bytes(view[:n]), channel))
            view = view[n:]

    def answer(self, stream: Asked, *pairs: tuple[Tag, int | bytes | str]) -> None:
        """REPLY to what the agent asked."""
        self.send(frame(FrameType.REPLY, stream.number, encode(pairs)))

    def finish(self, stream: Asked, *pairs: tuple[Tag, int | bytes | str]) -> None:
        """CLOSE what the agent asked."""
        stream.finished = True
        self.send(frame(FrameType.CLOSE, stream.number, encode(pairs)))

    def next_asked(self, count: int = 1) -> Asked:
        """The ``count``-th stream that the agent ever opened."""
        self.until(lambda: len(self.asked) >= count)
        return self.asked[count - 1]

    def end(self, stream: Stream) -> None:
        self.send(frame(FrameType.END, stream.number))

    def reset(self, stream: Stream) -> None:
        self.send(frame(FrameType.RESET, stream.number))

    def ctrl(self, stream: Stream, kind: CtrlKind, *pairs: tuple[Tag, int | bytes | str]) -> None:
        self.send(frame(FrameType.CTRL, stream.number, encode([(Tag.KIND, kind), *pairs])))

    def ping(self, data: bytes = b"x") -> None:
        count = len(self.pongs)
        self.send(frame(FrameType.PING, 0, data))
        self.until(lambda: len(self.pongs) > count)

    # -- commands

    def spawn(
        self,
        argv: str | list[str | bytes],
        *pairs: tuple[Tag, int | bytes | str],
        flags: int = 0,
        env: Iterable[str] = (),
    ) -> Stream:
        words = ["/bin/sh", "-c", argv] if isinstance(argv, str) else argv
        fields: list[tuple[Tag, int | bytes | str]] = [(Tag.ARGV, word) for word in words]
        fields += [(Tag.ENV, entry) for entry in env]
        return self.open(Op.EXEC, *fields, (Tag.FLAGS, flags), *pairs)

    def started(self, stream: Stream) -> int:
        """The wire's number of the process."""
        self.until(lambda: stream.reply is not None or stream.close is not None)
        assert stream.reply is not None, stream.close
        return int(stream.reply[Tag.PID])

    def wait(self, stream: Stream, patience: float = PATIENCE) -> Stream:
        self.until(lambda: stream.close is not None, patience)
        return stream

    def run(
        self,
        argv: str | list[str | bytes],
        *pairs: tuple[Tag, int | bytes | str],
        stdin: bytes | None = None,
        flags: int = 0,
        env: Iterable[str] = (),
    ) -> Stream:
        if stdin is not None:
            flags |= ExecFlag.STDIN
        stream = self.spawn(argv, *pairs, flags=flags, env=env)
        if stdin is not None:
            self.data(stream, stdin)
            if stream.close is None:
                self.end(stream)
        return self.wait(stream)

    def output(self, argv: str | list[str | bytes], *pairs: tuple[Tag, int | bytes | str]) -> str:
        stream = self.run(argv, *pairs)
        assert stream.closed[Tag.EXIT_CODE] == 0, (stream.closed, bytes(stream.err))
        return stream.out.decode()

    def write(self, path: str, data: bytes, *pairs: tuple[Tag, int | bytes | str]) -> Stream:
        stream = self.open(Op.WRITE, (Tag.PATH, path), *pairs)
        self.data(stream, data)
        if stream.close is None:
            self.end(stream)
        return self.wait(stream)


class AgentClient(WireClient):
    """A program of its own at the other end."""

    def __init__(self, command: list[str], hello: Pairs = (), greet: bool = True, **popen: Any) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, **popen
        )
        assert self.process.stdin
        assert self.process.stdout
        super().__init__(self.process.stdin.fileno(), self.process.stdout.fileno(), hello, greet)

    def errors(self) -> bytes:
        assert self.process.stderr
        os.set_blocking(self.process.stderr.fileno(), False)
        return self.process.stderr.read() or b""

    # -- the end

    def wait_exit(self, patience: float = PATIENCE) -> int:
        deadline = time.monotonic() + patience
        while not self.eof and time.monotonic() < deadline:
            self.receive(0.05)
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stderr:
                self.process.stderr.close()
