"""What E2B's network settings mean here: what is reached, what is not, and what is answered with 400."""

from __future__ import annotations

from typing import Any

import pytest

from sloplet.netspec import Network
from sloplet.network.presets import policy_of
from sloplet.server.e2b.netrules import NetworkInvalid, network_of

pytestmark = pytest.mark.anyone

ALL = "0.0.0.0/0"
NAMES = {
    "e2b.dev": "93.184.216.34",
    "dns.google": "8.8.8.8",
    "one.one.one.one": "1.1.1.1",
    "in.corp.example": "10.1.2.3",
    "meta.example": "169.254.169.254",
}


def reaches(target: str, port: int = 443, **settings: Any) -> bool:
    """Whether a program gets there, by the steps that a connection takes."""
    policy = policy_of(Network(**network_of(**settings)).spec)
    if target not in NAMES:
        return policy.judge_address(target, port).allow is True
    if policy.judge(target, port).allow is not True:
        return False
    return bool(policy.check_addresses(target, port, [NAMES[target]])[0])


@pytest.mark.parametrize(
    ("settings", "there", "not_there"),
    [
        ({}, ["1.1.1.1", "8.8.8.8", "e2b.dev", "2606:4700::1111"], ["10.1.2.3", "127.0.0.1", "in.corp.example"]),
        ({}, [], ["169.254.169.254", "meta.example", "192.168.1.1", "fd00::1", "100.64.0.1", "172.16.0.1"]),
        ({"internet": True}, ["1.1.1.1", "e2b.dev"], ["10.1.2.3"]),
        ({"internet": False}, [], ["1.1.1.1", "e2b.dev", "2606:4700::1111"]),
        ({"internet": False, "allow_out": ["1.1.1.1"]}, ["1.1.1.1", "one.one.one.one"], ["8.8.8.8", "e2b.dev"]),
        ({"deny_out": [ALL]}, [], ["1.1.1.1", "e2b.dev", "2606:4700::1111"]),
        ({"deny_out": ["1.2.3.4/0"]}, [], ["1.1.1.1", "e2b.dev"]),
        ({"deny_out": [ALL], "allow_out": ["1.1.1.1"]}, ["1.1.1.1", "one.one.one.one"], ["8.8.8.8", "dns.google"]),
        ({"deny_out": [ALL], "allow_out": ["1.1.1.1", "8.8.8.8"]}, ["1.1.1.1", "8.8.8.8", "dns.google"], ["9.9.9.9"]),
        ({"deny_out": [ALL], "allow_out": ["8.8.8.0/24"]}, ["8.8.8.8", "dns.google"], ["8.8.9.8", "e2b.dev"]),
        ({"deny_out": [ALL], "allow_out": [ALL]}, ["8.8.8.8", "e2b.dev", "2606:4700::1111"], ["10.1.2.3"]),
        ({"deny_out": ["8.8.8.8"]}, ["1.1.1.1", "e2b.dev"], ["8.8.8.8", "dns.google"]),
        ({"deny_out": ["8.8.8.8"], "allow_out": ["8.8.8.8"]}, ["8.8.8.8", "dns.google", "1.1.1.1"], []),
        ({"deny_out": ["8.0.0.0/8"], "allow_out": ["8.8.8.8"]}, ["8.8.8.8", "dns.google", "1.1.1.1"], ["8.8.4.4"]),
        ({"deny_out": ["8.8.8.0/24"], "allow_out": ["8.0.0.0/8"]}, ["8.8.8.8", "8.8.4.4", "1.1.1.1"], []),
        ({"deny_out": ["8.0.0.0/8", "8.8.8.0/24"], "allow_out": ["8.8.0.0/16"]}, ["8.8.8.8", "8.8.4.4"], ["8.9.0.1"]),
        ({"deny_out": ["8.8.8.99/24"]}, ["1.1.1.1"], ["8.8.8.8"]),
        ({"deny_out": ["2606:4700::/32"]}, ["2001:4860:4860::8888", "1.1.1.1"], ["2606:4700::1111"]),
        ({"deny_out": ["2606:4700::/32"], "allow_out": ["2606:4700::1111"]}, ["2606:4700::1111"], ["2606:4700::1112"]),
        ({"deny_out": [ALL], "allow_out": ["e2b.dev"]}, ["e2b.dev"], ["93.184.216.34", "dns.google", "8.8.8.8"]),
        ({"deny_out": [ALL], "allow_out": ["*.DEV"]}, ["e2b.dev"], ["dns.google", "1.1.1.1"]),
        ({"deny_out": [ALL], "allow_out": ["*.e2b.dev"]}, [], ["e2b.dev"]),
        ({"deny_out": [ALL], "allow_out": ["*"]}, ["e2b.dev", "dns.google"], ["8.8.8.8", "in.corp.example"]),
        ({"deny_out": [ALL], "allow_out": ["e2b.dev", "8.8.8.8"]}, ["e2b.dev", "8.8.8.8", "dns.google"], ["1.1.1.1"]),
        ({"deny_out": [ALL], "allow_out": ["no name!", "e2b.dev:22", "e2b.dev"]}, ["e2b.dev"], ["dns.google"]),
        # what is private stays closed, whoever asks
        ({"allow_out": ["10.0.0.0/8"]}, ["1.1.1.1"], ["10.1.2.3", "in.corp.example"]),
        ({"deny_out": [ALL], "allow_out": ["10.0.0.0/8", "169.254.169.254"]}, [], ["10.1.2.3", "169.254.169.254"]),
        ({"allow_out": ["169.254.169.254", "127.0.0.1"]}, [], ["169.254.169.254", "127.0.0.1", "meta.example"]),
        # but where the operator opens it, and it is asked for
        ({"private": ["10.1.0.0/16"]}, [], ["10.1.2.3"]),
        ({"private": ["10.1.0.0/16"], "allow_out": ["10.0.0.0/8"]}, ["10.1.2.3", "in.corp.example"], ["10.2.0.1"]),
        ({"private": ["10.0.0.0/8"], "allow_out": ["10.1.2.0/24"], "deny_out": [ALL]}, ["10.1.2.3"], ["10.1.3.1"]),
    ],
)  # fmt: skip
def test_who_is_reached(settings: dict[str, Any], there: list[str], not_there: list[str]) -> None:
    assert [target for target in there if not reaches(target, **settings)] == []
    assert [target for target in not_there if reaches(target, **settings)] == []


@pytest.mark.parametrize(
    ("settings", "opened"),
    [
        ({}, False),
        ({"private": ["5.5.5.9/32"]}, True),
        ({"private": ["5.5.5.8/30"]}, False),
        ({"private": ["5.5.5.8/30"], "allow_out": ["5.5.5.9"]}, True),
        ({"private": ["5.5.5.9/32"], "deny_out": ["5.5.5.0/24"]}, False),
        ({"private": ["5.5.5.9/32"], "deny_out": [ALL], "allow_out": ["e2b.dev"]}, False),
    ],
)
def test_this_machines_own_public_address(settings: dict[str, Any], opened: bool) -> None:
    """Sandboxes call each other by public names where these lead to it, and the operator opens it."""
    policy = policy_of(Network(**network_of(**settings)).spec)
    allowed = policy.judge_address("5.5.5.9", 443).allow is True
    assert (allowed and policy.check_own("", "5.5.5.9", 443) is None) is opened
    assert (policy.judge("e2b.dev", 443).allow and policy.check_own("e2b.dev", "5.5.5.9", 443) is None) is opened


def test_ports_are_all_of_an_address_and_those_of_the_web_of_a_name() -> None:
    assert reaches("1.1.1.1", 22)
    assert reaches("e2b.dev", 5432)
    only = {"deny_out": [ALL], "allow_out": ["e2b.dev", "8.8.8.8"]}
    assert reaches("e2b.dev", 80, **only)
    assert not reaches("e2b.dev", 22, **only)
    assert reaches("dns.google", 22, **only)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"deny_out": ["example.com"]}, "invalid denied CIDR example.com"),
        ({"deny_out": [ALL, "example.com"]}, "invalid denied CIDR example.com"),
        ({"deny_out": ["not-a-cidr"]}, "invalid denied CIDR not-a-cidr"),
        ({"deny_out": ["10.0.0.0/8:22"]}, "invalid denied CIDR 10.0.0.0/8:22"),
        ({"deny_out": ["0.0.0.0"]}, "invalid denied CIDR 0.0.0.0"),
        ({"deny_out": ["::/0"]}, "invalid denied CIDR ::/0"),
        ({"deny_out": ["10.0.0.0/255.0.0.0"]}, "invalid denied CIDR 10.0.0.0/255.0.0.0"),
        ({"deny_out": ["10.0.0.0/33"]}, "invalid denied CIDR 10.0.0.0/33"),
        ({"allow_out": ["0.0.0.0"]}, "invalid allowed address 0.0.0.0"),
        ({"allow_out": ["example.com"]}, "When specifying allowed domains in allow out, you must include"),
        ({"allow_out": ["*.example.com"], "internet": False}, "you must include 'ALL_TRAFFIC' in deny out"),
        ({"allow_out": ["example.com", "8.8.8.8"], "deny_out": ["10.0.0.0/8"]}, "to block all other traffic."),
        ({"rules": {f"a{n}.org": [] for n in range(11)}}, "Network rules can have at most 10 domains."),
        ({"rules": {"": []}}, "Rule domain must not be empty."),
        ({"rules": {"a" * 129: []}}, "exceeds maximum length of 128 characters."),
        ({"rules": {"not a domain": []}}, 'Rule domain "not a domain" is not a valid domain name.'),
        ({"rules": {"1.2.3.4": []}}, 'Rule domain "1.2.3.4" is not a valid domain name.'),
        ({"rules": {"a.org": [{}, {}]}}, 'Domain "a.org" can have at most 1 transform rule.'),
        ({"rules": {"a.org": [{"transform": {"headers": {f"X-{n}": "" for n in range(21)}}}]}}, "at most 20 headers"),
        ({"rules": {"a.org": [{"transform": {"headers": {"": "v"}}}]}}, "must not be empty."),
        ({"rules": {"a.org": [{"transform": {"headers": {"X Y": "v"}}}]}}, "only valid HTTP token characters."),
        ({"rules": {"a.org": [{"transform": {"headers": {"X" * 65: "v"}}}]}}, "maximum length of 64 characters."),
        ({"rules": {"a.org": [{"transform": {"headers": {"X": "a\r\nb"}}}]}}, "contains invalid characters."),
        ({"rules": {"a.org": [{"transform": {"headers": {"X": "v" * 2049}}}]}}, "length of 2048 characters."),
        ({"rules": {"a.org": [{"transform": {"headers": {"Host": "b.org"}}}]}}, "cannot be set."),
        ({"proxy": {}}, "egress proxy address must not be empty"),
        ({"proxy": {"address": "proxy.example.com"}}, "must be in host:port form"),
        ({"proxy": {"address": "fd00::1:80"}}, "must be in host:port form"),
        ({"proxy": {"address": ":80"}}, "egress proxy host must not be empty"),
        ({"proxy": {"address": "a.org:0"}}, 'egress proxy port "0" is not a valid 1-65535 value'),
        ({"proxy": {"address": "a.org:1", "password": "p"}}, "password must be empty when username is empty"),
        ({"proxy": {"address": "10.0.0.1:1080"}}, "internal / denied IP range: 10.0.0.1 resolves to 10.0.0.1"),
        ({"proxy": {"address": "[::1]:1080"}}, "internal / denied IP range"),
        ({"proxy": {"address": "a.org:1", "tls": {"enabled": True}}}, "TLS is not supported"),
    ],
)  # fmt: skip
def test_what_is_answered_with_400(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(NetworkInvalid) as caught:
        network_of(**settings)
    assert says in str(caught.value)


def test_headers_of_rules() -> None:
    rules = {
        "API.example.com": [{"transform": {"headers": {"X-Token": " v ", "x-token": "w"}}}],
        "b.org:8443": [{"transform": {"headers": {"Authorization": "Bearer ${e2b.secrets.key}", "X-No": "${gone}"}}}],
        "empty.org": [{"transform": {}}, ],
        "none.org": [],
    }  # fmt: skip
    values = {"Bearer ${e2b.secrets.key}": "Bearer k", "${gone}": None}
    found = network_of(rules=rules, fill=lambda text: values.get(text, text))
    assert found["headers"] == {
        "api.example.com": {"x-token": "w"},
        "b.org:8443": {"Authorization": "Bearer k", "X-No": None},
    }
    network = Network(**found)
    assert network.spec.headers == (("api.example.com", ("x-token",)), ("b.org:8443", ("Authorization", "X-No")))
    assert network.values == {"x-token@api.example.com": "w", "authorization@b.org:8443": "Bearer k"}


def test_the_proxy() -> None:
    given = {"address": "Proxy.Example.com:1080", "username": "u-{{sandboxID}}", "password": "p@:{{sandboxID}}"}
    found = network_of(proxy=given, sandbox_id="abc")
    network = Network(**found)
    assert network.spec.proxy == "socks5://u-abc:@proxy.example.com:1080"
    assert network.values == {"@proxy": "p@:abc"}
    opened = network_of(proxy={"address": "10.1.2.3:1080"}, private=["10.0.0.0/8"])
    assert "10.1.2.3:1080" in opened["allow"]
    assert Network(**network_of(proxy={"address": "93.184.216.34:1"})).values == {}


def test_many_entries_stay_few_rules() -> None:
    """A hole in a network that is denied is one rule."""
    many = [f"8.{n // 256}.{n % 256}.1" for n in range(450)]
    found = network_of(many, ["8.0.0.0/8"])
    assert len(found["allow"]) == 450 + 3
    assert found["deny"] == ["8.0.0.0/8:*"]
