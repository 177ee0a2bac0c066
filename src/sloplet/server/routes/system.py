"""Whether the server is up, and what it is: /healthz, /readyz, /metrics, /v1/me."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import Field

from ... import __version__
from ...errors import ServerBusy
from .. import metrics
from ..caller import CallerOf, ServerOf
from ..documents import PROBLEMS, Document
from ..state import ServerState

router = APIRouter(tags=["system"], responses=PROBLEMS)


class Health(Document):
    status: str
    version: str


class KeyLimitsDocument(Document):
    """null: not limited."""

    max_sandboxes: int | None
    max_memory: int | None
    max_cpus: float | None
    max_disk: int | None
    engines: list[str]
    at_least: str | None
    rate: float | None
    concurrency: int | None
    max_ttl: float | None


class KeyDocument(Document):
    """A key without its secret."""

    id: str
    name: str
    tenant: str
    admin: bool
    limits: KeyLimitsDocument
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class Used(Document):
    """What a tenant has running: the limits of all of that, added up."""

    sandboxes: int
    memory: int
    cpus: float
    disk: int


class Me(KeyDocument):
    server: str = Field(description="The server's version")
    used: Used


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health(status="ok", version=__version__)


@router.get("/readyz")
async def readyz(server: ServerOf) -> Health:
    """Requests will be served: it is not stopping, and can write what it must."""
    if problem := await asyncio.to_thread(why_not_ready, server):
        raise ServerBusy(problem, hint="the server's log tells more", retry_after=5)
    return Health(status="ok", version=__version__)


def why_not_ready(server: ServerState) -> str:
    if server.stopping:
        return "the server is stopping"
    if not os.access(server.home.path, os.W_OK | os.X_OK) or not server.audit.check():
        return "the server cannot write its state"
    disk = os.statvfs(server.home.path)
    if disk.f_bavail * disk.f_frsize < 16 << 20:
        return "the server's disk is full"
    return ""


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def prometheus(caller: CallerOf, server: ServerOf) -> PlainTextResponse:
    """Prometheus' text format: all of the server for an admin's key, what concerns its tenant for others."""
    text = metrics.render(server, None if caller.key.admin else caller.tenant.name)
    return PlainTextResponse(text, media_type=metrics.MEDIA_TYPE)


@router.get("/v1/me")
async def me(caller: CallerOf, server: ServerOf) -> Me:
    """Who the key is, what it may, and what its tenant uses."""
    return Me.model_validate(
        {
            **caller.key.to_dict(), "tenant": caller.tenant.name, "server": __version__,
            "used": await used(server, caller.tenant.name),
        }
    )  # fmt: skip


async def used(server: ServerState, tenant: str) -> dict[str, Any]:
    """As of a second ago, at most."""
    account = server.quotas.account(server.tenants.get(tenant))
    await account.look(1.0)
    share = account.used()
    return {"sandboxes": share.sandboxes, "memory": share.memory, "cpus": share.cpus, "disk": share.disk}
