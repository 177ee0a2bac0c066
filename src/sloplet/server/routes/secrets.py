"""Secrets of a sandbox: where each may be sent can be read, a value can only be written. docs/secrets.md."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from ...errors import SpecError
from ...headerspec import MAX_HEADERS, MAX_HOSTS
from ...secretspec import MAX_SECRETS
from ..caller import CallerOf
from ..documents import PROBLEMS, Items, SecretDocument
from ..documents import Request as Asked

MAX_VALUES = MAX_SECRETS + MAX_HOSTS * MAX_HEADERS + 1

router = APIRouter(prefix="/v1/sandboxes/{box}/secrets", tags=["network"], responses=PROBLEMS)


class SecretValues(Asked):
    values: dict[Annotated[str, Field(max_length=512)], Annotated[str, Field(max_length=16384)] | None] = Field(
        max_length=MAX_VALUES,
        repr=False,
        description="By the secrets' names, or header@host of the network's headers, or @proxy; null: forget it",
    )


@router.get("")
async def secrets(box: str, caller: CallerOf) -> Items[SecretDocument]:
    """What it has, also of its template. Never a value."""
    controller = caller.tenant.controller
    found = await controller.secrets((await controller.find(box)).id)
    return Items(items=[SecretDocument.model_validate(secret.to_dict()) for secret in found])


@router.put("", status_code=204)
async def set_values(box: str, asked: SecretValues, caller: CallerOf) -> Response:
    """The values behind the placeholders. They are kept in memory only."""
    controller = caller.tenant.controller
    await controller.set_secrets((await controller.find(box)).id, asked.values)
    return Response(status_code=204)


@router.delete("/{name}", status_code=204)
async def forget(box: str, name: str, caller: CallerOf) -> Response:
    """Forget a value: it is sent nowhere from now on."""
    controller = caller.tenant.controller
    info = await controller.find(box)
    if all(secret.name != name for secret in await controller.secrets(info.id)):
        raise SpecError(f"the sandbox has no secret {name[:128]!r}", hint="GET .../secrets lists those it has")
    await controller.set_secrets(info.id, {name: None})
    return Response(status_code=204)
