"""Headers that requests to some hosts are given on their way out, and the proxy that connections go through. Which
headers, for which hosts, is on record; the values, and the proxy's password, are not: they are told to the holder by
the keys that are made here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import SpecError
from .secretsource import is_text

#: (host, names of headers), sorted.
HeaderSpec = tuple[tuple[str, tuple[str, ...]], ...]

MAX_HOSTS = 64
MAX_HEADERS = 32  #: of a host
MAX_NAME = 128
MAX_VALUE = 8 * 1024  #: bytes
#: Of the proxy's password among values. A secret's name holds no '@', a header's key does not begin with it.
PROXY_KEY = "@proxy"

_NAME_RE = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+\Z")
#: What says where a message ends, whom it is for, or is between neighbours only.
FIXED = frozenset((
    "host", "content-length", "transfer-encoding", "connection", "proxy-connection", "keep-alive", "te", "trailer",
    "upgrade", "expect", "proxy-authenticate", "proxy-authorization",
))  # fmt: skip
_HINT = "write headers={'api.example.com': {'X-Token': 'value'}}"


def header_key(host: str, name: str) -> str:
    """By what a header's value is told to the holder."""
    return f"{name.lower()}@{host}"


def check_headers(given: object) -> tuple[HeaderSpec, dict[str, str]]:
    """What is on record, and the values by their keys; from ``{host: {name: value}}``, where a value may be None (it
    is told later, or is known already), or ``{host: [name, ...]}``."""
    from .network.hosts import parse_host

    if not isinstance(given, Mapping):
        raise SpecError(f"headers of type {type(given).__name__} are not a mapping", hint=_HINT)
    found: dict[str, tuple[str, ...]] = {}
    values: dict[str, str] = {}
    for text, headers in given.items():
        host = parse_host(text).text
        if host in found:
            raise SpecError(f"there are two sets of headers for {host!r}", hint="put them together")
        pairs = _pairs(host, headers)
        names = [check_name(name) for name in pairs]
        if len({name.lower() for name in names}) < len(names):
            raise SpecError(f"a header for {host!r} is there twice", hint="the case of letters does not matter")
        if not 1 <= len(names) <= MAX_HEADERS:
            raise SpecError(f"{len(names)} headers for {host!r}", hint=f"1 to {MAX_HEADERS}, or leave the host out")
        found[host] = tuple(sorted(names, key=str.lower))
        for name, value in pairs.items():
            if value is not None:
                values[header_key(host, name)] = check_header_value(name, value)
    if len(found) > MAX_HOSTS:
        raise SpecError(f"headers for {len(found)} hosts are too many", hint=f"at most {MAX_HOSTS}")
    return tuple(sorted(found.items())), values


def _pairs(host: str, headers: object) -> Mapping[str, object]:
    if isinstance(headers, Mapping):
        return headers
    if isinstance(headers, (list, tuple)):
        if len({str(name).lower() for name in headers}) < len(headers):
            raise SpecError(f"a header for {host!r} is there twice", hint="the case of letters does not matter")
        return dict.fromkeys(headers)
    raise SpecError(f"the headers for {host!r} are not a mapping", hint=_HINT)


def check_name(name: object) -> str:
    if not isinstance(name, str) or len(name) > MAX_NAME or not _NAME_RE.match(name):
        raise SpecError(f"{str(name)[:80]!r} is not the name of a header", hint="for example 'X-Token'")
    if name.lower() in FIXED:
        raise SpecError(
            f"the header {name} says how a request is to be read or passed on, and cannot be set",
            hint="leave it out; all others can",
        )
    return name


def check_header_value(name: str, value: object) -> str:
    """An error that shows nothing of it."""
    if not isinstance(value, str) or len(value.encode("utf-8", "replace")) > MAX_VALUE:
        raise SpecError(f"the value of the header {name} is not text, or longer than {MAX_VALUE} bytes")
    if not is_text(value):
        raise SpecError(f"the value of the header {name} is not text")
    if value != value.strip() or any((ord(char) < 32 and char != "\t") or ord(char) == 127 for char in value):
        raise SpecError(
            f"the value of the header {name} has control characters, or spaces around it", hint="one line of text"
        )
    return value


@dataclass(frozen=True)
class ProxySpec:
    """A SOCKS5 proxy. ``password``: it has one, which only its holder knows."""

    host: str
    port: int
    user: str = ""
    password: bool = False

    @property
    def text(self) -> str:
        """As it is on record."""
        from urllib.parse import quote

        user = quote(self.user, safe="") + (":" if self.password else "") + "@" if self.user else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"socks5://{user}{host}:{self.port}"


def read_proxy(text: str) -> ProxySpec:
    """What ``ProxySpec.text`` gave."""
    return _proxy(text)[0]


def check_proxy(given: object) -> tuple[str, dict[str, str]]:
    """From ``socks5://[user[:password]@]host:port``: what is on record, and the password by its key."""
    if given is None or given == "":
        return "", {}
    if not isinstance(given, str):
        raise SpecError(f"a proxy of type {type(given).__name__} is none", hint=_PROXY_HINT)
    spec, password = _proxy(given)
    return spec.text, {PROXY_KEY: password} if password else {}


_PROXY_HINT = "write proxy='socks5://user:password@proxy.example.com:1080'"


def _proxy(text: str) -> tuple[ProxySpec, str]:
    """Nothing of the text is in an error: it may hold a password."""
    from urllib.parse import unquote, urlsplit

    from .network.addresses import parse
    from .network.names import BadName, from_user, is_loopback, is_number

    if len(text) > 2048 or not text.isprintable():
        raise SpecError("that is not a proxy's address", hint=_PROXY_HINT)
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        user, password = unquote(parts.username or "", errors="strict"), unquote(parts.password or "", errors="strict")
    except ValueError:
        raise SpecError("that is not a proxy's address", hint=_PROXY_HINT) from None
    if parts.scheme not in ("socks5", "socks5h") or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise SpecError("only SOCKS5 proxies can be used, by host and port", hint=_PROXY_HINT)
    if not host or not port:
        raise SpecError("the proxy's address lacks its host or its port", hint=_PROXY_HINT)
    if ":" in host or is_number(host):
        address = parse(host)
        if address is None:
            raise SpecError("the proxy's address is neither a name nor an address", hint=_PROXY_HINT)
        host = str(address)
    else:
        try:
            host = from_user(host)
        except BadName as error:
            raise SpecError(f"the proxy: {error}", hint=_PROXY_HINT) from None
        if is_loopback(host):
            raise SpecError("the proxy's name is that of a loopback", hint="write its address, and a rule for it")
    check_credential("user", user)
    check_credential("password", password)
    if parts.password is not None and not user:
        raise SpecError("the proxy has a password, and no user", hint=_PROXY_HINT)
    return ProxySpec(host, port, user, parts.password is not None), password


def check_credential(what: str, value: str) -> str:
    if len(value.encode("utf-8", "replace")) > 255 or "\0" in value:
        raise SpecError(f"the proxy's {what} is longer than 255 bytes, or holds a NUL")
    return value


def with_values(headers: HeaderSpec, proxy: str, values: Mapping[str, str | None]) -> dict[str, Any]:
    """The arguments ``headers`` and ``proxy`` of a Network that has these values; None where one is not among them."""
    from urllib.parse import quote

    through = proxy
    if proxy and (password := values.get(PROXY_KEY)) is not None:
        front, at, place = proxy.partition("@")
        through = front + quote(password, safe="") + at + place
    told = {host: {name: values.get(header_key(host, name)) for name in names} for host, names in headers}
    return {"headers": told, "proxy": through}


def keys_of(headers: HeaderSpec, proxy: str) -> Iterable[str]:
    """Of all values that such a network needs."""
    for host, names in headers:
        for name in names:
            yield header_key(host, name)
    if proxy and read_proxy(proxy).password:
        yield PROXY_KEY
