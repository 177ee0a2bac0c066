"""Streams that the agent opens, as the host serves them: order, limits, credit, and agents that lie."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from mux_helpers import HELLO, OPEN, Peer, data, spin, with_peer

from sloplet.errors import KeeperError, ProtocolError, SlopletError, WireClosed
from sloplet.keeper.connection import Connection
from sloplet.wire.fields import Fields, decode_fields
from sloplet.wire.frames import Frame, encode_frame
from sloplet.wire.mux import AgentStream, HostMux, request
from sloplet.wire.schema import INITIAL_CREDIT, MAX_CREDIT, MAX_PAYLOAD, MAX_STREAMS, Channel, FrameType, Op, Tag

pytestmark = pytest.mark.anyone

CONNECT = request(Op.CONNECT, (Tag.ADDRESS, "1.2.3.4"), (Tag.PORT, 443)).encode()
REFUSED = Fields((Tag.ERRNO, errno.EACCES))


def opened(stream: int, fields: bytes = CONNECT) -> bytes:
    return encode_frame(FrameType.OPEN, stream, fields)


def credit(stream: int, count: int) -> bytes:
    return encode_frame(FrameType.CREDIT, stream, struct.pack("<I", count))


def reset(stream: int) -> bytes:
    return encode_frame(FrameType.RESET, stream)


def end(stream: int) -> bytes:
    return encode_frame(FrameType.END, stream)


class Served:
    """What the host was asked, in the order of its coming."""

    def __init__(self, peer: Peer) -> None:
        self.streams: list[AgentStream] = []
        peer.mux.set_accept(self.streams.append)

    async def next(self, count: int = 1) -> AgentStream:
        while len(self.streams) < count:
            await asyncio.sleep(0)
        return self.streams[count - 1]


async def served(peer: Peer, *frames: bytes) -> AgentStream:
    """Stream 2, open."""
    found = Served(peer)
    await peer.send(HELLO, opened(2), *frames)
    await peer.read(1)  # the host's HELLO
    return await found.next()


# -- honest ------------------------------------------------------------------------------


def test_from_open_to_close() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await served(peer, data(2, b"hello", 0), end(2))
        assert stream.request.text(Tag.ADDRESS) == "1.2.3.4"
        assert stream.request.integer(Tag.PORT) == 443
        assert (peer.mux.serving, peer.mux.waiting) == (1, False)
        assert await stream.recv() == (Channel.IN, b"hello")
        assert await stream.recv() is None
        stream.reply(Fields())
        await stream.send(b"world")
        assert stream.send_now(b"!") == 1
        stream.end_now()
        stream.close(Fields())
        stream.close(Fields())
        assert await peer.read(5) == [
            Frame(FrameType.REPLY, 0, 2, b""),
            Frame(FrameType.DATA, 1, 2, b"world"),
            Frame(FrameType.DATA, 1, 2, b"!"),
            Frame(FrameType.END, 0, 2, b""),
            Frame(FrameType.CLOSE, 0, 2, b""),
        ]
        assert peer.mux.serving == 0

    with_peer(scenario)


def test_both_sides_streams_do_not_meet() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await served(peer)
        ours = peer.mux.open(OPEN)
        assert ours.id == 1
        await peer.send(data(2, b"theirs", 0), data(1, b"ours"), encode_frame(FrameType.CLOSE, 1, Fields().encode()))
        assert await ours.recv() == (1, b"ours")
        assert await stream.recv() == (0, b"theirs")
        await ours.result()
        assert not peer.mux.waiting
        assert peer.mux.serving == 1

    with_peer(scenario)


def test_late_frames_are_dropped() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await served(peer)
        stream.close(REFUSED)
        await peer.send(data(2, b"late", 0), credit(2, 5), end(2), reset(2))
        peer.mux.write(FrameType.PING, 0)
        await spin()
        assert peer.mux.error is None
        assert stream.take() is None

    with_peer(scenario)


def test_after_a_reset_there_is_still_one_close() -> None:
    async def scenario(peer: Peer) -> None:
        changes = 0

        def changed() -> None:
            nonlocal changes
            changes += 1

        stream = await served(peer, data(2, b"x" * 10, 0))
        stream.on_change(changed)
        await peer.send(reset(2))
        await stream.reset_or_closed()
        assert changes
        assert stream.was_reset
        assert stream.peer_ended
        assert stream.take() is None
        assert stream.send_now(b"nobody") == 6, "dropped"
        assert peer.mux.serving == 1, "until it is closed"
        stream.close(Fields())
        assert await peer.read(1) == [Frame(FrameType.CLOSE, 0, 2, b"")]
        assert peer.mux.serving == 0

    with_peer(scenario)


def test_credit_both_ways() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await served(peer)
        assert stream.credit == INITIAL_CREDIT
        total = 0
        while sent := stream.send_now(bytes(MAX_PAYLOAD)):
            total += sent
        assert (total, stream.credit) == (INITIAL_CREDIT, 0)
        await peer.read(total // MAX_PAYLOAD)
        await peer.send(credit(2, 7))
        while not stream.credit:
            await asyncio.sleep(0)
        assert stream.send_now(b"more than seven") == 7
        assert await peer.read(1) == [Frame(FrameType.DATA, 1, 2, b"more th")]
        await peer.send(*(data(2, bytes(MAX_PAYLOAD), 0) for _ in range(4)))
        for _ in range(4):
            await stream.recv(auto_credit=False)
        stream.grant(100)
        assert await peer.read(1) == [Frame(FrameType.CREDIT, 0, 2, struct.pack("<I", 100))]

    with_peer(scenario)


def test_without_an_acceptor_it_is_refused() -> None:
    async def scenario(peer: Peer) -> None:
        await peer.send(HELLO, opened(2), opened(4))
        _, first, second = await peer.read(3)
        for frame, number in ((first, 2), (second, 4)):
            assert (frame.type, frame.stream) == (FrameType.CLOSE, number)
            assert decode_fields(frame.payload).integer(Tag.ERRNO) == errno.EACCES
        assert peer.mux.error is None

    with_peer(scenario)


def test_for_a_keepers_client_it_breaks_the_protocol() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        connection = Connection(Path("keeper.sock"), ours)
        theirs.sendall(HELLO)
        await connection.mux.peer_hello()
        assert not connection.lost
        theirs.sendall(opened(2))
        while not connection.lost:
            await asyncio.sleep(0)
        assert isinstance(connection.mux.error, KeeperError)
        assert "cannot be understood" in connection.mux.error.message
        theirs.close()

    asyncio.run(main())


def test_an_acceptor_that_fails_lets_nothing_through() -> None:
    async def scenario(peer: Peer) -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

        def accept(stream: AgentStream) -> None:
            raise RuntimeError("broken")

        peer.mux.set_accept(accept)
        await peer.send(HELLO, opened(2))
        _, frame = await peer.read(2)
        assert (frame.type, frame.stream) == (FrameType.CLOSE, 2)
        assert decode_fields(frame.payload).integer(Tag.ERRNO) == errno.EIO
        assert [str(context["exception"]) for context in told] == ["broken"]
        assert (peer.mux.error, peer.mux.serving) == (None, 0)

    with_peer(scenario)


def test_one_more_than_allowed() -> None:
    async def scenario(peer: Peer) -> None:
        found = Served(peer)
        await peer.send(HELLO, *(opened(2 * n) for n in range(1, MAX_STREAMS + 2)))
        _, frame = await peer.read(2)
        assert (frame.type, frame.stream) == (FrameType.CLOSE, 2 * (MAX_STREAMS + 1))
        assert decode_fields(frame.payload).integer(Tag.ERRNO) == errno.EMFILE
        assert (len(found.streams), peer.mux.serving) == (MAX_STREAMS, MAX_STREAMS)
        found.streams[0].close(Fields())
        await peer.send(opened(2 * (MAX_STREAMS + 2)))
        await found.next(MAX_STREAMS + 1)
        assert peer.mux.serving == MAX_STREAMS

    with_peer(scenario)


def test_what_is_held_is_sent_in_its_order() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await served(peer)
        peer.mux.hold()
        stream.reply(Fields())
        stream.send_now(bytes(MAX_PAYLOAD))
        stream.close(Fields())
        await spin()
        with pytest.raises(BlockingIOError):
            peer.sock.recv(1)
        peer.mux.let_go()
        types = [frame.type for frame in await peer.read(3)]
        assert types == [FrameType.REPLY, FrameType.DATA, FrameType.CLOSE]

    with_peer(scenario)


def test_the_end_of_the_wire_is_told_to_them_too() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await served(peer)
        waits = [
            asyncio.ensure_future(work)
            for work in (stream.recv(), stream.reset_or_closed(), stream.send(bytes(INITIAL_CREDIT + 1)))
        ]
        changed = asyncio.Event()
        stream.on_change(changed.set)
        await spin()
        peer.sock.close()
        outcomes = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [WireClosed] * 3
        await changed.wait()

    with_peer(scenario)


def test_told_once_there_is_room_again() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await served(peer, credit(2, 8 << 20))
        called: list[int] = []
        peer.mux.when_drained(lambda: called.append(0))
        assert called == [0], "at once"
        while not peer.mux.congested:
            stream.send_now(bytes(MAX_PAYLOAD)) or await asyncio.sleep(0)
        for number in (1, 2):
            peer.mux.when_drained(lambda number=number: called.append(number))  # type: ignore[misc]
        assert called == [0]
        while len(called) < 3:
            await asyncio.get_running_loop().sock_recv(peer.sock, 1 << 20)
        assert called == [0, 1, 2]
        while not peer.mux.congested:
            stream.send_now(bytes(MAX_PAYLOAD)) or await peer.send(credit(2, MAX_PAYLOAD))
        peer.mux.when_drained(lambda: called.append(3))
        peer.mux.fail(WireClosed("over"))
        assert called == [0, 1, 2, 3], "or when there is nothing to wait for any more"

    with_peer(scenario)


def test_what_is_held_counts_as_congestion() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await served(peer, credit(2, 8 << 20))
        while stream.credit == INITIAL_CREDIT:
            await asyncio.sleep(0)
        peer.mux.hold()
        while not peer.mux.congested:
            assert stream.send_now(bytes(MAX_PAYLOAD))
        told = asyncio.Event()
        peer.mux.when_drained(told.set)
        waiting = asyncio.ensure_future(stream.send(b"last"))
        await spin()
        assert not told.is_set()
        peer.mux.let_go()
        frames: list[Frame] = []
        while not frames or frames[-1].payload != b"last":
            frames += await peer.read(1)
        await waiting
        await told.wait()
        assert sum(len(frame.payload) for frame in frames) > 1 << 20

    with_peer(scenario)


# -- hostile -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [
        opened(1),  # the host's own id, in use
        opened(3),
        struct.pack("<IBBHI", 0, FrameType.OPEN, 0, 0, 0),
        opened(2),  # used before
        opened(6) + opened(4),
        opened(4, b"\x01"),
        opened(4, b"\xff\xff\0\0\0\0"),
        reset(1),
        reset(4),
        data(4, b"x", 0),
        credit(4, 1),
        end(4),
        data(2, b"x", 1),  # the answer's channel
        data(2, b"x", 2),
        encode_frame(FrameType.REPLY, 2, b""),
        encode_frame(FrameType.CLOSE, 2, b""),
        encode_frame(FrameType.CLOSE, 4, b""),
        encode_frame(FrameType.CTRL, 2, Fields((Tag.KIND, 3)).encode()),
        b"".join(data(2, bytes(MAX_PAYLOAD), 0) for _ in range(5)),
        credit(2, MAX_CREDIT),
        credit(2, 2**32 - 1),
        end(2) + data(2, b"x", 0),
        reset(2) + data(2, b"x", 0),
        struct.pack("<IBBHI", MAX_PAYLOAD + 1, FrameType.OPEN, 0, 0, 4),
    ],
)
def test_a_lie_ends_the_connection(lie: bytes) -> None:
    async def scenario(peer: Peer) -> None:
        stream = await served(peer)
        ours = peer.mux.open(OPEN)
        waiting = [asyncio.ensure_future(stream.reset_or_closed()), asyncio.ensure_future(ours.result())]
        await spin(3)
        await peer.send(lie)
        assert isinstance(await peer.fault(), ProtocolError)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(outcomes[1], ProtocolError)

    with_peer(scenario)


@pytest.mark.parametrize("accepts", [False, True])
def test_a_flood_of_openings_is_not_kept(accepts: bool) -> None:
    """10^5 of them, and the answers are not read: the connection goes, before they cost much."""

    async def scenario(peer: Peer) -> None:
        if accepts:
            peer.mux.set_accept(lambda stream: stream.refuse(errno.EACCES, "x" * 400))
        await peer.send(HELLO)
        flood = asyncio.ensure_future(peer.send(b"".join(opened(2 * n) for n in range(1, 100_001))))
        most = 0
        while peer.mux.error is None:
            most = max(most, peer.mux._outgoing.size)
            await asyncio.sleep(0)
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
        assert isinstance(peer.mux.error, ProtocolError)
        assert most < 2 << 20

    with_peer(scenario)


def test_a_hundred_thousand_that_are_read_are_served() -> None:
    """The positive control: whoever reads the answers may open on and on."""

    async def scenario(peer: Peer) -> None:
        count = 0

        def accept(stream: AgentStream) -> None:
            nonlocal count
            count += 1
            stream.close(Fields())

        peer.mux.set_accept(accept)
        await peer.send(HELLO)
        await peer.read(1)
        for batch in range(1000):
            await peer.send(b"".join(opened(2 * n) for n in range(batch * 100 + 1, batch * 100 + 101)))
            frames = await peer.read(100)
            assert [frame.stream for frame in frames] == [2 * n for n in range(batch * 100 + 1, batch * 100 + 101)]
        assert (count, peer.mux.serving, peer.mux.error) == (100_000, 0, None)
        assert len(peer.mux._closing) <= MAX_STREAMS

    with_peer(scenario)


def test_openings_before_hello() -> None:
    async def scenario(peer: Peer) -> None:
        peer.mux.set_accept(lambda stream: None)
        await peer.send(opened(2))
        fault: SlopletError = await peer.fault()
        assert isinstance(fault, ProtocolError)

    with_peer(scenario)


def test_the_acceptor_may_be_given_at_once() -> None:
    async def main() -> None:
        read_fd, write_fd = os.pipe()
        to, fro = os.pipe()
        found: list[AgentStream] = []
        mux = HostMux(read_fd, fro, accept=found.append)
        os.write(write_fd, HELLO + opened(2))
        while not found:
            await asyncio.sleep(0)
        mux.fail(WireClosed("over"))
        for fd in (read_fd, write_fd, to, fro):
            os.close(fd)

    asyncio.run(main())
