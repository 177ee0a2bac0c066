"""Addresses: every notation of one, and which of them are special (private, the host's, the cloud's, nobody's).

A special address is dialled only if a rule by address that lies inside the same range allows it: ``0.0.0.0/0`` opens
nothing of these, ``10.0.0.0/8`` opens that network, and a metadata service is opened by its own address only.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Net = ipaddress.IPv4Network | ipaddress.IPv6Network

_PART_RE = re.compile(r"(?:0[xX]([0-9a-fA-F]*)|(0[0-7]*)|([1-9][0-9]*))\Z", re.ASCII)
_MAX_TEXT = 80


def parse(text: str) -> Address | None:
    """The address that this text is for inet_aton or inet_pton, brackets and zones removed; None if it is none."""
    if len(text) > _MAX_TEXT or not text.isascii():
        return None
    if text.startswith("[") and text.endswith("]"):
        return _v6(text[1:-1])
    return _v6(text) if ":" in text else _v4(text)


def _v4(text: str) -> ipaddress.IPv4Address | None:
    parts = text.removesuffix(".").split(".")
    if len(parts) > 4:
        return None
    numbers = []
    for part in parts:
        match = _PART_RE.match(part)
        if match is None:
            return None
        base, digits = (16, match[1]) if match[1] is not None else (8, match[2]) if match[2] else (10, match[3])
        numbers.append(int(digits or "0", base))
    *heads, last = numbers
    if any(head > 255 for head in heads) or last >= 1 << 8 * (4 - len(heads)):
        return None
    value = last
    for index, head in enumerate(heads):
        value |= head << 8 * (3 - index)
    return ipaddress.IPv4Address(value)


def _v6(text: str) -> Address | None:
    try:
        address = ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        return None
    return address.ipv4_mapped or address  # a socket to ::ffff:1.2.3.4 speaks IPv4 with 1.2.3.4


@dataclass(frozen=True)
class Special:
    """A range that no name may lead to by itself."""

    net: Net
    what: str


def _table(text: str) -> tuple[Special, ...]:
    found = []
    for line in text.strip().splitlines():
        net, what = line.split(maxsplit=1)
        found.append(Special(ipaddress.ip_network(net), what))
    return tuple(sorted(found, key=lambda item: -item.net.prefixlen))


#: The narrowest range that holds an address says what it is.
SPECIAL: tuple[Special, ...] = _table("""
    0.0.0.0/8           an address of "this network"
    10.0.0.0/8          a private address
    100.64.0.0/10       a carrier's private address
    100.100.100.200/32  a cloud's metadata service
    127.0.0.0/8         a loopback address
    168.63.129.16/32    a cloud's metadata service
    169.254.0.0/16      a link-local address
    169.254.169.254/32  a cloud's metadata service
    169.254.170.2/32    a cloud's metadata service
    169.254.170.23/32   a cloud's metadata service
    172.16.0.0/12       a private address
    192.0.0.0/24        a reserved address
    192.0.0.192/32      a cloud's metadata service
    192.0.2.0/24        an address for documentation
    192.88.99.0/24      a reserved address
    192.168.0.0/16      a private address
    198.18.0.0/15       an address of the sandbox's own names
    198.51.100.0/24     an address for documentation
    203.0.113.0/24      an address for documentation
    224.0.0.0/4         a multicast address
    240.0.0.0/4         a reserved address
    255.255.255.255/32  the broadcast address
    ::/8                a reserved address
    ::/128              the unspecified address
    ::1/128             a loopback address
    64:ff9b:1::/48      an address of a local translator
    100::/8             a reserved address
    200::/7             a reserved address
    400::/6             a reserved address
    800::/5             a reserved address
    1000::/4            a reserved address
    2001::/23           a reserved address
    2001:db8::/32       an address for documentation
    2002::/16           a reserved address
    3fff::/20           an address for documentation
    4000::/3            a reserved address
    6000::/3            a reserved address
    8000::/3            a reserved address
    a000::/3            a reserved address
    c000::/3            a reserved address
    e000::/4            a reserved address
    f000::/5            a reserved address
    f800::/6            a reserved address
    fc00::/7            a private address
    fd00:ec2::254/128   a cloud's metadata service
    fd00:ec2::23/128    a cloud's metadata service
    fd20:ce::254/128    a cloud's metadata service
    fe00::/9            a reserved address
    fe80::/10           a link-local address
    fec0::/10           a private address
    ff00::/8            a multicast address
""")

_BY_VERSION = {
    version: tuple(
        (int(item.net.network_address), int(item.net.broadcast_address), item)
        for item in SPECIAL
        if item.net.version == version
    )
    for version in (4, 6)
}

#: What addresses are that stand for names inside.
NAMES = "an address of the sandbox's own names"
#: What a name may lead to if the host's own configuration names it as a mirror. Closed networks are known to use those
#: for documentation too.
LOCAL = ("a private address", "a carrier's private address", "a loopback address", "an address for documentation")


@functools.lru_cache(4096)
def special(address: Address) -> Special | None:
    """The special range that an address, or an IPv4 address inside of it, belongs to."""
    inner = embedded(address)
    if inner is not None:
        found = _range(inner)
        if found is not None:
            return found
        if int(address) >> 32 == _NAT64:  # how IPv6-only networks reach a public IPv4 address
            return None
    return _range(address)


def _range(address: Address) -> Special | None:
    value = int(address)
    for first, last, item in _BY_VERSION[address.version]:
        if first <= value <= last:
            return item
    return None


_NAT64 = 0x0064FF9B << 64
_ISATAP = (0x00005EFE, 0x02005EFE)


def embedded(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a translator or a tunnel would make of an IPv6 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    value, low = int(address), int(address) & 0xFFFFFFFF
    if value >> 32 in (0, 0xFFFF, 0xFFFF << 16, _NAT64) and low > 1:  # compatible, mapped, translated, NAT64
        return ipaddress.IPv4Address(low)
    if value >> 112 == 0x2002:  # 6to4
        return ipaddress.IPv4Address(value >> 80 & 0xFFFFFFFF)
    if value >> 96 == 0x20010000:  # Teredo
        return ipaddress.IPv4Address(low ^ 0xFFFFFFFF)
    if value >> 32 & 0xFFFFFFFF in _ISATAP:
        return ipaddress.IPv4Address(low)
    return None


def opens(net: Net, address: Address) -> bool:
    """May a rule for ``net`` allow this address? A special one only from inside its own range."""
    if address.version != net.version or address not in net:
        return False
    found = special(address)
    return found is None or (found.net.version == net.version and net.subnet_of(found.net))  # type: ignore[arg-type]
