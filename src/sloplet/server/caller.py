"""Who asks: what the guard has found out about a request, for routes to depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends
from starlette.requests import HTTPConnection

from ..errors import NotAllowed
from .keys import Key
from .tenants import Tenant

if TYPE_CHECKING:
    from .state import ServerState

SCOPE_KEY = "sloplet.caller"
BODY_KEY = "sloplet.body"  #: in the scope: what a JSON body says, if there is one


@dataclass(frozen=True)
class Caller:
    """``tenant`` is the key's own, or the one that an admin named by ``Sloplet-Tenant``."""

    key: Key
    tenant: Tenant
    request_id: str
    client: str  #: which program asks (``Sloplet-Client``), "" if it does not say
    address: str  #: where it connects from

    def need_admin(self) -> None:
        if not self.key.admin:
            raise NotAllowed("this needs an admin's key", hint="`sloplet key create --admin` on the server's machine")


async def _caller(connection: HTTPConnection) -> Caller:
    return cast(Caller, connection.scope[SCOPE_KEY])


async def _state(connection: HTTPConnection) -> ServerState:
    return cast("ServerState", connection.app.state.sloplet)


#: For routes: ``async def route(caller: CallerOf, server: ServerOf)``.
CallerOf = Annotated[Caller, Depends(_caller)]
ServerOf = Annotated["ServerState", Depends(_state)]
