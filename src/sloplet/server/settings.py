"""How a server is run: what the operator said. Frozen, checked by whoever makes it (cli/serve.py)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from .e2b.settings import E2BSettings

DEFAULT_PORT = 7667
MAX_JSON = 16 << 20  #: bytes of a request's body that is not a stream


@dataclass(frozen=True)
class AllowedPath:
    """A folder of the host's, with all below it, that requests may name as a volume or an image."""

    path: str  #: absolute, links resolved
    writable: bool = False


@dataclass(frozen=True)
class ServeSettings:
    host: str = "127.0.0.1"  #: an address
    port: int = DEFAULT_PORT  #: 0: any that is free
    domain: str = "localhost"  #: ``{port}-{id}.DOMAIN`` are sandboxes' own servers
    names: tuple[str, ...] = ()  #: further host names that the server answers to
    origins: tuple[str, ...] = ()  #: web pages' origins that may call it; none by default
    certificate: str | None = None  #: PEM file; with ``private_key``, unless that is in it. None: plain HTTP
    private_key: str | None = None
    authority: str | None = None  #: the certificate is our own, by the authority in this file
    allow_paths: tuple[AllowedPath, ...] = ()
    allow_private: tuple[str, ...] = ()  #: networks (10.0.7.0/24) that rules may open; "host.sloplet": this machine
    registries: tuple[str, ...] = ()  #: HOST[:PORT] that are private, and tenants may pull from all the same
    registry_logins: tuple[str, ...] = ()  #: HOST[:PORT] for which tenants' pulls use this machine's own login
    fake: bool = False  #: the fake engine may be used: in tests
    max_upload: int = 64 << 30  #: bytes of one streamed body
    max_creating: int = 16  #: sandboxes made, forked and loaded at a time, over all keys
    max_waiting: int = 512  #: requests that may wait for that; more are answered 503
    max_builds: int = 4  #: at a time, over all keys
    max_pulls: int = 16  #: and pushes
    max_connections: int = 4096  #: at a time; less where this process may not open so many files
    grace: float = 60.0  #: seconds after which a client whose connection broke is not waited for any more
    ssh_port: int | None = None  #: None: no SSH
    mcp: bool = True
    e2b: E2BSettings | None = field(default_factory=E2BSettings)  #: None: without E2B's API
    proxies: tuple[str, ...] = ()  #: addresses of proxies whose X-Forwarded-For and -Proto are believed
    url: str = ""  #: what clients call it by, if that is not where it listens: a proxy's
    log_format: str = "text"  #: or json
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def tls(self) -> bool:
        return self.certificate is not None

    @property
    def loopback(self) -> bool:
        """Whether only programs of this machine can reach it."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def wildcard(self) -> bool:
        """Whether it listens on all addresses."""
        return ipaddress.ip_address(self.host).is_unspecified
