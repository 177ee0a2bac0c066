"""Pages of lists: how long, and where the next one begins."""

from __future__ import annotations

import base64
import binascii

from .answers import refused

_PAGE = 100


def page_size(query: dict[str, str]) -> int:
    given = query.get("limit", "")
    if not given:
        return _PAGE
    if not given.isascii() or not given.isdecimal() or not 1 <= int(given[:9]) <= _PAGE:
        raise refused(400, f"limit is 1 to {_PAGE}")
    return int(given)


def write_token(moment: float, name: str) -> str:
    return base64.urlsafe_b64encode(f"{moment!r} {name}".encode()).decode().rstrip("=")


def read_token(token: str) -> tuple[float, str]:
    try:
        moment, _, name = base64.urlsafe_b64decode(token[:512] + "=" * (-len(token) % 4)).decode().partition(" ")
        return float(moment), name
    except (binascii.Error, ValueError):
        raise refused(400, "nextToken is not one of ours") from None
