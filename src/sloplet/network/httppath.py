"""The path that rules are asked about, and whether a server could see another one. Pure."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_HIDING_ESCAPE = re.compile(rb"%(2f|5c|25|3b|3f|23|0[0-9a-f]|1[0-9a-f]|7f)", re.IGNORECASE)


def judged_path(target: bytes) -> tuple[str, str]:
    """The decoded path of a request target without its query, and why it is ambiguous ("" if it is not)."""
    raw = target.partition(b"?")[0]
    decoded = unquote_to_bytes(raw)
    path = decoded.decode("utf-8", "replace")
    if _BAD_ESCAPE.search(raw):
        return path, "a '%' that is no escape"
    if match := _HIDING_ESCAPE.search(raw):
        return path, f"the escape {match[0].decode()}"
    if b"\\" in decoded:
        return path, "a backslash"
    if b";" in decoded:
        return path, "a ';'"
    if b"//" in decoded:
        return path, "an empty segment ('//')"
    if any(segment in (b".", b"..") for segment in decoded.split(b"/")):
        return path, "a dot segment ('/../')"
    try:
        decoded.decode()
    except UnicodeDecodeError:
        return path, "bytes that are not UTF-8"
    return path, ""
