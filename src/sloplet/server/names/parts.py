"""What of a visitor's request goes into a sandbox, and what of its answer comes out. Pure.

Both sides are hostile: a visitor must not be able to pose as this proxy or to hide a second request, and what is inside
must not be able to speak for the server, for its other sandboxes, or to a browser for longer than its own page.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass

Headers = list[tuple[bytes, bytes]]

TOKEN_HEADER = b"sloplet-token"
TOKEN_QUERY = b"sloplet_token"
_COOKIE = b"sloplet-token"
_SAFE_COOKIE = b"__Host-sloplet-token"  # a browser takes it from this very host over TLS only
MAX_HEAD = 64 * 1024  #: bytes of a head, in either direction
MAX_FIELDS = 200
_MAX_SHOWN = 8  # tokens looked at: pages of sibling names can put cookies of that name beside ours
_MAX_TOKEN = 256

_LABEL = re.compile(r"([1-9][0-9]{0,4})-([a-z0-9][a-z0-9-]{3,39})")
_AUTHORITY = re.compile(r"([a-z0-9.-]{1,253})(?::[0-9]{1,5})?")
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")

#: Of one connection, not of the message (RFC 9110, 7.6.1), and how long a body is: each side has its own.
_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-authentication-info", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings",
        b"content-length",
    )
)  # fmt: skip
#: What only a proxy may say of the visitor, and this one says itself.
_FORWARDED = frozenset((b"forwarded", b"x-real-ip", b"host", b"expect", b"via"))
#: What outlives the page in a browser, or is meant for more than this one host.
_NOT_OUT = frozenset(
    (
        b"alt-svc", b"strict-transport-security", b"public-key-pins", b"public-key-pins-report-only", b"expect-ct",
        b"clear-site-data", b"nel", b"report-to", b"set-cookie2", b"via",
    )
)  # fmt: skip


class Unsafe(Exception):
    """A head that must not be passed on."""


@dataclass(frozen=True)
class Place:
    """A port of a sandbox, as a host name says it."""

    port: int
    sandbox: str


def parse_host(host: str, domain: str) -> Place | None:
    """Of ``8000-abc123.localhost:7667``. None: no public name."""
    match = _AUTHORITY.fullmatch(host.lower()) if len(host) < 300 else None
    if match is None or not match[1].endswith("." + domain.lower()):
        return None
    label = _LABEL.fullmatch(match[1][: -len(domain) - 1])
    if label is None or int(label[1]) > 65535:
        return None
    return Place(int(label[1]), label[2])


def url_of(place: Place, domain: str, server_url: str) -> str:
    """``server_url`` says scheme and port."""
    scheme, _, rest = server_url.partition("://")
    port = rest.rsplit(":", 1)[1] if re.search(r":[0-9]+$", rest) else ""
    usual = {"http": "80", "https": "443"}.get(scheme)
    return f"{scheme}://{place.port}-{place.sandbox}.{domain}" + (f":{port}" if port and port != usual else "")


def _plain(name: bytes) -> bytes:
    """As servers of the CGI kind read it: to them ``X_Forwarded_For`` is X-Forwarded-For."""
    return name.lower().replace(b"_", b"-")


def values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


def one(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """The only value of a header; "" if it is not there, Unsafe if it is there twice."""
    found = values(headers, name)
    if len(found) > 1:
        raise Unsafe(f"more than one {name.decode()} header")
    return found[0].decode("latin-1").strip() if found else ""


# -- who may ---------------------------------------------------------------------------


def split_query(query: bytes) -> tuple[bytes, list[str]]:
    """The query without the token, and the tokens that were in it."""
    kept, tokens = [], []
    for part in query.split(b"&"):
        name, _, value = part.partition(b"=")
        if name == TOKEN_QUERY:
            tokens.append(value.decode("latin-1"))
        else:
            kept.append(part)
    return (b"&".join(kept), tokens) if tokens else (query, [])


def split_cookies(value: bytes) -> tuple[bytes, list[tuple[bytes, str]]]:
    """A Cookie header without our cookies, and those."""
    kept, ours = [], []
    for part in value.split(b";"):
        name, _, content = part.strip().partition(b"=")
        if name.strip() in (_COOKIE, _SAFE_COOKIE):
            ours.append((name.strip(), content.strip().decode("latin-1")))
        elif part.strip():
            kept.append(part.strip())
    return b"; ".join(kept), ours


def shown_tokens(headers: Headers, query: bytes, *, method: str, origin: str) -> list[str]:
    """What a visitor shows. A cookie counts only where the browser says that it is this page's own doing, or that a
    person has come here: other sandboxes' pages are of the same *site*, so SameSite alone does not keep them out."""
    found = [value.decode("latin-1") for value in values(headers, TOKEN_HEADER)] + split_query(query)[1]
    if own_doing(headers, method=method, origin=origin):
        wanted = _SAFE_COOKIE if origin.startswith("https:") else _COOKIE
        for value in values(headers, b"cookie"):
            found += [content for name, content in split_cookies(value)[1] if name == wanted]
    return found[:_MAX_SHOWN]


def own_doing(headers: Headers, *, method: str, origin: str) -> bool:
    """Whether a request that a browser sends comes of a page of this origin, or of a person. ``origin``: this one."""
    said = [value.decode("latin-1").strip().lower() for value in values(headers, b"origin")]
    if any(each != origin.lower() for each in said):
        return False
    site = {value.strip().lower() for value in values(headers, b"sec-fetch-site")}
    if site <= {b"same-origin", b"none"}:
        return True
    mode, dest = values(headers, b"sec-fetch-mode"), values(headers, b"sec-fetch-dest")
    return method in ("GET", "HEAD") and mode == [b"navigate"] and dest == [b"document"]


def is_right(shown: Iterable[str], token: str) -> bool:
    """In constant time for each that is shown."""
    right = False
    for each in shown:
        given = each.encode("utf-8", "replace")[:_MAX_TOKEN]
        right |= hmac.compare_digest(given, token.encode())
    return right


def token_cookie(token: str, *, secure: bool) -> bytes:
    name = _SAFE_COOKIE if secure else _COOKIE
    return name + b"=" + token.encode() + b"; Path=/; HttpOnly; SameSite=Lax" + (b"; Secure" if secure else b"")


def clean_target(raw_path: bytes, query: bytes) -> bytes:
    """What to redirect to when the token was in the query: a path of this host, whatever it looks like."""
    path = b"/" + raw_path.lstrip(b"/\\")
    return path + (b"?" + query if query else b"")


# -- inwards ---------------------------------------------------------------------------


def _usual(name: bytes) -> bytes:
    """As most write it: small programs inside look for ``Host``, not for ``host``."""
    return b"-".join(part[:1].upper() + part[1:].lower() for part in name.split(b"-"))


def inner_headers(
    headers: Headers, *, host: str, address: str, scheme: str, hide: Iterable[bytes] = (), seen: str = ""
) -> Headers:
    """What the sandbox is told, but for the framing. ``hide``: further names that are none of its business; ``seen``:
    what its Host is, if not the visitor's."""
    named = {part.strip().lower() for value in values(headers, b"connection") for part in value.split(b",")}
    dropped = _HOP | _FORWARDED | {_plain(name) for name in hide} | {_plain(name) for name in named}
    found: Headers = [(b"host", (seen or host).encode("latin-1"))]
    for name, value in headers:
        plain = _plain(name)
        if plain in dropped or plain.startswith((b"x-forwarded-", b"sloplet-")):
            continue
        if plain == b"cookie":
            value = split_cookies(value)[0]
            if not value:
                continue
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise Unsafe("a header with characters that may not be in one")
        found.append((name, value.strip(b" \t")))
    if address:
        found.append((b"x-forwarded-for", address.encode("latin-1")))
    found += [(b"x-forwarded-host", host.encode("latin-1")), (b"x-forwarded-proto", scheme.encode())]
    return [(_usual(name), value) for name, value in found]


def check_size(headers: Headers, *, other: int = 0) -> None:
    """Unsafe if it is too much."""
    if len(headers) > MAX_FIELDS or sum(len(name) + len(value) + 4 for name, value in headers) + other > MAX_HEAD:
        raise Unsafe("too many headers, or too long ones")


def body_length(headers: Headers) -> int | None:
    """Bytes of a request's body; None: chunked. The server has refused what can be read in two ways; so do we."""
    lengths, codings = values(headers, b"content-length"), values(headers, b"transfer-encoding")
    if codings:
        if lengths or len(codings) != 1 or codings[0].strip().lower() != b"chunked":
            raise Unsafe("a body whose length can be read in two ways")
        return None
    if len(lengths) > 1 or (lengths and not re.fullmatch(rb"[0-9]{1,18}", lengths[0])):
        raise Unsafe("a Content-Length that is not one number")
    return int(lengths[0]) if lengths else 0


# -- outwards --------------------------------------------------------------------------


def outer_headers(headers: Iterable[tuple[bytes, bytes]], *, drop: Iterable[bytes] = ()) -> Headers:
    """What of an answer's head the visitor gets, but for the framing. Unsafe if it is no head that all read alike."""
    listed = list(headers)
    check_size(listed)
    named = {part.strip().lower() for value in values(listed, b"connection") for part in value.split(b",")}
    dropped = _HOP | _NOT_OUT | named | frozenset(drop)
    found: Headers = []
    for name, value in listed:
        lower = name.lower()
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise Unsafe("a header with characters that may not be in one")
        if lower in dropped or lower.startswith(b"sloplet-"):
            continue
        if lower == b"set-cookie":
            clean = own_cookie(value)
            if clean is None:
                continue
            value = clean
        found.append((lower, value.strip(b" \t")))
    return found


def own_cookie(value: bytes) -> bytes | None:
    """A Set-Cookie for this host only: without Domain. None: one of ours, which nobody else sets."""
    first, *attributes = value.split(b";")
    if first.partition(b"=")[0].strip().lower() in (_COOKIE, _SAFE_COOKIE.lower()):
        return None
    kept = [part for part in attributes if part.partition(b"=")[0].strip().lower() != b"domain"]
    return b";".join([first, *kept])


def answer_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The Content-Length of an answer, if it has one. Unsafe if its length can be read in two ways."""
    listed = list(headers)
    lengths, codings = set(values(listed, b"content-length")), values(listed, b"transfer-encoding")
    if codings and (lengths or len(codings) != 1 or codings[0].strip().lower() != b"chunked"):
        raise Unsafe("an answer whose length can be read in two ways")
    if len(lengths) > 1 or (lengths and not re.fullmatch(rb"[0-9]{1,18}", next(iter(lengths)))):
        raise Unsafe("a Content-Length that is not one number")
    return int(next(iter(lengths))) if lengths else None
