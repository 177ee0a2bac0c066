"""``.dockerignore``, and the patterns of COPY: as Docker matches them. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

#: With more stars than these an expression may try longer than anybody waits.
_MOST_STARS = 3
_ANY, _ANY_ABOVE, _ANY_IN = ".*", "(?:.*/)?", "[^/]*"


class Matcher(Protocol):
    """What a pattern means."""

    def match(self, text: str, /) -> object:
        """Something true if all of the text is what the pattern names."""


class _Steps:
    """A pattern with many stars: all ways through it at once, so that the time is that of pattern times text."""

    def __init__(self, parts: list[str]) -> None:
        self._parts = [part if part in (_ANY, _ANY_ABOVE, _ANY_IN) else re.compile(part, re.DOTALL) for part in parts]

    def match(self, text: str, /) -> bool:
        places = self._onward({(0, False)})
        for char in text:
            after: set[tuple[int, bool]] = set()
            for at, inside in places:
                part = self._parts[at] if at < len(self._parts) else None
                if part in (_ANY, _ANY_ABOVE) or (part == _ANY_IN and char != "/"):
                    after.add((at, True))
                if (part == _ANY_ABOVE and char == "/") or (
                    isinstance(part, re.Pattern) and not inside and part.match(char)
                ):
                    after.add((at + 1, False))
            places = self._onward(after)
        return (len(self._parts), False) in places

    def _onward(self, places: set[tuple[int, bool]]) -> set[tuple[int, bool]]:
        """With those behind stars: of ``**/`` only before it has taken anything (else a slash must end it)."""
        waiting = list(places)
        while waiting:
            at, inside = waiting.pop()
            part = self._parts[at] if at < len(self._parts) else None
            if part in (_ANY, _ANY_IN) or (part == _ANY_ABOVE and not inside):
                behind = (at + 1, False)
                if behind not in places:
                    places.add(behind)
                    waiting.append(behind)
        return places


def pattern_expression(pattern: str) -> Matcher:
    """``*`` and ``?`` stop at a slash, ``**`` does not; ``[a-z]``, ``\\`` as in Go's filepath.Match. ValueError."""
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "*":
            if pattern[at : at + 1] == "*":
                at += 1
                if pattern[at : at + 1] == "/":
                    at += 1
                    parts.append(_ANY_ABOVE)
                else:
                    parts.append(_ANY)
            else:
                parts.append(_ANY_IN)
        elif char == "?":
            parts.append("[^/]")
        elif char == "[":
            end = pattern.find("]", at + (2 if pattern[at : at + 1] == "^" else 1))
            if end < 0:
                raise ValueError(f"the pattern {pattern[:80]!r} has a [ without ]")
            inner = pattern[at:end].replace("\\", "\\\\").replace("[", "\\[")
            parts.append(f"(?!/)[{inner}]")
            at = end + 1
        elif char == "\\":
            parts.append(re.escape(pattern[at : at + 1] or "\\"))
            at += 1
        else:
            parts.append(re.escape(char))
    try:
        if sum(part in (_ANY, _ANY_ABOVE, _ANY_IN) for part in parts) > _MOST_STARS:
            return _Steps(parts)
        return re.compile("".join(parts) + r"\Z", re.DOTALL)
    except re.error as error:
        raise ValueError(f"the pattern {pattern[:80]!r} makes no sense: {error}") from None


def is_pattern(text: str) -> bool:
    return any(char in text for char in "*?[")


@dataclass(frozen=True)
class _Rule:
    expression: Matcher
    back: bool  #: ``!``: what it matches is not ignored


class Ignore:
    """Which paths of a context do not exist for a build. The last rule that matches a path, or a folder above it,
    decides."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._rules: list[_Rule] = []
        for line in lines:
            text = line.strip()
            if not text or line.startswith("#"):
                continue
            back = text.startswith("!")
            cleaned = posixpath.normpath(text.removeprefix("!").strip()).lstrip("/")
            if cleaned not in ("", "."):
                self._rules.append(_Rule(pattern_expression(cleaned), back))
        self._any_back = any(rule.back for rule in self._rules)

    def ignores(self, path: str) -> bool:
        """Of a path relative to the context, without a slash at either end."""
        ignored = False
        names = path.split("/")
        above = ["/".join(names[:count]) for count in range(1, len(names) + 1)]
        for rule in self._rules:
            if rule.back == ignored and any(map(rule.expression.match, above)):
                ignored = not rule.back
        return ignored

    def prunes(self, folder: str) -> bool:
        """Whether nothing below that folder can matter."""
        return not self._any_back and self.ignores(folder)
