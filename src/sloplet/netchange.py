"""A change of a policy by its parts. Whoever holds the sandbox makes it, of the policy that it has in that moment: of
two who change different things at the same time neither takes the other's change away."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import SpecError
from .netspec import NetworkSpec, check_network


@dataclass(frozen=True)
class NetworkChange:
    """First ``allow`` and ``deny`` take the place of the lists that are there (None: they stay), then ``remove`` is
    taken out of both, then rules are added. What is added to one list is taken out of the other."""

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] | None = None
    remove: tuple[str, ...] = ()
    add_allow: tuple[str, ...] = ()
    add_deny: tuple[str, ...] = ()

    def applied(self, known: NetworkSpec) -> NetworkSpec:
        """What becomes of a policy. SpecError: for what is no rule, and for one to be removed that is not there."""
        allow = known.allow if self.allow is None else _canonical(self.allow, "allow")
        deny = known.deny if self.deny is None else _canonical(self.deny, "deny")
        more_allow, more_deny = _canonical(self.add_allow, "allow"), _canonical(self.add_deny, "deny")
        gone = _canonical(self.remove, "deny")
        for rule in gone:
            if rule not in (*allow, *deny):
                hint = f"it has {', '.join((*allow, *deny)[:20]) or 'none'}"
                raise SpecError(f"there is no rule {rule!r} to remove", hint=hint)
        return check_network(
            replace(
                known,
                allow=(*(rule for rule in allow if rule not in (*gone, *more_deny)), *more_allow),
                deny=(*(rule for rule in deny if rule not in (*gone, *more_allow)), *more_deny),
            )
        )

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: None if value is None else list(value) for name, value in values.items()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> NetworkChange:
        """What ``to_dict`` gave; SpecError for anything else."""
        known = {field.name for field in fields(NetworkChange)}
        values: dict[str, Any] = {}
        for name, texts in data.items():
            whole = texts is None and name in ("allow", "deny")
            if name not in known or not (whole or _is_texts(texts)):
                raise SpecError(f"a change of a network has no {name[:80]!r} like that")
            values[name] = None if whole else tuple(texts)
        return NetworkChange(**values)


def _canonical(rules: Iterable[str], what: str) -> tuple[str, ...]:
    from .network.presets import check_rule

    return tuple(check_rule(rule, what) for rule in rules)


def _is_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)
