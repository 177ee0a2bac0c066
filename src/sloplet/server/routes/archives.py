"""A sandbox as one file: exported, and brought to life again, here or elsewhere. docs/archive.md."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ...controller import Snapshot
from ..asked import Name
from ..caller import CallerOf, ServerOf
from ..documents import PROBLEMS, SandboxInfo
from ..idempotency import IdempotencyKey, Job
from ..streams import ClientGone, while_connected
from .sandboxes import found_since

router = APIRouter(prefix="/v1/sandboxes", tags=["archives"], responses=PROBLEMS)

MEDIA_TYPE = "application/vnd.sloplet.archive"
_PIECE = 1 << 20
_BODY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


@router.get(
    "/{box}/export",
    response_class=Response,
    responses={200: {"content": {MEDIA_TYPE: _BODY}, "description": "The archive"}},
)
async def export(
    box: str,
    request: Request,
    caller: CallerOf,
    server: ServerOf,
    image: Annotated[bool, Query(description="With its image inside, so that nothing else is needed there")] = True,
) -> Response:
    """The sandbox, running or paused, as one archive. It is written first and then sent; `export.progress` events tell
    how far it is. `Sloplet-Snapshot` is the id of the state in it, `Sloplet-Snapshot-Kind` live or disk."""
    controller = caller.tenant.controller
    info = await controller.find(box)
    turn = await server.exchange.turn(caller.tenant.name)
    try:
        async with server.exchange.place() as path:
            saved = await while_connected(request.receive, controller.export(info.id, path, image=image))
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except BaseException:
        turn.release()
        raise
    return _Archive(file, saved, info.name or info.id, turn)


class _Archive(Response):
    """An open file without a name, in pieces; closed when it was sent, or nobody wants it any more. So long it is one
    of the few that its tenant may have: what nobody reads fills no disk."""

    def __init__(self, file: int, saved: Snapshot, name: str, turn: asyncio.Semaphore) -> None:
        self._file = file
        self._turn = turn
        self.status_code = 200
        self.background = None
        headers = {
            "content-type": MEDIA_TYPE,
            "content-length": str(os.fstat(file).st_size),
            "content-disposition": f'attachment; filename="{name}.sloplet"',
            "cache-control": "no-store",
            "sloplet-snapshot": saved.id,
            "sloplet-snapshot-kind": saved.kind,
        }
        self.raw_headers = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(ClientGone):
                await while_connected(receive, self._pour(send))
        finally:
            os.close(self._file)
            self._turn.release()

    async def _pour(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while piece := await loop.run_in_executor(None, os.read, self._file, _PIECE):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise ClientGone from None


@router.post(
    "/import",
    status_code=201,
    response_model=SandboxInfo,
    openapi_extra={"requestBody": {"required": True, "content": {MEDIA_TYPE: _BODY}}},
)
async def load(
    request: Request,
    caller: CallerOf,
    server: ServerOf,
    name: Annotated[Name | None, Query(description="None: the name that it had")] = None,
    key: IdempotencyKey = None,
) -> Response:
    """Start the sandbox that an archive holds, as a new one. Every byte is checked before anything starts; whom it may
    reach is for this server to say: its network is closed, and its volumes stay behind."""
    controller = caller.tenant.controller
    async with server.exchange.receive(caller.tenant.name, _pieces(request)) as received:

        async def work() -> SandboxInfo:
            return SandboxInfo.of(await controller.load(received.path, name=name))

        async def look(since: float) -> SandboxInfo | None:
            found = await found_since(caller, [] if name is None else [name], since)
            return SandboxInfo.of(found[0]) if found else None

        job = Job(work, None if name is None else look)
        return await server.once.answer(request, caller, received.digest, job)
