"""The codec: round trips in any pieces, garbage is a ProtocolError and nothing else, the numbers are the C header's."""

from __future__ import annotations

import re
import struct
from enum import EnumMeta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloplet.errors import ProtocolError
from sloplet.wire import schema
from sloplet.wire.fields import MAX_RECORD, Fields, RecordDecoder, decode_fields, encode_record
from sloplet.wire.frames import FROM_AGENT, FROM_HOST, Frame, FrameDecoder, encode_frame
from sloplet.wire.schema import INTEGER_TAGS, MAX_OPEN, MAX_PAYLOAD, MAX_PING, FrameType, Tag

pytestmark = pytest.mark.anyone

HEADER = Path(__file__).parents[2] / "agent" / "proto.h"
ALL = FROM_AGENT | FROM_HOST


def _values(tag: Tag) -> st.SearchStrategy[int | bytes]:
    return st.integers(-(2**63), 2**63 - 1) if tag in INTEGER_TAGS else st.binary(max_size=300)


fields_ = st.lists(st.sampled_from(list(Tag)).flatmap(lambda tag: st.tuples(st.just(tag), _values(tag)))).map(
    lambda items: Fields(*items)
)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(list(FrameType)))
    stream = 0 if kind in (FrameType.HELLO, FrameType.PING, FrameType.PONG) else draw(st.integers(1, 2**32 - 1))
    channel = draw(st.integers(0, 2)) if kind in (FrameType.DATA, FrameType.END) else 0
    if kind in (FrameType.END, FrameType.RESET):
        payload = b""
    elif kind is FrameType.CREDIT:
        payload = draw(st.binary(min_size=4, max_size=4))
    elif kind is FrameType.DATA:
        payload = draw(st.binary(min_size=1, max_size=2000))
    else:
        payload = draw(st.binary(max_size=MAX_PING))
    return Frame(kind, channel, stream, payload)


def _chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    points = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(points)]


@given(st.lists(frames(), max_size=20), st.lists(st.integers(0, 10**6), max_size=30))
def test_frames_round_trip_in_any_pieces(items: list[Frame], cuts: list[int]) -> None:
    data = b"".join(encode_frame(f.type, f.stream, f.payload, f.channel) for f in items)
    decoder = FrameDecoder(ALL, wide=True)
    found: list[Frame] = []
    for piece in _chunks(data, cuts):
        found += decoder.feed(piece)
    assert found == items
    assert not decoder._buffer


@given(st.lists(st.binary(max_size=3000), max_size=10), st.sampled_from([FROM_AGENT, FROM_HOST]))
@settings(max_examples=300)
def test_garbage_is_frames_or_a_protocol_error(pieces: list[bytes], allowed: frozenset[FrameType]) -> None:
    decoder = FrameDecoder(allowed)
    try:
        for piece in pieces:
            for frame in decoder.feed(piece):
                assert frame.type in allowed
                assert len(frame.payload) <= MAX_PAYLOAD
            assert len(decoder._buffer) < schema.HEADER_SIZE + MAX_PAYLOAD
    except ProtocolError:
        pass


@given(frames(), st.integers(0, 11), st.integers(0, 255))
def test_a_damaged_header_never_raises_anything_else(frame: Frame, at: int, value: int) -> None:
    data = bytearray(encode_frame(frame.type, frame.stream, frame.payload, frame.channel))
    data[at] = value
    decoder = FrameDecoder(FROM_AGENT)
    try:
        decoder.feed(bytes(data))
        assert len(decoder._buffer) <= len(data)
    except ProtocolError:
        pass


def _raw(length: int, kind: int, channel: int, zero: int, stream: int) -> bytes:
    return struct.pack("<IBBHI", length, kind, channel, zero, stream)


@pytest.mark.parametrize(
    "header",
    [
        _raw(2**32 - 1, 3, 1, 0, 1),  # a huge length is refused by its header, before a byte of it is taken
        _raw(MAX_PAYLOAD + 1, 3, 1, 0, 1),
        _raw(MAX_PAYLOAD + 1, 1, 0, 0, 0),
        _raw(0, 3, 1, 0, 1),  # empty DATA
        _raw(1, 4, 1, 0, 1),  # END with a payload
        _raw(3, 5, 0, 0, 1),  # CREDIT of three bytes
        _raw(0, 0, 0, 0, 1),
        _raw(0, 12, 0, 0, 1),
        _raw(0, 255, 0, 0, 1),
        _raw(1, 3, 3, 0, 1),  # channel 3
        _raw(0, 8, 1, 0, 1),  # CLOSE on a channel
        _raw(0, 8, 0, 1, 1),  # reserved bits
        _raw(0, 8, 0, 0, 0),  # CLOSE on stream 0
        _raw(0, 1, 0, 0, 1),  # HELLO on a stream
        _raw(65, 10, 0, 0, 0),  # PING of 65 bytes
        _raw(MAX_PAYLOAD + 1, 2, 0, 0, 2),  # only the host's OPEN may be large
        _raw(1, 9, 0, 0, 2),  # RESET with a payload
        _raw(0, 2, 0, 0, 0),  # OPEN on stream 0
        _raw(0, 6, 0, 0, 1),  # CTRL from an agent
    ],
)
def test_broken_rules_are_refused_at_once(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameDecoder(FROM_AGENT).feed(header)


def test_only_the_host_sends_wide_frames() -> None:
    wide = encode_frame(FrameType.OPEN, 1, bytes(MAX_OPEN))
    assert len(FrameDecoder(FROM_HOST, wide=True).feed(wide)) == 1
    with pytest.raises(ProtocolError):
        FrameDecoder(FROM_AGENT).feed(_raw(MAX_PAYLOAD + 1, 1, 0, 0, 0))
    with pytest.raises(ValueError, match="at most"):
        encode_frame(FrameType.DATA, 1, bytes(MAX_PAYLOAD + 1))
    with pytest.raises(ValueError, match="at most"):
        encode_frame(FrameType.OPEN, 1, bytes(MAX_OPEN + 1))


@given(fields_)
def test_fields_round_trip(fields: Fields) -> None:
    assert decode_fields(fields.encode()) == fields


@given(st.binary(max_size=500))
@settings(max_examples=500)
def test_field_garbage(data: bytes) -> None:
    try:
        fields = decode_fields(data)
    except ProtocolError:
        return
    assert fields.encode() == data, "what is accepted means exactly what was sent"


@given(fields_, st.data())
def test_cut_fields(fields: Fields, data: st.DataObject) -> None:
    raw = fields.encode()
    cut = data.draw(st.integers(0, len(raw)))
    try:
        shorter = decode_fields(raw[:cut])
    except ProtocolError:
        return
    assert list(shorter) == list(fields)[: len(list(shorter))]


def test_fields_by_kind() -> None:
    fields = Fields((Tag.OP, 1), (Tag.ARGV, "a"), (Tag.ARGV, b"\xff"), (Tag.NAME, "\udcfe"))
    assert (fields.integer(Tag.OP), fields.all(Tag.ARGV), fields.text(Tag.NAME)) == (1, [b"a", b"\xff"], "\udcfe")
    assert fields.integer(Tag.PID, 7) == 7
    for missing in (lambda: fields.integer(Tag.PID), lambda: fields.raw(Tag.PATH), lambda: fields.text(Tag.PATH)):
        with pytest.raises(ProtocolError):
            missing()
    with pytest.raises(TypeError):
        Fields((Tag.OP, b"x"))
    with pytest.raises(TypeError):
        Fields((Tag.NAME, 1))


@given(st.lists(fields_, max_size=10), st.lists(st.integers(0, 10**6), max_size=30))
def test_records_round_trip_in_any_pieces(items: list[Fields], cuts: list[int]) -> None:
    data = b"".join(encode_record(item) for item in items)
    decoder = RecordDecoder()
    found: list[Fields] = []
    for piece in _chunks(data, cuts):
        found += decoder.feed(piece)
    decoder.finish()
    assert found == items


@given(st.lists(st.binary(max_size=2000), max_size=10))
def test_record_garbage(pieces: list[bytes]) -> None:
    decoder = RecordDecoder()
    try:
        for piece in pieces:
            decoder.feed(piece)
            assert len(decoder._buffer) <= MAX_RECORD + 4
    except ProtocolError:
        pass


def test_records_are_bounded() -> None:
    with pytest.raises(ProtocolError):
        RecordDecoder().feed(struct.pack("<I", MAX_RECORD + 1))
    decoder = RecordDecoder()
    decoder.feed(b"\x05\0\0\0abc")
    with pytest.raises(ProtocolError, match="cut off"):
        decoder.finish()


# -- the numbers -------------------------------------------------------------------------

_PREFIXES = {
    "FRAME_": schema.FrameType, "CHANNEL_": schema.Channel, "OP_": schema.Op, "TAG_": schema.Tag,
    "HELLO_FLAG_": schema.HelloFlag, "EXEC_FLAG_": schema.ExecFlag, "SIGNAL_FLAG_": schema.SignalFlag,
    "WRITE_FLAG_": schema.WriteFlag, "LIST_FLAG_": schema.ListFlag, "STAT_FLAG_": schema.StatFlag,
    "MKDIR_FLAG_": schema.MkdirFlag, "REMOVE_FLAG_": schema.RemoveFlag, "MOVE_FLAG_": schema.MoveFlag,
    "WATCH_FLAG_": schema.WatchFlag, "WATCH_MASK_": schema.WatchMask, "CTRL_": schema.CtrlKind,
    "FILE_TYPE_": schema.FileType, "CHANGES_FLAG_": schema.ChangesFlag, "LISTING_FLAG_": schema.ListingFlag,
    "CHANGE_FLAG_": schema.ChangeFlag, "FREEZE_FLAG_": schema.FreezeFlag, "FEATURE_": schema.Feature,
    "RESOLVE_FLAG_": schema.ResolveFlag, "SETXATTRS_FLAG_": schema.SetxattrsFlag,
}  # fmt: skip


def test_the_header_and_the_schema_agree() -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    in_c = {name: int(value) for name, value in re.findall(r"^\s*([A-Z][A-Z0-9_]*)\s*=\s*(\d+)", text, re.MULTILINE)}
    in_python = {prefix + item.name: int(item) for prefix, enum in _PREFIXES.items() for item in enum if item.name}
    assert in_c == in_python
    defines = {name: int(value) for name, value in re.findall(r"#define WIRE_([A-Z_]+)\s+(\d+)", text)}
    constants = {name: value for name, value in vars(schema).items() if name.isupper() and isinstance(value, int)}
    assert defines == constants


def test_no_enumeration_is_forgotten() -> None:
    enums = {value for value in vars(schema).values() if isinstance(value, EnumMeta)}
    ours = {value for value in enums if value.__module__ == schema.__name__}
    assert ours == set(_PREFIXES.values())


def test_the_page_names_every_number() -> None:
    page = (HEADER.parents[1] / "docs" / "wire.md").read_text()
    for frame in FrameType:
        assert re.search(rf"\|\s*{int(frame)} \| {frame.name}\s", page), frame
    for op in schema.Op:
        assert re.search(rf"\| {int(op)} \| {op.name} \|", page) or f"Op {int(op)} {op.name}" in page, op
    missing = [tag.name for tag in Tag if not re.search(rf"\b{tag.name}\b", page)]
    assert not missing
