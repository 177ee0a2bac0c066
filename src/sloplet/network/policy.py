"""Rules -> verdicts. Pure: nothing is resolved, read or dialled here; docs/policy.md says what the rules mean.

Who serves a connection asks, in this order: ``judge`` (a name) or ``judge_address`` (a literal address), then for
names ``check_addresses`` of what they resolved to, and ``judge_request`` where ``inspects`` says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .rules import Rule, parse_rule, rule_text

__all__ = ["Policy", "Verdict", "rule_text"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``allow`` None: no rule decides, whoever is to be asked may. ``rule`` is the rule's text, or "default" ("learn"
    in learn mode). ``reason``: one sentence that a model can act on."""

    allow: bool | None
    rule: str
    reason: str


class Policy:
    """What a sandbox may reach. Immutable; made by ``presets.policy_of(spec)``."""

    def __init__(self, rules: Iterable[Rule] = (), *, asks: bool = False, learn: bool = False) -> None:
        raise NotImplementedError

    @staticmethod
    def of(allow: Iterable[str] = (), deny: Iterable[str] = (), *, asks: bool = False, learn: bool = False) -> Policy:
        """From texts, without presets."""
        rules = [*(parse_rule(text) for text in allow), *(parse_rule(text, deny=True) for text in deny)]
        return Policy(rules, asks=asks, learn=learn)

    def judge(self, name: str, port: int) -> Verdict:
        """A connection to a name (a text that is an address in any notation is judged as that address)."""
        raise NotImplementedError

    def judge_address(self, address: str, port: int) -> Verdict:
        """A connection to a literal address: by rules for addresses only."""
        raise NotImplementedError

    def check_addresses(self, name: str, port: int, addresses: Iterable[str]) -> tuple[list[str], Verdict]:
        """Of what an allowed name resolved to, in that order, the addresses that may be dialled."""
        raise NotImplementedError

    def may_resolve(self, name: str) -> bool:
        """Is there a port on which it could be allowed, or asked? If not, the name never leaves the host."""
        raise NotImplementedError

    def inspects(self, name: str, port: int) -> bool:
        """Do rules look at requests there?"""
        raise NotImplementedError

    def judge_request(self, name: str, port: int, method: str, path: str) -> Verdict:
        """One request on an allowed connection. None: no rule decides; where the connection was let through by an
        answer, so is the request."""
        raise NotImplementedError
