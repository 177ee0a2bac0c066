"""Listens for SSH, counts who is connected, and ends the connections of keys that are valid no more."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import asyncssh
from asyncssh.kex import get_kex_algs

from ...errors import ServerError
from ..served import ServedKeeper
from .ahead import Ahead
from .keys import host_key
from .visitor import Visitor

if TYPE_CHECKING:
    from ..state import ServerState

MOST_CONNECTIONS = 512
MOST_OF_KEY = 64  #: connections of one key of the server
MOST_STRANGERS = 256  #: that have not shown a key yet
MOST_OF_ADDRESS = 64  #: of those: so nobody keeps the others out from one place
LOGIN_GRACE = 30.0  #: seconds to do so
_LOOK = 1.0  # seconds between looks for keys that were revoked
_END = 3.0
#: Key exchanges that cost little: by the others whoever connects, without a key, has this process reckon for a tenth of
#: a second (rsa2048 makes a pair of keys each time, groups of 8,192 bits). And no signatures or sums by SHA-1.
_EXCHANGES = ("mlkem768x25519-", "sntrup761x25519-", "curve25519-", "ecdh-sha2-nistp")
_SIGNATURES = "-ssh-rsa,*@ssh.com"
_SUMS = "-hmac-sha1*,*@ssh.com"


class SshService:
    """``start`` and ``aclose`` in the server's loop."""

    def __init__(self, server: ServerState) -> None:
        self.server = server
        self.keys = server.ssh_keys
        self.port = 0  #: that it listens on
        self.fingerprint = ""  #: of the host key
        self._acceptor: asyncssh.SSHAcceptor | None = None
        self._watching: asyncio.Task[None] | None = None
        self._all: set[Visitor] = set()
        self._inside: set[Visitor] = set()
        self._strangers: Counter[str] = Counter()  # by where they come from
        self._of_key: Counter[str] = Counter()
        self._ahead: dict[str, Ahead] = {}  # by key
        #: A connection to each tenant's keeper that is SSH's alone: many forwarded ports hold up nobody's requests.
        self._keepers: dict[str, ServedKeeper] = {}

    async def start(self) -> None:
        """ServerError if the port cannot be had."""
        settings = self.server.settings
        logging.getLogger("asyncssh").setLevel(logging.ERROR)  # it tells of every scan of the port
        key = host_key(self.server.home)
        self.fingerprint = key.get_fingerprint()
        exchanges = [name for each in get_kex_algs() if (name := each.decode()).startswith(_EXCHANGES)]
        try:
            self._acceptor = await asyncssh.listen(
                settings.host, settings.ssh_port or 0, server_factory=lambda: Visitor(self), server_host_keys=[key],
                public_key_auth=True, password_auth=False, kbdint_auth=False, host_based_auth=False, gss_host=None,
                agent_forwarding=False, x11_forwarding=False, allow_scp=False, line_editor=False, encoding=None,
                kex_algs=exchanges, signature_algs=_SIGNATURES, mac_algs=_SUMS, compression_algs=["none"],
                login_timeout=LOGIN_GRACE, keepalive_interval=30, keepalive_count_max=3,
                server_version="Sloplet", config=None,
            )  # fmt: skip
        except OSError as error:
            raise ServerError(
                f"cannot listen for SSH on {settings.host}:{settings.ssh_port}: {os.strerror(error.errno or 0)}",
                hint="is another server running? --ssh-port chooses another",
            ) from error
        self.port = self._acceptor.get_port()
        self._watching = asyncio.ensure_future(self._watch())
        self.server.gauges.append(("sloplet_ssh_connections", "SSH connections.", lambda: len(self._all)))

    def to_dict(self) -> dict[str, Any]:
        return {"port": self.port, "fingerprint": self.fingerprint}

    async def aclose(self) -> None:
        """End all connections; what they had started is hung up on. Idempotent."""
        if self._acceptor is not None:
            self._acceptor.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        tasks = [session.task for each in self._all for session in each.sessions if session.task is not None]
        for visitor in list(self._all):
            visitor.end("the server ends; sandboxes go on")
        if tasks:
            await asyncio.wait(tasks, timeout=_END)
        for keeper in self._keepers.values():
            keeper.close()

    def controller(self, tenant: str) -> ServedKeeper:
        """For what is done in its sandboxes."""
        found = self._keepers.get(tenant)
        if found is None:
            found = self._keepers[tenant] = ServedKeeper(self.server.tenants.get(tenant), self.server)
        return found

    # -- who is there ------------------------------------------------------------------

    def came(self, visitor: Visitor) -> bool:
        """Somebody connects. False: there is no room."""
        if len(self._all) >= MOST_CONNECTIONS or len(self._all) - len(self._inside) >= MOST_STRANGERS:
            return False
        if self._strangers[origin_of(visitor.address)] >= MOST_OF_ADDRESS:
            return False
        self._all.add(visitor)
        self._strangers[origin_of(visitor.address)] += 1
        return True

    def _known(self, visitor: Visitor) -> None:
        """It is no stranger any more, or gone."""
        origin = origin_of(visitor.address)
        self._strangers[origin] -= 1
        if not self._strangers[origin]:
            del self._strangers[origin]

    def logged_in(self, visitor: Visitor) -> bool:
        """Somebody has shown a key. False: that key has too many."""
        assert visitor.key is not None
        if self._of_key[visitor.key.id] >= MOST_OF_KEY:
            return False
        self._of_key[visitor.key.id] += 1
        self._inside.add(visitor)
        self._known(visitor)
        self.server.uses.came(visitor.key.tenant, visitor.client)
        return True

    def went(self, visitor: Visitor) -> bool:
        """Somebody has gone. Whether it was logged in."""
        if visitor in self._all and visitor not in self._inside:
            self._known(visitor)
        self._all.discard(visitor)
        if visitor not in self._inside or visitor.key is None:
            return False
        self._inside.discard(visitor)
        self._of_key[visitor.key.id] -= 1
        if not self._of_key[visitor.key.id]:
            del self._of_key[visitor.key.id]
            self._ahead.pop(visitor.key.id, None)
        self.server.uses.went(visitor.key.tenant, visitor.client, ended=True)
        return True

    def ahead(self, key: str) -> Ahead:
        """What is read ahead for that key."""
        return self._ahead.setdefault(key, Ahead())

    def forwards(self, key: str) -> int:
        """Connections to ports inside, of all who have shown that key."""
        return sum(each.forwards for each in self._inside if each.key is not None and each.key.id == key)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            self._rest()
            for visitor in list(self._inside):
                if visitor.key is not None and not self._is_valid(visitor, visitor.key.id):
                    visitor.audit("ssh.ended", "")(verdict="refused", error="KeyRefused")
                    visitor.end("this key is not valid any more")

    def _rest(self) -> None:
        """A keeper that holds nothing may leave once nobody is connected to it."""
        there = {visitor.key.tenant for visitor in self._inside if visitor.key is not None}
        for tenant in [name for name, keeper in self._keepers.items() if name not in there and keeper.idle]:
            self._keepers.pop(tenant).close()

    def _is_valid(self, visitor: Visitor, key_id: str) -> bool:
        tied = self.keys.find(visitor.fingerprint)
        return tied is not None and tied.key == key_id and self.server.keys.current(key_id) is not None


def origin_of(address: str) -> str:
    """Whom an address is counted as: of IPv6 one place has a whole network."""
    with suppress(ValueError):
        found = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
            return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return address
