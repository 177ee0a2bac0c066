"""Byte strings found and replaced in a stream, wherever the borders of its pieces are. Pure.

Whoever replaces holds what may be the beginning of one until more has come.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from urllib.parse import quote, quote_plus

from .channel import Refused

_BEGINNING = 8  # of many placeholders this much is the same, and looked for once


#: What stands for a needle; a function is asked at each occurrence, and may refuse.
Value = bytes | Callable[[], bytes]


class Growth:
    """By how many bytes one message may become longer than it came. What few bytes ask for is held here until the
    server takes it."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, size: int) -> None:
        """Before so much is made. Refused: it is too much."""
        self._left -= max(0, size)
        if self._left < 0:
            raise Refused(f"a request that would grow by more than {self._most} bytes where its placeholders stand")


class Replacer:
    """Each key becomes its value. With ``same_length`` the value is cut or filled up with '*': for bodies whose length
    has been told already. Refused if that is more than ``growth`` lets it be, or if a value's function refuses."""

    def __init__(
        self, pairs: Mapping[bytes, Value], *, same_length: bool = False, growth: Growth | None = None
    ) -> None:
        self._pairs = dict(pairs)
        self._same_length = same_length
        self._growth = growth
        self._held = b""

    @cached_property
    def _pattern(self) -> re.Pattern[bytes]:
        """Made when there is something to match: most of what passes holds no needle."""
        return _any_of(self._pairs)

    def feed(self, data: bytes) -> bytes:
        """What is certain now."""
        if self._held:
            data = self._held + data
        start = len(data) - _held(data, self._pairs)
        done: list[bytes] = []
        at = 0
        if self._is_in(data):
            for match in self._pattern.finditer(data):
                if match.start() >= start:
                    break
                done += (data[at : match.start()], self._instead(match))
                at = match.end()
                if at > start:  # what could have begun before the end of this one has not
                    start = len(data) - _held(data[at:], self._pairs)
        self._held = data[start:]
        if not done and start == len(data):
            return data
        return b"".join([*done, data[at:start]])

    def finish(self) -> bytes:
        held, self._held = self._held, b""
        return self.whole(held)

    def whole(self, data: bytes) -> bytes:
        """All of it at once."""
        return self._pattern.sub(self._instead, data) if self._is_in(data) else data

    def _is_in(self, data: bytes) -> bool:
        return any(key in data for key in self._pairs)  # finding is much faster than matching

    def _instead(self, match: re.Match[bytes]) -> bytes:
        key = match[0]
        found = self._pairs[key]
        value = found if isinstance(found, bytes) else found()
        if self._same_length:
            value = value[: len(key)].ljust(len(key), b"*")
        if self._growth is not None:
            self._growth.take(len(value) - len(key))
        return value


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


def echoes(value: bytes) -> frozenset[bytes]:
    """How a server may write what it was sent: as it is, percent-encoded in the usual ways, escaped as JSON. Never
    cached: it may be a secret's."""
    coded = {quote(value, safe=safe) for safe in ("", "/", "!'()*")} | {quote_plus(value)}
    coded |= {re.sub("%..", lambda match: match[0].lower(), text) for text in coded}
    text = value.decode("utf-8", "replace")
    quoted = {json.dumps(text, ensure_ascii=only)[1:-1] for only in (True, False)}
    quoted |= {text.replace("/", "\\/") for text in quoted}
    return frozenset({value, *(text.encode() for text in coded | quoted)})
