"""TLS with a server inside that speaks nothing else, over a stream to its port.

Its certificate is not looked at: whoever answers on that port of that sandbox is who was meant.
"""

from __future__ import annotations

import asyncio
import ssl

from ...controller import Data
from ...wire.fields import Fields
from ...wire.mux import Mux
from ...wire.schema import Channel
from ...wire.streams import HostStream

_PIECE = 64 << 10


class SecureStream:
    """What visitors' code uses of a stream. ssl.SSLError for what is no TLS."""

    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context().wrap_bio(self._incoming, self._outgoing)
        self._ended = False
        self._writing = asyncio.Lock()  # what is to be sent leaves in order

    async def handshake(self) -> None:
        """SlopletError where the connection ends."""
        while True:
            try:
                self._tls.do_handshake()
                await self._flush()
                return
            except ssl.SSLWantReadError:
                await self._flush()
                piece = await self._stream.recv()
                if piece is None:
                    raise ssl.SSLError("the connection ended in the handshake") from None
                self._incoming.write(piece.data)

    async def recv(self) -> Data | None:
        while (found := self._read()) is None and not self._ended:
            await self._flush()
            piece = await self._stream.recv()
            if piece is None:
                self._ended = True
                break
            self._incoming.write(piece.data)
        return found

    def take(self) -> Data | None:
        """What is here already; messages that TLS itself sends do not count."""
        while (piece := self._stream.take()) is not None:
            self._incoming.write(piece.data)
        return self._read()

    def _read(self) -> Data | None:
        if self._ended:
            return None
        try:
            data = self._tls.read(_PIECE)
        except ssl.SSLWantReadError:
            return None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            data = b""
        if not data:
            self._ended = True
            return None
        return Data(Channel.OUT, data)

    async def send(self, data: bytes) -> None:
        for at in range(0, len(data), _PIECE):
            self._tls.write(data[at : at + _PIECE])
            await self._flush()

    async def send_end(self) -> None:
        await self._stream.send_end()

    async def _flush(self) -> None:
        async with self._writing:
            if data := self._outgoing.read():
                await self._stream.send(data)

    def reset(self) -> None:
        self._stream.reset()

    @property
    def peer_ended(self) -> bool:
        return self._ended or self._stream.peer_ended

    @property
    def outcome(self) -> Fields | None:
        return self._stream.outcome

    @property
    def mux(self) -> Mux:
        return self._stream.mux


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context
