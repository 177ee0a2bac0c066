"""Changes of files as they happen: server-sent events, or a WebSocket on the same path."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import Response
from starlette.websockets import WebSocket

from ...results import FileChange
from ...sandbox import AsyncSandbox
from ..caller import CallerOf
from ..documents import PROBLEMS
from ..rawnames import FolderOf, UserOf, named
from ..sse import EVENTS, Events, event, event_stream
from ..streams import conversation, send_json, watched

router = APIRouter(prefix="/v1/sandboxes/{box}/files", tags=["files"], responses=PROBLEMS)
_Recursive = Annotated[bool, Query(description="Also everything below it")]


def told(change: FileChange) -> dict[str, Any]:
    return {"kind": change.kind, **named("name", change.name), **named("new_name", change.new_name)}


@router.get("/watch", response_class=Response, responses=EVENTS)
async def watch(
    box: str, path: FolderOf, caller: CallerOf, user: UserOf = None, recursive: _Recursive = False
) -> Response:
    """What changes at a path, or below it.

    Events: `ready` first (what happens after it is not missed), then `change`, each {"kind", "name", "new_name"}. The
    kinds are created, modified, removed, renamed, attributes and overflow (some were lost). A WebSocket on this path
    gets the same as JSON messages.
    """
    sandbox = await caller.tenant.box(box)
    return await event_stream(_events(sandbox, path, user, recursive), caller.request_id)


async def _events(sandbox: AsyncSandbox, path: str, user: str | None, recursive: bool) -> Events:
    async with aclosing(sandbox.files.watch(path, recursive=recursive, user=user)) as changes:  # type: ignore[type-var]
        async for change in changes:
            yield event("ready" if change.kind == "ready" else "change", told(change))


@router.websocket("/watch")
async def watch_socket(
    box: str, path: FolderOf, socket: WebSocket, caller: CallerOf, user: UserOf = None, recursive: _Recursive = False
) -> None:
    """The same as messages."""
    async with conversation(socket, caller.request_id):
        sandbox = await caller.tenant.box(box)
        await watched(socket, _send(socket, sandbox, path, user, recursive))


async def _send(socket: WebSocket, sandbox: AsyncSandbox, path: str, user: str | None, recursive: bool) -> None:
    async with aclosing(sandbox.files.watch(path, recursive=recursive, user=user)) as changes:  # type: ignore[type-var]
        async for change in changes:
            kind = "ready" if change.kind == "ready" else "change"
            await send_json(socket, {"type": kind, **told(change)})
