"""The host part of a rule: a name, ``*.name`` or ``*``, or a network of addresses; and ports."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from ..errors import SpecError
from .addresses import Net, parse
from .names import HOST, BadName, from_user, is_loopback, is_number, shown

#: How exactly a rule names a port. Higher decides first.
ANY, DEFAULT, RANGE, LISTED = range(4)
NO_MATCH = -1
WEB = ((80, 80), (443, 443))
_PORTS_RE = re.compile(r"[0-9]{1,5}(?:-[0-9]{1,5})?(?:,[0-9]{1,5}(?:-[0-9]{1,5})?)*\Z", re.ASCII)
MAX_SPANS = 64


@dataclass(frozen=True)
class Ports:
    """Which ports; ``text`` is "" where the rule names none, "*" for all."""

    text: str
    spans: tuple[tuple[int, int], ...]
    every: bool = False  #: named or not, all of them match

    def match(self, port: int) -> int:
        """How exactly this names the port; NO_MATCH if it does not."""
        if self.every:
            return DEFAULT if not self.text else ANY
        best = NO_MATCH
        for low, high in self.spans:
            if low <= port <= high:
                best = max(best, LISTED if low == high else RANGE)
        return DEFAULT if best != NO_MATCH and not self.text else best

    def cover(self, other: Ports) -> bool:
        """Are all of the other's among these?"""
        if self.every or other.every:
            return self.every
        return all(any(low <= first and last <= high for low, high in self.spans) for first, last in other.spans)

    def words(self) -> str:
        """As part of a sentence."""
        if self.every:
            return "every port"
        texts = [str(low) if low == high else f"{low} to {high}" for low, high in self.spans]
        return f"port {texts[0]}" if len(texts) == 1 and "to" not in texts[0] else "ports " + _and(texts)


def _and(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


#: What no port means: for what is allowed the web's two, for what is denied all.
ALLOWED = Ports("", WEB)
EVERY = Ports("", (), every=True)
ALL = Ports("*", (), every=True)


@dataclass(frozen=True)
class Host:
    """``net`` is None for names. ``name`` is "" for ``*``; ``wild``: everything below the name, not the name itself."""

    text: str  #: canonical, with the ports if any were named
    ports: Ports
    name: str = ""
    wild: bool = False
    net: Net | None = None

    def matches(self, name: str, port: int) -> bool:
        """For a name in its normal spelling."""
        if self.net is not None or self.ports.match(port) == NO_MATCH:
            return False
        return name.endswith("." + self.name) if self.wild and self.name else self.wild or name == self.name


def overlap(one: Host, other: Host) -> bool:
    """Is there a name that both mean?"""
    if one.net is not None or other.net is not None:
        return False
    first, second = (("." if host.wild and host.name else "") + host.name for host in (one, other))
    if one.wild and other.wild:
        return first.endswith(second) or second.endswith(first)
    return second.endswith(first) if one.wild else first.endswith(second) if other.wild else first == second


def covers(one: Host, other: Host) -> bool:
    """Does one mean every name and port that the other means?"""
    if one.net is not None or other.net is not None or not one.ports.cover(other.ports):
        return False
    if one.wild:
        return not one.name or other.name.endswith("." + one.name) or (other.wild and other.name == one.name)
    return not other.wild and other.name == one.name


def parse_host(text: object, *, ports: Ports = EVERY) -> Host:
    """The host patterns of secrets and of passthrough: a name or ``*.name``, and ports. No addresses, no bare ``*``."""
    if not isinstance(text, str):
        raise SpecError(f"{shown(str(text))} is not a host name", hint="for example 'api.github.com'")
    host = read_host(text, ports)
    if host.net is not None or not host.name:
        raise SpecError(f"{shown(text)} does not name a host", hint="a name or '*.name', for example 'api.github.com'")
    return host


def read_host(text: str, default: Ports) -> Host:
    """``host[:ports]``; SpecError with what to write instead."""
    if not text or text != text.strip() or any(char.isspace() or not char.isprintable() for char in text):
        raise SpecError(
            f"{shown(text)} is not a host", hint="write for example 'api.github.com' or '*.example.com:8443'"
        )
    if "@" in text:
        raise SpecError(
            f"{shown(text.rpartition('@')[2])} follows a user name", hint="leave out what stands before '@'"
        )
    if (found := _address(text, default)) is not None:
        return found
    host, colon, ports = text.partition(":")
    if colon and host.lower() in ("http", "https") and not ports[:1].isdecimal():
        raise SpecError(f"{shown(text)} lacks slashes", hint=f"write '{host.lower()}://' and a host")
    wanted = _ports(text, ports) if colon else default
    suffix = f":{wanted.text}" if wanted.text else ""
    if host == "*":
        return Host("*" + suffix, wanted, wild=True)
    wild = host.startswith("*.")
    name = _name(text, host[2:] if wild else host)
    if name == HOST and not wild and (wanted.every or not wanted.text):
        raise SpecError(f"{shown(text)} names no port", hint=f"write {HOST}:PORT: one port of this machine's loopback")
    return Host(("*." if wild else "") + name + suffix, wanted, name, wild)


def _name(text: str, host: str) -> str:
    if "*" in host:
        good = host.replace("*", "").strip(".") or "example.com"
        raise SpecError(
            f"{shown(text)}: '*' stands for whole labels at the front only", hint=f"write '*.{good}' or '*'"
        )
    try:
        name = from_user(host)
    except BadName as error:
        hint = "write for example 'api.github.com', '*.example.com' or '10.0.0.0/8'"
        raise SpecError(f"{shown(text)}: {error}", hint=hint) from None
    if is_loopback(name):
        raise SpecError(
            f"{shown(text)} is the sandbox itself when it is used inside, and needs no rule",
            hint=f"this machine's loopback is {HOST}:PORT",
        )
    return name


def _address(text: str, default: Ports) -> Host | None:
    """``1.2.3.4``, ``10.0.0.0/8:5432``, ``fd00::/8``, ``[fd00::1]:80``, ``[fd00::]/8:80``; None if it is a name."""
    bare, prefix, ports = _split_address(text)
    if "%" in bare and ":" in bare:
        raise SpecError(f"{shown(text)} has a zone", hint="write the address without a zone (what follows '%')")
    numeric = ":" in bare or is_number(bare.lower().removesuffix("."))
    if not numeric:
        if prefix is not None:
            raise SpecError(f"{shown(text)} is not a network", hint="write for example '10.0.0.0/8'")
        return None
    address = parse(bare)
    if address is None:
        raise SpecError(f"{shown(text)} is neither a name nor an address", hint="write for example '192.0.2.7'")
    if address.version == 4 and str(address) != bare:
        raise SpecError(f"{shown(text)} is an odd way to write {address}", hint=f"write '{address}'")
    net = _net(text, str(address), prefix)
    wanted = default if ports is None else _ports(text, ports)
    suffix = f":{wanted.text}" if wanted.text else ""
    shape = f"[{net.network_address}]" if net.version == 6 else str(net.network_address)
    length = "" if net.prefixlen == net.max_prefixlen else f"/{net.prefixlen}"
    return Host(shape + length + suffix, wanted, net=net)


def _split_address(text: str) -> tuple[str, str | None, str | None]:
    """(address, prefix length, ports) of what may be an address."""
    if text.startswith("["):
        inner, closed, rest = text[1:].partition("]")
        inner, slash, prefix = inner.partition("/")
        if not slash and rest.startswith("/"):
            prefix, colon, ports = rest[1:].partition(":")
            slash = "/"
        else:
            junk, colon, ports = rest.partition(":")
            closed = closed if not junk else ""
        if not closed:
            raise SpecError(f"{shown(text)} is not an address", hint="write for example '[fd00::1]:443'")
        return inner, prefix if slash else None, ports if colon else None
    if text.count(":") > 1:
        bare, slash, prefix = text.partition("/")
        prefix, colon, ports = prefix.partition(":")
        return bare, prefix if slash else None, ports if colon else None
    host, colon, ports = text.partition(":")
    bare, slash, prefix = host.partition("/")
    return bare, prefix if slash else None, ports if colon else None


def _net(text: str, address: str, prefix: str | None) -> Net:
    if prefix is None:
        return ipaddress.ip_network(address)
    if not (prefix.isascii() and prefix.isdecimal() and len(prefix) <= 3):
        raise SpecError(f"{shown(text)}: {shown(prefix)} is not a prefix length", hint="write for example '10.0.0.0/8'")
    try:
        loose = ipaddress.ip_network(f"{address}/{prefix}", strict=False)
    except ValueError:
        raise SpecError(
            f"{shown(text)} is not a network", hint="write for example '10.0.0.0/8' or 'fd00::/8'"
        ) from None
    if str(loose.network_address) != address:
        raise SpecError(f"{shown(text)} is an address within {loose}", hint=f"write '{loose}' or '{address}'")
    return loose


def _ports(text: str, ports: str) -> Ports:
    if ports == "*":
        return ALL
    hint = "ports are 1 to 65535: ':443', ':80,443', ':8000-8100' or ':*'"
    if not _PORTS_RE.match(ports):
        raise SpecError(f"{shown(text)}: {shown(ports)} is not a port", hint=hint)
    spans = set()
    for part in ports.split(","):
        low, _, high = part.partition("-")
        span = (int(low), int(high or low))
        if not 1 <= span[0] <= span[1] <= 65535:
            raise SpecError(f"{shown(text)}: {shown(part)} is not a port", hint=hint)
        spans.add(span)
    if len(spans) > MAX_SPANS:
        raise SpecError(f"{shown(text)[:80]} has too many ports", hint=f"at most {MAX_SPANS}, or ':*'")
    ordered = tuple(sorted(spans))
    return Ports(",".join(str(low) if low == high else f"{low}-{high}" for low, high in ordered), ordered)
