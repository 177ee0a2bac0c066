"""Bytes of the wire passed on without being read: whole frames only, by their headers. Pure, bounded.

For whoever stands between two ends (a server's tunnel) and must see some frames only: those of ``stops`` come out one
by one, all between them as they are, in as few pieces as possible.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .frames import Frame, FrameDecoder
from .schema import HEADER_SIZE, FrameType


class Walker(FrameDecoder):
    """Feed bytes; take runs of whole frames (``bytes``) and the frames of ``stops``, in their order. Frames of streams
    that ``known`` does not hold are left out (stream 0 always passes). ``known`` is looked at as the walk goes, so
    whoever takes an OPEN may add its stream before the frames behind it are seen.

    It holds one unfinished frame at most, and breaks on the same rules as whoever decodes the frames later.
    """

    def __init__(
        self,
        allowed: frozenset[FrameType],
        stops: frozenset[FrameType],
        known: Collection[int] | None = None,
        *,
        wide: bool = False,
    ) -> None:
        super().__init__(allowed, wide=wide)
        self._stops = stops
        self._known = known

    def walk(self, data: bytes) -> Iterator[bytes | Frame]:
        """What ``data`` completes. To be taken to its end before the next."""
        at = 0
        if self._buffer:
            missing = self._missing(data)
            if missing > len(data):
                self._buffer += data
                return
            # One copy of one frame; the rest is cut out of ``data`` as it is.
            self._buffer += memoryview(data)[:missing]
            whole, at = bytes(self._buffer), missing
            self._buffer.clear()
            yield from self._cut(whole, 0)
        yield from self._cut(data, at)

    def _missing(self, data: bytes) -> int:
        """How much of ``data`` the unfinished frame needs; more than there is, if that is not known or not there."""
        have = len(self._buffer)
        if have + len(data) < HEADER_SIZE:
            return len(data) + 1
        head = bytes(self._buffer[:HEADER_SIZE]) + data[: max(0, HEADER_SIZE - have)]
        return HEADER_SIZE + self._header(head, 0)[3] - have

    def _cut(self, data: bytes, at: int) -> Iterator[bytes | Frame]:
        end, begin = len(data), at
        known, stops = self._known, self._stops
        while end - at >= HEADER_SIZE:
            type, channel, stream, length = self._header(data, at)
            after = at + HEADER_SIZE + length
            if after > end:
                break
            stop = type in stops
            if stop or (known is not None and stream and stream not in known):
                if begin < at:
                    yield data[begin:at]
                begin = after
                if stop:
                    yield Frame(type, channel, stream, data[at + HEADER_SIZE : after])
            at = after
        if at < end:
            self._buffer += memoryview(data)[at:]
        if begin < at:
            yield data if begin == 0 and at == end else data[begin:at]
