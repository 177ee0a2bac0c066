"""What happens to sandboxes, as it happens: server-sent events, or a WebSocket on the same path. And what is kept ready
for the next who ask (pools)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from starlette.websockets import WebSocket

from ...controller import Event as Happened
from ...keeper.followed import Followed
from ..caller import Caller, CallerOf
from ..documents import PROBLEMS, Event, Items, Pool
from ..following import follow, follow_on
from ..sse import EVENTS

router = APIRouter(prefix="/v1", tags=["events"], responses=PROBLEMS)


@router.get("/events", response_class=Response, responses=EVENTS)
async def events(caller: CallerOf) -> Response:
    """What happens to all sandboxes of the tenant from now on. Each event's data is an Event, its id a number that
    counts up. Who reads too slowly loses the oldest, and sees `events.lost`. A WebSocket on this path gets the same as
    JSON messages."""
    return await follow(await _events(None, caller), _shown, caller.request_id)


@router.websocket("/events")
async def events_socket(socket: WebSocket, caller: CallerOf) -> None:
    await follow_on(socket, lambda: _events(None, caller), _shown, caller.request_id)


@router.get("/sandboxes/{box}/events", response_class=Response, responses=EVENTS)
async def events_of(box: str, caller: CallerOf) -> Response:
    """What happens to this one, until it ends."""
    return await follow(await _events(box, caller), _shown, caller.request_id)


@router.websocket("/sandboxes/{box}/events")
async def events_of_socket(box: str, socket: WebSocket, caller: CallerOf) -> None:
    await follow_on(socket, lambda: _events(box, caller), _shown, caller.request_id)


async def _events(box: str | None, caller: Caller) -> Followed:
    controller = caller.tenant.controller
    return await controller.follow("events", None if box is None else (await controller.find(box)).id)


def _shown(item: Any) -> dict[str, Any]:
    return Event.of(Happened(**item)).model_dump()


@router.get("/pools")
async def pools(caller: CallerOf) -> Items[Pool]:
    """What is kept ready: sandboxes that have started and wait for who asks for just these settings."""
    found = await caller.tenant.controller.pools()
    return Items(items=[Pool.of(item) for item in found])
