"""Sandboxes: made, found, listed, ended; paused and woken; what they use and what is enforced of them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from ...controller import SandboxInfo as Info
from ...errors import SandboxNotFound
from ...finding import create_or_find
from ...labels import matches, parse_wanted
from ...quantities import MAX_SECONDS
from ...spec import check_ttl
from ..asked import SandboxCreate, prepared
from ..caller import Caller, CallerOf, ServerOf
from ..documents import (
    PROBLEMS,
    Guarantee,
    Health,
    HostStats,
    Items,
    Metrics,
    Page,
    SandboxInfo,
)
from ..documents import Request as Asked
from ..idempotency import IdempotencyKey, Job
from ..pages import CursorOf, LimitOf, paged
from ..state import ServerState


class TtlAsked(Asked):
    ttl: Annotated[float, Field(ge=0, le=MAX_SECONDS)] | Annotated[str, Field(max_length=40)] | None = Field(
        description='Seconds, or "10m"; 0: not any longer; null: for ever'
    )


class PauseAsked(Asked):
    memory: bool = Field(default=True, description="false: only its files are kept, and nothing runs when it wakes")


router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"], responses=PROBLEMS)


@router.post("", status_code=201, response_model=SandboxInfo)
async def create(
    asked: SandboxCreate, request: Request, caller: CallerOf, server: ServerOf, key: IdempotencyKey = None
) -> Response:
    """Make one and start it. With `reuse`, one of that name and these settings is fine, and is woken."""
    spec = prepared(asked)  # what makes no sense is told before anything is noted

    async def work() -> SandboxInfo:
        return SandboxInfo.of(await _make(asked, spec, caller, server))

    async def look(since: float) -> SandboxInfo | None:
        assert asked.name is not None
        found = await found_since(caller, [asked.name], since)
        if found and (values := asked.values()):
            await caller.tenant.controller.set_secrets(found[0].id, values)
        return SandboxInfo.of(found[0]) if found else None

    async def find(sandbox_id: str) -> SandboxInfo | None:
        try:
            found = await caller.tenant.controller.find(sandbox_id)
        except SandboxNotFound:
            return None
        if found.state == "dead":  # it died before anybody was told of it
            await caller.tenant.controller.kill(found.id)
            return None
        if values := asked.values():
            await caller.tenant.controller.set_secrets(found.id, values)
        return SandboxInfo.of(found)

    if asked.name is None and not asked.reuse:
        job = Job(work, find=find)
    else:
        job = Job(work, _nothing if asked.reuse else look)
    return await server.once.answer(request, caller, asked.model_dump_json().encode(), job)


async def _nothing(since: float) -> None:
    """What may be asked for twice is asked for again."""


async def _make(asked: SandboxCreate, spec: Any, caller: Caller, server: ServerState) -> Info:
    controller = caller.tenant.controller
    if asked.reuse:
        # What is compared with what is there is what would be made.
        info = await create_or_find(controller, await server.permits.reuse(caller.key, controller, spec))
    else:
        info = await controller.create(spec)
    if values := asked.values():
        try:
            await controller.set_secrets(info.id, values)
        except BaseException:
            if not asked.reuse:
                await asyncio.shield(controller.kill(info.id))
            raise
    return info


async def found_since(caller: Caller, names: list[str], since: float) -> list[Info]:
    """What a request that was cut off has made, by the names that it gave: all, or none."""
    found = []
    for name in names:
        try:
            info = await caller.tenant.controller.find(name)
        except SandboxNotFound:
            continue
        if info.created_at >= since:
            found.append(info)
    return found if len(found) == len(names) else []


@router.get("")
async def listed(
    caller: CallerOf,
    server: ServerOf,
    limit: LimitOf = 100,
    cursor: CursorOf = None,
    state: Annotated[Literal["starting", "running", "paused", "dead", "ended"] | None, Query()] = None,
    engine: Annotated[str | None, Query(max_length=31)] = None,
    name: Annotated[str | None, Query(max_length=63, description="What names begin with")] = None,
    label: Annotated[list[str], Query(max_length=64, description="K=V, or K with any value")] = [],  # noqa: B006
    tenant: Annotated[str | None, Query(max_length=39, description="Of an admin: another one, or `*`")] = None,
) -> Page[SandboxInfo]:
    """Those of the key's tenant, oldest first, in pages. What is made or ended meanwhile moves nothing else."""
    wanted = parse_wanted(label)
    found: list[tuple[Info, str | None]] = []
    for owner, shown in _tenants(caller, server, tenant):
        for info in await owner.controller.list():
            if (
                state in (None, info.state)
                and engine in (None, info.engine)
                and (name is None or (info.name or "").casefold().startswith(name.casefold()))
                and matches(info.spec.labels, wanted)
            ):
                found.append((info, shown))
    return paged(
        found,
        lambda item: (item[0].created_at, item[1] or "", item[0].id),
        lambda item: SandboxInfo.of(*item),
        limit,
        cursor,
    )


def _tenants(caller: Caller, server: ServerState, asked: str | None) -> list[Any]:
    if asked is None:
        return [(caller.tenant, None)]
    caller.need_admin()
    if asked == "*":
        return [(tenant, tenant.name) for tenant in server.tenants]
    return [(server.tenants.find(asked), asked)]


@router.get("/{box}")
async def info(box: str, caller: CallerOf) -> SandboxInfo:
    """By id or name."""
    return SandboxInfo.of(await caller.tenant.controller.find(box))


@router.delete("/{box}", status_code=204)
async def delete(box: str, caller: CallerOf) -> Response:
    """End it and remove all it had. That there is none is no error."""
    try:
        found = await caller.tenant.controller.find(box)
        await caller.tenant.controller.kill(found.id)
    except SandboxNotFound:
        pass
    return Response(status_code=204)


# -- asleep and awake ----------------------------------------------------------------------------------------------


@router.put("/{box}/ttl")
async def set_ttl(box: str, asked: TtlAsked, caller: CallerOf) -> SandboxInfo:
    """From now on it has that long to live; then it ends, or sleeps where `on_ttl` says so. Of one that sleeps, too. A
    key that has a `max_ttl` gives no more than that. With 0 it is done when this is answered: `state` tells."""
    controller = caller.tenant.controller
    return SandboxInfo.of(await controller.set_ttl((await controller.find(box)).id, check_ttl(asked.ttl)))


@router.post("/{box}/pause")
async def pause(box: str, caller: CallerOf, asked: PauseAsked | None = None) -> SandboxInfo:
    """Write its memory and disk, and free everything else. Use wakes it. Idempotent."""
    controller = caller.tenant.controller
    memory = asked is None or asked.memory
    return SandboxInfo.of(await controller.pause((await controller.find(box)).id, memory=memory))


@router.post("/{box}/resume")
async def resume(box: str, caller: CallerOf) -> SandboxInfo:
    """Go on: a paused one where it was, a dead one from its last checkpoint. Idempotent."""
    controller = caller.tenant.controller
    return SandboxInfo.of(await controller.resume((await controller.find(box)).id))


@router.post("/{box}/release", status_code=204)
async def release(box: str, caller: CallerOf, server: ServerOf) -> Response:
    """This program (`Sloplet-Client`) needs it no more: a named one is paused if no other program uses it."""
    controller = caller.tenant.controller
    found = await controller.find(box)
    if server.uses.release(caller.tenant.name, caller.client, found.id):
        await controller.release(found.id)
    return Response(status_code=204)


# -- what is known of it -------------------------------------------------------------------------------------------


@router.get("/{box}/guarantees")
async def guarantees(box: str, caller: CallerOf) -> Items[Guarantee]:
    """What is enforced, at which value, by what."""
    controller = caller.tenant.controller
    found = await controller.guarantees((await controller.find(box)).id)
    return Items(items=[Guarantee.of(item) for item in found])


@router.get("/{box}/metrics")
async def metrics(box: str, caller: CallerOf) -> Metrics:
    """What it uses now. Wakes one that sleeps."""
    return Metrics.model_validate((await (await caller.tenant.box(box)).metrics()).to_dict())


@router.get("/{box}/stats")
async def stats(box: str, caller: CallerOf) -> HostStats:
    """The host's own counters."""
    controller = caller.tenant.controller
    return HostStats.of(await controller.stats((await controller.find(box)).id))


@router.get("/{box}/image-config", responses={200: {"description": "An OCI image config; null: the image has none."}})
async def image_config(box: str, caller: CallerOf) -> dict[str, Any] | None:
    """What its image says of how it wants to be run. Wakes one that sleeps."""
    import json

    controller = caller.tenant.controller
    config = await controller.image_config((await controller.find(box)).id)
    return None if config is None else dict(json.loads(config.to_json()))


@router.get("/{box}/health")
async def health(box: str, caller: CallerOf) -> Health:
    """Ask by the image's own health check, once, now. Wakes one that sleeps."""
    return Health.model_validate((await (await caller.tenant.box(box)).health()).to_dict())
