"""Commands: run to their end, followed as server-sent events, or held on a WebSocket."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.websockets import WebSocket

from ...process import AsyncProcess
from ...sandbox import AsyncSandbox
from ..caller import CallerOf, ServerOf
from ..commands import ExecAsked, ExecResult, FollowAsked, Texts, answered, ended
from ..documents import PROBLEMS
from ..sse import EVENTS, Events, event, event_stream
from ..streams import CommandSocket, conversation, first_message, send_json, while_connected

router = APIRouter(prefix="/v1/sandboxes/{box}/exec", tags=["commands"], responses=PROBLEMS)

CHANNELS = {1: "stdout", 2: "stderr"}


@router.post("", response_model=ExecResult)
async def run(box: str, asked: ExecAsked, request: Request, caller: CallerOf, server: ServerOf) -> Response:
    """Run a command to its end.

    A command that fails is an answer like any other: look at `exit_code`. It is ended, with all that it started, if the
    client goes away before.
    """
    sandbox = await caller.tenant.box(box)
    server.outputs.hold(request.scope, caller.tenant.name, asked.max_output)
    work = sandbox.run(**asked.arguments(), input=asked.input(), max_output=asked.max_output, text=False)
    result = await while_connected(request.receive, work)
    return answered(result, asked.encoding)


@router.post("/stream", response_class=Response, responses=EVENTS)
async def stream(box: str, asked: ExecAsked, caller: CallerOf) -> Response:
    """Run a command, and tell of it as it happens.

    Events: `started` {"pid"}, `stdout` and `stderr` {"data"}, then `exit` (as the answer of `exec`, without output) or
    `error` (a problem document). A client that goes away ends the command.
    """
    sandbox = await caller.tenant.box(box)
    return await event_stream(_followed(sandbox, asked), caller.request_id)


async def _followed(sandbox: AsyncSandbox, asked: ExecAsked) -> Events:
    given = asked.input()
    process = await sandbox.spawn(**asked.arguments(), stdin=given is not None, text=False, max_output=1)
    try:
        yield event("started", {"pid": process.pid})
        feeder = None if given is None else Feeder(process, given)
        try:
            async for piece in output(process, asked):
                yield piece
        finally:
            if feeder is not None:
                await feeder.stop()
    finally:
        await process.detach()


async def output(process: AsyncProcess, asked: ExecAsked) -> Events:
    """What it writes, up to ``max_output`` if that was asked for, and how it ended."""
    most = asked.max_output if "max_output" in asked.model_fields_set else None
    texts, sent = Texts(asked.encoding), {1: 0, 2: 0}
    async for channel, data in process:
        if most is not None:
            data = data[: most - sent[1] - sent[2]]
        sent[channel] += len(data)
        if data and (text := texts.of(channel, data)):
            yield event(CHANNELS[channel], {"data": text})
    for channel, name in CHANNELS.items():
        if text := texts.of(channel, b"", final=True):
            yield event(name, {"data": text})
    yield event("exit", ended(await process.wait(), sent))


class Feeder:
    """Writes to a command's stdin while its output is read."""

    def __init__(self, process: AsyncProcess, data: bytes) -> None:
        self._task = asyncio.ensure_future(self._feed(process, data))

    async def _feed(self, process: AsyncProcess, data: bytes) -> None:
        await process.send(data)
        await process.close_stdin()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@router.websocket("/ws")
async def held(box: str, socket: WebSocket, caller: CallerOf) -> None:
    """A command with its input, its terminal and its signals: see docs/http.md."""
    async with conversation(socket, caller.request_id):
        asked = await first_message(socket, FollowAsked)
        sandbox = await caller.tenant.box(box)
        process = await sandbox.spawn(**asked.arguments(), detached=asked.detached, text=False, max_output=1)
        await carry(socket, process, stdin=asked.has_input)


async def carry(socket: WebSocket, process: AsyncProcess, *, stdin: bool) -> None:
    """Carry a command over a WebSocket to its end. A client that goes away lets go of it."""
    try:
        await send_json(socket, {"type": "started", "pid": process.pid, "offsets": list(process.offsets)})
        session = CommandSocket(socket, process, stdin=stdin)
        await session.run()
        result = await process.wait()
    finally:
        with suppress(Exception):
            await process.detach()
    await send_json(socket, {"type": "exit", **ended(result, session.sent)})
