"""Sizes and durations as people write them: ``"512m"`` is bytes, ``"5m"`` is seconds."""

from __future__ import annotations

import math
import re

from .errors import InvalidLimit

_SIZE_RE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\Z", re.IGNORECASE | re.ASCII)
_DURATION_RE = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\Z", re.IGNORECASE | re.ASCII)
_SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

MAX_BYTES = 2**50
MAX_SECONDS = 10 * 365 * 86400.0


def parse_size(value: object, what: str = "size") -> int:
    """Bytes from ``512``, ``"512m"``, ``"1.5g"``."""
    number: float
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidLimit(f"{what}={value!r} is not a size", hint="write for example 536870912 or '512m'")
    if isinstance(value, str):
        match = _SIZE_RE.match(value.strip())
        if not match:
            raise InvalidLimit(f"{what}={value[:80]!r} is not a size", hint="write for example '512m' or '2g'")
        number = float(match[1]) * _SIZE_UNITS[match[2].lower()]
    else:
        number = value
    if isinstance(number, float) and not math.isfinite(number):
        raise InvalidLimit(f"{what}={value!r} is not a finite size")
    if number <= 0 or number > MAX_BYTES:
        raise InvalidLimit(f"{what}={value!r} is out of range", hint="it must be above 0 and at most 1 PiB")
    return int(number)


def parse_duration(value: object, what: str = "duration") -> float:
    """Seconds from ``30``, ``"90s"``, ``"5m"``, ``"2h"``, ``"1d"``."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidLimit(f"{what}={value!r} is not a duration", hint="write for example 30, '90s' or '5m'")
    if isinstance(value, str):
        match = _DURATION_RE.match(value.strip())
        if not match:
            raise InvalidLimit(f"{what}={value[:80]!r} is not a duration", hint="write for example '90s' or '5m'")
        seconds = float(match[1]) * _DURATION_UNITS[(match[2] or "s").lower()]
    else:
        seconds = float(value) if abs(value) <= MAX_SECONDS else math.inf
    if not math.isfinite(seconds) or seconds <= 0 or seconds > MAX_SECONDS:
        raise InvalidLimit(f"{what}={value!r} is out of range", hint="it must be above 0 and at most 10 years")
    return seconds
