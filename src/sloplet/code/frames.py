"""A kernel's bytes: output, and frames in between. Pure.

A frame is ``\\x1e KEY SP CELL SP KIND [SP REST] \\n``, at most 4,096 bytes, in one write of the kernel's, on stdout
(``begin`` and ``end`` on stderr too). KEY is the kernel's, random, so that nothing else looks like one. All other bytes
are output. The reader belongs to one cell: what others do meanwhile is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import KernelError
from ..wire.schema import Channel

MAX_FRAME = 4096
_START = 0x1E
_KIND = re.compile(rb"([0-9a-f]{1,32}) ([a-z]{1,16})(?: (.*))?", re.S)


@dataclass(frozen=True)
class Frame:
    """Something that the kernel says about our cell."""

    channel: int
    kind: str
    rest: bytes


@dataclass(frozen=True)
class Text:
    """Output."""

    channel: int
    data: bytes


class _Side:
    """stdout or stderr."""

    def __init__(self, channel: int, marker: bytes, cell: bytes, early: bool) -> None:
        self._channel = channel
        self._marker = marker
        self._cell = cell
        self._rest = b""
        self._ours = False
        self._early = early  # output of nobody's cell is ours: of threads and children, since our last one
        self._foreign = False  # another's cell runs
        self.taken = 0  # bytes, up to the end of our cell
        self.ended = False

    def feed(self, data: bytes) -> Iterator[Frame | Text]:
        self.taken += len(data) if not self.ended else 0
        data = self._rest + data
        at = 0
        while not self.ended:
            start = data.find(self._marker, at)
            if start < 0:
                kept = _partial(data, at, self._marker)
                yield from self._text(data[at : len(data) - kept])
                self._rest = data[len(data) - kept :]
                return
            yield from self._text(data[at:start])
            end = data.find(b"\n", start, start + MAX_FRAME)
            if end < 0:
                if len(data) - start >= MAX_FRAME:
                    raise KernelError("the kernel sent a frame that does not end", hint=_NONSENSE)
                self._rest = data[start:]
                return
            at = end + 1
            frame = self._frame(data[start + len(self._marker) : end])
            if frame is not None:
                yield frame
            if frame is not None and frame.kind == "end":
                self.taken -= len(data) - at
        self._rest = b""

    def _text(self, data: bytes) -> Iterator[Text]:
        if data and (self._ours or (self._early and not self._foreign)):
            yield Text(self._channel, data)

    def _frame(self, line: bytes) -> Frame | None:
        found = _KIND.fullmatch(line)
        if found is None:
            raise KernelError("the kernel sent a frame that makes no sense", hint=_NONSENSE)
        cell, kind, rest = found[1], found[2].decode(), found[3] or b""
        if cell != self._cell:
            self._foreign = kind != "end"
            return None
        self._ours = True
        self.ended = kind == "end"
        return Frame(self._channel, kind, rest)


_NONSENSE = "the code in it has written into the kernel's own descriptors; restart the context"


class Reader:
    """Feeds of both channels -> what they hold for the cell. ``ended`` once both said so."""

    def __init__(self, key: str, cell: str, *, early: bool = False) -> None:
        marker = bytes([_START]) + key.encode() + b" "
        self._sides = {channel: _Side(channel, marker, cell.encode(), early) for channel in (Channel.OUT, Channel.ERR)}

    def feed(self, channel: int, data: bytes) -> Iterator[Frame | Text]:
        return self._sides[Channel(channel)].feed(data)

    @property
    def taken(self) -> tuple[int, int]:
        """How many bytes of stdout and stderr there were up to the end of the cell."""
        return self._sides[Channel.OUT].taken, self._sides[Channel.ERR].taken

    @property
    def ended(self) -> bool:
        return all(side.ended for side in self._sides.values())


def _partial(data: bytes, at: int, marker: bytes) -> int:
    """How many bytes at the end may be the beginning of a marker."""
    start = data.rfind(marker[:1], max(at, len(data) - len(marker) + 1))
    return len(data) - start if start >= 0 and marker.startswith(data[start:]) else 0
