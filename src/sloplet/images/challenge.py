"""What a registry asks for when it answers 401, and what its headers say of waiting. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
#: One class for what separates: two stars beside each other try every split of a header full of spaces.
_SCHEME_RE = re.compile(rf"[\s,]*({_TOKEN})(?=\s|,|\Z)")
_PARAMETER_RE = re.compile(rf'[\s,]*({_TOKEN})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|({_TOKEN}))')
_MAX_HEADER = 16 * 1024
#: A token goes into a header: what could end that is no token.
BEARER_RE = re.compile(r"[\x21-\x7e]+\Z")


@dataclass(frozen=True)
class Challenge:
    """One of ``WWW-Authenticate``: ``bearer`` with realm, service and scope, or ``basic``."""

    scheme: str
    parameters: dict[str, str] = field(default_factory=dict, hash=False)


def parse_challenges(headers: list[str]) -> list[Challenge]:
    """What can be understood of the headers; the rest is left out."""
    found = []
    for text in headers:
        text = text[:_MAX_HEADER]
        at = 0
        while match := _SCHEME_RE.match(text, at):
            at = match.end()
            parameters: dict[str, str] = {}
            while parameter := _PARAMETER_RE.match(text, at):
                quoted, bare = parameter[2], parameter[3]
                parameters[parameter[1].lower()] = bare if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
                at = parameter.end()
            found.append(Challenge(match[1].lower(), parameters))
    return found


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds, from a number or a date; None for nothing that makes sense."""
    if not value:
        return None
    text = value.strip()
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, OverflowError, TypeError):
        return None
    seconds = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now
    return max(0.0, seconds) if math.isfinite(seconds) else None


def origin(url: str) -> tuple[str, str, int]:
    """Whom credentials belong to: scheme, host and port. ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"no address of a web server: {url[:100]!r}")
    return parts.scheme, parts.hostname.lower(), parts.port or (443 if parts.scheme == "https" else 80)


def content_range(value: str | None) -> int | None:
    """Where a part begins that the server says it sends: ``bytes 100-199/200``."""
    match = re.match(r"\s*bytes\s+(\d{1,15})-\d{1,15}/(?:\d{1,15}|\*)\s*\Z", value or "")
    return int(match[1]) if match else None
