"""Keys, tenants, the audit log, backups: what operators do, over HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field

from ...errors import RequestInvalid, SpecError
from ...quantities import parse_duration
from .. import audit, backup
from ..caller import CallerOf, ServerOf
from ..documents import PROBLEMS, Document, Items, Page, Request
from ..keys import KeyLimits
from ..served import FACTS
from .system import KeyDocument, Used, used

router = APIRouter(prefix="/v1", tags=["admin"], responses=PROBLEMS)

Size = Annotated[str, Field(max_length=40)] | int
Time = Annotated[str, Field(max_length=40)] | float
Word = Annotated[str, Field(max_length=120)]


class LimitsAsked(Request):
    """Of all that a key's tenant has at a time; what is left out is not limited."""

    max_sandboxes: int | None = None
    max_memory: Size | None = Field(default=None, description='Bytes, or "8g"')
    max_cpus: float | None = None
    max_disk: Size | None = None
    engines: list[Word] = Field(default_factory=list, max_length=20)
    at_least: Word | None = None
    rate: float | None = Field(default=None, description="Requests a second")
    concurrency: int | None = Field(default=None, description="Requests at a time")
    max_ttl: Time | None = Field(default=None, description='Seconds, or "1d"')


class KeyAsked(Request):
    name: Word
    tenant: Word | None = Field(default=None, description="Whose sandboxes it sees; left out: one of its own")
    admin: bool = False
    limits: LimitsAsked = Field(default_factory=LimitsAsked)
    expires: Time | None = Field(default=None, description='Seconds from now, or "30d"')


class NewKey(KeyDocument):
    key: str = Field(description="The key itself, shown this once")


class TenantDocument(Document):
    name: str
    keys: int = Field(description="That are valid")
    used: Used


class AuditLine(Document):
    """One thing that was asked for."""

    time: float
    action: str = Field(examples=["sandboxes.create"])
    verdict: str = Field(description="allowed or refused")
    key: str = Field(description="The key's id")
    name: str = Field(description="The key's name")
    tenant: str
    address: str
    sandbox: str = Field(description="As it was named; ids of those that were made")
    error: str = Field(description="The class of the error that was answered")
    status: int
    ms: float = Field(description="Until the answer began")
    request: str = Field(description="`Sloplet-Request-Id`")
    detail: str = Field(description="Of a command: its first word")


class BackupFile(Document):
    bytes: int
    sha256: str


class BackupDocument(Document):
    name: str = Field(description="The folder's name, in `backups` of the server's home")
    version: str
    time: float
    files: dict[str, BackupFile]


@router.get("/keys")
async def keys(caller: CallerOf, server: ServerOf) -> Items[KeyDocument]:
    """All of them, also revoked and expired ones, oldest first. For admins."""
    caller.need_admin()
    found = await asyncio.to_thread(server.keys.list)
    return Items(items=[KeyDocument.model_validate(key.to_dict()) for key in found])


@router.post("/keys", status_code=201)
async def create_key(asked: KeyAsked, caller: CallerOf, server: ServerOf) -> NewKey:
    """Make a key. The answer holds it, this once. For admins."""
    caller.need_admin()
    limits = KeyLimits.make(**asked.limits.model_dump())
    expires = None if asked.expires is None else parse_duration(asked.expires, "expires")
    made, text = await asyncio.to_thread(
        server.keys.create, asked.name, tenant=asked.tenant, admin=asked.admin, limits=limits, expires=expires
    )
    _tell(made.name)
    return NewKey.model_validate({**made.to_dict(), "key": text})


@router.delete("/keys/{ref}", status_code=204, response_class=Response)
async def revoke_key(ref: str, caller: CallerOf, server: ServerOf) -> Response:
    """Revoke a key, by name or id. What it made stays, and is its tenant's. For admins."""
    caller.need_admin()
    try:
        gone = await asyncio.to_thread(server.keys.revoke, ref)
    except SpecError as error:
        missing = RequestInvalid(error.message, hint="GET /v1/keys lists them")
        missing.status = 404
        raise missing from None
    _tell(gone.name)
    return Response(status_code=204)


@router.get("/tenants")
async def tenants(caller: CallerOf, server: ServerOf) -> Items[TenantDocument]:
    """Who has a home here, and what runs in it. For admins."""
    caller.need_admin()
    return Items(
        items=[
            TenantDocument.model_validate(
                {"name": name, "keys": len(list(server.keys.of_tenant(name))), "used": await used(server, name)}
            )
            for name in server.tenants.names()
        ]
    )


@router.get("/audit")
async def audit_log(
    caller: CallerOf,
    server: ServerOf,
    since: Annotated[float | None, Query(description="Seconds since the epoch")] = None,
    until: Annotated[float | None, Query(description="Seconds since the epoch")] = None,
    key: Annotated[Word, Query(description="A key's name or id")] = "",
    action: Annotated[Word, Query(description="`sandboxes.create`, or all of `sandboxes`")] = "",
    sandbox: Annotated[Word, Query()] = "",
    verdict: Annotated[Word, Query(description="allowed or refused")] = "",
    tenant: Annotated[Word, Query()] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
) -> Page[AuditLine]:
    """Who asked for what, and what came of it; newest first. A key sees what was asked with it, an admin's sees all. A
    page may be short, or empty, and still not the last: `next` tells."""
    query = audit.AuditQuery(
        since=since, until=until, key=key, action=action, sandbox=sandbox, verdict=verdict, tenant=tenant,
        key_id="" if caller.key.admin else caller.key.id,
    )  # fmt: skip
    found = await asyncio.to_thread(audit.read, server.home, query, limit=limit, cursor=cursor)
    return Page(items=[AuditLine.model_validate(line) for line in found.items], next=found.next)


@router.post("/backup", status_code=201)
async def make_backup(caller: CallerOf, server: ServerOf) -> BackupDocument:
    """Copy the records of the server and of all tenants to a new folder below `backups` of its home. For admins."""
    caller.need_admin()
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + f"-{caller.request_id[:6]}"
    _tell(name)
    manifest = await asyncio.to_thread(backup.make_backup, server.home, server.home.path / "backups" / name)
    return BackupDocument.model_validate({"name": name, **manifest})


def _tell(detail: str) -> None:
    if (facts := FACTS.get()) is not None:
        facts["detail"] = detail
