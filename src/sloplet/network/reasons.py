"""Why something was refused, in one sentence that says what to ask for instead."""

from __future__ import annotations

from .addresses import NAMES, Address, opens, special
from .lookup import Lookup
from .names import HOST, shown
from .rules import Rule, rule_text

_MOST_SHOWN = 3


def denied(what: str, port: int, rule: Rule) -> str:
    return f"{what}:{port} is denied by the rule '{rule.label}'"


def no_name(name: str) -> str:
    return f"{shown(name)} is neither a host name nor an address"


def too_many_names(name: str) -> str:
    """See agent/names.h."""
    return (
        f"{name} gets no address: the sandbox has looked up 16384 different names, and there are no more than that for "
        "its life; use names that it knows, or a new sandbox"
    )


def no_port(what: str, port: int) -> str:
    return f"{what}: {port} is not a port"


def loopback(name: str, port: int) -> str:
    return f"{name} is the sandbox itself; ask for '{HOST}:{port}' and use that name for the machine it runs on"


def host_itself(port: int) -> str:
    return (
        f"{HOST}:{port} is this machine's own loopback, which only a rule opens that names it; ask for '{HOST}:{port}'"
    )


def unknown_name(rules: Lookup, name: str, port: int, *, nothing: bool) -> str:
    """No rule decides about a name on this port."""
    if name == HOST:
        return host_itself(port)
    wanted = rule_text(name, port)
    elsewhere = [rule for _, found in rules.of_name(name) for rule in found if not rule.deny]
    if elsewhere:
        rule = elsewhere[0]
        if rule.host.text.partition(":")[0] == name:
            return f"{name} is allowed on {rule.host.ports.words()} only; ask for '{wanted}'"
        return f"'{rule.label}' allows {name} on {rule.host.ports.words()} only; ask for '{wanted}'"
    if below := rules.below(name):
        return f"'{below}' does not cover {name} itself; ask for '{wanted}'"
    if nothing:
        return f"this sandbox may reach nothing yet; ask for '{wanted}' to be allowed"
    if near := rules.near(name):
        return f"no rule allows {name}, the nearest is '{near}'; ask for '{wanted}'"
    return f"no rule allows {name}; ask for '{wanted}' to be allowed"


def unknown_address(rules: Lookup, address: Address, port: int) -> str:
    """No rule decides about an address on this port, or none may open it."""
    wanted, around, found = rule_text(str(address), port), rules.holding(address), special(address)
    if found is not None and found.what == NAMES and not around:
        return f"{address} stands for no name that was looked up here; look the name up again, and connect to that"
    if found is not None:
        wide = [rule for rule in around if rule.port(port) >= 0 and not _inside(rule, address)]
        if wide:
            return f"{address} is {found.what}, which '{wide[0].label}' does not open; ask for '{wanted}'"
    if around and (found is None or _inside(around[0], address)):
        return f"'{around[0].label}' allows {address} on {around[0].host.ports.words()} only; ask for '{wanted}'"
    if found is not None:
        return f"{address} is {found.what}, which only a rule by address opens; ask for '{wanted}'"
    return f"no rule allows the address {address}, and rules for names do not; use a name, or ask for '{wanted}'"


def _inside(rule: Rule, address: Address) -> bool:
    return rule.host.net is not None and opens(rule.host.net, address)


def leads_to(name: str, address: Address, port: int, why: str) -> str:
    return f"{name} leads to {address}, which is {why}; ask for '{rule_text(str(address), port)}' if that is meant"


def leads_elsewhere(name: str, address: Address, port: int) -> str:
    wanted, other = rule_text(name, port), rule_text(str(address), port)
    return f"{name} leads to {address}, and no rule allows either; ask for '{wanted}' or '{other}'"


def own_address(name: str, address: str, port: int) -> str:
    what = f"{name} leads to {address}, which is" if name else f"{address} is"
    return (
        f"{what} this machine's own, which only a rule for that very address opens; ask for "
        f"'{rule_text(address, port)}' if that is meant"
    )


def leads_to_denied(name: str, address: Address, rule: Rule) -> str:
    return f"{name} leads to {address}, which the rule '{rule.label}' denies"


def ambiguous_path(name: str) -> str:
    return f"{name}: servers may read this path in different ways; write it plainly, without encoded dots or slashes"


def denied_request(name: str, method: str, path: str, rule: Rule) -> str:
    return f"{method} {_cut(path)} on {name} is denied by the rule '{rule.label}'"


def unknown_request(name: str, port: int, method: str, path: str, rules: list[Rule]) -> str:
    allowing = [rule.label for rule in rules if not rule.deny]
    scheme = {80: "http://", 443: "https://"}.get(port, "")
    where = name if scheme else f"{name}:{port}"
    wanted = f"{method} {scheme}{where}{_cut(path)}"
    if not allowing:
        return f"no rule allows {method} {_cut(path)} on {name}; ask for '{wanted}'"
    return f"{name}:{port} is allowed for {_some(allowing)} only; ask for '{wanted}'"


def no_requests(what: str, rules: list[str]) -> str:
    """``what`` it is instead."""
    return f"{_some(rules)} {'is' if len(rules) == 1 else 'are'} about requests, which cannot be seen here: {what}"


def _some(rules: list[str]) -> str:
    texts = list(dict.fromkeys(f"'{rule}'" for rule in rules))
    return ", ".join(texts[:_MOST_SHOWN]) + (", ..." if len(texts) > _MOST_SHOWN else "")


def _cut(path: str) -> str:
    text = path.partition("?")[0].encode("ascii", "backslashreplace").decode()
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= 120 else text[:117] + "..."
