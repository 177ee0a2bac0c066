"""What was reached, as rules: exact names, ports where they are not the usual ones."""

from __future__ import annotations

import pytest

from sloplet.netspec import Network
from sloplet.network import learn
from sloplet.network.learn import Learned
from sloplet.network.presets import policy_of

pytestmark = pytest.mark.anyone

REACHED = [
    ("a.example.com", "93.184.216.34", 443),
    ("a.example.com", "93.184.216.35", 443),
    ("a.example.com", "93.184.216.34", 8443),
    ("b.example.com", "93.184.216.34", 22),
    ("", "93.184.216.40", 80),
    ("", "2606:2800:220:1::1", 5432),
    ("mirror.example.com", "10.1.2.3", 3128),
]


def test_the_rules_are_the_smallest_that_allow_it() -> None:
    learned = Learned()
    for name, address, port in REACHED:
        learned.add(name, address, port)
    rules = learned.allow()
    assert rules == (
        "10.1.2.3:3128",
        "93.184.216.40",
        "[2606:2800:220:1::1]:5432",
        "a.example.com",
        "a.example.com:8443",
        "b.example.com:22",
        "mirror.example.com:3128",
    )
    policy = policy_of(Network(allow=rules).spec)
    for name, address, port in REACHED:
        verdict = policy.judge(name, port) if name else policy.judge_address(address, port)
        assert verdict.allow
        if name:
            assert policy.check_addresses(name, port, [address])[0] == [address]
    assert not policy.judge("b.example.com", 443).allow
    assert not policy.judge("c.example.com", 443).allow
    assert not policy.judge_address("93.184.216.40", 22).allow


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn, "_MOST", 3)
    learned = Learned()
    for port in range(1000, 1010):
        learned.add("a.example.com", "93.184.216.34", port)
    assert learned.full
    assert learned.allow() == ("a.example.com:1000,1001,1002",)
