"""Presets: ``@github`` stands for rules that presets.toml lists, ``@package-indexes`` for what this machine uses."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from ..errors import SpecError
from ..netspec import NetworkSpec, check_passthrough
from .names import shown
from .policy import Policy
from .rules import Rule, parse_rule

#: Not in the file: it is read from the machine's own configuration.
PACKAGE_INDEXES = "package-indexes"


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    rules: tuple[str, ...]


@functools.cache
def presets() -> dict[str, Preset]:
    """Those of the file, by name."""
    text = resources.files(__package__).joinpath("presets.toml").read_text("utf-8")
    return {
        name: Preset(name, table["about"], tuple(table["rules"])) for name, table in sorted(tomllib.loads(text).items())
    }


def check_rule(text: object, what: str = "allow") -> str:
    """The canonical text of a rule or a preset; SpecError if it is neither."""
    if isinstance(text, str) and text.startswith("@"):
        return "@" + _preset_name(text)
    return parse_rule(text, deny=what == "deny").text


def _preset_name(text: str) -> str:
    name, known = text[1:].strip().lower(), [*presets(), PACKAGE_INDEXES]
    if name not in known:
        import difflib

        near = difflib.get_close_matches(name[:80], known, n=1, cutoff=0.5)
        hint = f"did you mean '@{near[0]}'?" if near else f"known are {', '.join('@' + item for item in known)}"
        raise SpecError(f"there is no preset {shown(text)}", hint=hint)
    return name


def expand(texts: Iterable[str], *, deny: bool = False) -> list[Rule]:
    """The rules that texts stand for, presets opened."""
    found: list[Rule] = []
    for text in texts:
        if not text.startswith("@"):
            found.append(parse_rule(text, deny=deny))
            continue
        name = _preset_name(text)
        if name == PACKAGE_INDEXES:
            from .indexes import package_indexes

            found += package_indexes().rules_for(deny=deny)
        else:
            found += [parse_rule(rule, deny=deny, source=f"@{name}") for rule in presets()[name].rules]
    return found


def warnings(texts: Iterable[str]) -> tuple[str, ...]:
    """What a user should know about the presets among these."""
    if f"@{PACKAGE_INDEXES}" not in texts:
        return ()
    from .indexes import package_indexes

    return package_indexes().warnings


def policy_of(spec: NetworkSpec) -> Policy:
    """The policy that a spec asks for, now. SpecError if it names what is not known (any more)."""
    check_passthrough(spec)
    rules = [*expand(spec.allow), *expand(spec.deny, deny=True)]
    return Policy(rules, asks=spec.asks, learn=spec.mode == "learn", by_address=spec.by_address)
