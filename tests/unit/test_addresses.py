"""Addresses: every notation is the address that it stands for, and every special one is known as such (N-04)."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloplet.network.addresses import SPECIAL, embedded, opens, parse, special

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1", "127.0.0.1"), ("127.1", "127.0.0.1"), ("2130706433", "127.0.0.1"), ("0x7f000001", "127.0.0.1"),
        ("0X7F.1", "127.0.0.1"), ("017700000001", "127.0.0.1"), ("0177.0.0.01", "127.0.0.1"), ("0", "0.0.0.0"),
        ("1.2.3", "1.2.0.3"), ("127.0.0.1.", "127.0.0.1"), ("0xa9fea9fe", "169.254.169.254"),
        ("169.16689662", "169.254.169.254"), ("0251.0376.0251.0376", "169.254.169.254"), ("[::1]", "::1"),
        ("::ffff:169.254.169.254", "169.254.169.254"), ("::ffff:a9fe:a9fe", "169.254.169.254"),
        ("fe80::1%eth0", "fe80::1"),
        ("0x", "0.0.0.0"),
    ],
)  # fmt: skip
def test_notations(text: str, address: str) -> None:
    assert str(parse(text)) == address


@pytest.mark.parametrize(
    "text",
    ["", ".", "x", "1.2.3.4.5", "256.1.1.1", "1.2.3.256", "1.2.65536", "1.16777216", "4294967296", "08", "0x1g",
     "1..2",
     "-1", "+1", "1e3", "１.2.3.4", " 1.2.3.4", "1.2.3.4 ", "::g", "[::1", "1:2", "9" * 100, "1.2.3.4/8", "[1.2.3.4]"],
)  # fmt: skip
def test_no_addresses(text: str) -> None:
    assert parse(text) is None


@given(st.lists(st.one_of(
    st.integers(0, 2**33).map(str), st.integers(0, 2**33).map(hex), st.integers(0, 2**33).map(lambda n: f"0{n:o}"),
    st.integers(0, 255).map(str), st.integers(0, 255).map(hex), st.just(""), st.just("08"), st.just("x"),
), min_size=1, max_size=5).map(".".join))  # fmt: skip
def test_as_inet_aton(text: str) -> None:
    """Whatever libc takes for an address is that address here; what it refuses is none."""
    try:
        expected = ipaddress.IPv4Address(socket.inet_aton(text))
    except OSError:
        assert parse(text) is None or text.endswith(".")  # we drop one dot at the end, as names do
    else:
        assert parse(text) == expected


@given(st.ip_addresses(v=6))
def test_as_inet_pton(address: ipaddress.IPv6Address) -> None:
    for text in (str(address), address.exploded, str(address).upper()):
        assert parse(text) == (address.ipv4_mapped or address)
        assert parse(f"[{text}]") == parse(f"{text}%1") == parse(text)


SOME = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.127.255.255", "100.100.100.200", "127.0.0.1",
    "127.255.255.254",
    "169.254.0.1", "169.254.169.254", "169.254.170.2", "168.63.129.16", "172.16.0.1", "172.31.255.255", "192.0.0.1",
    "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.19.255.255", "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::2", "::127.0.0.1", "::8.8.8.8", "::ffff:10.0.0.1", "::ffff:0:10.0.0.1", "::ffff:0:8.8.8.8",
    "64:ff9b::10.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b:1::8.8.8.8", "100::1", "2001::1", "2001:0:1:2::3",
    "2001:10::1",
    "2001:db8::1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "3fff::1", "4000::1", "5f00::1", "fc00::1",
    "fd00:ec2::254", "fd12::1",
    "fe80::1", "fe80::1%eth0", "febf::1", "fec0::1", "ff02::1", "2606:4700::5efe:10.0.0.1",
    "2606:4700::200:5efe:127.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("text", SOME)
def test_special(text: str) -> None:
    address = parse(text)
    assert address is not None
    assert special(address) is not None


@pytest.mark.parametrize(
    "text",
    ["1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255",
     "128.0.0.1",
     "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255", "192.169.0.0",
     "198.17.255.255",
     "198.20.0.0", "223.255.255.255", "2606:4700::1111", "2a00::1", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8",
     "2001:4860:4860::8888", "2620::5efe:8.8.8.8"],
)  # fmt: skip
def test_public(text: str) -> None:
    """The control: not everything is special."""
    address = parse(text)
    assert address is not None
    assert special(address) is None


@given(st.ip_addresses())
def test_what_python_calls_private_is_special(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    parsed = parse(str(address))
    assert parsed is not None
    if (parsed.is_private or parsed.is_multicast or parsed.is_reserved or parsed.is_link_local) and (
        embedded(parsed) is None or parsed not in ipaddress.ip_network("64:ff9b::/96")
    ):
        assert special(parsed) is not None


@pytest.mark.parametrize(
    ("net", "address", "may"),
    [
        ("10.0.0.0/8", "10.1.2.3", True), ("10.1.0.0/16", "10.1.2.3", True), ("10.1.2.3/32", "10.1.2.3", True),
        ("10.0.0.0/7", "10.1.2.3", False), ("0.0.0.0/0", "10.1.2.3", False), ("0.0.0.0/0", "8.8.8.8", True),
        ("11.0.0.0/8", "10.1.2.3", False), ("169.254.0.0/16", "169.254.1.1", True),
        ("169.254.0.0/16", "169.254.169.254", False), ("169.254.169.254/32", "169.254.169.254", True),
        ("100.64.0.0/10", "100.100.100.200", False), ("::/0", "::1", False), ("::1/128", "::1", True),
        ("::/8", "::1", False),
        ("fc00::/7", "fd00::1", True), ("fc00::/7", "fd00:ec2::254", False), ("fc00::/6", "fd00::1", False),
        ("64:ff9b::/96", "64:ff9b::10.0.0.1", False), ("2002::/16", "2002:7f00:1::", False),
        ("::/0", "2606::1", True),
        ("0.0.0.0/0", "2606::1", False), ("::/0", "8.8.8.8", False), ("8000::/1", "fd00::1", False),
    ],
)  # fmt: skip
def test_opens(net: str, address: str, may: bool) -> None:
    parsed = parse(address)
    assert parsed is not None
    assert opens(ipaddress.ip_network(net), parsed) is may


def test_the_table_is_sound() -> None:
    """The narrowest is found first, and IPv6 outside of 2000::/3 is special without a hole."""
    lengths = [item.net.prefixlen for item in SPECIAL]
    assert lengths == sorted(lengths, reverse=True)
    wide = [ipaddress.IPv6Network(net) for net in ("::/3", "4000::/2", "8000::/1")]
    outside = [part for net in wide for part in net.subnets(new_prefix=10)]
    for net in outside:
        for address in (net[0], net[-1]):
            parsed = parse(str(address))
            assert parsed is not None
            assert special(parsed) is not None, address
