"""Two-way byte streams, as the inspection of traffic sees them, and what ends one for a reason.

The wire's stream and a socket to a server are Channels; so is TLS over another Channel.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

_LINGER_SECONDS, _LINGER_BYTES = 2.0, 16 * 2**20


class Refused(Exception):
    """The connection must not go on. The text is one sentence for the log and for the program; it holds no secret."""


class Channel(Protocol):
    """One connection's two directions. ``read`` and ``write`` may wait at the same time, each for one caller."""

    async def read(self) -> bytes:
        """The next bytes (some at least, at most 256 KiB), b"" once the peer has ended. OSError if it was cut."""

    async def write(self, data: bytes) -> None:
        """Waits until there is room for more. OSError if the peer is gone."""

    async def end(self) -> None:
        """No more from us; reading goes on. Idempotent."""

    def abort(self) -> None:
        """Cut it, so that the peer sees a reset. Idempotent; does not wait."""


class Prefixed:
    """A Channel of which some bytes have been read already: they come first."""

    def __init__(self, channel: Channel, first: bytes) -> None:
        self._channel = channel
        self._first = first

    async def read(self) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        return await self._channel.read()

    async def write(self, data: bytes) -> None:
        await self._channel.write(data)

    async def end(self) -> None:
        await self._channel.end()

    def abort(self) -> None:
        self._channel.abort()


async def linger(channel: Channel) -> None:
    """End it in a way that lets the peer read our last words: closing with unread input would reset it."""
    try:
        async with asyncio.timeout(_LINGER_SECONDS):
            await channel.end()
            seen = 0
            while seen < _LINGER_BYTES and (piece := await channel.read()):
                seen += len(piece)
    except (OSError, TimeoutError):
        pass
