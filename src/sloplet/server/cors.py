"""What web pages of other origins are told: whether they may ask, and what they may read. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

ANYONE = b"*"  #: as an allowed origin: every page may, by what it knows; never with cookies
_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
_SENT = (
    b"authorization, content-type, idempotency-key, if-match, if-none-match, last-event-id, mcp-protocol-version, "
    b"mcp-session-id, range, sloplet-client, sloplet-lease, sloplet-tenant, x-api-key"
)
_READ = (
    b"sloplet-request-id, retry-after, etag, content-range, idempotent-replayed, x-next-token, should-retry, "
    b"content-disposition"
)
_NAMES = re.compile(r"[A-Za-z0-9_\-]+( *, *[A-Za-z0-9_\-]+)*")
_LONGEST = 4096
Headers = list[tuple[bytes, bytes]]


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a browser asks before a page's request. ``headers`` by small names."""
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def answered(origin: bytes) -> Headers:
    """Headers of an answer that a page of that origin may read."""
    said = [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _READ)]
    return said if origin == ANYONE else [*said, (b"vary", b"origin")]


def allowed(origin: bytes, headers: Mapping[str, str]) -> Headers:
    """Headers of the answer to a preflight, but for ``answered``. Whoever everybody is may send what he likes."""
    asked = headers.get("access-control-request-headers", "").strip()
    named = origin == ANYONE and len(asked) <= _LONGEST and _NAMES.fullmatch(asked) is not None
    return [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", asked.encode("latin-1") if named else _SENT),
        (b"access-control-max-age", b"600"), (b"content-length", b"0"),
    ]  # fmt: skip
