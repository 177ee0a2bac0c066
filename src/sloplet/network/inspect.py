"""Connections that are looked into: plain HTTP (the Host of every request), and TLS that is opened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from .channel import Channel
from .guard import Guard

if TYPE_CHECKING:
    import ssl

    from .authority import Authority


async def check_http(client: Channel, server: Channel, guard: Guard) -> None:
    """Serve one plain HTTP/1 connection (``sniff`` said Http) until it is over.

    Every request's Host must be ``guard.name``; placeholders are refused (they are for TLS only). After a 101 that
    was asked for (WebSocket) bytes are relayed as they are. Returns when all is done, or after a refusal, which was
    told to ``guard.refused`` and, where possible, to the program as a 403. Raises OSError if a side was cut.
    Either way both channels have been ended or aborted; close them. Cancelling it is safe.
    """
    raise NotImplementedError


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
    (``tls.upstream_context()``) for ``guard.name``. Ends like ``check_http``.
    """
    raise NotImplementedError
