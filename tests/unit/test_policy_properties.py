"""What holds for every policy: generated rules, names, addresses and requests."""

from __future__ import annotations

import ipaddress
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sloplet.network.addresses import SPECIAL, parse, special
from sloplet.network.policy import Policy
from sloplet.network.rules import parse_rule

pytestmark = pytest.mark.anyone

LABELS = ["a", "b", "x", "evilx", "xx"]
NAMES = st.lists(st.sampled_from(LABELS), min_size=1, max_size=4).map(lambda labels: ".".join([*labels, "org"]))
PORTS = st.sampled_from([1, 22, 80, 443, 8000, 8042, 65535])
PORT_TEXTS = st.sampled_from(["", "", ":*", ":443", ":80,443", ":8000-8100", ":8042", ":1-65535"])
PATH_TEXTS = st.sampled_from(["", "", "", "/a/*", "/a", "/a/b/*", "/*/c", "/b"])
METHODS = st.sampled_from(["", "", "", "GET ", "GET,POST "])
KNOWN = ["10.0.0.1", "10.1.2.3", "127.0.0.1", "169.254.169.254", "8.8.8.8", "1.1.1.1", "fd00::1", "::1", "2606::1"]
ADDRESSES = st.one_of(st.sampled_from(KNOWN), st.ip_addresses().map(str))
IPV4 = st.one_of(st.sampled_from(KNOWN[:6]).map(ipaddress.IPv4Address), st.ip_addresses(v=4))


def _net(address: str, length: int) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    most = ipaddress.ip_address(address).max_prefixlen
    return ipaddress.ip_network(f"{address}/{length % (most + 1)}", strict=False)


def _writable(net: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    """An IPv4 network inside of IPv6 is to be written as what it is."""
    return not isinstance(net, ipaddress.IPv6Network) or net.network_address.ipv4_mapped is None


NETS = st.builds(_net, ADDRESSES, st.integers(0, 128)).filter(_writable)


def _shape(net: ipaddress.IPv4Network | ipaddress.IPv6Network) -> str:
    return str(net) if net.version == 4 else f"[{net.network_address}]/{net.prefixlen}"


HOSTS = st.one_of(NAMES, NAMES.map("*.{}".format), st.just("*"))
NAME_RULES = st.builds(lambda *parts: "".join(parts), METHODS, HOSTS, PORT_TEXTS, PATH_TEXTS)
ADDRESS_RULES = st.builds(lambda net, ports: _shape(net) + ports, NETS, PORT_TEXTS)
RULES = st.one_of(NAME_RULES, ADDRESS_RULES)
LISTS = st.lists(RULES, max_size=8)
REQUESTS = st.tuples(
    st.sampled_from(["GET", "POST", "DELETE"]), st.sampled_from(["/", "/a", "/a/b", "/a/b/c", "/b/../a"])
)


@given(LISTS, LISTS, RULES, NAMES, ADDRESSES, PORTS, REQUESTS)
def test_one_more_deny_never_allows_more(
    allow: list[str], deny: list[str], more: str, name: str, address: str, port: int, request: tuple[str, str]
) -> None:
    before, after = Policy.of(allow, deny), Policy.of(allow, [*deny, more])
    _never_more(before, after, name, address, port, request)


@given(LISTS, LISTS, RULES, NAMES, ADDRESSES, PORTS, REQUESTS)
def test_one_less_allow_never_allows_more(
    allow: list[str], deny: list[str], less: str, name: str, address: str, port: int, request: tuple[str, str]
) -> None:
    before, after = Policy.of([*allow, less], deny), Policy.of(allow, deny)
    _never_more(before, after, name, address, port, request)


def _never_more(before: Policy, after: Policy, name: str, address: str, port: int, request: tuple[str, str]) -> None:
    pairs = [(policy.judge(name, port), policy.judge_address(address, port)) for policy in (before, after)]
    for old, new in zip(*pairs, strict=True):
        assert old.allow or not new.allow
    assert set(after.check_addresses(name, port, [address])[0]) <= set(before.check_addresses(name, port, [address])[0])
    assert before.may_resolve(name) or not after.may_resolve(name)
    if after.judge(name, port).allow and after.judge_request(name, port, *request).allow:
        assert before.judge_request(name, port, *request).allow


@given(LISTS, LISTS, NAMES, ADDRESSES, PORTS, REQUESTS, st.randoms(use_true_random=False))
def test_order_has_no_meaning(
    allow: list[str],
    deny: list[str],
    name: str,
    address: str,
    port: int,
    request: tuple[str, str],
    chance: random.Random,
) -> None:
    one = Policy.of(allow, deny)
    chance.shuffle(allow)
    chance.shuffle(deny)
    two = Policy.of([*allow, *allow], deny)
    for policy in (one, two):
        assert policy.judge(name, port).allow is one.judge(name, port).allow
        assert policy.judge_address(address, port).allow is one.judge_address(address, port).allow
        assert policy.judge_request(name, port, *request).allow is one.judge_request(name, port, *request).allow
        assert policy.inspects(name, port) is one.inspects(name, port)


@given(NAMES, PORTS, st.sampled_from(["", "evil", "x-", "x."]))
def test_a_wildcard_is_what_is_below(name: str, port: int, front: str) -> None:
    policy = Policy.of([f"*.{name}:*"])
    assert policy.judge(front + name, port).allow is (front.endswith("."))
    assert policy.judge(f"{name}.evil.org", port).allow is False
    assert policy.judge(f"a.b.{name.upper()}.", port).allow is True


def _lies_inside(text: str) -> bool:
    net = parse_rule(text).host.net
    return net is not None and any(net.version == item.net.version and net.subnet_of(item.net) for item in SPECIAL)  # type: ignore[arg-type]


@given(LISTS, LISTS, ADDRESSES, NAMES, PORTS, st.booleans(), st.booleans())
def test_special_addresses_stay_closed(
    allow: list[str], deny: list[str], address: str, name: str, port: int, asks: bool, learn: bool
) -> None:
    """Under every policy whose rules by address do not lie inside of a special range."""
    allow = [text for text in allow if not _lies_inside(text)]
    policy = Policy.of(allow, deny, asks=asks and not learn, learn=learn)
    parsed = parse(address)
    assert parsed is not None
    assume(special(parsed) is not None)
    assert policy.judge_address(address, port).allow is False
    assert policy.judge(address, port).allow is False
    assert policy.check_addresses(name, port, [address])[0] == []


@given(st.sampled_from([item.net for item in SPECIAL]), st.integers(0), PORTS)
def test_all_that_is_special_is_closed_to_everything(
    net: ipaddress.IPv4Network | ipaddress.IPv6Network, index: int, port: int
) -> None:
    address = str(net[index % net.num_addresses])
    assume(not address.startswith("64:ff9b::"))  # what a translator makes public again
    policy = Policy.of(["*:*", "0.0.0.0/0:*", "::/0:*"], learn=True)
    assert policy.judge_address(address, port).allow is False
    assert policy.check_addresses("x.org", port, [address])[0] == []


def _forms(address: ipaddress.IPv4Address) -> list[str]:
    value = int(address)
    a, b, c, d = address.packed
    return [
        str(address), f"{address}.",
        str(value), hex(value), f"0{value:o}", f"{a}.{value & 0xFFFFFF}", f"{a}.{b}.{value & 0xFFFF}",
        f"{a:#x}.{b:#x}.{c:#x}.{d:#x}", f"0{a:o}.0{b:o}.0{c:o}.0{d:o}", f"::ffff:{address}", f"[::ffff:{address}]",
        f"::FFFF:{value >> 16:x}:{value & 0xFFFF:x}",
    ]  # fmt: skip


@given(LISTS, LISTS, IPV4, PORTS)
def test_every_notation_is_judged_alike(
    allow: list[str], deny: list[str], address: ipaddress.IPv4Address, port: int
) -> None:
    policy = Policy.of([*allow, "0.0.0.0/0"], deny)
    expected = policy.judge_address(str(address), port)
    for text in _forms(address):
        assert policy.judge(text, port) == expected
        assert policy.judge_address(text, port) == expected
        assert not policy.may_resolve(text)


@given(LISTS, LISTS, NAMES, PORTS, st.booleans())
def test_what_may_be_reached_may_be_resolved(
    allow: list[str], deny: list[str], name: str, port: int, asks: bool
) -> None:
    policy = Policy.of(allow, deny, asks=asks)
    if policy.judge(name, port).allow is not False:
        assert policy.may_resolve(name)


@given(LISTS, LISTS, NAMES, PORTS, REQUESTS)
def test_a_request_that_is_allowed_has_a_connection(
    allow: list[str], deny: list[str], name: str, port: int, request: tuple[str, str]
) -> None:
    policy = Policy.of(allow, deny)
    if policy.judge_request(name, port, *request).allow:
        assert policy.judge(name, port).allow
    if not policy.inspects(name, port):
        assert policy.judge_request(name, port, *request) == policy.judge(name, port)


@given(st.text(max_size=80), st.integers(-1, 70000))
def test_any_text_from_inside_has_a_verdict(text: str, port: int) -> None:
    policy = Policy.of(["x.org"], asks=True)
    verdict = policy.judge(text, port)
    assert isinstance(verdict.reason, str)
    assert verdict.reason.isprintable()
    assert len(verdict.reason) < 700
    policy.may_resolve(text)
    policy.inspects(text, port)
    assert policy.judge_request("x.org", 443, text, text).reason.isprintable()


@given(LISTS)
def test_nothing_allowed_is_nothing_reached(deny: list[str]) -> None:
    policy = Policy.of([], deny)
    assert policy.judge("x.org", 443).allow is False
    assert policy.judge("8.8.8.8", 443).allow is False
    assert not policy.may_resolve("x.org")
