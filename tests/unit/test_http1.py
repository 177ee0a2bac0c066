"""HTTP/1 taken apart and put together again: what is ambiguous is refused, what is forwarded is canonical."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloplet.network import http1, httpbody
from sloplet.network.channel import Refused
from sloplet.network.http1 import CHUNKED, UNTIL_CLOSE, HeadReader, Malformed, Request
from sloplet.network.httppath import judged_path

pytestmark = pytest.mark.anyone


def read(data: bytes, step: int = 1 << 20) -> tuple[Request, bytes]:
    """A request's head and what follows it; EOFError if it is not whole."""
    reader = HeadReader()
    for at in range(0, len(data), step):
        lines = reader.feed(data[at : at + step])
        if lines is not None:
            return http1.parse_request(lines), reader.rest + data[at + step :]
    raise EOFError


def ask(*lines: bytes, first: bytes = b"GET /x HTTP/1.1", host: bytes = b"Host: a.com") -> bytes:
    return b"\r\n".join([first, *([host] if host else []), *lines, b"", b""])


def checked(data: bytes, *, name: str = "a.com", port: int = 80, secure: bool = False) -> Request:
    """All that a request must pass, in the order in which it does."""
    request, _ = read(data)
    http1.request_length(request)
    request = http1.check_host(request, name, port, secure=secure)
    return http1.clean_request(request)[0]


@pytest.mark.parametrize(
    "data",
    [
        ask(first=b"GET  /x HTTP/1.1"), ask(first=b"GET /x HTTP/1.1 "), ask(first=b"GET /x HTTP/2.0"),
        ask(first=b"GET /x HTTP/1.2"),
        ask(first=b"GET /x"), ask(first=b"get /x HTTP/1.1"), ask(first=b"G\xe9T /x HTTP/1.1"),
        ask(first=b"GET\t/x HTTP/1.1"),
        ask(first=b"GET /x#y HTTP/1.1"), ask(first=b"GET x HTTP/1.1"), ask(first=b"GET * HTTP/1.1"),
        ask(first=b"GET /\x7f HTTP/1.1"),
        ask(first=b"PRI * HTTP/2.0", host=b""), ask(first=b" GET /x HTTP/1.1"), ask(first=b"GET /x http/1.1"),
        ask(b"A : b"), ask(b" A: b"), ask(b"A: b", b" folded"), ask(b"A: b", b"\tfolded"), ask(b"A"), ask(b": b"),
        ask(b"A\0: b"),
        ask(b"A: b\0"), ask(b"A: b\x01"), ask(b"A: b\rc"), ask(b"A: b\nc: d"), ask(b"A(: b"), ask(b"A: b\x7f"),
        ask(b"A: \x0b"),
        ask(b"Host: a.com"), ask(host=b""), ask(host=b"Host:"), ask(host=b"Host: a.com, b.com"),
        ask(host=b"Host : a.com"),
        ask(host=b"Host: me@a.com"), ask(host=b"Host: a.com:80:80"), ask(host=b"Host: a.com:"),
        ask(host=b"Host: a.com/"),
        ask(host=b"Host: a.com\t.evil"), ask(host=b"Host: a.com evil.com"), ask(host=b"Host: a.com:+80"),
        ask(host=b"Host: a.com:080808"),
        ask(b"Content-Length: 1", b"Content-Length: 1"), ask(b"Content-Length: 1, 1"), ask(b"Content-Length: +1"),
        ask(b"Content-Length: -1"),
        ask(b"Content-Length: 0x1"), ask(b"Content-Length:"), ask(b"Content-Length: 1 2"),
        ask(b"Content-Length: " + b"9" * 19),
        ask(b"Content-Length: 1_0"), ask("Content-Length: ١".encode()), ask(b"Content-Length: 1", b"content-length: 2"),
        ask(b"Content-Length: 1", b"Transfer-Encoding: chunked"), ask(b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: chunked"),
        ask(b"Transfer-Encoding: xchunked"), ask(b"Transfer-Encoding: gzip, chunked"),
        ask(b"Transfer-Encoding: chunked, identity"),
        ask(b"Transfer-Encoding: identity"), ask(b"Transfer-Encoding:"), ask(b'Transfer-Encoding: "chunked"'),
        ask(b"Transfer-Encoding: chunked;"),
        ask(b"Transfer-Encoding: chunked", first=b"POST /x HTTP/1.0"), ask(b"Transfer-Encoding: \x0bchunked"),
        b"\r\n\r\n\r\n" + ask(), b"\n" + ask(), b"\r" + ask(), ask().replace(b"\r\n", b"\n"),
        ask()[:-2].replace(b"\r\n", b"\n") + b"\r\n\r\n",
        ask(*[b"A: b"] * 300), ask(b"A: " + b"b" * 70000),
    ],
)  # fmt: skip
def test_what_two_readers_could_read_differently_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        checked(data)


@pytest.mark.parametrize(
    "data",
    [
        ask(host=b"Host: evil.com"), ask(host=b"Host: a.com.evil.com"), ask(host=b"Host: xa.com"),
        ask(host=b"Host: a.com:81"),
        ask(host=b"Host: a.com.."), ask(host=b"Host: [::1]"), ask(first=b"CONNECT a.com:443 HTTP/1.1"),
        ask(first=b"GET http://evil.com/x HTTP/1.1"), ask(first=b"GET http://a.com:81/x HTTP/1.1"),
        ask(first=b"GET https://a.com/x HTTP/1.1"),
        ask(first=b"GET http://a.com@evil.com/x HTTP/1.1"), ask(first=b"GET http://a.com\\@evil.com/x HTTP/1.1"),
        ask(first=b"GET http:///x HTTP/1.1"), ask(first=b"GET http://a.com/x HTTP/1.1", host=b"Host: evil.com"),
        ask(first=b"GET http:/a.com/x HTTP/1.1"), ask(first=b"GET ftp://a.com/x HTTP/1.1"),
    ],
)  # fmt: skip
def test_a_request_for_another_host_is_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        checked(data)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (ask(), b"GET /x HTTP/1.1"),
        (ask(host=b"host:A.COM:80"), b"GET /x HTTP/1.1"),
        (ask(host=b"Host: a.com \t"), b"GET /x HTTP/1.1"),
        (ask(host=b"Host: a.com."), b"GET /x HTTP/1.1"),
        (ask(first=b"GET HTTP://A.com:80/y?z HTTP/1.1"), b"GET /y?z HTTP/1.1"),
        (ask(first=b"GET http://a.com?z HTTP/1.1"), b"GET /?z HTTP/1.1"),
        (ask(first=b"OPTIONS * HTTP/1.1"), b"OPTIONS * HTTP/1.1"),
        (ask(first=b"M-SEARCH /x HTTP/1.0"), b"M-SEARCH /x HTTP/1.0"),
        (b"\r\n\r\n" + ask(), b"GET /x HTTP/1.1"),
        (ask("X: é".encode(), first="GET /é HTTP/1.1".encode()), b"GET /%C3%A9 HTTP/1.1"),
        (ask(first=b'GET /?a="b"{c}|<d> HTTP/1.1'), b'GET /?a="b"{c}|<d> HTTP/1.1'),
    ],
)
def test_a_request_for_this_host_is_forwarded_in_origin_form(data: bytes, line: bytes) -> None:
    assert checked(data).encode().split(b"\r\n")[0] == line


@pytest.mark.parametrize("host", [b"host.sloplet", b"localhost", b"127.0.0.1:8000", b"LOCALHOST:8000"])
def test_this_machines_loopback_has_several_names(host: bytes) -> None:
    request = http1.parse_request([b"GET / HTTP/1.1", b"Host: " + host])
    assert http1.check_host(request, "host.sloplet", 8000, secure=False).values(b"host") == [host]
    with pytest.raises(Refused):
        http1.check_host(request, "a.com", 8000, secure=False)


def test_addresses_are_hosts_too() -> None:
    assert checked(ask(host=b"Host: [FD00::1]:80"), name="fd00::1")
    assert checked(ask(host=b"Host: 1.2.3.4"), name="1.2.3.4")
    with pytest.raises(Refused):
        checked(ask(host=b"Host: 0x1020304"), name="1.2.3.4")


def test_upgrades_other_than_websocket_are_left_out() -> None:
    def sent(*lines: bytes, first: bytes = b"GET /x HTTP/1.1") -> tuple[bytes, bool]:
        request, websocket = http1.clean_request(read(ask(*lines, first=first))[0])
        return request.encode().lower(), websocket

    head, websocket = sent(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAA")
    assert not websocket
    assert b"upgrade" not in head
    assert b"http2" not in head
    head, websocket = sent(b"Connection: keep-alive, Upgrade", b"Upgrade: WebSocket", b"Sec-WebSocket-Key: k")
    assert websocket
    assert b"connection: keep-alive, upgrade\r\n" in head
    for lines in ([b"Upgrade: websocket"], [b"Connection: upgrade", b"Upgrade: websocket, h2c"]):
        head, websocket = sent(*lines)
        assert not websocket
        assert b"upgrade" not in head
    assert not sent(b"Connection: upgrade", b"Upgrade: websocket", first=b"POST /x HTTP/1.1")[1]
    head, _ = sent(b"Connection: close, Host, Authorization", b"Connection: Content-Length")
    assert b"connection: close\r\n" in head
    assert head.count(b"connection") == 1


def test_methods_and_paths_cannot_be_overridden() -> None:
    for name in (b"X-HTTP-Method-Override", b"x_http_method", b"X-Original-URL"):
        with pytest.raises(Refused):
            http1.check_overrides(read(ask(name + b": DELETE"))[0])
    http1.check_overrides(read(ask(b"X-Other: DELETE"))[0])


@pytest.mark.parametrize(
    ("lines", "method", "length"),
    [
        ([b"HTTP/1.1 200 OK", b"Content-Length: 5"], b"GET", 5),
        ([b"HTTP/1.1 200 OK", b"Content-Length: 5", b"Content-Length: 5"], b"GET", 5),
        ([b"HTTP/1.1 200 OK", b"Content-Length: 5"], b"HEAD", 0),
        ([b"HTTP/1.1 204 No", b"Content-Length: 5"], b"GET", 0),
        ([b"HTTP/1.1 304 No", b"Content-Length: 5"], b"GET", 0),
        ([b"HTTP/1.1 200", b"Transfer-Encoding: Chunked", b"Content-Length: 9"], b"GET", CHUNKED),
        ([b"HTTP/1.0 200 OK"], b"GET", UNTIL_CLOSE),
    ],
)
def test_how_long_a_response_is(lines: list[bytes], method: bytes, length: int) -> None:
    response = http1.parse_response(lines)
    assert http1.response_length(response, method) == length
    shown = http1.clean_response(response).encode().lower()
    assert shown.count(b"content-length") + shown.count(b"transfer-encoding") <= 1


@pytest.mark.parametrize(
    "lines",
    [
        [b"HTTP/2 200 OK"], [b"HTTP/1.1 20 OK"], [b"HTTP/1.1 099 OK"], [b"HTTP/1.1  200 OK"], [b"ICY 200 OK"], [b""],
        [b"HTTP/1.1 200 OK", b"Content-Length: 5", b"Content-Length: 6"], [b"HTTP/1.1 200 OK", b"Content-Length: x"],
        [b"HTTP/1.1 200 OK", b"Transfer-Encoding: gzip, chunked"],
    ],
)  # fmt: skip
def test_a_response_that_makes_no_sense_is_refused(lines: list[bytes]) -> None:
    with pytest.raises(Malformed):
        http1.response_length(http1.parse_response(lines), b"GET")


# -- bodies -----------------------------------------------------------------------------


def taken(body: httpbody.Body, data: bytes, step: int) -> tuple[bytes, bytes, bool]:
    out = b""
    for at in range(0, len(data), step):
        out += body.feed(data[at : at + step])
        if body.done:
            return out, body.rest + data[at + step :], True
    return out, b"", body.ended()


@pytest.mark.parametrize("step", [1, 2, 5, 1 << 20])
def test_chunks(step: int) -> None:
    data = b"5\r\nhello\r\n6;a=b\r\n world\r\n0A \r\n0123456789\r\n0\r\nX-Sum: 1\r\n\r\nGET /"
    body = httpbody.body(CHUNKED)
    assert taken(body, data, step) == (b"hello world0123456789", b"GET /", True)
    assert body.trailers == ((b"X-Sum", b"1"),)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n", b"5\nhello\r\n", b"5\r\nhelloX\r\n", b"5\r\nhello\n0\r\n", b"-1\r\n", b"+5\r\n", b"0x5\r\n",
        b" 5\r\n", b"5;\n\r\n", b"5;\x00\r\n",
        b"1" * 16 + b"\r\n", b"5\r\nhello\r\n\r\n", b"0\r\nA : b\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n",
        b"0\r\nHost: x\r\n\r\n",
        b"0\r\n folded\r\n\r\n", b"5;" + b"x" * 5000, b"0\r\n" + b"A: b\r\n" * 4000 + b"\r\n", b"5\rhello\r\n",
        b"\xd9\xa1\r\nx\r\n", b"g\r\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_bad_chunks(data: bytes, step: int) -> None:
    with pytest.raises(Malformed):
        taken(httpbody.body(CHUNKED), data, step)


@pytest.mark.parametrize(("length", "data"), [(CHUNKED, b"5\r\nhel"), (CHUNKED, b"0\r\n"), (5, b"hell")])
def test_a_body_that_is_cut_is_not_whole(length: int, data: bytes) -> None:
    assert not taken(httpbody.body(length), data, 1)[2]
    assert taken(httpbody.body(UNTIL_CLOSE), data, 1) == (data, b"", True)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.binary(max_size=20), st.data())
def test_chunks_come_out_as_they_went_in(pieces: list[bytes], after: bytes, data: st.DataObject) -> None:
    coded = b"".join(httpbody.chunk(piece) for piece in pieces) + httpbody.last_chunk() + after
    assert taken(httpbody.body(CHUNKED), coded, data.draw(st.integers(1, 50))) == (b"".join(pieces), after, True)


# -- fuzzing ----------------------------------------------------------------------------

_WORDS = [
    b"GET", b"POST", b" ", b"  ", b"/", b"/x", b"http://a.com/", b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"\r\n", b"\r\n",
    b"\n", b"\r", b"\0", b"\t",
    b"Host: a.com", b"Host:", b"a.com", b"evil.com", b"Content-Length: 3", b"Content-Length:",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding:",
    b"chunked", b"Connection: close", b"X: y", b":", b",", b";", b"3", b"0", b"abc", b"3\r\nabc\r\n", b"0\r\n\r\n",
    b"\r\n\r\n", b"\xff", b"\x0b",
]  # fmt: skip


def soup() -> st.SearchStrategy[bytes]:
    """Bytes that look like requests, and often are some."""
    valid = st.sampled_from(
        [
            ask(), ask(b"Content-Length: 3", first=b"POST /x HTTP/1.1") + b"abc",
            ask(b"Transfer-Encoding: chunked", first=b"PUT /x HTTP/1.1") + b"3\r\nabc\r\n0\r\n\r\n", ask(b"X:  y ",
            b"Connection: close, X"),
        ]
    )  # fmt: skip
    word = st.sampled_from(_WORDS)
    spoilt = st.builds(lambda text, at, word: text[:at] + word + text[at:], valid, st.integers(0, 60), word)
    return st.lists(st.one_of(valid, spoilt, word, st.binary(max_size=3)), max_size=5).map(b"".join)


def forwarded(data: bytes, cuts: Callable[[bytes], list[bytes]]) -> tuple[bytes, str]:
    """The whole requests that go on to the server of a program's bytes, and how that ends."""
    out = b""
    pieces = cuts(data)
    rest = b""
    try:
        while True:
            reader = HeadReader()
            lines = reader.feed(rest)
            while lines is None:
                if not pieces:
                    return out, "over" if reader.empty else "cut"
                lines = reader.feed(pieces.pop(0))
            request = http1.parse_request(lines)
            length = http1.request_length(request)
            request = http1.check_host(request, "a.com", 80, secure=False)
            request, _ = http1.clean_request(request)
            head = request.encode()
            body, rest = httpbody.body(length), reader.rest
            payload = b""
            while not body.done:
                payload += body.feed(rest)
                if not body.done:
                    if not pieces:
                        return out, "cut"
                    rest = pieces.pop(0)
            if length:
                rest = body.rest
            coded = httpbody.chunk(payload) + httpbody.last_chunk(body.trailers) if length == CHUNKED else payload
            out += head + coded
    except Refused:
        return out, "refused"


@settings(max_examples=400, deadline=None)
@given(soup(), st.lists(st.integers(0, 200), max_size=6))
def test_any_split_gives_the_same(data: bytes, cuts: list[int]) -> None:
    def split(data: bytes) -> list[bytes]:
        marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        return [data[a:b] for a, b in pairwise(marks) if a < b]

    whole = forwarded(data, lambda data: [data] if data else [])
    single = forwarded(data, lambda data: [data[at : at + 1] for at in range(len(data))])
    # What was wrong may be seen earlier or later than the end of the bytes, but what went on is the same.
    assert forwarded(data, split) == whole
    assert single == whole


def by_h11(data: bytes) -> list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]]:
    """The same bytes, read by somebody else."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    connection.receive_data(b"")
    found = []
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            found.append((event.method, event.target, list(event.headers), b""))
        elif isinstance(event, h11.Data):
            method, target, headers, body = found.pop()
            found.append((method, target, headers, body + bytes(event.data)))
        elif isinstance(event, h11.EndOfMessage):
            connection.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
            connection.send(h11.EndOfMessage())
            if connection.states[h11.CLIENT] is not h11.DONE or connection.states[h11.SERVER] is not h11.DONE:
                return found
            connection.start_next_cycle()
        else:
            return found


@settings(max_examples=400, deadline=None)
@given(soup())
def test_what_is_forwarded_is_read_the_same_by_another_parser(data: bytes) -> None:
    out, _ = forwarded(data, lambda data: [data] if data else [])
    for method, target, headers, _ in by_h11(out):
        hosts = [value for name, value in headers if name == b"host"]
        assert [host.lower().removesuffix(b".").removesuffix(b":80") for host in hosts] == [b"a.com"]
        assert method.isupper()
        assert target.startswith(b"/")
    if b"HTTP/1.0" not in out and b"close" not in out:
        assert len(by_h11(out)) == _count(out)


def _count(out: bytes) -> int:
    count = 0
    while out:
        request, out = read(out)
        count += 1
        length = http1.request_length(request)
        if length:
            body = httpbody.body(length)
            body.feed(out)
            assert body.done
            out = body.rest
    return count


# -- paths ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "path"),
    [(b"/", "/"), (b"/a/b?c=/../", "/a/b"), (b"/a%20b", "/a b"), (b"/%61", "/a"), (b"/%C3%A9", "/é"), ("/é".encode(),
     "/é"), (b"/a/...", "/a/..."),
     (b"/a/.b", "/a/.b"), (b"/a/", "/a/"), (b"*", "*"), (b"/a:b@c", "/a:b@c")],
)  # fmt: skip
def test_the_path_that_is_judged(target: bytes, path: str) -> None:
    assert judged_path(target) == (path, "")


@pytest.mark.parametrize(
    "target",
    [b"/a/../b", b"/a/..", b"/.", b"/a/%2e%2e/b", b"/a/.%2E/b", b"/a%2fb", b"/a%5cb", b"/a\\b", b"//a", b"/a//b",
     b"/a;b", b"/a%3bb", b"/a/..;/b",
     b"/%252e", b"/%", b"/%4", b"/%zz", b"/%00", b"/%3f", b"/%23", b"/%0a", b"/%ff", b"/a%2F..%2Fb", b"/\xff"],
)  # fmt: skip
def test_a_path_that_a_server_could_see_otherwise_is_ambiguous(target: bytes) -> None:
    assert judged_path(target)[1]
