"""Rules -> verdicts. Pure: nothing is resolved, read or dialled here; docs/policy.md says what the rules mean.

Who serves a connection asks, in this order: ``judge`` (a name) or ``judge_address`` (a literal address), then for
names ``check_addresses`` of what they resolved to, and ``judge_request`` where ``inspects`` says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from . import paths, reasons
from .addresses import LOCAL, Address, parse, special
from .lookup import Lookup, Ranked, rank, weigh
from .names import HOST, BadName, is_loopback, is_number, normal
from .rules import Rule, parse_rule, rule_text

__all__ = ["Policy", "Verdict", "rule_text"]

DEFAULT = "default"
LEARN = "learn"
BY_ADDRESS = "by address"
_MOST_KNOWN = 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """``allow`` None: no rule decides, whoever is to be asked may. ``rule`` is the rule's text, or "default" ("learn"
    in learn mode). ``reason``: one sentence that a model can act on."""

    allow: bool | None
    rule: str
    reason: str


class Policy:
    """What a sandbox may reach. Immutable; made by ``presets.policy_of(spec)``."""

    def __init__(
        self, rules: Iterable[Rule] = (), *, asks: bool = False, learn: bool = False, by_address: bool = False
    ) -> None:
        self.rules = tuple(rules)
        self._lookup = Lookup(self.rules)
        self._asks, self._learn = asks, learn
        #: Where a name that no rule decides about may lead to, if names are judged by that.
        self._places = [rule.host for rule in self.rules if by_address and rule.host.net is not None and not rule.deny]
        self._nothing = all(rule.deny for rule in self.rules)
        #: What allows some requests of a host only: texts by what verdicts call them.
        self.of_requests = {rule.label: rule.text for rule in self.rules if rule.of_requests and not rule.deny}
        self._known: dict[tuple[str, int], Verdict] = {}  # the same question has the same answer

    @staticmethod
    def of(
        allow: Iterable[str] = (),
        deny: Iterable[str] = (),
        *,
        asks: bool = False,
        learn: bool = False,
        by_address: bool = False,
    ) -> Policy:
        """From texts, without presets."""
        rules = [*(parse_rule(text) for text in allow), *(parse_rule(text, deny=True) for text in deny)]
        return Policy(rules, asks=asks, learn=learn, by_address=by_address)

    def judge(self, name: str, port: int) -> Verdict:
        """A connection to a name (a text that is an address in any notation is judged as that address)."""
        verdict = self._known.get((name, port))
        if verdict is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            verdict = self._known[name, port] = self._judge(name, port)
        return verdict

    def _judge(self, name: str, port: int) -> Verdict:
        try:
            clean = normal(name)
        except BadName:
            return self.judge_address(name, port)
        if not 1 <= port <= 65535:
            return Verdict(False, DEFAULT, reasons.no_port(clean, port))
        if is_loopback(clean):
            return Verdict(False, DEFAULT, reasons.loopback(clean, port))
        rule = self._of_connection(clean, port)
        if rule is None:
            return self._undecided(clean, port)
        if rule.deny:
            return Verdict(False, rule.label, reasons.denied(clean, port, rule))
        return Verdict(True, rule.label, f"allowed by '{rule.label}'")

    def judge_address(self, address: str, port: int) -> Verdict:
        """A connection to a literal address: by rules for addresses only."""
        parsed = parse(address)
        if parsed is None:
            return Verdict(False, DEFAULT, reasons.no_name(address))
        if not 1 <= port <= 65535:
            return Verdict(False, DEFAULT, reasons.no_port(str(parsed), port))
        rule = self._of_address(parsed, port)
        if rule is not None:
            if rule.deny:
                return Verdict(False, rule.label, reasons.denied(str(parsed), port, rule))
            return Verdict(True, rule.label, f"allowed by '{rule.label}'")
        if special(parsed) is None:
            if self._learn:
                return Verdict(True, LEARN, "everything public is allowed while it is learned")
            if self._asks:
                return Verdict(None, DEFAULT, reasons.unknown_address(self._lookup, parsed, port))
        return Verdict(False, DEFAULT, reasons.unknown_address(self._lookup, parsed, port))

    def check_addresses(self, name: str, port: int, addresses: Iterable[str]) -> tuple[list[str], Verdict]:
        """Of what an allowed name resolved to, in that order, the addresses that may be dialled."""
        try:
            clean = normal(name)
        except BadName:
            return [], Verdict(False, DEFAULT, reasons.no_name(name))
        decider = self._of_connection(clean, port)
        allowed: list[str] = []
        refusal: Verdict | None = None
        for text in addresses:
            parsed = parse(text)
            if parsed is None:
                continue
            found = self._refusal(clean, port, parsed, decider)
            if found is None:
                allowed.append(text)
            refusal = refusal or found
        if allowed:
            other = LEARN if self._learn else BY_ADDRESS if self._places else DEFAULT
            label = decider.label if decider is not None else other
            return allowed, Verdict(True, label, f"allowed by '{label}'")
        return [], refusal or Verdict(False, DEFAULT, f"{clean} has no address")

    def check_own(self, name: str, address: str, port: int) -> Verdict | None:
        """Of an address that is the machine's own, and may be dialled as far as its range goes (``name``: what led to
        it, "" for nothing): why it is not, or None. A public one is opened only by a rule for that very address, or by
        the host's own configuration, which names a mirror on it."""
        parsed = parse(address)
        if parsed is not None and special(parsed) is not None:
            return None
        rule = self._of_address(parsed, port) if parsed is not None else None
        if rule is not None and not rule.deny and rule.host.net is not None and rule.host.net.num_addresses == 1:
            return None
        decider = self._of_connection(name, port) if name else None
        if decider is not None and not decider.deny and decider.local:
            return None
        return Verdict(False, DEFAULT, reasons.own_address(name, address, port))

    @property
    def sees_addresses(self) -> bool:
        """Whether it matters which addresses a name leads to, beyond their being public."""
        return bool(self._places) or any(rule.deny and rule.host.net is not None for rule in self.rules)

    def may_resolve(self, name: str) -> bool:
        """Is there a port on which it could be allowed, or asked? If not, the name never leaves the host."""
        try:
            clean = normal(name)
        except BadName:
            return False
        if is_loopback(clean):
            return False
        rules = [rule for _, found in self._lookup.of_name(clean) for rule in found]
        # between two of these ports every verdict is the same
        ports = {1} | {edge for rule in rules for low, high in rule.host.ports.spans for edge in (low, high + 1)}
        for port in ports:
            decider = self._of_connection(clean, port) if port <= 65535 else None
            if (not decider.deny) if decider is not None else (self._open(clean) and port <= 65535):
                return True
        return False

    def inspects(self, name: str, port: int) -> bool:
        """Do rules look at requests there?"""
        try:
            found = self._matching(normal(name), port)
        except BadName:
            return False
        if any(rule.deny and rule.of_requests for _, rule in found):
            return True
        if all(not rule.of_requests for _, rule in found):
            return False
        plain = [item for item in found if not item[1].of_requests]
        denies = [item for item in plain if item[1].deny]
        decider = weigh([item for item in plain if not item[1].deny], denies)
        return decider.deny if decider is not None else True

    def request_rules(self, name: str, port: int) -> list[str]:
        """Where ``inspects``: the rules that it is because of."""
        found = [rule for _, rule in self._matching(normal(name), port) if rule.of_requests]
        return [rule.label for rule in found if rule.deny] or [rule.label for rule in found]

    def judge_request(self, name: str, port: int, method: str, path: str) -> Verdict:
        """One request on an allowed connection. None: no rule decides; where the connection was let through by an
        answer, so is the request."""
        try:
            clean = normal(name)
        except BadName:
            return self.judge_address(name, port)
        if not self.inspects(clean, port):
            return self.judge(clean, port)
        forms = paths.forms(path)
        if not forms:
            return Verdict(False, DEFAULT, reasons.ambiguous_path(clean))
        verdicts = [self._of_form(clean, port, method, form) for form in forms]
        return min(verdicts, key=lambda verdict: (verdict.allow is True, verdict.allow is None))

    # -- the parts -------------------------------------------------------------------------------------

    def _open(self, name: str) -> bool:
        """Could a name that no rule decides about be let through all the same?"""
        return (self._asks or self._learn or bool(self._places)) and name != HOST

    def _undecided(self, name: str, port: int) -> Verdict:
        if self._learn and name != HOST:
            return Verdict(True, LEARN, "everything public is allowed while it is learned")
        if name != HOST and any(host.ports.match(port) >= 0 for host in self._places):
            return Verdict(True, BY_ADDRESS, "it is judged by the addresses that it leads to")
        reason = reasons.unknown_name(self._lookup, name, port, nothing=self._nothing)
        return Verdict(None if self._asks and name != HOST else False, DEFAULT, reason)

    def _matching(self, name: str, port: int) -> Ranked:
        found = []
        for host, rules in self._lookup.of_name(name):
            for rule in rules:
                exact = rule.host.ports.match(port)
                if exact >= 0:
                    found.append((rank(host, exact, rule), rule))
        return found

    def _of_connection(self, name: str, port: int) -> Rule | None:
        """What decides whether there may be a connection at all: some request on it must be possible."""
        found = self._matching(name, port)
        allows = [item for item in found if not item[1].deny]
        return weigh(allows, [item for item in found if item[1].deny and not item[1].of_requests])

    def _of_form(self, name: str, port: int, method: str, path: str) -> Verdict:
        found = self._matching(name, port)
        taken = [item for item in found if item[1].takes(method, path)]
        best = weigh([item for item in taken if not item[1].deny], [item for item in taken if item[1].deny])
        if best is not None:
            if best.deny:
                return Verdict(False, best.label, reasons.denied_request(name, method, path, best))
            return Verdict(True, best.label, f"allowed by '{best.label}'")
        if self._learn and name != HOST:
            return Verdict(True, LEARN, "everything public is allowed while it is learned")
        reason = reasons.unknown_request(name, port, method, path, [rule for _, rule in found])
        return Verdict(None if self._asks else False, DEFAULT, reason)

    def _of_address(self, address: Address, port: int) -> Rule | None:
        allows: Ranked = []
        denies: Ranked = []
        for length, rule in self._lookup.of_address(address):
            exact = rule.host.ports.match(port)
            if exact >= 0:
                (denies if rule.deny else allows).append((rank(length, exact, rule), rule))
        return weigh(allows, denies)

    def _refusal(self, name: str, port: int, address: Address, decider: Rule | None) -> Verdict | None:
        """Why an address that a name led to is not dialled; None if it is."""
        by_address = self._of_address(address, port)
        if by_address is not None and by_address.deny:
            return Verdict(False, by_address.label, reasons.leads_to_denied(name, address, by_address))
        found = special(address)
        if name == HOST:
            good = decider is not None and not decider.deny and found is not None and "loopback" in found.what
            return None if good else Verdict(False, DEFAULT, reasons.host_itself(port))
        if decider is None and by_address is None and self._places and not self._learn:
            return Verdict(False, DEFAULT, reasons.leads_elsewhere(name, address, port))
        if found is None or by_address is not None:
            return None
        if decider is not None and decider.local and found.what in LOCAL:
            return None
        return Verdict(False, DEFAULT, reasons.leads_to(name, address, port, found.what))


def is_address(text: str) -> bool:
    """Is a text from inside an address rather than a name, in whatever notation?"""
    return ":" in text or is_number(text.lower().removesuffix("."))
