"""Tenants: each has a home and a keeper of its own. Which keeper a request goes to is what separates them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..controller import SandboxInfo
from ..errors import TenantNotFound
from ..sandbox import AsyncSandbox
from ..state.home import TENANT_RE, Home
from .building import BuildRuntime
from .keys import MAIN
from .served import ServedKeeper

if TYPE_CHECKING:
    from .state import ServerState

_REMEMBERED = 4096


class Tenant:
    """One tenant. ``controller`` is its keeper, started when it is first needed."""

    def __init__(self, name: str, home: Home, server: ServerState) -> None:
        self.name = name
        self.home = home
        self.controller = ServedKeeper(self, server)
        self._server = server
        self._builds: BuildRuntime | None = None
        self._known: dict[str, SandboxInfo] = {}  # by id: what does not change of it

    async def box(self, ref: str) -> AsyncSandbox:
        """The sandbox of that name or id. SandboxNotFound, at the latest when it is asked something."""
        info = self._known.get(ref)
        if info is None:
            info = await self.controller.find(ref)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[info.id] = info  # an id is never used again: who has it need not be looked up
        return AsyncSandbox._adopt(self.controller, info)

    def forget(self, sandbox_id: str) -> None:
        """It is gone."""
        self._known.pop(sandbox_id, None)

    @property
    def embedded(self) -> BuildRuntime:
        """Sandboxes that end with this process: the steps of builds."""
        if self._builds is None:
            self._builds = BuildRuntime(self.home)
            self._builds.tenant, self._builds.server = self, self._server
        return self._builds

    async def aclose(self) -> None:
        self.controller.close()
        if self._builds is not None:
            await self._builds.aclose()


class Tenants:
    """Those of one server. All methods belong to the server's loop."""

    def __init__(self, home: Home, server: ServerState) -> None:
        self.home = home
        self._server = server
        self._tenants: dict[str, Tenant] = {}

    def get(self, name: str) -> Tenant:
        """The tenant of a key, made if it is new."""
        found = self._tenants.get(name)
        if found is None:
            home = self.home if name == MAIN else self.home.tenant(name)
            found = self._tenants[name] = Tenant(name, home, self._server)
        return found

    def find(self, name: str) -> Tenant:
        """One that has been here. TenantNotFound."""
        if name not in self.names():
            raise TenantNotFound(f"there is no tenant {name[:80]!r}", hint="see `sloplet key ls`")
        return self.get(name)

    def names(self) -> list[str]:
        """All that have a home, the server's own first."""
        try:
            there = sorted(name for name in os.listdir(self.home.path / "tenants") if TENANT_RE.match(name))
        except FileNotFoundError:
            there = []
        return [MAIN, *(name for name in there if name != MAIN)]

    def __iter__(self) -> Iterator[Tenant]:
        return iter([self.get(name) for name in self.names()])

    @property
    def connected(self) -> list[Tenant]:
        """Those with whose keeper there is a connection."""
        return [tenant for tenant in self._tenants.values() if tenant.controller.connected]

    async def aclose(self) -> None:
        await asyncio.gather(*(tenant.aclose() for tenant in self._tenants.values()))
