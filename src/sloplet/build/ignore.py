"""``.dockerignore``, and the patterns of COPY: as Docker matches them. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass


def pattern_expression(pattern: str) -> re.Pattern[str]:
    """``*`` and ``?`` stop at a slash, ``**`` does not; ``[a-z]``, ``\\`` as in Go's filepath.Match. ValueError."""
    parts, at = [], 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "*":
            if pattern[at : at + 1] == "*":
                at += 1
                if pattern[at : at + 1] == "/":
                    at += 1
                    parts.append("(?:.*/)?")
                else:
                    parts.append(".*")
            else:
                parts.append("[^/]*")
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
        return re.compile("".join(parts) + r"\Z", re.DOTALL)
    except re.error as error:
        raise ValueError(f"the pattern {pattern[:80]!r} makes no sense: {error}") from None


def is_pattern(text: str) -> bool:
    return any(char in text for char in "*?[")


@dataclass(frozen=True)
class _Rule:
    expression: re.Pattern[str]
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
