"""Rules: what each text means, and that every text which means nothing is refused with words that help (N-02)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloplet.errors import SpecError
from sloplet.network.hosts import overlap, parse_host
from sloplet.network.names import BadName, from_user, normal
from sloplet.network.rules import parse_rule, rule_text

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize(
    ("text", "canonical", "spans"),
    [
        ("api.github.com", "api.github.com", ((80, 80), (443, 443))),
        ("API.GitHub.com.", "api.github.com", ((80, 80), (443, 443))),
        (" pypi.org ", "pypi.org", ((80, 80), (443, 443))),
        ("db.example.com:5432", "db.example.com:5432", ((5432, 5432),)),
        ("*.example.com:8000-8100,443", "*.example.com:443,8000-8100", ((443, 443), (8000, 8100))),
        ("x.org:*", "x.org:*", ()),
        ("*", "*", ((80, 80), (443, 443))),
        ("*:*", "*:*", ()),
        ("10.0.0.0/8:5432", "10.0.0.0/8:5432", ((5432, 5432),)),
        ("10.0.0.0/8", "10.0.0.0/8", ((80, 80), (443, 443))),
        ("1.2.3.4", "1.2.3.4", ((80, 80), (443, 443))),
        ("1.2.3.4/32", "1.2.3.4", ((80, 80), (443, 443))),
        ("1.2.3.4:22", "1.2.3.4:22", ((22, 22),)),
        ("[fd00::1]:80", "[fd00::1]:80", ((80, 80),)),
        ("fd00::1", "[fd00::1]", ((80, 80), (443, 443))),
        ("FD00::/8", "[fd00::]/8", ((80, 80), (443, 443))),
        ("[fd00::]/8:5432", "[fd00::]/8:5432", ((5432, 5432),)),
        ("[fd00::/8]:5432", "[fd00::]/8:5432", ((5432, 5432),)),
        ("fd00::/8:5432", "[fd00::]/8:5432", ((5432, 5432),)),
        ("::/0", "[::]/0", ((80, 80), (443, 443))),
        ("https://pypi.org", "https://pypi.org", ((443, 443),)),
        ("HTTPS://pypi.org/", "https://pypi.org", ((443, 443),)),
        ("http://pypi.org/*", "http://pypi.org", ((80, 80),)),
        ("https://pypi.org/simple/*", "https://pypi.org/simple/*", ((443, 443),)),
        ("https://x.org:8443/a", "https://x.org:8443/a", ((8443, 8443),)),
        ("HEAD,GET https://api.github.com/repos/*", "GET,HEAD https://api.github.com/repos/*", ((443, 443),)),
        ("POST x.org", "POST x.org", ((80, 80), (443, 443))),
        ("GET *", "GET *", ((80, 80), (443, 443))),
        ("bücher.example", "xn--bcher-kva.example", ((80, 80), (443, 443))),
        ("*.BÜCHER.example", "*.xn--bcher-kva.example", ((80, 80), (443, 443))),
        ("_dmarc.x.org:53", "_dmarc.x.org:53", ((53, 53),)),
        ("db:5432", "db:5432", ((5432, 5432),)),
        ("host.sloplet:8000", "host.sloplet:8000", ((8000, 8000),)),
        ("3com.com", "3com.com", ((80, 80), (443, 443))),
    ],
)
def test_good(text: str, canonical: str, spans: tuple[tuple[int, int], ...]) -> None:
    rule = parse_rule(text)
    assert rule.text == canonical
    assert rule.host.ports.spans == spans
    assert parse_rule(canonical) == rule, "a canonical text means the same"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"), ("  ", "empty"), (None, "type NoneType"), (7, "type int"), (b"x.org", "type bytes"),
        (["x.org"], "type list"), ("http//x", "'http://x'"), ("https//x.org/a", "'https://x.org/a'"),
        ("http:", "'http://'"),
        ("http:/x", "'http://x'"), ("*.", "not a host name"), ("*.*.com", "'*.com'"), ("a*.com", "'*.a.com'"),
        ("*example.com", "'*.example.com'"), ("x.*", "'*.x'"), ("**", "'*.example.com'"), ("x.org:0", "1 to 65535"),
        ("x.org:65536", "1 to 65535"), ("x.org:", "not a port"), ("x.org:http", "not a port"),
        ("x.org:9-1", "not a port"),
        ("x.org:-1", "not a port"), ("x.org:1-", "not a port"), ("x.org:80,,81", "not a port"),
        ("x.org:80;81", "not a port"),
        ("ftp://x.org", "ftp://"), ("ssh://git@x.org", "ssh://"), ("user:secret@x.org", "user name"),
        ("x .org", "methods"),
        ("get https://x.org", "methods"), ("GET, HEAD https://x.org", "methods"), ("GET", None),
        ("x.org y.org", "methods"),
        ("x\n.org", "printable"), ("x.org\0", "printable"), ("-x.org", "not a host name"),
        ("x-.org", "not a host name"),
        ("x..org", "not a host name"), (".x.org", "not a host name"), ("x.org..", "not a host name"),
        ("a" * 64 + ".org", "not a host name"),
        ("a." * 127 + "org", "not a host name"), ("x" * 3000, "at most 2048"), ("localhost", "host.sloplet:PORT"),
        ("foo.localhost:80", "host.sloplet:PORT"), ("host.sloplet", "host.sloplet:PORT"),
        ("host.sloplet:*", "host.sloplet:PORT"),
        ("10.0.0.1/8", "'10.0.0.0/8'"), ("10.0.0.0/33", "not a network"), ("10.0.0.0/", "not a network"),
        ("10.0.0.0/x", "not a network"),
        ("127.1", "'127.0.0.1'"), ("2130706433", "'127.0.0.1'"), ("0x7f.0.0.1", "'127.0.0.1'"),
        ("010.0.0.1", "'8.0.0.1'"),
        ("1.2.3.4.5", "neither a name nor an address"), ("256.1.1.1", "neither"), ("x.123", "neither"),
        ("*.10.0.0.1", "neither"),
        ("[fd00::1", "not an address"), ("[fd00::1]x", "not an address"), ("fe80::1%eth0", "without a zone"),
        ("[fe80::1%1]:80", "without a zone"),
        ("GET http://10.0.0.1/x", "to an address"), ("https://x.org/a?b=c", "'?'"),
        ("https://x.org/a/../b", "spellings"),
        ("https://x.org/%61", "spellings"), ("https://x.org//a", "spellings"), ("https://x.org/a;b", "spellings"),
        ("https://x.org/" + "*a" * 9, "too many '*'"), ("@github", "preset"), ("straße.example", "xn--"),
        ("x。org", None),
        ("１.2.3.4", None), ("x.org/8", None),
    ],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_bad(text: object, says: str | None) -> None:
    """None: a text that is fine, or that another form makes fine; it must only not be taken for something wider."""
    if says is None:
        try:
            rule = parse_rule(text)
        except SpecError:
            return
        assert rule.host.name in ("get", "x.org"), "no wildcard, no network"
        return
    with pytest.raises(SpecError) as caught:
        parse_rule(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()
    assert caught.value.hint


def test_a_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(SpecError) as caught:
        parse_rule("https://me:hunter2@x.org/simple")
    assert "hunter2" not in str(caught.value)


@given(st.text(max_size=60))
def test_anything_is_a_rule_or_a_spec_error(text: str) -> None:
    try:
        rule = parse_rule(text)
    except SpecError:
        return
    assert parse_rule(rule.text) == rule


RULE_PARTS = st.tuples(
    st.sampled_from(["", "GET ", "GET,POST ", "get "]),
    st.sampled_from(["", "http://", "https://", "ftp://", "http//"]),
    st.sampled_from(["x.org", "*.x.org", "*", "10.0.0.0/8", "1.2.3.4", "[::1]", "::1", "fd00::/8", "a*.b", "0x7f.1"]),
    st.sampled_from(["", ":80", ":*", ":1-9", ":0", ":", ":80,443"]),
    st.sampled_from(["", "/", "/*", "/a/*", "/../x", "?", "/8"]),
).map("".join)  # fmt: skip


@given(RULE_PARTS, st.booleans())
def test_canonical_texts_are_stable(text: str, deny: bool) -> None:
    try:
        rule = parse_rule(text, deny=deny)
    except SpecError:
        return
    assert parse_rule(rule.text, deny=deny) == rule


def test_no_port_means_the_web_or_everything() -> None:
    allowed, denied = parse_rule("x.org"), parse_rule("x.org", deny=True)
    assert [port for port in (22, 80, 443, 8443) if allowed.port(port) >= 0] == [80, 443]
    assert all(denied.port(port) >= 0 for port in (22, 80, 443, 8443))


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("x.org", 443, "x.org"), ("X.org.", 80, "x.org"), ("x.org", 22, "x.org:22"), ("1.2.3.4", 443, "1.2.3.4"),
        ("1.2.3.4", 22, "1.2.3.4:22"), ("fd00::1", 80, "[fd00::1]"), ("fd00::1", 22, "[fd00::1]:22"),
        ("0x7f.1", 22, "127.0.0.1:22"),
        ("host.sloplet", 443, "host.sloplet:443"),
    ],
)  # fmt: skip
def test_rule_text(host: str, port: int, text: str) -> None:
    assert rule_text(host, port) == text
    assert parse_rule(text).port(port) >= 0


@pytest.mark.parametrize("host", ["", "a b", "a*", "1.2.3.4.5", "x\n"])
def test_rule_text_of_nothing(host: str) -> None:
    with pytest.raises(SpecError):
        rule_text(host, 80)


@pytest.mark.parametrize(
    ("name", "same"),
    [("A.b.", "a.b"), ("xn--bcher-kva.example", "xn--bcher-kva.example"), ("a_b.c", "a_b.c"), ("a1", "a1")],
)
def test_names(name: str, same: str) -> None:
    assert normal(name) == same


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a..b", "-a", "a-", "a b", "a\0", "a/b", "a:1", "*", "*.a", "1", "1.2.3.4", "a.1", "a.0x1",
     "ü.de", "a.b..",
     "a" * 64, ".".join(["a" * 60] * 5), "\u212a.org", "a@b", "[::1]"],
    ids=ascii,
)  # fmt: skip
def test_no_names(name: str) -> None:
    with pytest.raises(BadName):
        normal(name)


def test_fullwidth_numbers_are_numbers() -> None:
    with pytest.raises(BadName):
        from_user("１２７.０.０.１")


@pytest.mark.parametrize(
    ("pattern", "name", "port", "yes"),
    [
        ("x.org", "x.org", 443, True), ("x.org", "a.x.org", 443, False), ("*.x.org", "a.b.x.org", 1, True),
        ("*.x.org", "x.org", 1, False),
        ("*.x.org", "evilx.org", 1, False), ("x.org:443", "x.org", 443, True), ("x.org:443", "x.org", 80, False),
    ],
)  # fmt: skip
def test_hosts(pattern: str, name: str, port: int, yes: bool) -> None:
    assert parse_host(pattern).matches(name, port) is yes


@pytest.mark.parametrize("pattern", ["*", "1.2.3.4", "10.0.0.0/8", "", None, "https://x.org", "x.org/a"])
def test_no_hosts(pattern: object) -> None:
    with pytest.raises(SpecError):
        parse_host(pattern)


@pytest.mark.parametrize(
    ("one", "other", "yes"),
    [
        ("x.org", "x.org", True), ("x.org", "y.org", False), ("*.x.org", "a.x.org", True),
        ("*.x.org", "x.org", False),
        ("*.x.org", "*.a.x.org", True), ("*.x.org", "*.y.org", False), ("*.x.org", "evilx.org", False),
    ],
)  # fmt: skip
def test_overlap(one: str, other: str, yes: bool) -> None:
    assert overlap(parse_host(one), parse_host(other)) is yes
    assert overlap(parse_host(other), parse_host(one)) is yes
    assert overlap(parse_rule("GET *").host, parse_host(one))
