"""``/v1/wire``: the tunnel that the library's own client uses. See docs/remote.md."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response
from starlette.websockets import WebSocket

from ...errors import SlopletError
from ..caller import CallerOf, ServerOf
from ..problems import MEDIA_TYPE, headers_of, problem, status_of

router = APIRouter(prefix="/v1", tags=["wire"])


@router.websocket("/wire")
async def wire(
    websocket: WebSocket,
    caller: CallerOf,
    server: ServerOf,
    session: Annotated[str | None, Query(max_length=64)] = None,
    received: Annotated[int, Query(ge=0, le=2**62)] = 0,
    attempt: Annotated[int, Query(ge=0, le=2**62)] = 0,
) -> None:
    try:
        await server.tunnels.serve(websocket, caller, session, received, attempt)
    except SlopletError as error:  # before it was accepted
        document = json.dumps(problem(error, caller.request_id))
        await websocket.send_denial_response(Response(document, status_of(error), headers_of(error), MEDIA_TYPE))
