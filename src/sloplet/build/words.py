"""Words of a Dockerfile: quotes, escapes, and variables, as Docker reads them. Pure.

What is wrong is a ``Malformed``; whoever knows the line makes a RecipeInvalid of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import translate

#: The value of a variable, or None.
Lookup = Callable[[str], str | None]

_NAME_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_DEPTH = 20


class Malformed(ValueError):
    """What is wrong with a word, and what to write instead."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def split(text: str, escape: str = "\\") -> list[str]:
    """The words of a line, as they are written: quotes and escapes stay, and hold a word together."""
    words: list[str] = []
    word, quote, at = "", "", 0
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'" and at + 1 < len(text):
            word += text[at : at + 2]
            at += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char.isspace():
            if word:
                words.append(word)
            word, at = "", at + 1
            continue
        word += char
        at += 1
    if word:
        words.append(word)
    return words


def expand(word: str, lookup: Lookup, escape: str = "\\") -> str:
    """One word with its variables put in, its quotes and escapes taken away."""
    return _Expansion(word, lookup, escape).all()


def expand_list(text: str, lookup: Lookup, escape: str = "\\") -> list[str]:
    """The words of a line, each expanded; one that comes out empty of unquoted variables is none."""
    found = []
    for word in split(text, escape):
        value = expand(word, lookup, escape)
        if value or "'" in word or '"' in word:
            found.append(value)
    return found


def expand_text(text: str, lookup: Lookup, escape: str = "\\") -> str:
    """A heredoc's text: variables are put in, quotes are nothing special."""
    return _Expansion(text, lookup, escape, quotes=False).all()


class _Expansion:
    """A reader over one word."""

    def __init__(self, text: str, lookup: Lookup, escape: str, *, quotes: bool = True, depth: int = 0) -> None:
        self._text, self._lookup, self._escape, self._quotes, self._depth = text, lookup, escape, quotes, depth
        self._at = 0

    def all(self) -> str:
        parts = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if self._quotes and char == "'":
                parts.append(self._single())
            elif self._quotes and char == '"':
                parts.append(self._double())
            elif char == "$":
                parts.append(self._variable())
            elif char == self._escape:
                parts.append(self._escaped("\\$" if not self._quotes else None))
            else:
                parts.append(char)
                self._at += 1
        return "".join(parts)

    def _escaped(self, only: str | None) -> str:
        """An escape and what follows; ``only``: before other characters than these it stays."""
        self._at += 1
        if self._at >= len(self._text):
            return self._escape
        char = self._text[self._at]
        self._at += 1
        if only is not None and char not in (*only, self._escape):
            return self._escape + char
        return char

    def _single(self) -> str:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise Malformed("a quote ' is not closed", "write the closing '")
        found = self._text[self._at + 1 : end]
        self._at = end + 1
        return found

    def _double(self) -> str:
        parts: list[str] = []
        self._at += 1
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == '"':
                self._at += 1
                return "".join(parts)
            if char == "$":
                parts.append(self._variable())
            elif char == self._escape:
                parts.append(self._escaped('"$'))
            else:
                parts.append(char)
                self._at += 1
        raise Malformed('a quote " is not closed', 'write the closing "')

    def _variable(self) -> str:
        self._at += 1
        rest = self._text[self._at :]
        if rest.startswith("{"):
            return self._braced()
        match = _NAME_RE.match(rest)
        if match is None:
            return "$"  # a lonely one, as Docker leaves it
        self._at += match.end()
        return self._lookup(match[0]) or ""

    def _braced(self) -> str:
        inner = self._inside()
        match = _NAME_RE.match(inner)
        if match is None:
            raise Malformed(f"${{{inner[:80]}}} is no variable", "write ${NAME}, ${NAME:-default} or ${NAME:+value}")
        name, rest = match[0], inner[match.end() :]
        value = self._lookup(name)
        if not rest:
            return value or ""
        colon, sign, word = (":", rest[1:2], rest[2:]) if rest[0] == ":" else ("", rest[0], rest[1:])
        if sign not in ("-", "+", "?", "#", "%", "/") or (colon and sign not in "-+?"):
            raise Malformed(
                f"${{{inner[:80]}}} has a modifier that is not known", "known are :-, :+, :?, -, +, ?, #, ##, %, %%, /"
            )
        if sign in "#%":
            return _trimmed(value or "", sign, word)
        if sign == "/":
            return _replaced(value or "", word)
        given = bool(value) if colon else value is not None
        if sign == "-":
            return (value or "") if given else self._nested(word)
        if sign == "+":
            return self._nested(word) if given else ""
        if not given:
            raise Malformed(f"{name} is not set" + (f": {self._nested(word)}" if word else ""), "give it a value")
        return value or ""

    def _inside(self) -> str:
        """What stands between the braces at hand, which may hold others."""
        start, depth = self._at + 1, 0
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == self._escape:
                self._at += 1
            elif char == "{":
                depth += 1
            elif char == "}":
                depth -= 1
                if depth == 0:
                    self._at += 1
                    return self._text[start : self._at - 1]
            self._at += 1
        raise Malformed("${ is not closed", "write the closing }")

    def _nested(self, word: str) -> str:
        if self._depth >= _MAX_DEPTH:
            raise Malformed("variables are nested too deeply")
        return _Expansion(word, self._lookup, self._escape, depth=self._depth + 1).all()


def _trimmed(value: str, sign: str, pattern: str) -> str:
    greedy = pattern.startswith(sign)
    match = re.compile(translate(pattern[1:] if greedy else pattern)).match
    ends = range(len(value) + 1)
    if sign == "#":
        for end in reversed(ends) if greedy else ends:
            if match(value[:end]):
                return value[end:]
    else:
        for start in ends if greedy else reversed(ends):
            if match(value[start:]):
                return value[:start]
    return value


def _replaced(value: str, rest: str) -> str:
    every = rest.startswith("/")
    match = re.match(r"((?:[^/\\]|\\.)*)(?:/(.*))?\Z", rest[1:] if every else rest, re.DOTALL)
    pattern, new = (match[1], match[2] or "") if match else ("", "")
    pattern = re.sub(r"\\(.)", r"[\1]", pattern)
    if not pattern:
        return value
    expression = translate(pattern).removeprefix("(?s:").removesuffix(")\\Z").removesuffix(")\\z")
    return re.sub(expression, lambda _: new, value, count=0 if every else 1, flags=re.DOTALL)
