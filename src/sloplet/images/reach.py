"""Where registries may be, for those who must not reach everything that this machine can: tenants of a server.

A reference names a host, a registry redirects and names token servers: whoever chooses these would otherwise send
requests from inside of the operator's network. So names are resolved here, once, addresses that are private, this
machine's own or special are refused, and the very address that was looked at is the one that is dialled.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from ..errors import NotAllowed, RegistryUnavailable
from ..network import addresses
from ..network.resolving import Resolver
from ..network.upstream import System

_TRIES = 4  # addresses of a name that are dialled


class Reach:
    """Public addresses, and what the operator allows: ``HOST`` or ``HOST:PORT``, as references have them."""

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._allow = frozenset(_split(text) for text in allow)

    def allows(self, host: str, port: int) -> bool:
        """Whether the operator means that server, wherever it is."""
        bare = _bare(host)
        return (bare, None) in self._allow or (bare, port) in self._allow

    def plus(self, host: str) -> Reach:
        """One more that is allowed."""
        made = Reach()
        made._allow = self._allow | {_split(host)}
        return made

    def __repr__(self) -> str:
        return f"Reach({sorted(f'{host}:{port}' if port else host for host, port in self._allow)})"


def confine(http: httpx.AsyncClient, reach: Reach) -> None:
    """From now on this client reaches only what ``reach`` lets it. Before the first request."""
    judge = _Judge(reach)
    # Where a proxy of the environment dials, it resolves as well: what can be known of a name here is looked at first.
    http.event_hooks = {"request": [judge.look]}
    pool: Any = getattr(http._transport, "_pool", None)
    if not isinstance(getattr(pool, "_network_backend", None), httpcore.AsyncNetworkBackend):
        raise RegistryUnavailable(
            "this version of httpx cannot be kept from private addresses: registries are not asked"
        )
    pool._network_backend = _Backend(judge)


class _Judge:
    """Of one client; what it found out of a name holds for as long as a connection takes to be made."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._system = System()
        self._resolver = Resolver(self._system)

    async def look(self, request: httpx.Request) -> None:
        url = request.url
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            await self.addresses(url.host, port)
        except OSError:
            return  # a proxy may know that name; without one it is not dialled

    async def addresses(self, host: str, port: int) -> list[str]:
        """Where this host may be dialled. NotAllowed; OSError: nothing is known of it."""
        literal = addresses.parse(host)
        allowed = self._reach.allows(host, port)
        found = [str(literal)] if literal is not None else await self._looked_up(_bare(host))
        good = found if allowed else [text for text in found if self._is_public(text)]
        if not good:
            raise NotAllowed(
                f"the registry {host[:253]}:{port} is not at a public address, and this server lets no tenant reach it",
                hint=f"its operator can: `sloplet serve --allow-registry {host[:253]}:{port}`",
            )
        return good

    async def _looked_up(self, name: str) -> list[str]:
        """gaierror, as of a client that is not confined: who counts tries goes by it."""
        try:
            found = await self._resolver.resolve(name)
        except OSError as error:
            raise socket.gaierror(socket.EAI_AGAIN, error.strerror or str(error)) from error
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "there is no such name")
        return found

    def _is_public(self, text: str) -> bool:
        address = ipaddress.ip_address(text)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return addresses.special(address) is None and not self._system.is_own(str(address))


class _Backend(httpcore.AsyncNetworkBackend):
    """Dials addresses that were judged. TLS is still for the name: httpcore knows that from the request."""

    def __init__(self, judge: _Judge) -> None:
        self._judge = judge
        self._plain = httpcore.AnyIOBackend()

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:  # fmt: skip
        try:
            found = await self._judge.addresses(host, port)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        failure: Exception | None = None
        for address in found[:_TRIES]:
            try:
                return await self._plain.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = failure or error
        assert failure is not None
        raise failure

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.ConnectError("no registry is a Unix socket")

    async def sleep(self, seconds: float) -> None:
        await self._plain.sleep(seconds)


def _split(text: str) -> tuple[str, int | None]:
    """Host and port of ``HOST[:PORT]``; brackets of IPv6 are taken off."""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.lstrip(":")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    return _bare(host), int(port) if port.isdecimal() else None


def _bare(host: str) -> str:
    return host.strip("[]").lower().rstrip(".")
