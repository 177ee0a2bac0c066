"""Named volumes of a tenant: data that outlives sandboxes."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response

from ...volumes.store import Volumes
from ..caller import CallerOf
from ..documents import PROBLEMS, Items
from ..imagedocs import CloneAsked, SnapshotAsked, VolumeCreate, VolumeDocument, VolumeSnapshot

router = APIRouter(prefix="/v1/volumes", tags=["volumes"], responses=PROBLEMS)

Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]


@router.get("")
async def listed(caller: CallerOf) -> Items[VolumeDocument]:
    """By name, with who has each."""
    found = await asyncio.to_thread(Volumes(caller.tenant.home).list)
    return Items(items=[VolumeDocument.of(info) for info in found])


@router.post("", status_code=201)
async def create(asked: VolumeCreate, caller: CallerOf) -> VolumeDocument:
    """A new and empty one."""
    volumes = Volumes(caller.tenant.home)
    return VolumeDocument.of(await asyncio.to_thread(lambda: volumes.create(asked.name, size=asked.size)))


@router.get("/{name}")
async def inspect(name: Name, caller: CallerOf) -> VolumeDocument:
    """With its snapshots, and what it takes on the disk."""
    return VolumeDocument.of(await asyncio.to_thread(Volumes(caller.tenant.home).inspect, name))


@router.delete("/{name}", status_code=204)
async def remove(name: Name, caller: CallerOf) -> Response:
    """With all its snapshots. One that a sandbox has is refused."""
    await asyncio.to_thread(Volumes(caller.tenant.home).remove, name)
    return Response(status_code=204)


@router.get("/{name}/snapshots")
async def snapshots(name: Name, caller: CallerOf) -> Items[VolumeSnapshot]:
    found = await asyncio.to_thread(Volumes(caller.tenant.home).inspect, name)
    return Items(items=VolumeDocument.of(found).snapshots)


@router.post("/{name}/snapshots", status_code=201)
async def snapshot(name: Name, asked: SnapshotAsked, caller: CallerOf) -> VolumeSnapshot:
    """Keep its content as it is now. Nobody may have it read-write meanwhile."""
    info = await asyncio.to_thread(Volumes(caller.tenant.home).snapshot, name, asked.name)
    return VolumeSnapshot.model_validate(info.to_dict())


@router.delete("/{name}/snapshots/{snapshot}", status_code=204)
async def remove_snapshot(name: Name, snapshot: Name, caller: CallerOf) -> Response:
    await asyncio.to_thread(Volumes(caller.tenant.home).remove_snapshot, name, snapshot)
    return Response(status_code=204)


@router.post("/{name}/clone", status_code=201)
async def clone(name: Name, asked: CloneAsked, caller: CallerOf) -> VolumeDocument:
    """A new volume with the content that one has now, or had at a snapshot."""
    volumes = Volumes(caller.tenant.home)
    info = await asyncio.to_thread(lambda: volumes.clone(name, asked.name, snapshot=asked.snapshot))
    return VolumeDocument.of(info)
