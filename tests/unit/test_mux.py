"""The multiplexer: credit both ways, hostile agents (GAUNTLET E-14), cancelling at any moment."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from mux_helpers import HELLO, OPEN, Pair, Peer, data, spin, with_pair, with_peer

from sloplet.errors import FileMissing, ProtocolError, SlopletError, WireClosed
from sloplet.wire.fields import Fields
from sloplet.wire.frames import Frame, encode_frame
from sloplet.wire.mux import AgentMux, HostStream
from sloplet.wire.schema import (
    INITIAL_CREDIT,
    MAX_CREDIT,
    MAX_PAYLOAD,
    MAX_STREAMS,
    Channel,
    CtrlKind,
    FrameType,
    Tag,
)

pytestmark = pytest.mark.anyone

# -- honest ------------------------------------------------------------------------------


def test_a_stream_from_open_to_close() -> None:
    async def scenario(pair: Pair) -> None:
        host, agent = await pair.open()
        assert agent.request == OPEN
        agent.reply(Fields((Tag.PID, 4)))
        await agent.send(b"out", Channel.OUT)
        await agent.send(b"err", Channel.ERR)
        await host.send(b"in")
        await host.send_end()
        assert (await agent.recv()) == (0, b"in")
        assert (await agent.recv()) is None
        agent.close(Fields((Tag.BYTES, 9)))
        agent.close(Fields((Tag.BYTES, 10)))
        assert (await host.started()).integer(Tag.PID) == 4
        assert [await host.recv(), await host.recv(), await host.recv()] == [(1, b"out"), (2, b"err"), None]
        assert (await host.result()).integer(Tag.BYTES) == 9
        host.reset()
        assert not pair.host._streams
        assert not pair.agent._streams

    with_pair(scenario)


def test_errors_come_from_the_close() -> None:
    async def scenario(pair: Pair) -> None:
        host, agent = await pair.open()
        agent.close(Fields((Tag.ERRNO, 2), (Tag.MESSAGE, "no \x1b[31mfile\n" + "x" * 2000)))
        with pytest.raises(FileMissing) as caught:
            await host.started()
        assert "\x1b" not in str(caught.value), "what a sandbox says is made printable"
        assert len(str(caught.value)) < 1000
        with pytest.raises(FileMissing):
            await host.result()

    with_pair(scenario)


def test_a_reader_that_does_not_read_holds_the_writer() -> None:
    async def scenario(pair: Pair) -> None:
        host, agent = await pair.open()
        other, other_agent = await pair.open()
        writing = asyncio.ensure_future(agent.send(bytes(INITIAL_CREDIT * 3)))
        await spin(200)
        assert not writing.done()
        assert sum(len(item.data) for item in host._queue) == INITIAL_CREDIT
        other_agent.close(Fields())
        await other.result()  # others go on
        total = 0
        while total < INITIAL_CREDIT * 3:
            piece = await host.recv()
            assert piece is not None
            total += len(piece.data)
        await writing

    with_pair(scenario)


def test_the_host_waits_for_credit_too() -> None:
    async def scenario(pair: Pair) -> None:
        host, agent = await pair.open()
        writing = asyncio.ensure_future(host.send(bytes(INITIAL_CREDIT + 1)))
        await spin(200)
        assert not writing.done()
        got = 0
        while got < INITIAL_CREDIT + 1:
            piece = await agent.recv()
            assert piece is not None
            got += len(piece.data)
        await writing

    with_pair(scenario)


def test_credit_is_granted_in_lumps() -> None:
    async def scenario(peer: Peer) -> None:
        await peer.send(HELLO)
        stream = peer.mux.open(OPEN)
        await peer.read(2)
        for _ in range(64):
            await peer.send(data(1, bytes(4096)))
            got = 0
            while got < 4096:
                piece = await stream.recv()
                assert piece is not None
                got += len(piece.data)
        (credit, *_) = await peer.read(2)
        assert credit.type is FrameType.CREDIT
        assert struct.unpack("<I", credit.payload)[0] == INITIAL_CREDIT // 2

    with_peer(scenario)


def test_granting_by_hand() -> None:
    async def scenario(pair: Pair) -> None:
        host, agent = await pair.open()
        writing = asyncio.ensure_future(agent.send(bytes(INITIAL_CREDIT + 10)))
        got = 0
        while got < INITIAL_CREDIT:
            piece = await host.recv(auto_credit=False)
            assert piece is not None
            got += len(piece.data)
        await spin()
        assert not writing.done()
        host.grant(10)
        assert len((await host.recv(auto_credit=False) or (0, b""))[1]) == 10
        await writing

    with_pair(scenario)


def test_a_closed_stream_frees_its_sender() -> None:
    async def scenario(pair: Pair) -> None:
        host, agent = await pair.open()
        writing = asyncio.ensure_future(host.send(bytes(INITIAL_CREDIT * 2)))
        await spin()
        agent.close(Fields())
        await writing
        await host.send(b"dropped")
        await host.send_end()
        host.ctrl(Fields((Tag.KIND, 1)))

    with_pair(scenario)


def test_reset() -> None:
    async def scenario(pair: Pair) -> None:
        host, agent = await pair.open()
        writing = asyncio.ensure_future(agent.send(bytes(INITIAL_CREDIT * 2)))
        await spin()
        host.reset()
        host.reset()
        await agent.reset_or_closed()
        await writing
        assert agent.was_reset
        assert await agent.recv() is None
        assert await agent.control() is None
        agent.close(Fields())
        await host.result()
        assert await host.recv() is None

    with_pair(scenario)


def test_a_burst_of_controls() -> None:
    async def scenario(pair: Pair) -> None:
        host, agent = await pair.open()
        for _ in range(1000):
            host.ctrl(Fields((Tag.KIND, int(CtrlKind.RESIZE)), (Tag.ROWS, 1), (Tag.COLS, 1)))
        for _ in range(1000):
            assert await agent.control() is not None

    with_pair(scenario)


def test_more_streams_than_allowed() -> None:
    async def scenario(pair: Pair) -> None:
        streams = [pair.host.open(OPEN) for _ in range(MAX_STREAMS + 1)]
        with pytest.raises(SlopletError, match="too many"):
            await streams[-1].result()
        assert pair.accepted.qsize() == MAX_STREAMS

    with_pair(scenario)


def test_ping() -> None:
    async def scenario(peer: Peer) -> None:
        await peer.send(HELLO, encode_frame(FrameType.PING, 0, b"hello"))
        frames = await peer.read(2)
        assert frames[1] == Frame(FrameType.PONG, 0, 0, b"hello")

    with_peer(scenario)


# -- hostile -----------------------------------------------------------------------------

CLOSE = encode_frame(FrameType.CLOSE, 1, Fields((Tag.BYTES, 1)).encode())
REPLY = encode_frame(FrameType.REPLY, 1, Fields().encode())
END = encode_frame(FrameType.END, 1, b"", 1)


@pytest.mark.parametrize(
    "lie",
    [
        struct.pack("<IBBHI", 2**32 - 1, 3, 1, 0, 1),
        b"\xff" * 64,
        HELLO,
        data(1, b"x", 0),
        data(3, b"x"),
        data(2, b"x", 0),
        encode_frame(FrameType.CLOSE, 99, b""),
        encode_frame(FrameType.REPLY, 5, b""),
        encode_frame(FrameType.CREDIT, 7, struct.pack("<I", 1)),
        REPLY + REPLY,
        CLOSE + CLOSE,
        CLOSE + data(1, b"late"),
        END + data(1, b"x"),
        encode_frame(FrameType.CREDIT, 1, struct.pack("<I", MAX_CREDIT)),
        encode_frame(FrameType.CREDIT, 1, struct.pack("<I", 2**32 - 1)),
        b"".join(data(1, bytes(MAX_PAYLOAD)) for _ in range(5)),
        encode_frame(FrameType.REPLY, 1, b"\x01"),
        encode_frame(FrameType.REPLY, 1, b"\xff\xff\0\0\0\0"),
        encode_frame(FrameType.CLOSE, 1, struct.pack("<HI", int(Tag.PID), 2**32 - 1)),
        encode_frame(FrameType.CLOSE, 1, struct.pack("<HI", int(Tag.PID), 4) + b"1234"),
    ],
)
def test_a_lie_ends_the_connection(lie: bytes) -> None:
    async def scenario(peer: Peer) -> None:
        await peer.send(HELLO)
        stream = peer.mux.open(OPEN)
        later = peer.mux.open(OPEN)
        peer.mux.forget(later.id)  # as if stream 3 had been closed already
        waiting = [asyncio.ensure_future(stream.result()), asyncio.ensure_future(_drain(stream))]
        await spin(3)
        await peer.send(lie)
        assert isinstance(await peer.fault(), ProtocolError)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(o, (ProtocolError, Fields)) or o is None for o in outcomes)
        with pytest.raises(ProtocolError):
            peer.mux.open(OPEN)

    with_peer(scenario)


async def _drain(stream: HostStream) -> None:
    while stream._mux.error is None and not stream._closed:
        await asyncio.sleep(0)  # never takes anything


@pytest.mark.parametrize(
    "first",
    [CLOSE, encode_frame(FrameType.PING, 0), encode_frame(FrameType.HELLO, 0, Fields((Tag.VERSION, 2)).encode()),
     encode_frame(FrameType.HELLO, 0, b""), encode_frame(FrameType.HELLO, 0, b"junk")],
)  # fmt: skip
def test_a_wrong_beginning(first: bytes) -> None:
    async def scenario(peer: Peer) -> None:
        waiting = asyncio.ensure_future(peer.mux.peer_hello())
        await peer.send(first)
        assert isinstance(await peer.fault(), ProtocolError)
        with pytest.raises(ProtocolError):
            await waiting

    with_peer(scenario)


def test_a_flood_of_pings_is_not_kept() -> None:
    async def scenario(peer: Peer) -> None:
        await peer.send(HELLO)
        flood = asyncio.ensure_future(peer.send(encode_frame(FrameType.PING, 0, bytes(64)) * 100_000))
        most = 0
        while peer.mux.error is None:  # and no answer is read
            most = max(most, peer.mux._outgoing.size)
            await asyncio.sleep(0)
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
        assert isinstance(peer.mux.error, ProtocolError)
        assert most < 2 * 2**20

    with_peer(scenario)


def test_one_byte_frames_cost_no_more_than_their_credit() -> None:
    async def scenario(peer: Peer) -> None:
        await peer.send(HELLO)
        stream = peer.mux.open(OPEN)
        await peer.send(data(1, b"x") * (INITIAL_CREDIT // 2))
        while stream._window > INITIAL_CREDIT // 2:
            await asyncio.sleep(0)
        assert len(stream._queue) < 100
        alternating = (data(1, b"x", 1) + data(1, b"x", 2)) * 5000
        await peer.send(alternating)
        while stream._window > INITIAL_CREDIT // 2 - 10_000:
            await asyncio.sleep(0)
        got = {1: 0, 2: 0}
        while stream._queue:
            piece = await stream.recv()
            assert piece is not None
            got[piece.channel] += len(piece.data)
        assert got == {1: INITIAL_CREDIT // 2 + 5000, 2: 5000}

    with_peer(scenario)


def test_an_abandoned_stream_is_still_bounded() -> None:
    async def scenario(peer: Peer) -> None:
        await peer.send(HELLO)
        stream = peer.mux.open(OPEN)
        stream.reset()
        await peer.send(b"".join(data(1, bytes(MAX_PAYLOAD)) for _ in range(4)))
        await spin()
        assert peer.mux.error is None
        assert not stream._queue
        await peer.send(data(1, b"one too many"))
        assert isinstance(await peer.fault(), ProtocolError)

    with_peer(scenario)


def test_the_end_of_the_wire_is_told_to_everybody() -> None:
    async def scenario(peer: Peer) -> None:
        await peer.send(HELLO)
        stream = peer.mux.open(OPEN)
        waits = [
            asyncio.ensure_future(work)
            for work in (stream.result(), stream.recv(), stream.started(), stream.send(bytes(INITIAL_CREDIT + 1)))
        ]
        await spin()
        await peer.send(data(1, b"half")[:-1])  # in the middle of a frame
        peer.sock.close()
        outcomes = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [WireClosed] * 4
        assert len({id(outcome) for outcome in outcomes}) == 4, "each has an exception of its own"

    with_peer(scenario)


@pytest.mark.parametrize("stream", [0, 2, 1])
def test_the_agent_checks_the_ids_of_openers(stream: int) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        mux = AgentMux(ours.fileno(), ours.fileno(), lambda opened: None)
        frame = struct.pack("<IBBHI", len(OPEN.encode()), FrameType.OPEN, 0, 0, stream) + OPEN.encode()
        theirs.sendall(HELLO + encode_frame(FrameType.OPEN, 5, OPEN.encode()) + frame)
        while mux.error is None:
            await asyncio.sleep(0)
        assert isinstance(mux.error, ProtocolError)
        ours.close()
        theirs.close()

    asyncio.run(main())


# -- cancelling --------------------------------------------------------------------------


def test_a_cancelled_wait_loses_nothing() -> None:
    async def scenario(pair: Pair) -> None:
        host, agent = await pair.open()
        for number in range(200):
            waiting = asyncio.ensure_future(host.recv())
            for _ in range(number % 5):
                await asyncio.sleep(0)
            if number % 2:
                await agent.send(bytes([number]))
            if waiting.cancel():
                await asyncio.gather(waiting, return_exceptions=True)
        await agent.send(b"\xff" * 10)
        agent.close(Fields())
        await host.result()
        left = b""
        while (piece := await host.recv()) is not None:
            left += piece.data
        assert left.endswith(b"\xff" * 10)

    with_pair(scenario)


def test_a_cancelled_sender_leaves_whole_pieces() -> None:
    async def scenario(pair: Pair) -> None:
        host, agent = await pair.open()
        sending = asyncio.ensure_future(host.send(b"a" * (INITIAL_CREDIT * 2)))
        await spin()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        got = b""
        while len(got) < INITIAL_CREDIT:
            piece = await agent.recv()
            assert piece is not None
            got += piece.data
        await host.send(b"b")
        assert (await agent.recv()) == (0, b"b")

    with_pair(scenario)
