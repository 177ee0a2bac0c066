"""The pure parts of public names: which hosts they are, what goes in, what comes out, who may."""

from __future__ import annotations

import pytest

from sloplet.server.names import parts
from sloplet.server.names.parts import Place, Unsafe

pytestmark = pytest.mark.anyone

BOX = "abcdef234567"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (f"8000-{BOX}.localhost", Place(8000, BOX)),
        (f"8000-{BOX}.localhost:7667", Place(8000, BOX)),
        (f"8000-{BOX.upper()}.LocalHost:7667", Place(8000, BOX)),
        (f"65535-{BOX}.localhost", Place(65535, BOX)),
        ("1-ab-cd.localhost", Place(1, "ab-cd")),
        ("localhost", None),
        ("localhost:7667", None),
        ("", None),
        (f"0-{BOX}.localhost", None),
        (f"08000-{BOX}.localhost", None),
        (f"65536-{BOX}.localhost", None),
        (f"-8000-{BOX}.localhost", None),
        (f"{BOX}.localhost", None),
        ("8000-.localhost", None),
        ("8000-ab.localhost", None),
        ("8000-" + "a" * 41 + ".localhost", None),
        (f"8000-{BOX}.localhost.", None),
        (f"8000-{BOX}.evil.test", None),
        (f"8000-{BOX}.localhost.evil.test", None),
        (f"x.8000-{BOX}.localhost", None),
        (f"8000-{BOX}xlocalhost", None),
        (f"8000-{BOX}.localhost:", None),
        (f"8000-{BOX}.localhost:123456", None),
        (f"8000-{BOX}.localhost:80:80", None),
        (f"8000-{BOX}.localhost\n", None),
        (f"8000-{BOX}/x.localhost", None),
        (f"user@8000-{BOX}.localhost", None),
        ("8000-äbcdef234567.localhost", None),
        ("[::1]:80", None),
        ("a" * 5000 + ".localhost", None),
    ],
)
def test_which_hosts_are_public_names(host: str, expected: Place | None) -> None:
    assert parts.parse_host(host, "localhost") == expected


def test_a_domain_of_several_labels() -> None:
    assert parts.parse_host(f"80-{BOX}.box.example.org", "box.example.org") == Place(80, BOX)
    assert parts.parse_host(f"80-{BOX}.boxxexample.org", "box.example.org") is None


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ("http://127.0.0.1:7667", f"http://80-{BOX}.localhost:7667"),
        ("https://[::1]:7667", f"https://80-{BOX}.localhost:7667"),
        ("https://0.0.0.0:443", f"https://80-{BOX}.localhost"),
        ("http://0.0.0.0:80", f"http://80-{BOX}.localhost"),
        ("http://0.0.0.0:443", f"http://80-{BOX}.localhost:443"),
        ("https://box.example.org", f"https://80-{BOX}.localhost"),
    ],
)
def test_urls(server: str, url: str) -> None:
    assert parts.url_of(Place(80, BOX), "localhost", server) == url


def inner(*headers: tuple[bytes, bytes], **options: object) -> dict[bytes, bytes]:
    found = parts.inner_headers(
        list(headers), host="h.test", address="10.0.0.7", scheme="https", **options  # type: ignore[arg-type]
    )  # fmt: skip
    assert len({name.lower() for name, _ in found}) == len(found), found
    return {name.lower(): value for name, value in found}


def test_nobody_but_the_proxy_says_who_the_visitor_is() -> None:
    found = inner(
        (b"x-forwarded-for", b"1.2.3.4"), (b"X_Forwarded_For", b"1.2.3.4"), (b"x-forwarded-port", b"1"),
        (b"forwarded", b"for=1.2.3.4"), (b"x-real-ip", b"1.2.3.4"), (b"X_Real_IP", b"1.2.3.4"), (b"host", b"other"),
        (b"via", b"1.1 x"),
    )  # fmt: skip
    assert found == {
        b"host": b"h.test", b"x-forwarded-for": b"10.0.0.7", b"x-forwarded-host": b"h.test",
        b"x-forwarded-proto": b"https",
    }  # fmt: skip


def test_what_is_of_one_connection_stays_on_it() -> None:
    found = inner(
        (b"connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"keep-alive", b"5"), (b"te", b"trailers"),
        (b"trailer", b"x"), (b"transfer-encoding", b"chunked"), (b"upgrade", b"h2c"), (b"http2-settings", b"x"),
        (b"proxy-authorization", b"x"), (b"content-length", b"3"), (b"expect", b"100-continue"), (b"accept", b"*/*"),
    )  # fmt: skip
    assert found.keys() - {b"host", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto"} == {b"accept"}


def test_the_token_does_not_go_in_and_the_visitors_own_does() -> None:
    found = inner(
        (b"sloplet-token", b"t"), (b"Sloplet_Token", b"t"), (b"sloplet-tenant", b"x"),
        (b"authorization", b"Bearer of the app"), (b"cookie", b"a=1; sloplet-token=t; __Host-sloplet-token=t; b=2"),
    )  # fmt: skip
    assert b"t" not in found.values()
    assert found[b"authorization"] == b"Bearer of the app"
    assert found[b"cookie"] == b"a=1; b=2"
    assert b"cookie" not in inner((b"cookie", b"sloplet-token=t"))
    assert b"authorization" not in inner((b"Authorization", b"x"), hide=[b"authorization"])


@pytest.mark.parametrize("header", [(b"a b", b"x"), (b"a", b"x\ny"), (b"a", b"\x01"), (b"a\0", b"x"), (b"", b"x")])
def test_a_header_that_could_be_two_is_refused_in_both_directions(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(Unsafe):
        inner(header)
    with pytest.raises(Unsafe):
        parts.outer_headers([header])


def test_what_is_inside_speaks_for_its_own_host_only() -> None:
    found = parts.outer_headers(
        [
            (b"Content-Type", b"text/html"), (b"Alt-Svc", b'h3=":1"'), (b"Strict-Transport-Security", b"max-age=1"),
            (b"Clear-Site-Data", b'"*"'), (b"NEL", b"{}"), (b"Report-To", b"{}"), (b"Sloplet-Request-Id", b"fake"),
            (b"Connection", b"X-Gone"), (b"X-Gone", b"1"), (b"Transfer-Encoding", b"chunked"),
            (b"Proxy-Authenticate", b"Basic"), (b"Location", b"/next"),
        ]
    )  # fmt: skip
    assert found == [(b"content-type", b"text/html"), (b"location", b"/next")]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"a=1", b"a=1"),
        (b"a=1; Path=/; HttpOnly", b"a=1; Path=/; HttpOnly"),
        (b"a=1; Domain=localhost; Path=/", b"a=1; Path=/"),
        (b"a=1;domain=.example.org", b"a=1"),
        (b"a=1; DOMAIN ; domain=x", b"a=1"),
        (b"a=domain; Domain = x", b"a=domain"),
        (b"sloplet-token=x; Path=/", None),
        (b" SLOPLET-TOKEN =x", None),
        (b"__Host-sloplet-token=x", None),
    ],
)
def test_cookies_are_for_this_host(given: bytes, kept: bytes | None) -> None:
    assert parts.own_cookie(given) == kept


def test_too_many_headers_are_refused() -> None:
    with pytest.raises(Unsafe):
        parts.outer_headers([(b"a", b"x")] * (parts.MAX_FIELDS + 1))
    with pytest.raises(Unsafe):
        parts.outer_headers([(b"a", b"x" * parts.MAX_HEAD)])


def test_lengths() -> None:
    assert parts.body_length([]) == 0
    assert parts.body_length([(b"content-length", b"5")]) == 5
    assert parts.body_length([(b"transfer-encoding", b"Chunked")]) is None
    two_ways: list[list[tuple[bytes, bytes]]] = [
        [(b"content-length", b"5"), (b"transfer-encoding", b"chunked")],
        [(b"content-length", b"5"), (b"content-length", b"5")],
        [(b"content-length", b"+5")],
        [(b"content-length", b"5, 5")],
        [(b"transfer-encoding", b"gzip, chunked")],
        [(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")],
    ]
    for headers in two_ways:
        with pytest.raises(Unsafe):
            parts.body_length(headers)
    assert parts.answer_length([(b"Content-Length", b"5"), (b"content-length", b"5")]) == 5
    for headers in (
        two_ways[0],
        two_ways[2],
        two_ways[3],
        two_ways[4],
        [(b"content-length", b"1"), (b"content-length", b"2")],
    ):
        with pytest.raises(Unsafe):
            parts.answer_length(headers)


def test_the_token_leaves_the_query() -> None:
    assert parts.split_query(b"a=1&sloplet_token=t&b=2") == (b"a=1&b=2", ["t"])
    assert parts.split_query(b"sloplet_token=t") == (b"", ["t"])
    assert parts.split_query(b"") == (b"", [])
    assert parts.split_query(b"a&&b") == (b"a&&b", [])
    assert parts.split_query(b"xsloplet_token=t") == (b"xsloplet_token=t", [])


@pytest.mark.parametrize(
    ("path", "query", "target"),
    [
        (b"/", b"", b"/"),
        (b"/a/b", b"c=d", b"/a/b?c=d"),
        (b"//evil.test/x", b"", b"/evil.test/x"),
        (b"/\\evil.test", b"", b"/evil.test"),
        (b"\\\\evil.test", b"", b"/evil.test"),
        (b"*", b"", b"/*"),
    ],
)
def test_a_redirect_stays_on_this_host(path: bytes, query: bytes, target: bytes) -> None:
    assert parts.clean_target(path, query) == target


ORIGIN = "http://8000-abc.localhost:7667"
COOKIE = (b"cookie", b"sloplet-token=good")
BROWSER = {
    "nothing said (curl)": ([], "POST", True),
    "its own page": ([(b"origin", ORIGIN.encode()), (b"sec-fetch-site", b"same-origin")], "POST", True),
    "typed in": ([(b"sec-fetch-site", b"none")], "GET", True),
    "a link elsewhere": (
        [(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"document")],
        "GET", True,
    ),
    "a form elsewhere": (
        [(b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"document")],
        "POST", False,
    ),
    "a frame of a sibling": (
        [(b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"iframe")],
        "GET", False,
    ),
    "a fetch of a sibling": ([(b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"cors")], "GET", False),
    "another origin": ([(b"origin", b"http://9000-abc.localhost:7667")], "GET", False),
    "no origin at all": ([(b"origin", b"null")], "POST", False),
    "two origins": ([(b"origin", ORIGIN.encode()), (b"origin", b"http://evil.test")], "GET", False),
}  # fmt: skip


@pytest.mark.parametrize("case", BROWSER)
def test_a_cookie_counts_for_ones_own_doing_only(case: str) -> None:
    headers, method, counts = BROWSER[case]
    shown = parts.shown_tokens([COOKIE, *headers], b"", method=method, origin=ORIGIN)
    assert shown == (["good"] if counts else [])
    # Who shows the token itself needs no cookie.
    shown = parts.shown_tokens([(b"sloplet-token", b"good"), *headers], b"", method=method, origin=ORIGIN)
    assert shown == ["good"]


def test_over_tls_only_the_cookie_that_siblings_cannot_set_counts() -> None:
    headers = [(b"cookie", b"sloplet-token=planted; __Host-sloplet-token=good")]
    assert parts.shown_tokens(headers, b"", method="GET", origin="https://x") == ["good"]
    assert parts.shown_tokens(headers, b"", method="GET", origin="http://x") == ["planted"]
    assert b"Secure" in parts.token_cookie("t", secure=True)
    assert parts.token_cookie("t", secure=True).startswith(b"__Host-")
    assert parts.token_cookie("t", secure=False) == b"sloplet-token=t; Path=/; HttpOnly; SameSite=Lax"


def test_right_tokens() -> None:
    assert parts.is_right(["wrong", "good"], "good")
    assert not parts.is_right([], "good")
    assert not parts.is_right(["", "goo", "good ", "GOOD", "good" * 100], "good")
    assert len(parts.shown_tokens([(b"sloplet-token", b"x")] * 1000, b"", method="GET", origin=ORIGIN)) <= 8
