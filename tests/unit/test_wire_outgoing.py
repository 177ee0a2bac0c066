"""Bytes on their way out: whole and in order whatever the descriptor takes at a time, and pipes that grow when busy."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import socket
from collections.abc import Iterator

import pytest

from sloplet.wire import pipes
from sloplet.wire.frames import FROM_AGENT, FrameDecoder, encode_frame, encode_header
from sloplet.wire.outgoing import Outgoing
from sloplet.wire.pipes import Growth
from sloplet.wire.schema import MAX_PAYLOAD, FrameType

pytestmark = pytest.mark.anyone


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def _size(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)


def test_whole_and_in_order(pipe: tuple[int, int]) -> None:
    async def main() -> None:
        dice = random.Random(4)
        os.set_blocking(pipe[0], False)
        emptied = 0

        def empty() -> None:
            nonlocal emptied
            emptied += 1

        out = Outgoing(pipe[1], empty, lambda error: pytest.fail(str(error)), lambda: None)
        decoder = FrameDecoder(FROM_AGENT)
        sent: list[bytes] = []
        got: list[bytes] = []
        while len(sent) < 400 or out.waiting:
            if len(sent) < 400:
                payload = dice.randbytes(dice.choice([1, 50, 5000, MAX_PAYLOAD]))
                if dice.random() < 0.5:
                    out.put(encode_header(FrameType.DATA, 1, len(payload), 1), payload)
                else:
                    out.put(encode_frame(FrameType.DATA, 1, payload, 1))
                sent.append(payload)
                if dice.random() < 0.1:
                    out.hold()
                if dice.random() < 0.3:
                    out.let_go()
            else:
                out.let_go()
            if dice.random() < 0.6:
                try:
                    got += [
                        frame.payload for frame in decoder.feed(os.read(pipe[0], dice.choice([1, 13, 4096, 300_000])))
                    ]
                except BlockingIOError:
                    pass
            await asyncio.sleep(0)
        try:
            while True:
                got += [frame.payload for frame in decoder.feed(os.read(pipe[0], 65536))]
        except BlockingIOError:
            pass
        assert got == sent
        assert emptied
        assert out.sent == out.end == sum(12 + len(payload) for payload in sent)
        out.stop()

    asyncio.run(main())


def test_a_busy_pipe_grows_and_a_quiet_one_does_not(pipe: tuple[int, int]) -> None:
    async def main() -> None:
        growth = Growth()
        os.set_blocking(pipe[0], False)
        before = _size(pipe[1])
        out = Outgoing(pipe[1], lambda: None, lambda error: None, lambda: growth.grow(pipe[1]))
        total = 0
        while total < 2 * pipes.BUSY:
            out.put(bytes(MAX_PAYLOAD))
            out.put(bytes(MAX_PAYLOAD))
            while out.size:
                try:
                    total += len(os.read(pipe[0], 1 << 20))
                except BlockingIOError:
                    pass
                await asyncio.sleep(0)
            if total < pipes.BUSY // 2:
                assert _size(pipe[1]) == before
        assert _size(pipe[1]) == 1 << 20
        out.stop()
        growth.forget()

    asyncio.run(main())


def test_few_are_grown_for_an_ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 64 MiB of one user's the kernel makes all his new pipes tiny: they must not be ours."""
    monkeypatch.setattr(pipes, "_grown", 0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    made = [os.pipe() for _ in range(20)]
    first, second = Growth(), Growth()
    for read_fd, _ in made[:18]:
        first.grow(read_fd)
    assert sum(_size(read_fd) == 1 << 20 for read_fd, _ in made) == 16
    first.forget()
    first.forget()
    second.grow(made[19][0])
    assert _size(made[19][0]) == 1 << 20
    for both in made:
        for fd in both:
            os.close(fd)


def test_what_is_no_pipe_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "_grown", 0)
    ours, theirs = socket.socketpair()
    growth = Growth()
    growth.grow(ours.fileno())
    assert pipes._grown == 0
    ours.close()
    theirs.close()
