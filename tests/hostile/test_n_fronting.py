"""N-08: a connection that was allowed to one host talks to no other. N-09: the same policy on every path."""

from __future__ import annotations

import ssl
import struct

import pytest
from net_kit import (
    EVIL,
    EVIL_AT,
    GOOD,
    GOOD_AT,
    HELLO,
    Rung,
    attempt,
    decisions,
    get,
    http,
    https,
    set_network,
    tcp,
)  # fmt: skip

from netkit import Internet
from sloplet import Network, Sandbox

pytestmark = pytest.mark.anyone  # the host's part, over whichever rung

CANARY = "canary5d21ee"


def client_hello(name: str | None, *extensions: tuple[int, bytes]) -> bytes:
    """A first TLS record for that server, with more extensions than usual."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    hello = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    record = outgoing.read()
    body = record[9:]
    at = 34 + 1 + body[34]
    at += 2 + struct.unpack_from("!H", body, at)[0]
    at += 1 + body[at]
    known = body[at + 2 :]
    more = b"".join(struct.pack("!HH", kind, len(data)) + data for kind, data in extensions)
    body = body[:at] + struct.pack("!H", len(known) + len(more)) + known + more
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + struct.pack("!H", len(message)) + message


#: An outer hello with an encrypted one inside (draft-ietf-tls-esni): type outer, cipher suite, id, key, payload.
ECH = (0xFE0D, b"\x00\x00\x01\x00\x01\x07\x00\x20" + bytes(32) + b"\x00\x90" + bytes(144))


def raw(to: str, port: int, data: bytes) -> dict[str, object]:
    return tcp(to, port, (data.decode("latin-1"), None))


# -- N-08 ----------------------------------------------------------------------------------------------------


def test_n08_tls_names_its_server(shared: Sandbox, net: Internet) -> None:
    set_network(shared, Network(allow=[GOOD, f"{EVIL_AT}:443"]))
    before = len(decisions(shared))
    tries = [
        https(GOOD, sni=EVIL),
        https(GOOD, sni=f"x.{GOOD}"),
        https(GOOD, sni=""),
        raw(GOOD, 443, client_hello(EVIL, ECH)),
        raw(GOOD, 443, client_hello(None)),
        raw(GOOD, 443, client_hello(EVIL)),
        raw(GOOD, 443, b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00"),  # no ClientHello
        raw(GOOD, 443, b"\x14\x03\x01\x00\x00" + client_hello(EVIL)),  # OpenSSL passes over an empty record
        raw(GOOD, 443, b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + client_hello(EVIL)),
    ]
    tried = attempt(shared, *tries)
    for outcome in tried.outcomes:
        assert outcome.refused, outcome
    assert net.seen("tls") == []
    assert net.heard(EVIL) == []
    assert [line.verdict for line in decisions(shared)[before:]] == ["deny"] * len(tries)
    assert any(EVIL in text for text in tried.denied)


def test_n08_positive_control(shared: Sandbox, net: Internet) -> None:
    """As it should be it works; and where only an address was judged, names inside are nobody's business."""
    set_network(shared, Network(allow=[GOOD, f"{EVIL_AT}:443"]))
    mine, upper, fronted = attempt(
        shared, https(GOOD), https(GOOD, sni=GOOD.upper(), host=GOOD), https(EVIL_AT, sni="front.example", host=EVIL)
    ).outcomes
    assert HELLO in mine.data, mine
    assert HELLO in upper.data, upper
    assert f"hello from {EVIL}" in fronted.data
    assert [event["sni"].lower() for event in net.seen("tls")] == [GOOD, GOOD, "front.example"]


NEXT = get(EVIL, f"/{CANARY}")
SMUGGLED = [
    ("another host", NEXT),
    ("no host", f"GET /{CANARY} HTTP/1.1\r\n\r\n"),
    ("two hosts", f"GET /{CANARY} HTTP/1.1\r\nHost: {GOOD}\r\nHost: {EVIL}\r\n\r\n"),
    ("a host with a space", f"GET /{CANARY} HTTP/1.1\r\nHost : {EVIL}\r\nHost: {GOOD}\r\n\r\n"),
    ("a folded host", f"GET /{CANARY} HTTP/1.1\r\nHost: {GOOD}\r\n {EVIL}\r\n\r\n"),
    ("another port", get(f"{GOOD}:22", f"/{CANARY}")),
    ("bare newlines", f"GET /{CANARY} HTTP/1.1\nHost: {EVIL}\n\n"),
    ("a first line of two", f"GET /{CANARY} HTTP/1.1\rHost: {EVIL}\r\nHost: {GOOD}\r\n\r\n"),
    ("http/2 from the start", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + CANARY),
    ("a version that Node takes", f"GET /{CANARY} RTSP/1.0\r\nHost: {EVIL}\r\n\r\n"),
    ("a long method", get(GOOD, "/", "A" * 40, close=False) + NEXT),
    ("a method that is none", get(GOOD, "/", 'G"ET', close=False) + NEXT),
    ("another header in front", "PROXY UNKNOWN\r\n" + NEXT),
    ("absolute form", get(GOOD, f"http://{EVIL}/{CANARY}")),
    ("absolute form of https", get(GOOD, f"https://{EVIL}:443/{CANARY}")),
    ("user information", get(GOOD, f"http://{GOOD}@{EVIL}/{CANARY}")),
    ("connect", get(f"{EVIL}:443", f"{EVIL}:443", "CONNECT") + CANARY),
    ("connect to mail", get(GOOD, f"{GOOD}:25", "CONNECT") + CANARY),
    ("two lengths", get(GOOD, "/", "POST", "Content-Length: 3", "Content-Length: 99") + "abc" + NEXT),
    ("length and chunks", get(GOOD, "/", "POST", "Content-Length: 5", "Transfer-Encoding: chunked") + "0\r\n\r\n"
     + NEXT),
    ("strange chunks", get(GOOD, "/", "POST", "Transfer-Encoding: xchunked") + "0\r\n\r\n" + NEXT),
    ("a body, then another", get(GOOD, "/", "POST", "Content-Length: 3", close=False) + "abc" + NEXT),
    ("chunks, then another", get(GOOD, "/", "POST", "Transfer-Encoding: chunked", close=False) + "3\r\nabc\r\n0\r\n\r\n"
     + NEXT),
    ("pipelined", get(GOOD, close=False) + NEXT),
    ("after an upgrade that is none", get(GOOD, "/", "GET", "Upgrade: nonsense", "Connection: Upgrade", close=False)
     + NEXT),
]  # fmt: skip


def test_n08_http_on_every_request(shared: Sandbox, net: Internet) -> None:
    set_network(shared, Network(allow=[GOOD]))
    tried = attempt(shared, *(tcp(GOOD, 80, (text, None)) for _, text in SMUGGLED))
    for (what, _), outcome in zip(SMUGGLED, tried.outcomes, strict=True):
        assert f"hello from {EVIL}" not in outcome.data, f"{what}: {outcome}"
        assert outcome.error != "TIMEOUT", f"{what}: {outcome}"
    assert net.heard(CANARY) == []
    assert {event["host"] for event in net.seen("http")} <= {GOOD}


def test_n08_the_second_request(shared: Sandbox, net: Internet) -> None:
    """A connection that is kept open: the first request is answered, the second to another host never leaves."""
    set_network(shared, Network(allow=[GOOD]))
    first = (get(GOOD, close=False), HELLO)
    second, control = attempt(
        shared, tcp(GOOD, 80, first, (get(EVIL, f"/{CANARY}"), None)), tcp(GOOD, 80, first, (get(GOOD, "/two"), None))
    ).outcomes
    assert second.data.count("HTTP/1.1 200") == 1
    assert second.error or "HTTP/1.1 403" in second.data
    assert control.data.count("HTTP/1.1 200") == 2
    assert net.heard(CANARY) == []
    assert [event["target"] for event in net.seen("http")] == ["/", "/", "/two"]


@pytest.fixture(scope="module")
def inspected_box(rung: Rung, whole_internet: Internet) -> object:
    with rung.box(network=Network(allow=[GOOD], inspect=True)) as made:
        yield made


def test_n08_inside_tls(inspected_box: Sandbox, net: Internet) -> None:
    """Where TLS is opened: server name and host must agree, on every request, and HTTP/2 is not spoken."""
    first = (get(GOOD, close=False), HELLO)
    mine, host, second, sni, nameless = attempt(
        inspected_box,
        https(GOOD, alpn=["h2", "http/1.1"]),
        https(GOOD, host=EVIL, path=f"/{CANARY}"),
        tcp(GOOD, 443, first, (get(EVIL, f"/{CANARY}"), None), tls=GOOD),
        https(GOOD, sni=EVIL, path=f"/{CANARY}"),
        https(GOOD, sni="", path=f"/{CANARY}"),
    ).outcomes
    assert HELLO in mine.data
    assert host.refused
    assert second.data.count("hello") == 1
    for outcome in (sni, nameless):
        assert "hello" not in outcome.data
    assert net.heard(CANARY) == []
    assert {event["sni"] for event in net.seen("tls")} == {GOOD}
    tried = attempt(inspected_box, *(tcp(GOOD, 443, (text, None), tls=GOOD) for _, text in SMUGGLED))
    for (what, _), outcome in zip(SMUGGLED, tried.outcomes, strict=True):
        assert f"hello from {EVIL}" not in outcome.data, what
        assert outcome.error != "TIMEOUT", what
    assert net.heard(CANARY) == []


def test_n08_a_server_that_lies(inspected_box: Sandbox, net: Internet) -> None:
    """Opened or not, a certificate that nobody vouches for is not good enough."""
    inspected_box.network.set(Network(allow=["untrusted.example", GOOD], inspect=True))
    net.name("untrusted.example")
    result = inspected_box.run(["curl", "-sS", "-m", "10", "-k", f"https://untrusted.example/{CANARY}"])
    assert "certificate" in result.denied[0]
    assert net.heard(CANARY) == []
    assert inspected_box.run(["curl", "-sS", "-m", "10", f"https://{GOOD}/"]).stdout.strip() == HELLO


# -- N-09 ----------------------------------------------------------------------------------------------------

#: A proxy as users run them: it takes CONNECT and absolute forms from programs in the sandbox.
PROXY = """
import socket, threading
def copy(a, b):
    try:
        while data := a.recv(65536): b.sendall(data)
    except OSError: pass
    for s in (a, b):
        try: s.shutdown(socket.SHUT_RDWR)
        except OSError: pass
def serve(c):
    head = b""
    while b"\\r\\n\\r\\n" not in head: head += c.recv(65536)
    method, target = head.split(b" ")[:2]
    host = target.split(b"//")[-1].split(b"/")[0].decode()
    name, _, port = host.partition(":")
    try: s = socket.create_connection((name, int(port or 80)), 10)
    except OSError: c.close(); return
    if method == b"CONNECT": c.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
    else: s.sendall(head.replace(target, b"/", 1))
    threading.Thread(target=copy, args=(s, c), daemon=True).start()
    copy(c, s)
l = socket.create_server(("127.0.0.1", 3128))
print("up", flush=True)
while True: threading.Thread(target=serve, args=(l.accept()[0],), daemon=True).start()
"""


def test_n09_a_proxy_inside(shared: Sandbox, net: Internet) -> None:
    set_network(shared, Network(allow=[GOOD]))
    proxy = shared.spawn(["python3", "-uc", PROXY])
    try:
        assert next(iter(proxy))[1].startswith("up")
        by_proxy = {"http_proxy": "http://127.0.0.1:3128", "https_proxy": "http://127.0.0.1:3128"}
        curl = ["curl", "-sSk", "-m", "10"]
        assert shared.run([*curl, f"http://{GOOD}/"], env=by_proxy).stdout.strip() == HELLO
        assert shared.run([*curl, f"https://{GOOD}/"], env=by_proxy).stdout.strip() == HELLO
        net.forget()
        for url in (f"http://{EVIL}/{CANARY}", f"https://{EVIL}/{CANARY}", f"http://{EVIL_AT}/", f"https://{GOOD}:22/"):
            result = shared.run([*curl, url], env=by_proxy)
            assert not result.ok, url
        assert net.dialled() == set()
        assert net.heard(EVIL) == []
    finally:
        proxy.kill()


def test_n09_every_way_is_the_same(shared: Sandbox, net: Internet) -> None:
    """Variables that name a proxy have nothing to do with it, and neither has the program."""
    set_network(shared, Network(allow=[f"{GOOD}:80", f"{GOOD}:443"]))
    nonsense = {
        "http_proxy": f"http://{EVIL}:8080",
        "HTTPS_PROXY": f"http://{EVIL_AT}:8080",
        "ALL_PROXY": "socks5://9.9.9.9",
    }
    for env in ({}, nonsense, {**nonsense, "no_proxy": "*"}):
        for url in (
            f"http://{EVIL}/",
            f"https://{EVIL}/",
            f"http://{EVIL_AT}/",
            f"telnet://{GOOD}:25",
            f"http://{GOOD}:22/",
        ):
            result = shared.run(["curl", "-sSk", "-m", "10", url], env=env)
            assert not result.ok, (env, url)
    attempt(shared, http(EVIL), https(EVIL), tcp(GOOD, 25), tcp(GOOD, 22), tcp(EVIL_AT, 7, ("x", None))).all_refused()
    assert net.dialled() == set()
    for url in (f"http://{GOOD}/", f"https://{GOOD}/"):  # the positive control
        assert shared.run(["curl", "-sSk", "-m", "10", url]).stdout.strip() == HELLO
    assert net.dialled() == {GOOD_AT}


def test_n09_a_server_that_speaks_first(shared: Sandbox, net: Internet) -> None:
    """Mail is not opened by a rule for the web, and works with one of its own."""
    dialogue = [("", "ESMTP"), (f"HELO {CANARY}\r\n", "250"), ("QUIT\r\n", None)]
    set_network(shared, Network(allow=[GOOD]))
    attempt(shared, tcp(GOOD, 25, *dialogue)).all_refused()
    assert net.heard(CANARY) == []
    set_network(shared, Network(allow=[f"{GOOD}:25"]))
    outcome = attempt(shared, tcp(GOOD, 25, *dialogue)).one
    assert outcome.data.endswith("221 bye\r\n"), outcome
    assert net.heard(CANARY)
