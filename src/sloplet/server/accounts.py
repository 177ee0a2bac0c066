"""What is looked at now and then: what each tenant has (quotas.py), and whose keeper is not needed any more."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ..errors import SlopletError
from ..keeper.launch import listens
from .logs import log

if TYPE_CHECKING:
    from .state import ServerState
    from .tenants import Tenant

LOOK = 10.0  #: seconds between looks at what a tenant has
IDLE = 10.0  #: seconds after which the connection to a keeper that holds nothing is closed, so that it can leave
_STEP = 2.0


async def keep_accounts(server: ServerState) -> None:
    """For ever."""
    await asyncio.gather(*(_find(server, tenant) for tenant in server.tenants))
    while True:
        await asyncio.sleep(_STEP)
        server.end_revoked()
        for tenant in server.tenants.connected:
            await _look(server, tenant)
            _rest(server, tenant)


async def _find(server: ServerState, tenant: Tenant) -> None:
    """At the start: what runs on from before."""
    loop = asyncio.get_running_loop()
    try:
        if await loop.run_in_executor(None, lambda: listens(tenant.home.open().socket_path())):
            await server.quotas.account(tenant).look()
    except (SlopletError, OSError) as error:
        log.warning(f"the keeper of tenant {tenant.name} does not answer: {error}")


async def _look(server: ServerState, tenant: Tenant) -> None:
    try:
        await server.quotas.account(tenant).look(LOOK)
    except (SlopletError, OSError) as error:
        log.warning(f"what tenant {tenant.name} has cannot be told: {error}")


def _rest(server: ServerState, tenant: Tenant) -> None:
    """A keeper that holds nothing leaves when nobody is connected to it."""
    controller, account = tenant.controller, server.quotas.account(tenant)
    quiet = time.monotonic() - max(controller.used_at, account.changed_at) > IDLE
    if quiet and controller.idle and not account.running and not account.reserved:
        controller.close()
