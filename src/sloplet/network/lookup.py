"""Finding the rules that speak of a name or an address, the most specific first, without looking at the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .addresses import Address, embedded, opens
from .names import HOST
from .rules import Rule

#: How exactly a rule names host, port, path and method.
Rank = tuple[int, int, int, int]
Ranked = list[tuple[Rank, Rule]]
_EXACT = 1000  # more than any name has letters
_AS_V6 = 96  # so that 10.0.0.0/8 and the same network inside of an IPv6 address weigh the same


class Lookup:
    """All rules of a policy, by what they speak of."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._exact: dict[str, list[Rule]] = {}
        self._below: dict[str, list[Rule]] = {}
        self._every: list[Rule] = []
        self._nets: dict[tuple[int, int], dict[int, list[Rule]]] = {}
        self._near: dict[str, str] = {}
        for rule in rules:
            self._add(rule)
        self._lengths = {
            version: sorted((length for v, length in self._nets if v == version), reverse=True) for version in (4, 6)
        }

    def _add(self, rule: Rule) -> None:
        host = rule.host
        if host.net is not None:
            length, shift = host.net.prefixlen, host.net.max_prefixlen - host.net.prefixlen
            table = self._nets.setdefault((host.net.version, length), {})
            table.setdefault(int(host.net.network_address) >> shift, []).append(rule)
            return
        if not host.name:
            self._every.append(rule)
            return
        (self._below if host.wild else self._exact).setdefault(host.name, []).append(rule)
        if not rule.deny:
            for suffix in (host.name, *_suffixes(host.name)):
                if "." in suffix:
                    self._near[suffix] = min(rule.text, self._near.get(suffix, rule.text))

    def of_name(self, name: str) -> Iterator[tuple[int, list[Rule]]]:
        """(how exactly they name it, rules), most exact first. The host's own name is meant only where it stands."""
        if (rules := self._exact.get(name)) is not None:
            yield _EXACT, rules
        if name == HOST:
            return
        if self._below:
            for suffix in _suffixes(name):
                if (rules := self._below.get(suffix)) is not None:
                    yield len(suffix), rules
        if self._every:
            yield 0, self._every

    def of_address(self, address: Address) -> Iterator[tuple[int, Rule]]:
        """The rules that may decide about an address: what is denied counts for every form of it, what is allowed
        only if it may open it."""
        for length, rule in self._holding(address):
            if rule.deny or (rule.host.net is not None and opens(rule.host.net, address)):
                yield length, rule
        inner = embedded(address)
        if inner is not None:
            yield from ((length, rule) for length, rule in self._holding(inner) if rule.deny)

    def _holding(self, address: Address) -> Iterator[tuple[int, Rule]]:
        value, bits = int(address), address.max_prefixlen
        extra = _AS_V6 if address.version == 4 else 0
        for length in self._lengths[address.version]:
            for rule in self._nets[address.version, length].get(value >> (bits - length), ()):
                yield length + extra, rule

    def holding(self, address: Address) -> list[Rule]:
        """What is allowed around an address, whether it may open it or not; for explanations."""
        return [rule for _, rule in self._holding(address) if not rule.deny]

    def below(self, name: str) -> str:
        """The rule that allows what is below a name, or ""."""
        return next((rule.text for rule in self._below.get(name, ()) if not rule.deny), "")

    def near(self, name: str) -> str:
        """The text of a rule that allows a relative of a name, or ""."""
        return next((self._near[suffix] for suffix in (name, *_suffixes(name)) if suffix in self._near), "")


def _suffixes(name: str) -> Iterator[str]:
    """``b.c`` and ``c`` of ``a.b.c``."""
    at = name.find(".")
    while at >= 0:
        yield name[at + 1 :]
        at = name.find(".", at + 1)


def rank(host: int, port: int, rule: Rule) -> Rank:
    if not rule.of_requests:
        return host, port, 0, 0
    path = 0 if rule.path is None else 1 + len(rule.path) - rule.path.count("*")
    return host, port, path, rule.methods is not None


def weigh(allows: Ranked, denies: Ranked) -> Rule | None:
    """The rule that decides among those that match. One that allows does so only if it is more specific than each that
    denies: in no respect less, and in one more."""
    good = [item for item in allows if all(_beats(item[0], rank) for rank, _ in denies)] if denies else allows
    if good:
        return max(good, key=lambda item: item[0])[1]
    if not denies:
        return None
    best = max((rank for rank, _ in allows), default=(-1, -1, -1, -1))
    standing = [item for item in denies if not _beats(best, item[0])] or denies
    return max(standing, key=lambda item: item[0])[1]


def _beats(one: Rank, other: Rank) -> bool:
    return one != other and all(mine >= its for mine, its in zip(one, other, strict=True))
