"""A sandbox through time: snapshots, templates, forks, rollback, undo, diff."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from ...controller import Snapshot as Saved
from ...errors import SnapshotNotFound, SpecError
from ...spec import MAX_FORK, MAX_UNDO, parse_duration
from ..asked import Duration, Name
from ..caller import CallerOf, ServerOf
from ..documents import PROBLEMS, Diff, Items, SandboxInfo, Snapshot, sandboxes
from ..documents import Request as Asked
from ..idempotency import IdempotencyKey, Job
from .sandboxes import found_since

router = APIRouter(prefix="/v1", tags=["history"], responses=PROBLEMS)

Ref = Annotated[str, Field(min_length=1, max_length=63)]
_Role = Literal["snapshot", "template", "pause", "checkpoint", "undo", "fork", "export"]
RoleOf = Annotated[_Role | Literal["all"], Query(description="Why it was saved")]


_MEMORY: bool = Field(default=True, description="false: its files only, also where more can be saved")


class SnapshotCreate(Asked):
    name: Name | None = None
    role: Literal["snapshot", "template", "undo"] = "snapshot"
    note: str = Field(default="", max_length=1000)
    memory: bool = _MEMORY


class TemplateCreate(Asked):
    sandbox: Ref = Field(description="The id or name of the sandbox that it is made of")
    name: Name
    memory: bool = _MEMORY


class RollbackAsked(Asked):
    snapshot: Ref = Field(description="The id or name of one of its snapshots")


class UndoAsked(Asked):
    steps: int = Field(default=1, ge=1, le=MAX_UNDO)


class ForkAsked(Asked):
    count: int = Field(default=1, ge=1, le=MAX_FORK)
    names: list[Name] | None = Field(default=None, max_length=MAX_FORK, description="As many as copies; all different")
    snapshot: Ref | None = Field(default=None, description="Copies of how it was then, not of how it is")
    ttl: Duration | None = Field(default=None, description="What each has to live; none: as its settings say")


class AppliedMarks(Asked):
    marks: dict[Annotated[str, Field(max_length=4096)], Annotated[str, Field(max_length=4096)]] = Field(
        max_length=100_000, description="Paths inside, and what is there now, as `before` of a change"
    )


# -- of one sandbox ------------------------------------------------------------------------------------------------


@router.get("/sandboxes/{box}/snapshots")
async def snapshots_of(box: str, caller: CallerOf, role: RoleOf = "snapshot") -> Items[Snapshot]:
    """Its snapshots, oldest first; `parent` makes them a tree."""
    controller = caller.tenant.controller
    found = await controller.snapshots((await controller.find(box)).id, role=None if role == "all" else role)
    return Items(items=[Snapshot.of(item) for item in found])


@router.post("/sandboxes/{box}/snapshots", status_code=201)
async def snapshot(box: str, asked: SnapshotCreate, caller: CallerOf) -> Snapshot:
    """Save its state now; it runs on. `kind` says what was saved."""
    if asked.role == "template" and asked.name is None:
        raise SpecError("a template needs a name", hint="POST /v1/templates makes one, too")
    controller = caller.tenant.controller
    info = await controller.find(box)
    made = await controller.snapshot(info.id, asked.name, role=asked.role, note=asked.note, memory=asked.memory)
    return Snapshot.of(made)


@router.post("/sandboxes/{box}/rollback")
async def rollback(box: str, asked: RollbackAsked, caller: CallerOf) -> SandboxInfo:
    """Be as it was at one of its snapshots: same id, same name."""
    controller = caller.tenant.controller
    info = await controller.find(box)
    target = await controller.find_snapshot(asked.snapshot, info.id)
    return SandboxInfo.of(await controller.rollback(info.id, target.id))


@router.post("/sandboxes/{box}/undo")
async def undo(box: str, asked: UndoAsked, caller: CallerOf) -> Snapshot:
    """Be as before the last command, or the `steps`-th last. Needs `undo` in its settings."""
    controller = caller.tenant.controller
    return Snapshot.of(await controller.undo((await controller.find(box)).id, asked.steps))


@router.post("/sandboxes/{box}/fork", status_code=201, response_model=Items[SandboxInfo])
async def fork(
    box: str, asked: ForkAsked, request: Request, caller: CallerOf, server: ServerOf, key: IdempotencyKey = None
) -> Response:
    """Running copies, of how it is now or was at a snapshot, each with an identity of its own. All or none."""
    names = asked.names
    if names is not None and (len(names) != asked.count or len({name.casefold() for name in names}) != asked.count):
        raise SpecError(f"{asked.count} copies need {asked.count} different names, not {len(names)}")
    ttl = None if asked.ttl is None else parse_duration(asked.ttl, "ttl")
    controller = caller.tenant.controller

    async def work() -> Items[SandboxInfo]:
        info = await controller.find(box)
        source = None if asked.snapshot is None else (await controller.find_snapshot(asked.snapshot, info.id)).id
        made = await controller.fork(info.id, asked.count, names=names, snapshot=source, ttl=ttl)
        return Items[SandboxInfo](items=sandboxes(made))

    async def look(since: float) -> Items[SandboxInfo] | None:
        found = await found_since(caller, names or [], since)
        return Items[SandboxInfo](items=sandboxes(found)) if found else None

    job = Job(work, None if names is None else look)
    return await server.once.answer(request, caller, asked.model_dump_json().encode(), job)


@router.get("/sandboxes/{box}/diff", response_model=Diff)
async def diff(
    box: str,
    request: Request,
    caller: CallerOf,
    server: ServerOf,
    against: Annotated[str | None, Query(max_length=63, description="One of its snapshots; none: its image")] = None,
    text: Annotated[bool, Query(description="With unified diffs, where a file is text")] = True,
) -> Response:
    """Files added, changed and removed since its image, or since one of its snapshots. Names that are no UTF-8 have
    lone surrogates (`\\udc80` to `\\udcff`) for the bytes that are none."""
    controller = caller.tenant.controller
    info = await controller.find(box)
    target = None if against is None else (await controller.find_snapshot(against, info.id)).id
    found = await controller.diff(info.id, target, text=text)
    data = json.dumps(found.to_dict(), separators=(",", ":")).encode()
    server.outputs.hold(request.scope, caller.tenant.name, len(data))
    return Response(data, media_type="application/json")


@router.post("/sandboxes/{box}/applied", status_code=204)
async def applied(box: str, asked: AppliedMarks, caller: CallerOf) -> Response:
    """Changes were brought back to where they were copied from: the next diff knows them."""
    controller = caller.tenant.controller
    await controller.applied((await controller.find(box)).id, asked.marks)
    return Response(status_code=204)


# -- of all ---------------------------------------------------------------------------------------------------------


@router.get("/snapshots")
async def snapshots(caller: CallerOf, role: RoleOf = "snapshot") -> Items[Snapshot]:
    """Those of all sandboxes, oldest first."""
    found = await caller.tenant.controller.snapshots(role=None if role == "all" else role)
    return Items(items=[Snapshot.of(item) for item in found])


_OfBox = Annotated[str | None, Query(max_length=63, description="The sandbox whose snapshot is named")]


@router.get("/snapshots/{ref}")
async def find_snapshot(ref: str, caller: CallerOf, sandbox: _OfBox = None) -> Snapshot:
    """By id; by name among those of a sandbox, or, without one, among templates."""
    return Snapshot.of(await _find(caller, ref, sandbox))


@router.delete("/snapshots/{ref}", status_code=204)
async def delete_snapshot(ref: str, caller: CallerOf, sandbox: _OfBox = None, force: bool = False) -> Response:
    """With `force` also if others descend from it: they then descend from its parent."""
    await caller.tenant.controller.delete_snapshot((await _find(caller, ref, sandbox)).id, force=force)
    return Response(status_code=204)


async def _find(caller: CallerOf, ref: str, sandbox: str | None) -> Saved:
    controller = caller.tenant.controller
    return await controller.find_snapshot(ref, None if sandbox is None else (await controller.find(sandbox)).id)


@router.get("/templates")
async def templates(caller: CallerOf) -> Items[Snapshot]:
    """What sandboxes can start from, warm."""
    return Items(items=[Snapshot.of(item) for item in await caller.tenant.controller.snapshots(role="template")])


@router.post("/templates", status_code=201, response_model=Snapshot)
async def create_template(
    asked: TemplateCreate, request: Request, caller: CallerOf, server: ServerOf, key: IdempotencyKey = None
) -> Response:
    """Save a sandbox as a template, which stays when it is gone."""
    controller = caller.tenant.controller

    async def work() -> Snapshot:
        info = await controller.find(asked.sandbox)
        return Snapshot.of(await controller.snapshot(info.id, asked.name, role="template", memory=asked.memory))

    async def look(since: float) -> Snapshot | None:
        try:
            found = await _template(caller, asked.name)
        except SnapshotNotFound:
            return None
        return Snapshot.of(found) if found.created_at >= since else None

    return await server.once.answer(request, caller, asked.model_dump_json().encode(), Job(work, look))


@router.get("/templates/{name}")
async def find_template(name: str, caller: CallerOf) -> Snapshot:
    return Snapshot.of(await _template(caller, name))


@router.delete("/templates/{name}", status_code=204)
async def delete_template(name: str, caller: CallerOf, force: bool = False) -> Response:
    """With `force` also if sandboxes descend from it."""
    await caller.tenant.controller.delete_snapshot((await _template(caller, name)).id, force=force)
    return Response(status_code=204)


async def _template(caller: CallerOf, name: str) -> Saved:
    found = await caller.tenant.controller.find_snapshot(name)
    if found.role != "template":
        raise SnapshotNotFound(f"there is no template {name[:80]!r}", hint="GET /v1/templates lists those there are")
    return found
