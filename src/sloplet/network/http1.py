"""Heads of HTTP/1 messages: strict about everything on which two readers could disagree. Pure.

What is forwarded is written anew from what was understood, never the bytes as they came.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .channel import Refused
from .names import HOST

MAX_HEAD = 64 * 1024
MAX_FIELDS = 256
_METHOD = re.compile(rb"[A-Z][A-Z0-9_-]{0,31}")
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"[\x21\x22\x24-\x7e\x80-\xff]+")  # no space, control or '#'
_HIGH = re.compile(rb"[\x80-\xff]")  # clients mean these to be percent-encoded, and some forget it
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?")
_BAD_LINE = re.compile(rb"(?<!\r)\n|\r(?=[^\n])|\0")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_HOST = re.compile(rb"(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z_.-]+)(?::([0-9]{1,5}))?")
_ABSOLUTE = re.compile(rb"(?i:(https?)://)([^/?]*)(.*)", re.DOTALL)

#: What servers on this machine's loopback are called otherwise; some answer to nothing else.
_LOOPBACK = ("localhost", "127.0.0.1")

Fields = tuple[tuple[bytes, bytes], ...]


class Malformed(Refused):
    """This is no HTTP/1 that everybody would read the same way."""


@dataclass(frozen=True)
class Head:
    """What both kinds of head share: fields in order, with names as they were written."""

    fields: Fields
    minor: int  #: HTTP/1.<minor>

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key.lower() == name]

    def tokens(self, name: bytes) -> list[bytes]:
        """The parts of a list field, lower case."""
        parts = b",".join(self.values(name)).split(b",")
        return [part.strip(b" \t").lower() for part in parts if part.strip(b" \t")]


@dataclass(frozen=True)
class Request(Head):
    method: bytes
    target: bytes

    def encode(self) -> bytes:
        return _encode(b"%s %s HTTP/1.%d" % (self.method, self.target, self.minor), self.fields)


@dataclass(frozen=True)
class Response(Head):
    status: int
    reason: bytes

    def encode(self) -> bytes:
        return _encode(b"HTTP/1.%d %d %s" % (self.minor, self.status, self.reason), self.fields)


def _encode(first: bytes, fields: Fields) -> bytes:
    return b"\r\n".join([first, *(name + b": " + value for name, value in fields), b"", b""])


def without(fields: Fields, *names: bytes) -> Fields:
    return tuple((name, value) for name, value in fields if name.lower() not in names)


def with_field(fields: Fields, name: bytes, value: bytes) -> Fields:
    """The field once, with this value: where it was first, or at the end."""
    lower = name.lower()
    found: list[tuple[bytes, bytes]] = []
    done = False
    for key, old in fields:
        if key.lower() != lower:
            found.append((key, old))
        elif not done:
            found.append((key, value))
            done = True
    return tuple(found) if done else (*found, (name, value))


class HeadReader:
    """Collects one head out of pieces. ``feed`` until it gives the lines; ``rest`` is what came after them."""

    def __init__(self, data: bytes = b"") -> None:
        self._data = bytearray(data)
        self._looked = 0
        self._skipped = 0

    @property
    def empty(self) -> bool:
        """Nothing of a head has come."""
        return not self._data

    @property
    def rest(self) -> bytes:
        return bytes(self._data)

    def feed(self, data: bytes) -> list[bytes] | None:
        self._data += data
        while self._data.startswith(b"\r\n") and self._skipped < 2:  # an old client's empty line after a body
            del self._data[:2]
            self._skipped += 1
        end = self._data.find(b"\r\n\r\n", max(0, self._looked - 3))
        length = end + 2 if end >= 0 else len(self._data)
        if length > MAX_HEAD:
            raise Malformed(f"an HTTP head of more than {MAX_HEAD} bytes")
        if _BAD_LINE.search(self._data, max(0, self._looked - 1), length) or self._data.startswith(b"\r\n"):
            raise Malformed("an HTTP head with a NUL, or a line that does not end with CR LF")
        self._looked = len(self._data)
        if end < 0:
            return None
        lines = bytes(self._data[:end]).split(b"\r\n")
        del self._data[: end + 4]
        return lines


def parse_request(lines: list[bytes]) -> Request:
    parts = lines[0].split(b" ")
    if lines[0].startswith(b"PRI * HTTP/2"):
        raise Malformed("HTTP/2 without TLS cannot be checked here; use HTTP/1.1")
    if len(parts) != 3 or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise Malformed("a request line that is not 'METHOD target HTTP/1.1'")
    method, target, version = parts
    if not _METHOD.fullmatch(method):
        raise Malformed("a method that is not a word of capital letters")
    if not _TARGET.fullmatch(target):
        raise Malformed("a request target with characters that are not allowed in it")
    target = _HIGH.sub(lambda match: b"%%%02X" % match[0][0], target)
    return Request(parse_fields(lines[1:]), int(version[-1:]), method, target)


def parse_response(lines: list[bytes]) -> Response:
    match = _STATUS.fullmatch(lines[0])
    if match is None:
        raise Malformed("the server's answer does not begin with an HTTP/1 status line")
    return Response(parse_fields(lines[1:]), int(match[1]), int(match[2]), match[3] or b"")


def parse_fields(lines: Iterable[bytes]) -> Fields:
    found: list[tuple[bytes, bytes]] = []
    for line in lines:
        if line[:1] in (b" ", b"\t"):
            raise Malformed("an HTTP header line that goes on in the next one")
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name):
            raise Malformed("an HTTP header line that is not 'name: value'")
        if not _VALUE.fullmatch(value):
            raise Malformed("control characters in an HTTP header")
        found.append((name, value.strip(b" \t")))
    if len(found) > MAX_FIELDS:
        raise Malformed(f"more than {MAX_FIELDS} HTTP header lines")
    return tuple(found)


# -- whom a request is for -------------------------------------------------------------


def check_host(request: Request, name: str, port: int, *, secure: bool) -> Request:
    """The request in origin form, if it is for that name alone; else Refused."""
    if request.method == b"CONNECT":
        raise Refused(f"CONNECT through {name} is refused: connect to the other host directly, and it is judged itself")
    hosts = request.values(b"host")
    if len(hosts) != 1:
        raise Malformed(f"a request to {name} with {len(hosts)} Host headers; one is needed")
    _check_authority(hosts[0], name, port)
    match = _ABSOLUTE.fullmatch(request.target)
    if match is not None:
        if match[1].lower() != (b"https" if secure else b"http"):
            raise Refused(f"a request to {name} whose target has another scheme than its connection")
        _check_authority(match[2], name, port)
        target = match[3] if match[3].startswith(b"/") else b"/" + match[3]
        return replace(request, target=target)
    if request.target == b"*" and request.method == b"OPTIONS":
        return request
    if not request.target.startswith(b"/"):
        raise Malformed(f"a request to {name} whose target is neither a path nor a URL")
    return request


def _check_authority(value: bytes, name: str, port: int) -> None:
    match = _HOST.fullmatch(value)
    if match is None:
        raise Malformed(f"a request to {name} with a Host that is not 'name' or 'name:port'")
    host = match[1].decode().lower().strip("[]").removesuffix(".")
    if host != name.lower().strip("[]") and not (name == HOST and host in _LOOPBACK):
        raise Refused(f"a request for {host} on a connection to {name}: connect to {host} itself, and it is judged")
    if match[2] is not None and int(match[2]) != port:
        raise Refused(f"a request for port {int(match[2])} on a connection to port {port} of {name}")


# -- what follows a head ---------------------------------------------------------------

CHUNKED, UNTIL_CLOSE = -1, -2


def request_length(request: Request) -> int:
    """Bytes of body, or CHUNKED."""
    lengths, codings = request.values(b"content-length"), request.values(b"transfer-encoding")
    if codings:
        if lengths or len(codings) != 1 or codings[0].lower() != b"chunked" or request.minor == 0:
            raise Malformed("a request whose length can be read in two ways (Transfer-Encoding)")
        return CHUNKED
    if not lengths:
        return 0
    if len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
        raise Malformed("a request whose Content-Length is not one number")
    return int(lengths[0])


def response_length(response: Response, method: bytes) -> int:
    """Bytes of body, CHUNKED or UNTIL_CLOSE."""
    if response.status < 200 or response.status in (204, 304) or method == b"HEAD":
        return 0
    codings = response.values(b"transfer-encoding")
    if codings:
        if len(codings) != 1 or codings[0].lower() != b"chunked":
            raise Malformed("the server's answer has a Transfer-Encoding other than chunked")
        return CHUNKED
    lengths = set(response.values(b"content-length"))
    if not lengths:
        return UNTIL_CLOSE
    if len(lengths) != 1 or not _LENGTH.fullmatch(next(iter(lengths))):
        raise Malformed("the server's answer has a Content-Length that is not one number")
    return int(next(iter(lengths)))


def clean_response(response: Response) -> Response:
    """As it is forwarded: one length, and only one way to read it."""
    fields = response.fields
    if response.values(b"transfer-encoding"):
        fields = without(fields, b"content-length")
    elif len(lengths := response.values(b"content-length")) > 1:
        fields = with_field(fields, b"Content-Length", lengths[0])
    return replace(response, fields=fields)


# -- hop by hop ------------------------------------------------------------------------

_KEPT = (b"close", b"keep-alive", b"te")


def clean_request(request: Request) -> tuple[Request, bool]:
    """As it is forwarded, and whether it asks for WebSocket. Other upgrades are left out (h2c would hide what follows),
    and so is Expect, and whatever Connection names: a server's front could drop it, a Host for example."""
    websocket = request.tokens(b"upgrade") == [b"websocket"] and b"upgrade" in request.tokens(b"connection")
    websocket = websocket and request.minor == 1 and request.method == b"GET"
    fields = without(request.fields, b"expect", b"trailer")
    if not websocket:
        fields = without(fields, b"upgrade", b"http2-settings")
    tokens = [token for token in request.tokens(b"connection") if token in _KEPT]
    if websocket:
        tokens.append(b"Upgrade")
    fields = with_field(fields, b"Connection", b", ".join(tokens)) if tokens else without(fields, b"connection")
    return replace(request, fields=fields), websocket


def closing(response: Response) -> Response:
    """The same as the last one of its connection."""
    return replace(response, fields=with_field(response.fields, b"Connection", b"close"))


def is_last(request: Request) -> bool:
    """Whether the program says that no other request follows on this connection."""
    tokens = request.tokens(b"connection")
    return b"close" in tokens or (request.minor == 0 and b"keep-alive" not in tokens)


_OVERRIDES = frozenset(
    (b"x-http-method-override", b"x-http-method", b"x-method-override", b"x-original-url", b"x-rewrite-url")
)


def check_overrides(request: Request) -> None:
    """Where methods and paths are judged, no header may say that others count."""
    for name, _ in request.fields:
        if name.lower().replace(b"_", b"-") in _OVERRIDES:
            raise Refused(
                f"the header {name.decode()} could make the server see another method or path than was judged"
            )
