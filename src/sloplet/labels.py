"""Labels: words that users give sandboxes to find them by. They decide nothing, so they are no part of what a sandbox
is: one that is opened again by its name keeps those that it has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .errors import SpecError

Labels = tuple[tuple[str, str], ...]

MOST = 64
MOST_VALUE = 256  #: characters
KEY_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,62}\Z")
_HINT = "1 to 63 letters, digits, '_', '.', '/' or '-', beginning with a letter or digit"


def check_labels(labels: object) -> Labels:
    """From ``{"team": "search"}``; sorted, since their order has no meaning."""
    if not isinstance(labels, Mapping):
        raise SpecError(f"labels={str(labels)[:80]!r} is not a mapping", hint="for example {'team': 'search'}")
    if len(labels) > MOST:
        raise SpecError(f"{len(labels)} labels are too many", hint=f"at most {MOST}")
    return tuple(sorted((_key(key), _value(key, value)) for key, value in labels.items()))


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """``K=V``, given any number of times: what is to be given to a sandbox."""
    found: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not KEY_RE.match(key):
            raise SpecError(f"{text[:80]!r} is not a label", hint=f"write K=V; K: {_HINT}")
        if found.setdefault(key, value) != value:
            raise SpecError(f"the label {key} is given twice")
    return found


def parse_wanted(texts: Iterable[str]) -> tuple[tuple[str, str | None], ...]:
    """``K=V``, or ``K`` with any value: what is looked for."""
    found: list[tuple[str, str | None]] = []
    for text in texts:
        key, separator, value = text.partition("=")
        if not KEY_RE.match(key):
            raise SpecError(f"{text[:80]!r} is not a label", hint=f"write K=V, or K alone; K: {_HINT}")
        found.append((key, value if separator else None))
    return tuple(found)


def matches(labels: Labels, wanted: Iterable[tuple[str, str | None]]) -> bool:
    """Whether all that is looked for is there."""
    there = dict(labels)
    return all(key in there and value in (None, there[key]) for key, value in wanted)


def _key(key: object) -> str:
    if not isinstance(key, str) or not KEY_RE.match(key):
        raise SpecError(f"{str(key)[:80]!r} is not a name for a label", hint=_HINT)
    return key


def _value(key: object, value: object) -> str:
    if not isinstance(value, str) or len(value) > MOST_VALUE or not value.isprintable():
        raise SpecError(
            f"the label {str(key)[:63]} has a value that is no text, longer than {MOST_VALUE} characters, or not "
            "printable"
        )
    return value
