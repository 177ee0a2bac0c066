"""What a sandbox may reach, what it has reached, and questions about what no rule decides. docs/network.md."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import Field
from starlette.websockets import WebSocket

from ...keeper.followed import Followed
from ...netchange import NetworkChange
from ...netspec import NetworkSpec
from ..asked import NetworkAsked, Rules
from ..caller import Caller, CallerOf
from ..documents import PROBLEMS, Decision, Items, NetworkDocument
from ..documents import Request as Asked
from ..following import follow, follow_on
from ..sse import EVENTS

router = APIRouter(prefix="/v1/sandboxes/{box}/network", tags=["network"], responses=PROBLEMS)


class NetworkChanged(Asked):
    """First `allow` and `deny` take the place of the lists that are there (null: they stay), then `remove` is taken out
    of both, then rules are added. What is added to one list is taken out of the other."""

    allow: Rules | None = None
    deny: Rules | None = None
    remove: Rules = Field(default=[])
    add_allow: Rules = Field(default=[])
    add_deny: Rules = Field(default=[])


class Answer(Asked):
    verdict: Literal["once", "always", "no", "never"]


@router.get("")
async def policy(box: str, caller: CallerOf) -> NetworkDocument:
    """What it may reach now: as it was made, and what was changed since."""
    controller = caller.tenant.controller
    return NetworkDocument.of(await controller.network((await controller.find(box)).id))


@router.put("")
async def set_policy(box: str, asked: NetworkAsked, caller: CallerOf) -> NetworkDocument:
    """Another policy, at once; open connections that it does not allow are cut."""
    network = asked.network()
    spec, values = (NetworkSpec(), {}) if network is None else (network.spec, network.values)
    controller = caller.tenant.controller
    await controller.set_network((await controller.find(box)).id, spec, values)
    return NetworkDocument.of(spec)


@router.patch("")
async def change_policy(box: str, asked: NetworkChanged, caller: CallerOf) -> NetworkDocument:
    """A part of the policy, of how it is when this is done: two changes at the same time are both made."""
    change = NetworkChange.from_dict(asked.model_dump())
    controller = caller.tenant.controller
    return NetworkDocument.of(await controller.change_network((await controller.find(box)).id, change))


@router.get("/log")
async def log(
    box: str,
    caller: CallerOf,
    after: Annotated[int, Query(ge=0, le=2**53, description="The `seq` that was last seen")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Items[Decision]:
    """Connections and what was decided about them, oldest first. One that is open comes again when it has ended."""
    controller = caller.tenant.controller
    found = await controller.network_log((await controller.find(box)).id, after=after, limit=limit)
    return Items(items=[Decision.model_validate(row.to_dict()) for row in found])


@router.get("/learned")
async def learned(box: str, caller: CallerOf) -> NetworkDocument:
    """The smallest policy that allows what it has reached so far."""
    controller = caller.tenant.controller
    return NetworkDocument.of(await controller.learned((await controller.find(box)).id))


# -- questions -----------------------------------------------------------------------------------------------------


@router.get("/asks", response_class=Response, responses=EVENTS)
async def asks(box: str, caller: CallerOf) -> Response:
    """What waits to be decided, and what comes: each event's data is {"id", "sandbox", "name", "address", "port",
    "reason"}. While somebody listens here, undecided connections wait for an answer; otherwise they are refused. A
    WebSocket on this path gets the same as JSON messages."""
    return await follow(await _asks(box, caller), dict, caller.request_id)


@router.websocket("/asks")
async def asks_socket(box: str, socket: WebSocket, caller: CallerOf) -> None:
    await follow_on(socket, lambda: _asks(box, caller), dict, caller.request_id)


async def _asks(box: str, caller: Caller) -> Followed:
    controller = caller.tenant.controller
    return await controller.follow("asks", (await controller.find(box)).id)


@router.post("/asks/{ask}", status_code=204)
async def answer(box: str, ask: Annotated[int, Path(ge=0, le=2**53)], asked: Answer, caller: CallerOf) -> Response:
    """`once`: this connection; `always`: and a rule for the future; `no`: not this time; `never`: and a rule. One that
    was answered already, or waits no more, is let be."""
    controller = caller.tenant.controller
    await controller.answer((await controller.find(box)).id, ask, asked.verdict)
    return Response(status_code=204)
