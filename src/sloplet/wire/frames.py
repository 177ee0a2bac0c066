"""Bytes to frames and back: pure, incremental, bounded. No I/O here."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..errors import ProtocolError
from .schema import HEADER_SIZE, MAX_OPEN, MAX_PAYLOAD, MAX_PING, FrameType

_HEADER = struct.Struct("<IBBHI")

_WIDE = {FrameType.HELLO, FrameType.OPEN}
_FIXED = {FrameType.END: 0, FrameType.RESET: 0, FrameType.CREDIT: 4}
_ON_ZERO = {FrameType.HELLO, FrameType.PING, FrameType.PONG}
_WITH_CHANNEL = {FrameType.DATA, FrameType.END}
_TYPES: list[FrameType | None] = [None] * 256
for _type in FrameType:
    _TYPES[_type] = _type

#: What each side may receive. Which of these on whose streams is the multiplexer's to know.
FROM_AGENT = frozenset(
    {
        FrameType.HELLO, FrameType.OPEN, FrameType.DATA, FrameType.END, FrameType.CREDIT,
        FrameType.REPLY, FrameType.CLOSE, FrameType.RESET, FrameType.PING, FrameType.PONG,
    }
)  # fmt: skip
#: From an opener that answers nothing itself: a keeper's client. A sandbox's host also sends REPLY and CLOSE.
FROM_HOST = frozenset(
    {
        FrameType.HELLO, FrameType.OPEN, FrameType.DATA, FrameType.END, FrameType.CREDIT,
        FrameType.CTRL, FrameType.RESET, FrameType.PING, FrameType.PONG,
    }
)  # fmt: skip


class Frame(NamedTuple):
    type: FrameType
    channel: int
    stream: int
    payload: bytes


def encode_header(type: FrameType, stream: int, length: int, channel: int = 0) -> bytes:
    most = MAX_OPEN if type in _WIDE else MAX_PAYLOAD
    if length > most:
        raise ValueError(f"a {type.name} frame holds at most {most} bytes, not {length}")
    return _HEADER.pack(length, type, channel, 0, stream)


def encode_frame(type: FrameType, stream: int, payload: bytes = b"", channel: int = 0) -> bytes:
    return encode_header(type, stream, len(payload), channel) + payload


class FrameDecoder:
    """Feed bytes, take frames. Holds at most one unfinished frame, so memory is bounded by the largest frame.

    ``allowed`` is the set of types this side may receive; ``wide`` whether HELLO and OPEN may exceed MAX_PAYLOAD.
    """

    def __init__(self, allowed: frozenset[FrameType], *, wide: bool = False) -> None:
        self._allowed = allowed
        self._wide = wide
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """A frame that lies within ``data`` costs one copy."""
        frames: list[Frame] = []
        at, end = 0, len(data)
        if self._buffer:
            at = self._go_on(data, frames)
        while end - at >= HEADER_SIZE:
            type, channel, stream, length = self._header(data, at)
            start = at + HEADER_SIZE
            if end - start < length:
                break
            at = start + length
            frames.append(Frame(type, channel, stream, data[start:at]))
        if at < end:
            self._buffer += memoryview(data)[at:]
        return frames

    def _go_on(self, data: bytes, frames: list[Frame]) -> int:
        """Finish the frame that began earlier, as far as ``data`` goes; how much of it that took."""
        buffer, view, at = self._buffer, memoryview(data), 0
        if len(buffer) < HEADER_SIZE:
            at = HEADER_SIZE - len(buffer)
            buffer += view[:at]
            if len(buffer) < HEADER_SIZE:
                return len(data)
        type, channel, stream, length = self._header(buffer, 0)
        missing = HEADER_SIZE + length - len(buffer)
        if len(data) - at < missing:
            buffer += view[at:]
            return len(data)
        buffer += view[at : at + missing]
        with memoryview(buffer) as whole:
            frames.append(Frame(type, channel, stream, bytes(whole[HEADER_SIZE:])))
        buffer.clear()
        return at + missing

    def _header(self, data: bytes | bytearray, at: int) -> tuple[FrameType, int, int, int]:
        length, number, channel, zero, stream = _HEADER.unpack_from(data, at)
        type = _TYPES[number]
        if type is None or type not in self._allowed:
            raise ProtocolError(f"unexpected frame type {number}")
        self._check(type, length, channel, zero, stream)
        return type, channel, stream, length

    def _check(self, type: FrameType, length: int, channel: int, zero: int, stream: int) -> None:
        if zero:
            raise ProtocolError("reserved header bits are set")
        most = MAX_OPEN if self._wide and type in _WIDE else MAX_PAYLOAD
        if length > most:
            raise ProtocolError(f"a {type.name} frame of {length} bytes is over the limit of {most}")
        if type in _FIXED and length != _FIXED[type]:
            raise ProtocolError(f"a {type.name} frame of {length} bytes")
        if type is FrameType.DATA and not length:
            raise ProtocolError("an empty DATA frame")
        if type in _ON_ZERO and (stream or (type is not FrameType.HELLO and length > MAX_PING)):
            raise ProtocolError(f"a {type.name} frame on stream {stream} of {length} bytes")
        if type not in _ON_ZERO and not stream:
            raise ProtocolError(f"a {type.name} frame on stream 0")
        if channel > 2 or (channel and type not in _WITH_CHANNEL):
            raise ProtocolError(f"a {type.name} frame on channel {channel}")
