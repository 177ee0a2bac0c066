"""The first bytes of a connection: nothing that a server may take for TLS or HTTP is called opaque."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloplet.network.sniff import LIMIT, Broken, Http, Opaque, SecondHello, Tls, sniff

pytestmark = pytest.mark.anyone


def hello(name: str | None = "example.com", alpn: list[str] | None = None) -> bytes:
    """As OpenSSL makes it."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    if alpn:
        context.set_alpn_protocols(alpn)
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def records(message: bytes, size: int) -> bytes:
    """The handshake message in records of at most that size."""
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(piece).to_bytes(2, "big") + piece for piece in pieces)


def made(extensions: bytes, *, body: bytes = b"\x03\x03" + b"r" * 32 + b"\0" + b"\0\2\x13\1" + b"\1\0") -> bytes:
    """A hello of our own making."""
    message = body + len(extensions).to_bytes(2, "big") + extensions
    message = b"\1" + len(message).to_bytes(3, "big") + message
    return records(message, 16384)


def extension(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2, "big") + len(data).to_bytes(2, "big") + data


def sni(*names: bytes, kind: int = 0) -> bytes:
    entries = b"".join(bytes([kind]) + len(name).to_bytes(2, "big") + name for name in names)
    return extension(0, len(entries).to_bytes(2, "big") + entries)


def test_a_real_hello() -> None:
    assert sniff(hello("Example.COM", ["h2", "http/1.1"])) == Tls("example.com", ("h2", "http/1.1"))
    assert sniff(hello(None)) == Tls(None)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 16384])
def test_a_hello_in_pieces_of_records_and_reads(size: int) -> None:
    data = records((hello() if size > 4 else made(sni(b"example.com")))[5:], size)
    for end in range(len(data)):
        assert sniff(data[:end]) is None, end
    assert sniff(data) == Tls("example.com")


def test_encrypted_hello_is_seen() -> None:
    assert sniff(made(sni(b"a.com") + extension(0xFE0D, b"x"))) == Tls("a.com", (), ech=True)


@pytest.mark.parametrize(
    "data",
    [
        made(sni(b"a.com", b"b.com")),
        made(sni(b"a.com") + sni(b"b.com")),
        made(sni(b"a.com", kind=1)),
        made(sni(b"")),
        made(sni(b"a.com\0.b.com")),
        made(sni(b"a com")),
        made(sni("é.com".encode())),
        made(extension(0, b"\0\x20\0\0\3a.c")),
        made(extension(16, b"\0\x20\2h2")),
        b"\x16\x03\x01\0\4\2\0\0\0",
        b"\x16\x03\x01\x50\0" + b"\1" * 20,
        b"\x16\x03\x01\0\0",
        b"\x16\x02\x01\0\5\1",
        b"\x16\x02\x01\0\0",
        *(bytes([kind, 3, 1, 0, 0]) + hello() for kind in (0x14, 0x15, 0x17, 0x18)),
        b"\x14\x03\x03\0\1\1" + hello(),
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + hello(),
        b"PROXY UNKNOWN\r\nGET / HTTP/1.1\r\n",
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12) + hello(),
        b"\x15\x03\x01\0\2\1\x5a" + hello(),
        b"\x15\0\0\0\2\1\x5a" + hello(),
        records(hello()[5:], 1),
        made(sni(b"a.com"))[:60] + b"\x17" * 300,
        records(b"\1\xff\xff\xff" + b"x" * 17000, 16384),
        records(hello()[5:] + hello("evil.com")[5:], 16384),
    ],
)  # fmt: skip
def test_a_hello_that_could_be_read_in_two_ways_is_broken(data: bytes) -> None:
    assert isinstance(sniff(data), Broken)


def test_a_hello_of_ssl2_has_no_name() -> None:
    data = b"\x80\x2e\x01\x03\x01" + b"\0" * 40
    assert sniff(data[:3]) is None
    assert sniff(data) == Tls(None)


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n", b"get / http/1.1\r\n", b"\r\n\r\nGET / HTTP/1.1\r\n", b" GET / HTTP/1.1\r\n",
        b"GET  / HTTP/1.1\n",
        b"PRI * HTTP/2.0\r\n", b"CONNECT a:1 HTTP/1.1\r\n", b"GET /\r\n", b"POST http://x/ HTTP/1.0\r\n",
        b"M-SEARCH * HTTP/1.1\r\n",
        b"GET\t/\tHTTP/1.1\r\n", b"GET /\x01\xff HTTP/1.1\r\n", b"GET /" + b"a" * 9000, b"PROPFIND /" + b"a" * 9000,
        b"\r\n" * 5000,
        b"GET" + b" " * 9000, b"GET x" + b"a" * 9000,
        b"GET /x RTSP/1.0\r\nHost: x\r\n", b"SOURCE /x ICE/1.0\r\n", b"GET *\r\n", b"GET\r/\rHTTP/1.1\r\n",
        b"A" * 33 + b" / HTTP/1.1\r\n", b"A" * 9000, b"FOO x:" + b"a" * 9000, b'G"ET / HTTP/1.1\r\n',
        b"GET\x0b/\x0bHTTP/1.1\r\n", b"\x0cGET / HTTP/1.1\r\n", b"GET\x1f/\r\n", b"GET\xa0/x\x85HTTP/1.1\r\n",
    ],
)  # fmt: skip
def test_whatever_a_lenient_server_takes_for_http_is_http(line: bytes) -> None:
    assert sniff(line) == Http()
    assert all(sniff(line[:end]) in (None, Http()) for end in range(0, len(line), max(1, len(line) // 50)))


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n", b"\0\0\0\x08\x04\xd2\x16\x2f", b"*1\r\n$4\r\nPING\r\n", b"EHLO me\r\n",
        b"\x3a\0\0\1", b"P\0",
        b"\x15\x03\0\0\7\0\0\0", b"\x14\x03\0\0\7\0\0\0", b"\x16\1\0\0\7\0\0\0", b"\x16\1\0\1\x85\xa6",
        b"\x0b\0\0\0", b"\x85\0\2",
        b"get key\r\n", b"USER me\r\n", b"{}\n", b"\x10\x10\0\4MQTT",
    ],
)  # fmt: skip
def test_other_protocols_are_opaque(data: bytes) -> None:
    assert sniff(data) == Opaque()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"G",
        b"GET",
        b"GET /",
        b"NICK",
        b"\x16",
        b"\x16\x03",
        b"\x15",
        b"\x15\3\3\0\2",
        b"\r\n",
        b"\x80",
        b"\x80\x2e\x01",
        b"\x14",
        b"\x14\3\1\0",
        b"\x16\1\0\1\x85",
        b'{"',
        b"\r\n\r\n\0\r",
    ],
)
def test_more_is_needed(data: bytes) -> None:
    assert sniff(data) is None


@given(st.binary(min_size=1, max_size=200), st.integers(0, 200))
def test_an_answer_never_changes_when_more_comes(data: bytes, cut: int) -> None:
    first = sniff(data[:cut])
    if first is not None:
        assert type(first) is type(sniff(data))


@given(st.binary(max_size=64))
def test_there_is_always_an_answer_at_the_limit(data: bytes) -> None:
    for byte in (b"\x16", b"G", b"\r", b"\x80", b"\x16\x03\x01\0\1\1" * 3000):
        assert sniff((byte + data).ljust(LIMIT, b"\0")) is not None
        assert sniff((byte + data).ljust(LIMIT, b"A")) is not None


# -- a second hello ---------------------------------------------------------------------


def after(first: bytes, *later: bytes, step: int = 1 << 20) -> str | None:
    found = sniff(first)
    assert isinstance(found, Tls)
    watch = SecondHello(found)
    data = first + b"".join(later)
    for at in range(0, len(data), step):
        reason = watch.feed(data[at : at + step])
        if reason:
            return reason
    return None if watch.done else "unfinished"


CCS = b"\x14\x03\x03\0\1\1"
DATA = b"\x17\x03\x03\0\5hello"


@pytest.mark.parametrize("step", [1, 3, 1 << 20])
def test_a_second_hello_must_name_the_same_server(step: int) -> None:
    assert after(hello(), hello(), DATA, step=step) is None
    assert after(hello(), CCS, hello(), CCS, DATA, step=step) is None
    assert "another server" in (after(hello(), hello("evil.com"), step=step) or "")
    assert "another server" in (after(hello(), CCS, hello("evil.com"), step=step) or "")
    assert "another server" in (after(hello(), records(hello("evil.com")[5:], 3), step=step) or "")
    assert "another server" in (after(hello(), hello(None), step=step) or "")
    alert = b"\x15\x03\x03\0\2\1\x5a"
    assert "another server" in (after(hello(), alert, CCS, alert, hello("evil.com"), step=step) or "")
    assert after(hello(), alert, hello(), DATA, step=step) is None
    huge = b"\1\1\0\x40" + hello("evil.com")[9:] + b"x" * 66_000
    assert "another server" in (after(hello(), CCS, records(huge, 16384), step=step) or "")
    odd = hello("evil.com")
    odd = odd[:9] + b"\x7f\x7f" + odd[11:]  # a version that does not exist
    assert "another server" in (after(hello(), CCS, odd, step=step) or "")


@pytest.mark.parametrize("step", [7, 1 << 20])
def test_early_data_hides_no_second_hello(step: int) -> None:
    """A server that wants a second hello passes over what came before it."""
    early = made(sni(b"example.com") + extension(42, b""))
    assert "another server" in (after(early, DATA, DATA, hello("evil.com"), step=step) or "")
    assert after(early, CCS, DATA, hello(), DATA, step=step) is None
    assert after(early, b"\x17\x03\x03\x40\0" + bytes(16384), step=step) == "unfinished"
    assert after(early, *[b"\x17\x03\x03\x40\0" + bytes(16384)] * 65, step=1 << 20) is None


@pytest.mark.parametrize("step", [1, 3, 1 << 20])
def test_what_usually_follows_is_let_through(step: int) -> None:
    assert after(hello(), DATA, step=step) is None
    assert after(hello(), CCS, DATA, step=step) is None
    key_exchange = b"\x16\x03\x03\0\x25\x10\0\0\x21\x20" + b"k" * 32
    finished = b"\x16\x03\x03\0\x28" + b"\1" + b"f" * 39  # encrypted: begins like a hello by accident
    assert after(hello(), key_exchange, CCS, finished, step=step) is None
    assert after(hello(), CCS, finished, step=step) is None
