"""N-01: without a network, and with one that allows nothing, not one packet leaves, and nobody is kept waiting.

On every rung that could have a way out; test_n_network.py has the rest of it, on the host's own network.
"""

from __future__ import annotations

from typing import Any

from hostile_kit import install, parse
from net_kit import FAST_MS, GOOD, GOOD_AT, HELLO, Rung, attempt, http, https, name, set_network, tcp

from netkit import Internet
from sloplet import Network, Sandbox

EACH_MAPPING = True

WAYS: list[dict[str, Any]] = [
    http(GOOD), https(GOOD), http(GOOD_AT), tcp(GOOD_AT, 22), tcp("198.18.0.1", 80), http("host.sloplet"),
    {"way": "udp", "to": GOOD_AT, "port": 443}, {"way": "udp", "to": "10.0.0.1", "port": 53, "wait": 2},
    {"way": "icmp", "to": GOOD_AT}, {"way": "raw", "to": GOOD_AT}, {"way": "icmp", "to": "2a00::1"},
    tcp("2a00::1", 80), {"way": "udp", "to": "2a00::1", "port": 53},
]  # fmt: skip


def test_n01_no_network(rung: Rung, net: Internet) -> None:
    with rung.box(network="none") as box:
        for outcome in attempt(box, *WAYS, name(GOOD)).outcomes:
            assert outcome.refused, outcome
            assert outcome.ms < FAST_MS, outcome
        said = parse(box.run([install(box, "network"), "80"], timeout=60).stdout)
        for way, value in said.lines.items():
            code, milliseconds = (int(word) for word in value.split())
            if way.startswith("interface/"):
                assert way == "interface/lo"
            else:
                assert code, f"{way} left the sandbox"
                assert milliseconds < FAST_MS, f"{way}: {milliseconds} ms"
    assert net.packets() == []


def test_n01_nothing_is_allowed(rung: Rung, shared: Sandbox, net: Internet) -> None:
    set_network(shared, Network())
    users = ("agent", "root") if rung.can.users else ("agent",)
    for outcome in [each for user in users for each in attempt(shared, *WAYS, user=user).outcomes]:
        asks = (
            outcome.asked.get("port") == 53
        )  # our own name server hears it, and has no answer to a question that is none
        assert outcome.refused or (asks and not outcome.data), outcome
    assert net.packets() == []


def test_n01_positive_control(shared: Sandbox, net: Internet) -> None:
    set_network(shared, Network(allow=[GOOD, f"{GOOD_AT}:80"]))
    for outcome in attempt(shared, http(GOOD), http(GOOD_AT, host=GOOD)).outcomes:
        assert HELLO in outcome.data
    assert net.dialled() == {GOOD_AT}
