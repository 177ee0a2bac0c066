"""Verdicts: the table of docs/policy.md, what names may lead to, what is resolved and inspected, and the reasons."""

from __future__ import annotations

import re
import timeit
from pathlib import Path

import pytest

from sloplet.network.policy import Policy, Verdict
from sloplet.network.rules import parse_rule

pytestmark = pytest.mark.anyone

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policy.md"


def _table() -> list[tuple[str, ...]]:
    lines = PAGE.read_text().splitlines()
    start = lines.index("| allow | deny | asked for | verdict | by |") + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip().strip("`") for cell in line.strip("|").split("|")))
    return rows


@pytest.mark.parametrize(("allow", "deny", "asked", "verdict", "by"), _table())
def test_the_page(allow: str, deny: str, asked: str, verdict: str, by: str) -> None:
    policy = Policy.of([allow] if allow else [], [deny] if deny else [])
    match = re.match(r"(?:([A-Z]+) )?(.+?):([0-9]+)(/.*)?\Z", asked)
    assert match is not None
    method, host, port, path = match.groups()
    found = policy.judge(host, int(port))
    if method:
        assert found.allow is True, "a connection on which some request is possible"
        assert policy.inspects(host, int(port))
        found = policy.judge_request(host, int(port), method, path)
    assert (found.allow, found.rule) == (verdict == "allow", by)


def test_the_page_has_examples() -> None:
    rows = _table()
    assert len(rows) > 35
    assert {row[3] for row in rows} == {"allow", "deny"}


NET = Policy.of(
    ["api.github.com", "*.example.com:443,8000-8100", "10.0.0.0/8:5432", "0.0.0.0/0", "host.sloplet:3000",
     "GET,HEAD https://pypi.org/simple/*", "db.internal:5432"],
    ["bad.example.com", "9.9.9.0/24"],
)  # fmt: skip


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("api.github.com", 22, "api.github.com is allowed on ports 80 and 443 only; ask for 'api.github.com:22'"),
        ("raw.github.com", 443, "no rule allows raw.github.com, the nearest is 'api.github.com'; "
                                "ask for 'raw.github.com'"),
        ("example.com", 443, "'*.example.com:443,8000-8100' does not cover example.com itself; ask for 'example.com'"),
        ("a.example.com", 22, "'*.example.com:443,8000-8100' allows a.example.com on ports 443 and 8000 to 8100 only; "
                              "ask for 'a.example.com:22'"),
        ("bad.example.com", 443, "bad.example.com:443 is denied by the rule 'bad.example.com'"),
        ("evil.org", 443, "no rule allows evil.org; ask for 'evil.org' to be allowed"),
        ("pypi.org", 80, "pypi.org is allowed on port 443 only; ask for 'pypi.org'"),
        ("10.0.0.1", 22, "'10.0.0.0/8:5432' allows 10.0.0.1 on port 5432 only; ask for '10.0.0.1:22'"),
        ("10.0.0.1", 80, "10.0.0.1 is a private address, which '0.0.0.0/0' does not open; ask for '10.0.0.1'"),
        ("1.1.1.1", 22, "'0.0.0.0/0' allows 1.1.1.1 on ports 80 and 443 only; ask for '1.1.1.1:22'"),
        ("9.9.9.9", 443, "9.9.9.9:443 is denied by the rule '9.9.9.0/24'"),
        ("169.254.169.254", 22, "169.254.169.254 is a cloud's metadata service, which only a rule by address opens; "
                                "ask for '169.254.169.254:22'"),
        ("2606::1", 443, "no rule allows the address 2606::1, and rules for names do not; use a name, "
                         "or ask for '[2606::1]'"),
        ("localhost", 80, "localhost is the sandbox itself; ask for 'host.sloplet:80' and use that name for the "
                          "machine it runs on"),
        ("host.sloplet", 80, "host.sloplet:80 is this machine's own loopback, which only a rule opens that names it; "
                             "ask for 'host.sloplet:80'"),
        ("a b", 80, "'a b' is neither a host name nor an address"),
        ("x\x1b[31m", 80, "'x\\x1b[31m' is neither a host name nor an address"),
        ("1.2.3.4.5", 80, "'1.2.3.4.5' is neither a host name nor an address"),
        ("api.github.com", 0, "api.github.com: 0 is not a port"),
        ("1.1.1.1", 70000, "1.1.1.1: 70000 is not a port"),
    ],
)  # fmt: skip
def test_reasons(host: str, port: int, reason: str) -> None:
    verdict = NET.judge(host, port)
    assert verdict.allow is False
    assert verdict.reason == reason
    match = re.search(r"ask for '([^']+)'", reason)
    if match:  # what it says to ask for would do
        assert Policy.of([match[1]]).judge("host.sloplet" if host == "localhost" else host, port).allow is True


def test_an_empty_policy_says_so() -> None:
    assert Policy.of().judge("x.org", 443).reason == "this sandbox may reach nothing yet; ask for 'x.org' to be allowed"
    assert "169.254.169.254 is a cloud's metadata" in Policy.of().judge("169.254.169.254", 80).reason


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [
        ("POST", "/simple/x", "pypi.org:443 is allowed for 'GET,HEAD https://pypi.org/simple/*' only; "
                              "ask for 'POST https://pypi.org/simple/x'"),
        ("GET", "/pypi", "pypi.org:443 is allowed for 'GET,HEAD https://pypi.org/simple/*' only; "
                         "ask for 'GET https://pypi.org/pypi'"),
        ("GET", "/%25252525252e", "pypi.org: servers may read this path in different ways; write it plainly, "
                                  "without encoded dots or slashes"),
    ],
)  # fmt: skip
def test_reasons_for_requests(method: str, path: str, reason: str) -> None:
    verdict = NET.judge_request("pypi.org", 443, method, path)
    assert (verdict.allow, verdict.reason) == (False, reason)


def _leads(policy: Policy, name: str, port: int, *addresses: str) -> tuple[list[str], bool | None]:
    usable, verdict = policy.check_addresses(name, port, addresses)
    assert bool(usable) is (verdict.allow is True)
    return usable, verdict.allow


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "192.168.0.1", "169.254.169.254", "100.100.100.200", "fd00:ec2::254", "::1", "0.0.0.0",
     "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::", "fe80::1%eth0", "224.0.0.1", "198.18.0.1", "nonsense",
     ""],
)  # fmt: skip
def test_a_name_does_not_lead_to_special_addresses(address: str) -> None:
    policy = Policy.of(["api.github.com", "*:*", "0.0.0.0/0:*", "::/0:*"])
    assert _leads(policy, "api.github.com", 443, address) == ([], False)
    assert _leads(policy, "api.github.com", 443, address, "140.82.112.5") == (["140.82.112.5"], True), "the control"


def test_rules_by_address_count_for_what_names_lead_to() -> None:
    assert _leads(NET, "db.internal", 5432, "10.0.0.7", "192.168.0.1", "2606::1") == (["10.0.0.7", "2606::1"], True)
    assert _leads(NET, "api.github.com", 443, "10.0.0.7") == ([], False), "another port"
    assert _leads(NET, "api.github.com", 443, "9.9.9.9") == ([], False), "denied by address"
    assert _leads(NET, "api.github.com", 443, "64:ff9b::909:909") == ([], False), "also inside of another"
    _, verdict = NET.check_addresses("api.github.com", 443, ["10.0.0.7"])
    assert verdict.reason == (
        "api.github.com leads to 10.0.0.7, which is a private address; ask for '10.0.0.7' if that is meant"
    )
    assert NET.check_addresses("api.github.com", 443, [])[1].reason == "api.github.com has no address"
    assert NET.check_addresses("api.github.com", 443, ["9.9.9.9"])[1].rule == "9.9.9.0/24"


def test_the_host_itself() -> None:
    assert _leads(NET, "host.sloplet", 3000, "127.0.0.1", "::1") == (["127.0.0.1", "::1"], True)
    assert _leads(NET, "host.sloplet", 3000, "10.0.0.1", "8.8.8.8") == ([], False)
    assert _leads(NET, "host.sloplet", 3001, "127.0.0.1") == ([], False)
    wide = Policy.of(["*:*", "*.sloplet:*", "127.0.0.0/8:*"], learn=True)
    assert wide.judge("host.sloplet", 3000).allow is False
    assert not wide.may_resolve("host.sloplet")
    assert _leads(wide, "host.sloplet", 3000, "127.0.0.1") == ([], False)


def test_a_mirror_of_the_hosts_own_may_be_private() -> None:
    policy = Policy([parse_rule("mirror.corp:8080", local=True), parse_rule("other.corp")])
    assert _leads(policy, "mirror.corp", 8080, "10.0.0.7") == (["10.0.0.7"], True)
    assert _leads(policy, "mirror.corp", 8080, "127.0.0.1") == (["127.0.0.1"], True)
    assert _leads(policy, "mirror.corp", 8080, "169.254.169.254") == ([], False)
    assert _leads(policy, "mirror.corp", 8080, "169.254.1.1") == ([], False)
    assert _leads(policy, "other.corp", 443, "10.0.0.7") == ([], False)
    assert policy.judge_address("10.0.0.7", 8080).allow is False


@pytest.mark.parametrize(
    ("allow", "deny", "name", "asks", "may"),
    [
        ([], [], "x.org", False, False), (["x.org"], [], "x.org", False, True),
        (["x.org:9"], [], "x.org", False, True),
        (["x.org"], ["x.org"], "x.org", False, False), (["x.org:9"], ["x.org"], "x.org", False, True),
        (["x.org"], ["x.org:80"], "x.org", False, True), (["x.org"], ["x.org:80,443"], "x.org", False, False),
        (["x.org:80-90"], ["x.org:80-89", "x.org:90"], "x.org", False, False), (["*"], [], "y.org", False, True),
        (["x.org:*"], ["x.org:1-80"], "x.org", False, True), (["x.org:65535"], [], "x.org", False, True),
        (["x.org:*"], ["x.org:1-65535"], "x.org", False, False),
        (["*"], ["*.evil.org"], "a.evil.org", False, False), (["GET https://x.org/a"], [], "x.org", False, True),
        ([], [], "x.org", True, True), ([], ["x.org"], "x.org", True, False), ([], ["x.org:80"], "x.org", True, True),
        (["*", "0.0.0.0/0"], [], "1.2.3.4", True, False), (["*"], [], "localhost", True, False),
        (["*"], [], "bad name", True, False), (["1.2.3.4"], [], "x.org", False, False),
        (["*:*"], [], "a.localhost", True, False), (["*:*"], [], "x" * 64, True, False),
    ],
)  # fmt: skip
def test_may_resolve(allow: list[str], deny: list[str], name: str, asks: bool, may: bool) -> None:
    assert Policy.of(allow, deny, asks=asks).may_resolve(name) is may


@pytest.mark.parametrize(
    ("allow", "deny", "name", "port", "looks"),
    [
        (["x.org"], [], "x.org", 443, False), (["https://x.org/a/*"], [], "x.org", 443, True),
        (["https://x.org/a/*"], [], "x.org", 80, False), (["GET x.org"], [], "x.org", 80, True),
        (["x.org"], ["POST x.org"], "x.org", 443, True), (["x.org:*"], ["POST x.org"], "x.org", 22, True),
        (["GET *.x.org", "a.x.org"], [], "a.x.org", 443, False),
        (["GET *.x.org", "a.x.org"], [], "b.x.org", 443, True),
        (["GET *", "x.org"], [], "x.org", 443, False), (["GET *", "x.org"], [], "y.org", 443, True),
        (["x.org:443"], ["POST *"], "x.org", 443, True), (["https://x.org"], ["POST x.org"], "x.org", 443, True),
        ([], [], "10.0.0.1", 443, False),
    ],
)  # fmt: skip
def test_inspects(allow: list[str], deny: list[str], name: str, port: int, looks: bool) -> None:
    assert Policy.of(allow, deny).inspects(name, port) is looks


def test_a_connection_needs_some_request_that_is_allowed() -> None:
    policy = Policy.of(["GET https://x.org/a/*"], ["x.org"])
    assert policy.judge("x.org", 443).allow is True
    assert policy.judge_request("x.org", 443, "GET", "/a/b").allow is True
    assert policy.judge_request("x.org", 443, "GET", "/b").rule == "x.org"
    assert Policy.of(["GET https://*.x.org"], ["a.x.org"]).judge("a.x.org", 443).allow is False


SIMPLE = Policy.of(["https://x.org/a/*", "GET https://x.org/exact"], ["https://x.org/a/secret", "DELETE x.org"])


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/a/b", True), ("GET", "/a/b/c.d", True), ("GET", "/a/", True), ("GET", "/a", False),
        ("GET", "/ab", False),
        ("GET", "/a/../b", False), ("GET", "/a/x/../y", True), ("GET", "/a/%2e%2e/b", False),
        ("GET", "/a/%252e%252e/b", False),
        ("GET", "/a/..%2fb", False), ("GET", "/a/..\\..\\b", False), ("GET", "/a/..;/b", False),
        ("GET", "/a/secret", False),
        ("GET", "/a/SECRET", False), ("GET", "/a/secret/", False), ("GET", "/a//secret", False),
        ("GET", "/a/./secret", False),
        ("GET", "/a/%73ecret", False), ("GET", "/a/%2573ecret", False), ("GET", "/a/secret;x=1", False),
        ("GET", "/a/secrets", True),
        ("GET", "/a/secret?x=1", False), ("DELETE", "/a/b", False), ("delete", "/a/b", False),
        ("DELETE", "/exact", False),
        ("GET", "/exact", True), ("get", "/exact", False), ("HEAD", "/exact", False), ("GET", "/exact/", False),
        ("GET", "/exact?x", False), ("GET", "/@scope%2fname", False), ("GET", "/a/@scope%2fname", True),
        ("GET", "/a/caf%C3%A9", True),
        ("GET", "/a/\x00", False), ("GET", "/a/%00", False), ("GET", "/a/%0d%0a", False), ("GET", "*", False),
        ("GET", "", False),
        ("GET", "a/b", False), ("GET", "/a/" + "x" * 20000, True), ("GET", "/a/" + "%61" * 20000, False),
    ],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_paths(method: str, path: str, allow: bool) -> None:
    """What is denied is so in any spelling."""
    assert SIMPLE.judge_request("x.org", 443, method, path).allow is allow


def test_what_is_denied_may_have_parameters() -> None:
    """Some servers drop what follows ';', others do not: both readings count, with doubled slashes merged."""
    policy = Policy.of(["x.org"], ["https://x.org/a/s*t"])
    for path in ("/a/secret", "/a//s;et", "/a//secret;x=1", "/a/s;x/t", "/a/%2e/s;et"):
        assert policy.judge_request("x.org", 443, "GET", path).allow is False, path
    assert policy.judge_request("x.org", 443, "GET", "/a/public").allow is True


def test_ask_and_learn() -> None:
    asks, learns = Policy.of(["x.org"], ["y.org"], asks=True), Policy.of([], ["y.org"], learn=True)
    assert asks.judge("z.org", 443).allow is None
    assert asks.judge("x.org", 22).allow is None
    assert asks.judge("y.org", 443).allow is False
    assert asks.judge("1.1.1.1", 443).allow is None
    assert asks.judge("10.0.0.1", 443).allow is False, "special addresses are not asked for"
    assert asks.judge("not a name", 443).allow is False
    assert asks.judge("host.sloplet", 443).allow is False
    assert (learns.judge("z.org", 22).allow, learns.judge("z.org", 22).rule) == (True, "learn")
    assert learns.judge("y.org", 443).allow is False
    assert learns.judge("1.1.1.1", 22).allow is True
    assert learns.judge("169.254.169.254", 80).allow is False
    assert learns.check_addresses("z.org", 443, ["10.0.0.1", "8.8.8.8"])[0] == ["8.8.8.8"]
    learns = Policy.of(["GET https://x.org/a", "GET http://host.sloplet:80/a"], learn=True)
    assert learns.judge_request("x.org", 443, "GET", "/a").rule == "GET https://x.org/a"
    assert learns.judge_request("x.org", 443, "GET", "/b").rule == "learn"
    assert learns.judge_request("host.sloplet", 80, "GET", "/a").allow is True
    assert learns.judge_request("host.sloplet", 80, "GET", "/b").allow is False, "the host itself is not public"
    some = Policy.of(["GET https://x.org/a"], asks=True)
    assert some.judge_request("x.org", 443, "GET", "/b").allow is None
    assert some.judge_request("x.org", 443, "GET", "/a").allow is True


def test_a_verdict_names_the_preset() -> None:
    policy = Policy([parse_rule("api.github.com", source="@github")])
    assert policy.judge("api.github.com", 443) == Verdict(
        True, "api.github.com (@github)", "allowed by 'api.github.com (@github)'"
    )


def test_quick_with_many_rules() -> None:
    """20 µs is the aim, on a machine that does nothing else; what must not come is a look at all the rules."""
    few = Policy.of(["a1.example1.com:2", "*.w1.org"])
    many = Policy.of([f"a{i}.example{i}.com:{i + 1}" for i in range(500)] + [f"*.w{i}.org" for i in range(500)])
    asked = (("a1.example1.com", 2), ("x.y.w1.org", 443), ("b.example1.com", 443), ("evil.net", 443), ("1.1.1.1", 443))
    for host, port in asked:
        costs = [
            min(timeit.repeat(lambda: policy._judge(host, port), number=200, repeat=7)) / 200  # noqa: B023
            for policy in (few, many)
        ]
        assert costs[1] < 4 * costs[0] + 20e-6


def test_a_mirror_of_a_closed_network() -> None:
    """Where the machine's own names of indexes lead may be private, or even for documentation; never its cloud's."""
    rule = parse_rule("https://pypi.org", source="@package-indexes", local=True)
    policy = Policy([rule, parse_rule("https://other.org")])
    for address in ("10.1.2.3", "203.0.113.80", "127.0.0.1", "fd00::1", "2001:db8::1"):
        assert policy.check_addresses("pypi.org", 443, [address])[0] == [address]
        assert policy.check_addresses("other.org", 443, [address])[0] == []
    for address in ("169.254.169.254", "169.254.1.1", "224.0.0.1", "0.0.0.0", "fd00:ec2::254", "198.18.0.1"):
        assert policy.check_addresses("pypi.org", 443, [address])[0] == []
