"""Connections that are looked into: plain HTTP (the Host of every request), and TLS that is opened."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from .channel import Channel, Prefixed, Refused, linger
from .exchange import Exchange, answer
from .guard import Guard
from .http1 import HeadReader
from .sniff import Tls, sniff
from .tls import TlsChannel, TlsError

if TYPE_CHECKING:
    import ssl

    from .authority import Authority

_HEAD_SECONDS = 30.0
#: How OpenSSL calls it when a program does not like our certificate.
_DISTRUST = ("unknown ca", "bad certificate", "certificate unknown", "certificate expired", "decrypt error")


async def check_http(client: Channel, server: Channel, guard: Guard) -> None:
    """Serve one plain HTTP/1 connection (``sniff`` said Http) until it is over.

    Every request's Host must be ``guard.name``; placeholders are refused (they are for TLS only). After a 101 that
    was asked for (WebSocket) bytes are relayed as they are. Returns when all is done, or after a refusal, which was
    told to ``guard.refused`` and, where possible, to the program as a 403. Raises OSError if a side was cut.
    Either way both channels have been ended or aborted; close them. Cancelling it is safe.
    """
    await Exchange(client, server, guard, secure=False).run()


async def inspect_tls(
    client: Channel,
    dial: Callable[[], Awaitable[Channel]],
    guard: Guard,
    authority: Authority,
    trust: ssl.SSLContext,
) -> None:
    """Serve one TLS connection by opening it (``sniff`` said Tls; ``Prefixed`` gives its first bytes back).

    The server name must be ``guard.name``. Towards the program a leaf of ``authority``, towards the server (``dial``:
    a connected TCP channel; OSError or Refused if there is none) TLS verified by ``trust``
    (``tls.upstream_context()``) for ``guard.name``. Ends like ``check_http``; a server that cannot be reached or
    verified is told to ``guard.refused``, and to the program as a 502.
    """
    try:
        first = await _hello(client, guard.name)
    except Refused as why:
        guard.refused(str(why))
        client.abort()
        return
    except BaseException:
        client.abort()
        raise
    raw: Channel | None = None
    try:
        problem = ""
        inner = TlsChannel(Prefixed(client, first), authority.leaf(guard.name))
        try:
            raw = await dial()
            server = TlsChannel(raw, trust, server_hostname=guard.name)
            await server.handshake()
        except (OSError, Refused) as error:
            problem = str(error) if isinstance(error, Refused) else f"no TLS to {guard.name}: {error}"
            guard.refused(problem)
        await _serve(inner, None if problem else server, problem, guard)
    except BaseException:
        client.abort()
        raise
    finally:
        if raw is not None:
            raw.abort()


async def _serve(client: TlsChannel, server: TlsChannel | None, problem: str, guard: Guard) -> None:
    exchange = None
    try:
        await client.handshake()
        if server is None:
            await _say(client, problem)
            return
        exchange = Exchange(client, server, guard, secure=True)
        await exchange.run()
    except TlsError as error:
        if not problem and (exchange is None or (not exchange.requests and _distrusts(error))):
            guard.refused(
                f"the program gave up when it saw the sandbox's certificate for {guard.name} ({error}): it brings a "
                f"trust store of its own, or pins certificates; passthrough=['{guard.name}'] leaves its TLS closed"
            )
        raise


def _distrusts(error: TlsError) -> bool:
    return any(words in str(error) for words in _DISTRUST)


async def _hello(client: Channel, name: str) -> bytes:
    """The program's first bytes, which are a ClientHello that can be served; Refused if not."""
    data = b""
    async with asyncio.timeout(_HEAD_SECONDS):
        while (found := sniff(data)) is None:
            piece = await client.read()
            if not piece:
                raise Refused(f"the connection to {name} ended in its TLS handshake")
            data += piece
    if not isinstance(found, Tls):
        raise Refused(f"what was sent to {name} is not TLS that can be read")
    if found.server_name != name and not (found.server_name is None and _is_address(name)):
        raise Refused(f"TLS for {found.server_name or 'no server name'} on a connection to {name}")
    if found.alpn and not {"http/1.1", "http/1.0"} & set(found.alpn):
        raise Refused(
            f"the program offers {', '.join(found.alpn)[:80]!a} to {name}, but only HTTP/1.1 can be inspected; switch "
            f"HTTP/2 off in it, or leave its TLS closed with passthrough=['{name}']"
        )
    return data


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _say(client: Channel, problem: str) -> None:
    """Answers the first request with why there is no server."""
    reader = HeadReader()
    try:
        async with asyncio.timeout(_HEAD_SECONDS):
            lines = None
            while lines is None:
                data = await client.read()
                if not data:
                    return
                lines = reader.feed(data)
        await client.write(answer("502 Bad Gateway", problem, head_only=lines[0].startswith(b"HEAD ")))
        await linger(client)
    except (Refused, TimeoutError):
        client.abort()
