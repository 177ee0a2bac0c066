"""YAML with line numbers: a tree of values that know where they stand. Bounded; no tags but !!binary, no merge keys.

A scalar keeps its text: what a number was written as matters (``0644``). Aliases are followed, within a bound on all
nodes that are visited, so that a few lines cannot stand for millions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import RecipeInvalid

_MOST_NODES = 50_000
_DEEPEST = 20
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(frozen=True)
class Value:
    """A node: a scalar (``text``, with ``kind`` str, int, float, bool, null, binary in base64), a list or a mapping."""

    line: int
    kind: str
    text: str = ""
    quoted: bool = False
    items: tuple[Value, ...] = ()
    pairs: tuple[tuple[Value, Value], ...] = field(default=())

    def wrong(self, what: str, hint: str | None = None) -> RecipeInvalid:
        return RecipeInvalid(f"cloud-init, line {self.line}: {what}", hint=hint)

    # -- what it should be -------------------------------------------------------------

    @property
    def is_null(self) -> bool:
        return self.kind == "null"

    def string(self, what: str) -> str:
        """A text; a number is one, too, as it was written."""
        if self.kind not in ("str", "int", "float") or "\0" in self.text:
            raise self.wrong(f"{what} must be a text", _quote(self))
        return self.text

    def boolean(self, what: str) -> bool:
        text = self.text.lower()
        if self.kind not in ("bool", "str") or text not in _TRUE + _FALSE:
            raise self.wrong(f"{what} must be true or false")
        return text in _TRUE

    def whole(self, what: str, most: int) -> int:
        if self.kind not in ("int", "str") or not self.text.isascii() or not self.text.isdecimal():
            raise self.wrong(f"{what} must be a whole number")
        digits = self.text.lstrip("0") or "0"
        if len(digits) > 10 or int(digits) > most:
            raise self.wrong(f"{what} must be at most {most}")
        return int(digits)

    def list(self, what: str) -> tuple[Value, ...]:
        if self.kind != "list":
            raise self.wrong(f"{what} must be a list", "begin each item with '- '")
        return self.items

    def strings(self, what: str) -> tuple[str, ...]:
        """A list of texts; or one text, with commas between."""
        if self.kind == "str":
            return tuple(part.strip() for part in self.text.split(",") if part.strip())
        return tuple(item.string(f"an item of {what}") for item in self.list(what))

    def entries(
        self, what: str, known: Iterable[str] | None = None, *, dashes: bool = False
    ) -> Iterator[tuple[str, Value]]:
        """The keys and values of a mapping; a key that is not ``known`` is an error that names what is near. With
        ``dashes`` they may stand for ``_``."""
        if self.kind != "map":
            raise self.wrong(f"{what} must be a mapping", "write it as `key: value`")
        names = None if known is None else list(known)
        seen: dict[str, int] = {}
        for key, value in self.pairs:
            name = key.string(f"a key of {what}")
            name = name.replace("-", "_") if dashes else name
            if name in seen:
                raise key.wrong(f"{name!r} is there twice: also in line {seen[name]}")
            seen[name] = key.line
            if names is not None and name not in names:
                raise key.wrong(f"{what} has no key {name[:80]!r}", near(name, names))
            yield name, value


def near(name: str, known: Iterable[str]) -> str:
    choices = sorted(known)
    close = difflib.get_close_matches(name.replace("-", "_").lower(), choices, 1, 0.7)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(choices)}"


def _quote(value: Value) -> str | None:
    return f"put it in quotes: '{value.text}'" if value.kind == "bool" else None


def read(text: str) -> Value:
    """The document, which must be a mapping. RecipeInvalid."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    reader: Any = None
    try:
        _check_depth(yaml.parse(text, Loader=loader))
        reader = loader(text)
        node = reader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RecipeInvalid(f"cloud-init{line}: this is not YAML: {problem}", hint="check the indentation") from None
    finally:
        if reader is not None:
            reader.dispose()
    if node is None:
        return Value(1, "map")
    return _Builder().build(node, 0)


def _check_depth(events: Iterable[Any]) -> None:
    """Before nodes are made of it: that recurses, in C, until the stack is full."""
    depth = 0
    for event in events:
        name = type(event).__name__
        depth += name in ("SequenceStartEvent", "MappingStartEvent")
        depth -= name in ("SequenceEndEvent", "MappingEndEvent")
        if depth > _DEEPEST:
            raise RecipeInvalid(f"cloud-init, line {event.start_mark.line + 1}: the file is nested too deeply")


class _Builder:
    def __init__(self) -> None:
        self.visited = 0

    def build(self, node: Any, depth: int) -> Value:
        line = int(node.start_mark.line) + 1
        self.visited += 1
        if self.visited > _MOST_NODES or depth > _DEEPEST:
            raise RecipeInvalid(f"cloud-init, line {line}: there is too much in it, or it is nested too deeply")
        tag = str(node.tag)
        kind = tag.removeprefix("tag:yaml.org,2002:")
        if node.id == "sequence" and kind == "seq":
            return Value(line, "list", items=tuple(self.build(item, depth + 1) for item in node.value))
        if node.id == "mapping" and kind == "map":
            pairs = []
            for key, value in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    raise RecipeInvalid(
                        f"cloud-init, line {key.start_mark.line + 1}: merge keys (<<) are not taken",
                        hint="write out what is meant",
                    )
                pairs.append((self.build(key, depth + 1), self.build(value, depth + 1)))
            return Value(line, "map", pairs=tuple(pairs))
        if node.id == "scalar" and kind == "binary":
            return Value(line, "binary", text=str(node.value))
        if node.id == "scalar" and kind in ("str", "int", "float", "bool", "null", "timestamp", "value"):
            plain = kind if kind in ("str", "int", "float", "bool", "null") else "str"
            return Value(line, plain, text=str(node.value), quoted=node.style in ("'", '"', "|", ">"))
        raise RecipeInvalid(f"cloud-init, line {line}: the tag {tag[:60]!r} is not taken", hint="leave the tag out")
