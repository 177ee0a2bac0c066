"""What a program speaks, by its first bytes: TLS (and to whom), HTTP, or something that is not looked into.

Pure. Whatever a lenient server could take for TLS or HTTP must not be called opaque: a name that is not read is a
name that is not checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LIMIT = 16 * 1024
_LINE_LIMIT = 8 * 1024
_CLIENT_HELLO = 1
_SERVER_NAME, _ALPN, _EARLY_DATA, _ECH = 0, 16, 42, 0xFE0D
_OTHER_RECORDS = (0x14, 0x15, 0x17, 0x18)
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TEXT = re.compile(rb"[\x21-\x7e]+")
#: What some servers take for a space, Python's own for example.
_SPACES = b" \t\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0"
_TO_SPACES = bytes.maketrans(_SPACES, b" " * len(_SPACES))
#: Node's parser takes the last two for HTTP, Host header and all.
_VERSION = re.compile(rb"HTTP/|[" + re.escape(_SPACES) + rb"](?:RTSP|ICE)/", re.IGNORECASE)
_PROXY_1, _PROXY_2 = (b"TCP4", b"TCP6", b"UNKNOWN"), b"\r\n\r\n\0\r\nQUIT\n"
_MAX_EARLY = 1024 * 1024  # of TLS 1.3's early data; servers take 16 KiB, and few of them more
_MAX_RECORDS = 128  # that a hello is spread over: each read looks at all of them again
_PLAIN_METHODS = frozenset(b"GET HEAD POST PUT DELETE OPTIONS PATCH TRACE CONNECT PRI".split())
_PROXIED = "it begins with a header of the PROXY protocol, and what follows would not be looked at"
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?\.?")


@dataclass(frozen=True)
class Tls:
    """A ClientHello. Judged by name: no server name, or another one, is refused. ``ech``: it may hide a second name;
    browsers always look as if. Behind a front that serves many names it can do no more than a Host header in TLS that
    is not opened, so it is no reason to refuse (docs/network.md, "What is not covered")."""

    server_name: str | None  #: lower case, without a trailing dot
    alpn: tuple[str, ...] = ()
    ech: bool = False
    early: bool = False  #: it announces data that is encrypted already


@dataclass(frozen=True)
class Http:
    """A request line, perhaps a bad one: ``inspect.check_http`` finds out."""


@dataclass(frozen=True)
class Opaque:
    """Neither."""


@dataclass(frozen=True)
class Broken:
    """It begins like TLS, or with something in front of it, and cannot be read: refused, since a server may be able to
    (OpenSSL passes over an empty record of another kind)."""

    reason: str


def sniff(data: bytes) -> Tls | Http | Opaque | Broken | None:
    """What these first bytes are. None: more are needed (never treat it as opaque; refuse if no more come).
    With ``LIMIT`` bytes there is always an answer."""
    if not data:
        return None
    if data[0] == 0x16:
        return _tls(data)
    if data[0] == 0x15 and data[3:5] == b"\0\2"[: len(data[3:5])] and data[5:6] in (b"\1", b"\2", b""):
        return Broken("it begins with an alert of TLS, which some servers pass over") if len(data) > 5 else None
    if data[0] in _OTHER_RECORDS and data[1:2] in (b"\3", b""):
        if len(data) < 5:
            return None
        if data[3] == 0 and data[4] <= 2:
            return Broken("it begins with a record of TLS that is no ClientHello, which some servers pass over")
    if data[0] & 0x80 and len(data) < 5 and b"\0\0\1\3".startswith(b"\0\0" + data[2:4]):
        return None
    if data[0] & 0x80 and data[2:4] == b"\1\3":  # the hello of SSL 2: TLS without a name
        return Tls(None)
    return _http(data)


# -- HTTP ------------------------------------------------------------------------------


def _http(data: bytes) -> Http | Opaque | Broken | None:
    if data[0] == 0x0D and _PROXY_2.startswith(data[: len(_PROXY_2)]):
        return None if len(data) < len(_PROXY_2) else Broken(_PROXIED)
    line, newline, _ = data.lstrip(b"\n" + _SPACES).partition(b"\n")
    long = len(data) >= _LINE_LIMIT
    if not line:
        return Http() if long else None
    text = _TEXT.match(line)
    if text is None:
        return Opaque()
    word, rest = text[0], line[text.end() :]
    if rest and rest[0] not in _SPACES:
        return Opaque()
    if _VERSION.search(rest):
        return Http()
    if not (newline or long):
        return None
    words = rest.translate(_TO_SPACES).split()
    if word == b"PROXY" and words[:1] and words[0] in _PROXY_1:
        return Broken(_PROXIED)
    if not _TOKEN.fullmatch(word):
        return Opaque()
    if not newline:  # as long as no other protocol's first line
        return Http()
    # without a version: HTTP/0.9, which some servers still answer; another protocol's version is not HTTP
    target = len(words) == 1 and (words[0][:1] in (b"/", b"*") or b"://" in words[0])
    return Http() if target and word.upper() in _PLAIN_METHODS else Opaque()


# -- TLS -------------------------------------------------------------------------------


class _Bad(Exception):
    pass


class _Reader:
    """Takes bytes apart; _Bad where they end too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise _Bad("is cut short")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> _Reader:
        return _Reader(self.take(self.number(size)))

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def __bool__(self) -> bool:
        return self._at < len(self._data)


_NO_TLS = b"no TLS"


def _tls(data: bytes) -> Tls | Opaque | Broken | None:
    try:
        message = _handshake(data)
        if message is _NO_TLS:
            return Opaque()
        if message is not None:
            return _hello(message)
    except _Bad as why:
        return Broken(f"the TLS ClientHello {why}")
    return None if len(data) < LIMIT else Broken(f"the TLS ClientHello is longer than {LIMIT} bytes")


def _handshake(data: bytes) -> bytes | None:
    """The first handshake message, out of as many records as it takes; None: more bytes are needed; _NO_TLS: it is
    another protocol, whose first byte is the same."""
    message = b""
    at = 0
    for _ in range(_MAX_RECORDS):
        record = data[at : at + 5]
        if at == 0 and record[1:2] not in (b"\3", b"") and record[3:5] != b"\0\0":
            if len(data) < 6:
                return None
            if data[5] != _CLIENT_HELLO:
                return _NO_TLS
        if record[:1] not in (b"\x16", b"") or record[1:2] not in (b"\3", b""):
            raise _Bad("is not in handshake records")
        if len(record) < 5:
            return None
        size = int.from_bytes(record[3:5], "big")
        if not 0 < size <= 2**14:
            raise _Bad("is in a record of a length that is not allowed")
        message += data[at + 5 : at + 5 + size]
        at += 5 + size
        if message and message[0] != _CLIENT_HELLO:
            raise _Bad("is missing: another message came first")
        if len(message) >= 4:
            need = 4 + int.from_bytes(message[1:4], "big")
            if need > LIMIT:
                raise _Bad(f"is longer than {LIMIT} bytes")
            if len(message) > need:
                raise _Bad("is followed by something in its own record")
            if len(message) == need:
                return message[4:]
        if at > len(data):
            return None
    raise _Bad(f"is in more than {_MAX_RECORDS} records")


def _hello(message: bytes) -> Tls:
    hello = _Reader(message)
    hello.take(2 + 32)  # version, random
    hello.vector(1), hello.vector(2), hello.vector(1)  # session, ciphers, compression
    if not hello:
        return Tls(None)
    extensions = hello.vector(2)
    if hello:
        raise _Bad("has bytes after its extensions")
    found: dict[int, _Reader] = {}
    while extensions:
        kind = extensions.number(2)
        if kind in found:
            raise _Bad("has an extension twice")
        found[kind] = extensions.vector(2)
    name = _server_name(found[_SERVER_NAME]) if _SERVER_NAME in found else None
    alpn = _protocols(found[_ALPN]) if _ALPN in found else ()
    return Tls(name, alpn, _ECH in found, _EARLY_DATA in found)


def _server_name(extension: _Reader) -> str:
    names = extension.vector(2)
    if extension or names.number(1) != 0:
        raise _Bad("has a server name of an unknown kind")
    raw = names.vector(2).rest()
    if names:
        raise _Bad("has several server names")
    name = raw.decode("ascii", "replace").lower()
    if not _NAME.fullmatch(name):
        raise _Bad("has a server name that is none")
    return name.removesuffix(".")


def _protocols(extension: _Reader) -> tuple[str, ...]:
    protocols = extension.vector(2)
    found: list[str] = []
    while protocols:
        found.append(protocols.vector(1).rest().decode("latin-1"))
    if extension:
        raise _Bad("has bytes after its protocols")
    return tuple(found)


class SecondHello:
    """Watches the program's bytes after its first hello: asked to try again (HelloRetryRequest), it sends a second
    one, which must name the same server. Feed it everything from the first byte on until ``done``."""

    def __init__(self, first: Tls) -> None:
        self._first = first
        self._data = b""
        self._hellos = 0
        self._early = _MAX_EARLY if first.early else 0  # bytes that a server which wants a second hello passes over
        self.done = False

    def feed(self, data: bytes) -> str | None:
        """Why the connection must be refused, or None."""
        if self.done:
            return None
        self._data += data
        while not self.done and len(self._data) >= 6:
            size = 5 + int.from_bytes(self._data[3:5], "big")
            # change_cipher_spec (for old boxes in between) and alerts in clear: a server may pass over them
            if self._hellos and (self._data[0], size) in ((0x14, 6), (0x15, 7)):
                if len(self._data) < size:
                    return None
                self._data = self._data[size:]
                continue
            if self._hellos and self._data[0] == 0x17 and self._early >= size:
                if len(self._data) < size:
                    return None
                self._data = self._data[size:]
                self._early -= size
                continue
            plain = self._plain_hello(size) if self._hellos else True
            if plain is None:
                return None
            if not plain:
                self._finish()
                return None
            found = sniff(self._data)
            if found is None:
                return None
            if not self._same(found):
                self._finish()
                return "its second TLS ClientHello names another server than its first"
            self._hellos += 1
            self._data = self._after_hello()
            if self._hellos == 2:
                self._finish()
        return None

    def _same(self, found: object) -> bool:
        return isinstance(found, Tls) and (found.server_name, found.ech) == (self._first.server_name, self._first.ech)

    def _plain_hello(self, size: int) -> bool | None:
        """Whether this record holds a ClientHello, and not what TLS 1.2 sends here (a key, or encrypted, which begins
        like this once in 20,000 times). None: more bytes are needed."""
        if self._data[0] != 0x16 or self._data[5] != _CLIENT_HELLO:
            return False
        if size < 5 + 2:
            return True
        return None if len(self._data) < 5 + 2 else self._data[6] <= 2  # of its length: servers take 128 KiB

    def _after_hello(self) -> bytes:
        """What follows the records of the hello at the beginning."""
        at, message = 0, b""
        while True:
            size = int.from_bytes(self._data[at + 3 : at + 5], "big")
            message += self._data[at + 5 : at + 5 + size]
            at += 5 + size
            if len(message) >= 4 and len(message) >= 4 + int.from_bytes(message[1:4], "big"):
                return self._data[at:]

    def _finish(self) -> None:
        self.done = True
        self._data = b""
