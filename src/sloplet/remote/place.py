"""Where a server is, and the key to it: what was given, else what the environment says. Nothing is connected here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..errors import SpecError

if TYPE_CHECKING:
    import ssl

_KEY_RE = re.compile(r"[\x21-\x7e]{1,512}\Z")


@dataclass(frozen=True)
class Place:
    """A server, and who asks. ``ca``: a file with the certificate authority to trust, instead of the system's."""

    scheme: str
    host: str
    port: int
    key: str = field(repr=False)
    ca: str | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def secure(self) -> bool:
        return self.scheme == "https"

    @property
    def loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.") or self.host.endswith(".localhost")

    def context(self) -> ssl.SSLContext | None:
        """For TLS; None for plain HTTP. SpecError if the CA's file cannot be used."""
        return _context(self.ca, _stamp(self.ca)) if self.secure else None

    def proxy(self) -> str | None:
        """The proxy to go through, by the usual variables; never to this machine itself."""
        import urllib.request

        if self.loopback or urllib.request.proxy_bypass(f"{self.host}:{self.port}"):
            return None
        proxies = urllib.request.getproxies()
        return proxies.get(self.scheme) or proxies.get("all")


def find(server: str | None, key: str | None, ca: str | os.PathLike[str] | None) -> Place:
    """What is given, and for what is not the environment: SLOPLET_URL, SLOPLET_KEY, SLOPLET_CA."""
    url = os.environ.get("SLOPLET_URL", "") if server is None else server
    if not url:
        raise SpecError("there is a key and no server", hint='server="https://host:port", or SLOPLET_URL')
    return parse(url, _first(key, os.environ, "SLOPLET_KEY"), _first(ca, os.environ, "SLOPLET_CA") or None)


def _first(given: str | os.PathLike[str] | None, environment: Mapping[str, str], name: str) -> str:
    return environment.get(name, "") if given is None else os.fspath(given)


def parse(url: str, key: str, ca: str | None = None) -> Place:
    """SpecError for what cannot be a server, or a key to one."""
    hint = "for example https://sandboxes.example.com:7667"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise SpecError(f"{url[:80]!r} is not the URL of a server", hint=hint) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SpecError(f"{url[:80]!r} is not the URL of a server", hint=hint)
    if parts.username is not None or parts.password is not None:
        raise SpecError("the URL of a server holds no user and no password", hint="the key goes to key= or SLOPLET_KEY")
    if parts.path.rstrip("/") or parts.query or parts.fragment:
        raise SpecError(f"{url[:80]!r} is more than the URL of a server", hint=f"without a path: {hint}")
    if not key:
        raise SpecError(
            f"the server {parts.hostname} needs a key",
            hint="key=, SLOPLET_KEY or --key; `sloplet key create` on its machine makes one",
        )
    if not _KEY_RE.match(key):
        raise SpecError("the key is not one of a Sloplet server", hint="it begins with slp_, and has no spaces")
    return Place(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), key, ca)


def _stamp(path: str | None) -> float:
    if path is None:
        return 0.0
    try:
        return os.stat(path).st_mtime
    except OSError as error:
        raise SpecError(f"the CA's file {path[:200]} cannot be read: {error.strerror}") from None


@lru_cache(maxsize=8)
def _context(ca: str | None, stamp: float) -> ssl.SSLContext:
    import ssl

    try:
        return ssl.create_default_context(cafile=ca)
    except (ssl.SSLError, OSError) as error:
        raise SpecError(
            f"the CA's file {ca} holds no certificate: {error}", hint="the ca.pem that `sloplet serve --tls` made"
        ) from None
