"""Paths of requests: patterns with ``*``, and every way in which a server may read one path."""

from __future__ import annotations

import re
from urllib.parse import unquote

from ..errors import SpecError
from .names import shown

MAX_PATH = 16 * 1024
MAX_STARS = 8
_MOST_DECODINGS = 3
_PLAIN_RE = re.compile(r"(?:/[A-Za-z0-9_~@:+,=!$&'()*-][A-Za-z0-9_.~@:+,=!$&'()*-]*)*/?\Z")


def check_pattern(path: str, text: str) -> str:
    """The path of a rule; SpecError if it could never match, or not mean what it seems to."""
    if "?" in path or "#" in path:
        raise SpecError(f"{shown(text)}: rules do not see what follows '?'", hint="end the path with '*' or before it")
    if path.count("*") > MAX_STARS:
        raise SpecError(f"{shown(text)} has too many '*'", hint=f"at most {MAX_STARS} in a path")
    plain = path.replace("*", "x")
    if not plain.isascii() or forms(plain) != (plain,):
        raise SpecError(
            f"{shown(text)}: this path has several spellings",
            hint="write it decoded, without '..', '//', ';', '%' and backslashes",
        )
    return path


def matches(pattern: str, path: str, *, loosely: bool = False) -> bool:
    """``*`` is any text, slashes too. Loosely: in any case of letters, whatever slash or query ends it."""
    if loosely:
        pattern, path = pattern.lower(), path.lower().partition("?")[0]
        if _glob(pattern, path.rstrip("/") or "/"):
            return True
    return _glob(pattern, path)


def _glob(pattern: str, text: str) -> bool:
    first, *middle = pattern.split("*")
    if not middle:
        return text == pattern
    last = middle.pop()
    if not text.startswith(first) or len(text) < len(first) + len(last) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for piece in middle:
        found = text.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


def forms(path: str) -> tuple[str, ...]:
    """What servers may take a request's path (without its query) for: decoded once and more often, with dots, doubled
    slashes and parameters resolved. Empty if it cannot be told. A request is allowed only if it is in every form."""
    if _PLAIN_RE.match(path) and path:
        return (path,)
    if not path.startswith("/") or len(path) > MAX_PATH or not path.isprintable():
        return ()
    levels = [path]
    while (decoded := unquote(levels[-1], encoding="utf-8", errors="replace")) != levels[-1]:
        if len(levels) > _MOST_DECODINGS:
            return ()
        levels.append(decoded)
    if any(ord(char) < 32 or ord(char) == 127 for char in levels[-1]):
        return ()
    read = levels[1:] or levels
    found = list(read)
    for seen in read:
        slashed = seen.replace("\\", "/")
        found += [_resolved(slashed), _resolved(re.sub(r";[^/]*", "", slashed))]
    return tuple(dict.fromkeys(found))


def _resolved(path: str) -> str:
    """As RFC 3986 removes dot segments, and empty ones."""
    kept: list[str] = []
    parts = path.split("/")[1:]
    for part in parts:
        if part == "..":
            del kept[-1:]
        elif part not in (".", ""):
            kept.append(part)
    tail = "/" if kept and parts[-1] in ("", ".", "..") else ""
    return "/" + "/".join(kept) + tail
