"""A stream of bytes that outlives its connections: what one end has to count and to keep. Pure, no I/O.

Each end keeps what it has sent until the other says that it has used it (``on_ack``), and never more than a window of
it. When a connection breaks, the next begins by each end telling how much it has received; ``again`` gives what
follows that, so every byte comes once and in order, wherever the connection was cut. An acknowledgement is also what
lets the other end send on: an end that does not use what it receives does not acknowledge it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from ..errors import ProtocolError

WINDOW = 2 << 20  #: bytes that may be under way, or wait to be used
ACK_EVERY = 1 << 19  #: bytes after which an acknowledgement is due
_GENTLE, _BOLD = 1 << 10, 1 << 16
_SMALL = 4096
_JOINED = 16384  # small pieces are kept together: a piece costs more than a few bytes


class ByteSession:
    """One end. ``window``: what the other end takes without having used it; ``takes``: what this one does."""

    def __init__(self, window: int = WINDOW, takes: int = WINDOW) -> None:
        self.window = window
        self._takes = takes
        # what goes out
        self.sent = 0  #: bytes ever sent
        self._acked = 0  # bytes that the other end has used
        self._base = 0  # where the first kept piece begins: what the other end has received
        self._kept: deque[bytes | bytearray] = deque()
        # what comes in
        self.received = 0  #: bytes ever received
        self._used = 0
        self._told = 0  # the last acknowledgement

    # -- out ---------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more bytes may be sent now; negative if more was."""
        return self.window - (self.sent - self._acked)

    @property
    def kept(self) -> int:
        """Bytes kept in memory."""
        return self.sent - self._base

    def put(self, data: bytes) -> None:
        """These bytes are sent now, or as soon as there is a connection. The caller minds ``room``."""
        last = self._kept[-1] if self._kept else None
        if isinstance(last, bytearray) and len(data) < _SMALL and len(last) + len(data) <= _JOINED:
            last += data
        else:
            self._kept.append(bytearray(data) if len(data) < _SMALL else data)
        self.sent += len(data)

    def on_ack(self, count: int) -> None:
        """The other end has used so many bytes."""
        if not self._acked <= count <= self.sent:
            raise ProtocolError(f"an acknowledgement of {count} bytes, of {self._acked} to {self.sent}")
        self._acked = count
        self._forget(count)

    def again(self, received: int) -> list[bytes]:
        """A new connection: the other end has received so many bytes. What is to be sent first."""
        if not self._base <= received <= self.sent:
            raise ProtocolError(f"the other end has {received} bytes, of {self._base} to {self.sent} that are kept")
        self._forget(received)
        at, found = self._base, []
        for piece in self._kept:
            if at + len(piece) > received:
                found.append(bytes(piece[received - at :] if at < received else piece))
            at += len(piece)
        return found

    def _forget(self, until: int) -> None:
        while self._kept and self._base + len(self._kept[0]) <= until:
            self._base += len(self._kept.popleft())

    # -- in ----------------------------------------------------------------------------

    def take(self, count: int) -> None:
        """So many bytes have come."""
        self.received += count
        if self.received - self._told > self._takes:
            raise ProtocolError("more bytes than were allowed")

    def use(self, count: int) -> None:
        """So many of them need no memory here any more."""
        self._used += count

    @property
    def waiting(self) -> int:
        """Bytes that have come and are not used."""
        return self.received - self._used

    @property
    def untold(self) -> int:
        """Bytes that are used and not acknowledged."""
        return self._used - self._told

    @property
    def ack_due(self) -> bool:
        """Whether to acknowledge now, and not only after a while of quiet."""
        return self._used - self._told >= min(ACK_EVERY, self._takes // 4)

    def ack(self) -> int:
        """What to acknowledge: it counts as told."""
        self._told = self._used
        return self._told


def gently(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same in messages that begin small and grow. Of a message that a connection breaks in nothing has come: where
    it breaks again and again, small ones still get through."""
    size = _GENTLE
    for piece in pieces:
        at = 0
        while at < len(piece):
            yield piece[at : at + size]
            at, size = at + size, min(_BOLD, size * 2)
