"""TLS over a Channel, both ends of it, without sockets: the ssl module's memory buffers."""

from __future__ import annotations

import asyncio
import ssl

from .channel import Channel

_READ = 64 * 1024
_WRITE = 256 * 1024
_HANDSHAKE_SECONDS = 30.0


class TlsError(OSError):
    """The handshake, or what came after it, failed. The text says why, in OpenSSL's words."""


class TlsTruncated(TlsError):
    """The connection ended without TLS saying so: what was read may not be all."""


def upstream_context(cafile: str | None = None) -> ssl.SSLContext:
    """How servers are verified: the host's own trust store, and ``cafile`` beside it; HTTP/1.1 only."""
    context = ssl.create_default_context()
    if cafile is not None:
        context.load_verify_locations(cafile)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


class TlsChannel:
    """A Channel through another one. ``handshake`` comes first."""

    def __init__(self, channel: Channel, context: ssl.SSLContext, *, server_hostname: str | None = None) -> None:
        """With ``server_hostname`` this is the client's end."""
        self._channel = channel
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self._sending = asyncio.Lock()  # what OpenSSL wrote first goes first
        self._ended = False
        self._ready = b""
        self._cut = False  # the channel ended before TLS did; some builds of Python hide that (IGNORE_UNEXPECTED_EOF)

    async def handshake(self) -> None:
        """TlsError if it fails: the peer was told, but the channel is still to be closed."""
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                while True:
                    try:
                        self._tls.do_handshake()
                    except ssl.SSLWantReadError:
                        await self._flush()
                        await self._fill()
                        continue
                    await self._flush()
                    return
        except TimeoutError:
            raise TlsError("the TLS handshake took too long") from None
        except ssl.SSLError as error:
            try:
                await self._flush()  # the alert
            except OSError:
                pass
            raise self._translated(error) from None

    async def read(self) -> bytes:
        if self._ready:
            ready, self._ready = self._ready, b""
            return ready
        pieces: list[bytes] = []
        size = 0
        while True:
            try:
                while size < _READ:
                    piece = self._tls.read(_READ)
                    if not piece:
                        raise ssl.SSLZeroReturnError
                    pieces.append(piece)
                    size += len(piece)
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            except ssl.SSLWantReadError:
                if self._outgoing.pending and not self._sending.locked():  # who sends now sends that, too
                    await self._flush()
                if pieces:
                    return b"".join(pieces)
                await self._fill()
            except ssl.SSLError as error:
                ended = isinstance(error, ssl.SSLZeroReturnError) and not self._cut
                if pieces or ended:
                    return b"".join(pieces)  # an error comes again
                raise self._translated(error) from None

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                count = self._tls.write(view[:_WRITE])
            except ssl.SSLError as error:
                raise self._translated(error) from None
            view = view[count:]
            await self._flush()

    async def end(self) -> None:
        """Says that no more comes, in TLS and below."""
        if self._ended:
            return
        self._ended = True
        self._unpack()
        try:
            self._tls.unwrap()
        except (ssl.SSLError, ValueError):
            pass  # the peer has not said the same yet
        try:
            await self._flush()
        finally:
            await self._channel.end()

    def abort(self) -> None:
        self._channel.abort()

    def _unpack(self) -> None:
        """What is here is taken out: OpenSSL's shutdown looks for the peer's, and loses data that it finds instead."""
        try:
            while piece := self._tls.read(_READ):
                self._ready += piece
        except ssl.SSLError:
            pass  # that was all; an error comes again

    async def _fill(self) -> None:
        data = await self._channel.read()
        if data:
            self._incoming.write(data)
        else:
            self._cut = True
            self._incoming.write_eof()

    async def _flush(self) -> None:
        async with self._sending:
            while self._outgoing.pending:
                await self._channel.write(self._outgoing.read())

    def _translated(self, error: ssl.SSLError) -> TlsError:
        if self._cut or isinstance(error, ssl.SSLEOFError) or "EOF" in (error.reason or ""):
            return TlsTruncated("the connection ended without TLS saying so")
        if isinstance(error, ssl.SSLCertVerificationError):
            return TlsError(f"the certificate cannot be verified: {error.verify_message}")
        return TlsError(f"TLS failed: {(error.reason or 'unknown').replace('_', ' ').lower()}")
