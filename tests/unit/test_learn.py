"""What was reached, as rules: exact names, the ports that were used, and no more than a rule about requests allowed."""

from __future__ import annotations

import asyncio

import pytest
from net_inside import Inside, World, with_world

from sloplet.netspec import Network
from sloplet.network import learn
from sloplet.network.learn import Learned
from sloplet.network.presets import policy_of

pytestmark = pytest.mark.anyone

PUBLIC = "93.184.216.34"

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
        "93.184.216.40:80",
        "[2606:2800:220:1::1]:5432",
        "a.example.com:443,8443",
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
    assert not policy.judge("a.example.com", 80).allow
    assert not policy.judge("c.example.com", 443).allow
    assert not policy.judge_address("93.184.216.40", 22).allow
    assert not policy.judge_address("93.184.216.40", 443).allow


def test_a_rule_about_requests_stays_until_more_than_that_was_done() -> None:
    learned = Learned()
    learned.add("a.example.com", PUBLIC, 443, "GET https://a.example.com/x")
    learned.add("a.example.com", PUBLIC, 443, "POST https://a.example.com/y")
    learned.add("a.example.com", PUBLIC, 80)
    assert learned.allow() == ("GET https://a.example.com/x", "POST https://a.example.com/y", "a.example.com:80")
    learned.add("a.example.com", PUBLIC, 443)
    assert learned.allow() == ("a.example.com:80,443",)


async def _web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        writer.close()


@pytest.mark.parametrize("learn", [True, False])
def test_what_the_users_own_rule_let_through_is_that_rule(learn: bool) -> None:
    rule = "GET http://a.example.com/a"

    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 80, _web, "a.example.com")
        inside = await Inside(Network(allow=[rule], learn=learn), world).hello()
        program = await inside.connect("a.example.com", 80)
        await program.send(b"GET /a HTTP/1.1\r\nHost: a.example.com\r\n\r\n")
        await program.until(lambda: program.got.endswith(b"ok"))
        assert inside.egress.learned.allow() == (rule,)
        await program.send(b"GET /b HTTP/1.1\r\nHost: a.example.com\r\n\r\n")
        await program.until(lambda: program.got.count(b"HTTP/1.1") == 2)
        assert inside.egress.learned.allow() == (("a.example.com:80",) if learn else (rule,))
        await inside.close()

    with_world(scenario)


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn, "_MOST", 3)
    learned = Learned()
    for port in range(1000, 1010):
        learned.add("a.example.com", "93.184.216.34", port)
    assert learned.full
    assert learned.allow() == ("a.example.com:1000,1001,1002",)
