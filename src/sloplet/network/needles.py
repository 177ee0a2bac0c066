"""Byte strings found and replaced in a stream, wherever the borders of its pieces are. Pure.

Whoever replaces holds what may be the beginning of one until more has come.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote

from .channel import Refused

_BEGINNING = 8  # of many placeholders this much is the same, and looked for once


class Replacer:
    """Each key becomes its value. With ``same_length`` the value is cut or filled up with '*': for bodies whose length
    has been told already."""

    def __init__(self, pairs: Mapping[bytes, bytes], *, same_length: bool = False) -> None:
        self._pairs = {
            key: value[: len(key)].ljust(len(key), b"*") if same_length else value for key, value in pairs.items()
        }
        self._pattern = _any_of(self._pairs)
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What is certain now."""
        if self._held:
            data = self._held + data
        start = len(data) - _held(data, self._pairs)
        done: list[bytes] = []
        at = 0
        if any(key in data for key in self._pairs):  # finding is much faster than matching
            for match in self._pattern.finditer(data):
                if match.start() >= start:
                    break
                done += (data[at : match.start()], self._pairs[match[0]])
                at = match.end()
                if at > start:  # what could have begun before the end of this one has not
                    start = len(data) - _held(data[at:], self._pairs)
        self._held = data[start:]
        if not done and start == len(data):
            return data
        return b"".join([*done, data[at:start]])

    def finish(self) -> bytes:
        held, self._held = self._held, b""
        return self._pattern.sub(lambda match: self._pairs[match[0]], held)

    def whole(self, data: bytes) -> bytes:
        """All of it at once."""
        return self._pattern.sub(lambda match: self._pairs[match[0]], data)


class Scanner:
    """Lets bytes through until they complete one of the needles: then Refused, with that needle's reason. Nothing is
    held, so no protocol stalls; what has gone before was a part of a needle only."""

    def __init__(self, reasons: Mapping[bytes, str]) -> None:
        self.reasons = dict(reasons)
        self._beginnings = {needle[:_BEGINNING] for needle in self.reasons}
        self._keep = max((len(needle) for needle in self.reasons), default=1) - 1
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """The same bytes: they may be sent on."""
        self.check(self._tail + data if self._tail else data)
        if len(data) >= self._keep:
            self._tail = data[len(data) - self._keep :]
        else:
            self._tail = (self._tail + data)[-self._keep :]
        return data

    def finish(self) -> bytes:
        """What is left at the end of the stream: nothing."""
        return b""

    def check(self, data: bytes) -> None:
        """All of it at once."""
        if any(beginning in data for beginning in self._beginnings):
            for needle, reason in self.reasons.items():
                if needle in data:
                    raise Refused(reason)


def _any_of(needles: Mapping[bytes, object]) -> re.Pattern[bytes]:
    if not needles:
        return re.compile(rb"(?!)")
    return re.compile(b"|".join(re.escape(needle) for needle in sorted(needles, key=len, reverse=True)))


def _held(data: bytes, needles: Mapping[bytes, object]) -> int:
    """The length of the longest end of ``data`` that is the beginning of a needle (and not all of it)."""
    longest = 0
    for needle in needles:
        at = max(0, len(data) - len(needle) + 1)
        while (at := data.find(needle[:1], at)) >= 0:
            if len(data) - at <= longest:
                break
            if needle.startswith(data[at:]):
                longest = len(data) - at
                break
            at += 1
    return longest


@lru_cache(1024)
def disguises(text: bytes) -> frozenset[bytes]:
    """How it looks in a stream: as it is, percent-encoded, and inside base64 (whatever stands around it)."""
    found = {text, quote(text, safe="").encode()}
    for before in range(3):
        bits = (before + len(text)) * 8
        coded = b64encode(b"\0" * before + text)
        core = coded[(before * 8 + 5) // 6 : bits // 6]
        found |= {core, core.replace(b"+", b"-").replace(b"/", b"_")}
    return frozenset(found)
