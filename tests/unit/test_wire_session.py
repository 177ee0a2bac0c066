"""A stream of bytes over connections that break anywhere: every byte once, in order, in bounded memory; and frames that
are passed on without being read."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloplet.errors import ProtocolError
from sloplet.wire.frames import FROM_HOST, Frame, FrameDecoder, encode_frame
from sloplet.wire.schema import MAX_OPEN, MAX_PAYLOAD, FrameType
from sloplet.wire.session import ACK_EVERY, WINDOW, ByteSession, gently
from sloplet.wire.walk import Walker

pytestmark = pytest.mark.anyone


class End:
    """One end over a connection that is a queue of messages: bytes, or an acknowledgement."""

    def __init__(self, window: int, greedy: random.Random) -> None:
        self.session = ByteSession(window, window)
        self.got = bytearray()
        self.unused = bytearray()
        self.line: deque[bytes | int] = deque()  # on its way to the other end
        self.most = 0
        self._random = greedy

    def send(self, data: bytes) -> int:
        piece = data[: max(0, self.session.room)]
        if piece:
            self.session.put(piece)
            self.line.append(piece)
        self.most = max(self.most, self.session.kept)
        return len(piece)

    def hear(self, message: bytes | int) -> None:
        if isinstance(message, int):
            self.session.on_ack(message)
            return
        self.session.take(len(message))
        self.unused += message
        if self._random.random() < 0.7:
            self.use()

    def use(self) -> None:
        self.session.use(len(self.unused))
        self.got += self.unused
        self.unused.clear()
        if self.session.untold:
            self.line.append(self.session.ack())


def resume(one: End, other: End) -> None:
    """A new connection: what was on the old one is lost, both ways."""
    for end, peer in ((one, other), (other, one)):
        end.line.clear()
        end.line.extend(end.session.again(peer.session.received))
        end.line.append(end.session.ack())


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(8, 400) | st.integers(8000, 60_000),
    st.integers(0, 20),
    st.integers(0, 20),
    st.floats(0, 0.3),
)
def test_every_byte_once_and_in_order(seed: int, window: int, here: int, there: int, cuts: float) -> None:
    """However it is split, acknowledged and cut; and no end ever keeps more than its window, but for the rest of a
    piece."""
    chance = random.Random(seed)
    here, there = here * window // 2, there * window // 2
    ends = End(window, chance), End(window, chance)
    wanted = chance.randbytes(here), chance.randbytes(there)
    sent = [0, 0]
    for _ in range(100_000):
        done = all(len(ends[1 - side].got) == len(wanted[side]) for side in (0, 1))
        if done:
            break
        if chance.random() < cuts:
            resume(*ends)
            continue
        side = chance.randrange(2)
        if chance.random() < 0.5:
            size = chance.randrange(1, window + 1)
            sent[side] += ends[side].send(wanted[side][sent[side] : sent[side] + size])
        elif ends[side].line:
            ends[1 - side].hear(ends[side].line.popleft())
        else:
            ends[side].use()
    assert [bytes(ends[1].got), bytes(ends[0].got)] == list(wanted)
    assert all(end.most <= window + max(window, 16384) for end in ends)


@pytest.mark.parametrize("ack", [-1, 3, 11])
def test_acknowledgements_that_cannot_be(ack: int) -> None:
    session = ByteSession()
    session.put(b"0123456789")
    session.on_ack(4)
    with pytest.raises(ProtocolError):
        session.on_ack(ack)
    with pytest.raises(ProtocolError):
        session.again(11)


def test_what_was_acknowledged_is_gone() -> None:
    session = ByteSession()
    session.put(b"a" * 5000)
    session.put(b"b" * 5000)
    session.on_ack(5000)
    assert session.kept == 5000
    with pytest.raises(ProtocolError):
        session.again(4999)
    assert b"".join(session.again(6000)) == b"b" * 4000


def test_more_than_was_allowed() -> None:
    session = ByteSession(takes=100)
    session.take(100)
    with pytest.raises(ProtocolError, match="allowed"):
        session.take(1)


def test_a_resumption_does_not_open_the_window() -> None:
    """What was received and not used still counts: reconnecting is no way to fill the other end's memory."""
    session = ByteSession(window=100)
    session.put(bytes(100))
    assert session.again(100) == []
    assert session.kept == 0
    assert session.room == 0
    session.on_ack(60)
    assert session.room == 60


def test_when_to_acknowledge() -> None:
    session = ByteSession()
    session.take(ACK_EVERY)
    assert not session.ack_due
    session.use(ACK_EVERY - 1)
    assert not session.ack_due
    assert session.untold == ACK_EVERY - 1
    session.use(1)
    assert session.ack_due
    assert session.ack() == ACK_EVERY
    assert not session.untold


@given(st.lists(st.binary(max_size=9000), max_size=8))
def test_what_is_sent_again_begins_small(pieces: list[bytes]) -> None:
    messages = list(gently(pieces))
    assert b"".join(messages) == b"".join(pieces)
    assert all(0 < len(message) <= 1024 << number for number, message in enumerate(messages))


def test_tiny_pieces_cost_little() -> None:
    session = ByteSession()
    for _ in range(WINDOW // 16):
        session.put(bytes(12))
    assert len(session._kept) <= WINDOW // 16 * 12 // 8192


# -- frames that are passed on -------------------------------------------------------------------------------------

_STOPS = frozenset({FrameType.HELLO, FrameType.OPEN, FrameType.PING, FrameType.PONG})

frames = st.one_of(
    st.builds(lambda s, n: (FrameType.DATA, s, bytes(n or 1)), st.integers(1, 9), st.integers(1, 200)),
    st.builds(lambda s: (FrameType.END, s, b""), st.integers(1, 9)),
    st.builds(lambda s: (FrameType.CREDIT, s, b"\1\0\0\0"), st.integers(1, 9)),
    st.builds(lambda s, n: (FrameType.CTRL, s, bytes(n)), st.integers(1, 9), st.integers(0, 40)),
    st.builds(lambda s, n: (FrameType.OPEN, s, bytes(n)), st.integers(1, 9), st.integers(0, 300)),
    st.builds(lambda n: (FrameType.PING, 0, bytes(n)), st.integers(0, 64)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(frames, max_size=30), st.lists(st.integers(1, 97), min_size=1, max_size=20), st.sets(st.integers(1, 9)))
def test_what_passes_is_what_came(said: list[tuple[FrameType, int, bytes]], sizes: list[int], known: set[int]) -> None:
    """Split anywhere: the frames that stop, and the others as they were, but for those of unknown streams; each OPEN
    makes its stream known."""
    data = b"".join(encode_frame(*each) for each in said)
    open_now, expected = set(known), []
    for type, stream, payload in said:
        if type is FrameType.OPEN:
            open_now.add(stream)
        if type in _STOPS or stream in open_now:
            expected.append(Frame(type, 0, stream, payload))
    walker = Walker(FROM_HOST, _STOPS, known, wide=True)
    decoder, found, at, turn = FrameDecoder(FROM_HOST, wide=True), [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        for item in walker.walk(data[at : at + size]):
            if isinstance(item, bytes):
                run = decoder.feed(item)
                assert run
                assert not decoder._buffer, "whole frames only"
                found += run
            else:
                found.append(item)
                if item.type is FrameType.OPEN:
                    known.add(item.stream)
        at, turn = at + size, turn + 1
    assert found == expected
    assert not walker._buffer


def test_one_piece_where_nothing_stops() -> None:
    data = b"".join(encode_frame(FrameType.DATA, 1, bytes(60000)) for _ in range(4))
    (run,) = Walker(FROM_HOST, _STOPS, {1}).walk(data)
    assert run is data


@pytest.mark.parametrize(
    "bad",
    [
        b"\0\0\0\0\xff\0\0\0\1\0\0\0",  # a type that is none
        (MAX_PAYLOAD + 1).to_bytes(4, "little") + b"\3\0\0\0\1\0\0\0",  # a DATA frame that is too long
        (MAX_OPEN + 1).to_bytes(4, "little") + b"\2\0\0\0\1\0\0\0",
        b"\0\0\0\0\3\0\0\0\1\0\0\0",  # an empty one
        b"\4\0\0\0\7\0\0\0\1\0\0\0",  # REPLY, which is not an opener's
        b"\1\0\0\0\3\0\1\0\1\0\0\0",  # reserved bits
    ],
)
def test_what_breaks_the_rules_breaks_here(bad: bytes) -> None:
    for size in (1, 5, 12, 100):
        walker = Walker(FROM_HOST, _STOPS, {1}, wide=True)
        pieces = [bad[at : at + size] for at in range(0, len(bad), size)]
        with pytest.raises(ProtocolError):
            _ = [list(walker.walk(piece)) for piece in pieces]
