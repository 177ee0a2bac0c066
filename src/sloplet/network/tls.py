"""TLS over a Channel, both ends of it, without sockets: the ssl module's memory buffers."""

from __future__ import annotations

import ssl


def upstream_context(cafile: str | None = None) -> ssl.SSLContext:
    """How servers are verified: the host's own trust store, and ``cafile`` beside it; HTTP/1.1 only."""
    raise NotImplementedError
