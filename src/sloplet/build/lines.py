"""The logical lines of a Dockerfile: directives, comments, continuations, heredocs. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import RecipeInvalid
from .words import split

MAX_BYTES = 4 * 2**20
_DIRECTIVE_RE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*\Z")
_HEREDOC_RE = re.compile(r"\d*<<(-?)(['\"]?)([A-Za-z_.][A-Za-z0-9_.+/-]*)(['\"]?)\Z")
_WITH_HEREDOCS = ("RUN", "COPY", "ADD")
_DIRECTIVES = ("syntax", "escape", "check")


@dataclass(frozen=True)
class Heredoc:
    """Text that follows an instruction."""

    name: str
    text: str
    expand: bool = True  #: its name stood without quotes: variables are put in


@dataclass(frozen=True)
class Line:
    """One instruction as it is written."""

    number: int  #: of its first line, from 1
    keyword: str  #: upper case
    rest: str  #: what follows it, continuations joined
    heredocs: tuple[Heredoc, ...] = ()
    escape: str = "\\"
    name: str = "Dockerfile"

    @property
    def text(self) -> str:
        return f"{self.keyword} {self.rest}".strip()

    def wrong(self, message: str, hint: str | None = None) -> RecipeInvalid:
        return RecipeInvalid(f"{self.name} line {self.number}: {message}", hint=hint)


def near(word: str, known: Iterable[str]) -> str | None:
    """A hint for what was probably meant."""
    choices = list(known)
    found = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"did you mean {found[0]}?" if found else f"known are {', '.join(choices)}" if choices else None


def first_word(text: str) -> tuple[str, str]:
    parts = text.split(None, 1)
    return (parts[0] if parts else ""), (parts[1].strip() if len(parts) > 1 else "")


def read_lines(text: str, name: str = "Dockerfile") -> list[Line]:
    """RecipeInvalid, with the line's number."""
    if len(text) > MAX_BYTES:
        raise RecipeInvalid(f"{name} has {len(text)} characters; at most {MAX_BYTES} are allowed")
    if "\0" in text:
        number = text[: text.index("\0")].count("\n") + 1
        raise RecipeInvalid(f"{name} line {number}: a NUL character", hint="is it a text file?")
    return _Reader(text.removeprefix("\ufeff"), name).lines()


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        self._lines = [line.removesuffix("\r") for line in text.split("\n")]
        self._name = name
        self._at = 0
        self._escape = "\\"
        self._directives()
        mark = re.escape(self._escape)
        self._continued = re.compile(rf"(?:^|[^{mark}])({mark})[ \t]*\Z")

    def _directives(self) -> None:
        """``# escape=`` and ``# syntax=``, before anything else."""
        seen: set[str] = set()
        for number, line in enumerate(self._lines, 1):
            match = _DIRECTIVE_RE.match(line.strip())
            key = match[1].lower() if match else ""
            if match is None or key not in _DIRECTIVES:
                return
            if key in seen:
                raise RecipeInvalid(f"{self._name} line {number}: the directive {key} is there twice")
            seen.add(key)
            if key == "escape":
                if match[2] not in ("\\", "`"):
                    raise RecipeInvalid(
                        f"{self._name} line {number}: escape={match[2][:20]} is not possible", hint="\\ or ` only"
                    )
                self._escape = match[2]

    def lines(self) -> list[Line]:
        found = []
        while self._at < len(self._lines):
            stripped = self._lines[self._at].strip()
            if not stripped or stripped.startswith("#"):
                self._at += 1
                continue
            found.append(self._instruction())
        return found

    def _instruction(self) -> Line:
        number = self._at + 1
        text = self._logical().strip()
        keyword, rest = first_word(text)
        line = Line(number, keyword.upper(), rest, (), self._escape, self._name)
        kind, inner = line.keyword, rest
        if kind == "ONBUILD":
            kind, inner = first_word(rest)
            kind = kind.upper()
        if kind not in _WITH_HEREDOCS or "<<" not in inner or inner.lstrip().startswith("["):
            return line
        heredocs = tuple(self._heredoc(line, match) for match in map(_HEREDOC_RE.match, split(inner)) if match)
        return Line(number, line.keyword, line.rest, heredocs, self._escape, self._name)

    def _logical(self) -> str:
        """The line at hand with those that continue it; comments and empty lines among them are left out."""
        parts: list[str] = []
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            if parts and (not line.strip() or line.lstrip().startswith("#")):
                continue
            match = self._continued.search(line)
            if match is None:
                parts.append(line)
                break
            parts.append(line[: match.start(1)])
        return "".join(parts)

    def _heredoc(self, line: Line, match: re.Match[str]) -> Heredoc:
        dash, opened, name, closed = match.groups()
        if opened != closed:
            raise line.wrong(f"the heredoc {match[0]} has a quote that is not closed")
        lines: list[str] = []
        while self._at < len(self._lines):
            text = self._lines[self._at]
            self._at += 1
            if dash:
                text = text.lstrip("\t")
            if text == name:
                return Heredoc(name, "".join(f"{item}\n" for item in lines), expand=not opened)
            lines.append(text)
        raise line.wrong(f"the heredoc {match[0]} does not end", f"a line that holds {name} and nothing else ends it")
