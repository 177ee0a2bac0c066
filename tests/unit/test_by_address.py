"""Names that no rule decides about, judged by the addresses that they lead to."""

from __future__ import annotations

import errno

import pytest
from net_inside import Inside, World, echo, with_world

from sloplet.netspec import Network
from sloplet.network.policy import BY_ADDRESS, Policy

pytestmark = pytest.mark.anyone

A, B = "93.184.216.34", "8.8.8.8"


@pytest.mark.parametrize(
    ("allow", "deny", "name", "port", "leads_to", "there"),
    [
        (["8.8.8.0/24:*"], [], "x.org", 443, B, True),
        (["8.8.8.0/24:*"], [], "x.org", 443, A, False),
        (["8.8.8.0/24"], [], "x.org", 22, B, False),
        (["8.8.8.0/24:*"], ["8.8.8.8:*"], "x.org", 443, B, False),
        (["8.8.8.8:*"], ["8.8.8.0/24:*"], "x.org", 443, B, True),
        (["8.8.8.0/24:*"], ["x.org"], "x.org", 443, B, False),
        (["8.8.8.0/24:*"], ["*.org"], "x.org", 443, B, False),
        (["x.org"], [], "x.org", 443, A, True),
        (["x.org"], [], "y.org", 443, A, False),
        (["0.0.0.0/0:*"], [], "x.org", 443, "10.0.0.1", False),
        (["0.0.0.0/0:*"], [], "x.org", 80, "169.254.169.254", False),
        (["10.0.0.0/8:*"], [], "x.org", 443, "10.0.0.1", True),
        (["0.0.0.0/0:*"], [], "x.org", 443, "2606:4700::1", False),
        (["0.0.0.0/0:*", "::/0:*"], [], "x.org", 443, "2606:4700::1", True),
        (["127.0.0.0/8:*"], [], "host.sloplet", 8000, "127.0.0.1", False),
        (["127.0.0.0/8:*"], [], "localhost", 8000, "127.0.0.1", False),
    ],
)
def test_verdicts(allow: list[str], deny: list[str], name: str, port: int, leads_to: str, there: bool) -> None:
    policy = Policy.of(allow, deny, by_address=True)
    verdict = policy.judge(name, port)
    reached = verdict.allow is True and bool(policy.check_addresses(name, port, [leads_to])[0])
    assert reached is there
    plain = Policy.of(allow, deny)
    if name not in allow:
        assert plain.judge(name, port).allow is False, "without it a rule for addresses allows no name"


def test_nobody_is_asked_where_no_address_is_allowed() -> None:
    assert not Policy.of(["x.org"], by_address=True).may_resolve("y.org")
    policy = Policy.of(["8.8.8.8:*"], ["z.org"], by_address=True)
    assert policy.may_resolve("y.org")
    assert not policy.may_resolve("z.org")
    assert not policy.may_resolve("host.sloplet")


def test_through_an_egress() -> None:
    async def scenario(world: World) -> None:
        await world.serve(B, 443, echo, "dns.example")
        await world.serve(A, 443, echo, "web.example")
        inside = await Inside(Network(allow=["8.8.8.0/24:*"], by_address=True), world).hello()
        program = await inside.connect("dns.example", 443)
        assert program.replied.is_set()
        assert (inside.last().rule, inside.last().address) == (BY_ADDRESS, B)
        refused = await inside.connect("web.example", 443)
        assert refused.errno == errno.EACCES
        assert "leads to 93.184.216.34, and no rule allows either" in inside.last().reason
        assert (await inside.connect(A, 443)).errno == errno.EACCES
        assert world.dialled == [(B, 443)]
        inside.egress.set(Network(allow=["8.8.4.0/24:*"], by_address=True).spec)
        assert await program.over() == errno.ECONNRESET
        await inside.close()

    with_world(scenario)
