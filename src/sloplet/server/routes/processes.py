"""Processes: what was started through the API, also by others, and what goes on without anybody."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response
from pydantic import Field
from starlette.websockets import WebSocket

from ... import results
from ...errors import ProcessNotFound
from ...sandbox import AsyncSandbox
from ..caller import CallerOf
from ..commands import Encoding, SignalName, SpawnAsked, Texts, ended
from ..documents import PROBLEMS, Document, Items, Request
from ..sse import EVENTS, Events, event, event_stream
from ..streams import conversation
from .exec import CHANNELS, carry

router = APIRouter(prefix="/v1/sandboxes/{box}/processes", tags=["commands"], responses=PROBLEMS)

Pid = Annotated[int, Path(ge=1, le=2**62, description="The agent's number for it: `pid` of the list")]


class Process(Document):
    """A process that was started through the API, running or ended lately."""

    pid: int = Field(description="The agent's number for it, never used twice in a sandbox")
    os_pid: int = Field(description="The kernel's number inside the sandbox")
    command: list[str]
    running: bool
    started_at: float
    tty: bool
    tag: str
    exit_code: int | None
    stdout_size: int
    stderr_size: int

    @classmethod
    def of(cls, info: results.ProcessInfo) -> Process:
        return cls.model_validate(info.to_dict())


class SignalAsked(Request):
    signal: SignalName = "TERM"
    tree: bool = Field(default=True, description="Also to everything that it started")


@router.get("")
async def listed(box: str, caller: CallerOf) -> Items[Process]:
    """Those that run, and those that ended lately."""
    sandbox = await caller.tenant.box(box)
    return Items(items=[Process.of(info) for info in await sandbox.processes()])


@router.post("", status_code=201)
async def spawn(box: str, asked: SpawnAsked, caller: CallerOf) -> Process:
    """Start a command that goes on without anybody, until it or the sandbox ends."""
    sandbox = await caller.tenant.box(box)
    process = await sandbox.spawn(**asked.arguments(), detached=True, text=False, max_output=1)
    await process.detach()
    return Process.of(await _found(sandbox, process.pid))


@router.get("/{pid}")
async def info(box: str, pid: Pid, caller: CallerOf) -> Process:
    """One of them."""
    return Process.of(await _found(await caller.tenant.box(box), pid))


@router.post("/{pid}/signal", status_code=204, response_class=Response)
async def signal(box: str, pid: Pid, asked: SignalAsked, caller: CallerOf) -> None:
    """Send a signal to it and, unless `tree` is false, to everything that it started."""
    sandbox = await caller.tenant.box(box)
    await sandbox.signal(pid, asked.signal, tree=asked.tree)


@router.get("/{pid}/output", response_class=Response, responses=EVENTS)
async def output(
    box: str,
    pid: Pid,
    caller: CallerOf,
    replay: Annotated[bool, Query(description="First what is kept of its output")] = True,
    follow: Annotated[bool, Query(description="Go on until it ends")] = True,
    encoding: Encoding = "utf-8",
) -> Response:
    """What it writes, as server-sent events.

    A sandbox keeps the last 256 KiB of each of its streams. Events: `started` {"pid", "offsets"}, `stdout` and `stderr`
    {"data"}, and last `exit` if it has ended, `end` {} if it has not (`follow=false`), or `error`. Whoever looks on
    never holds the process up: what comes too fast is left out.
    """
    sandbox = await caller.tenant.box(box)
    return await event_stream(_told(sandbox, pid, replay, follow, encoding), caller.request_id)


@router.websocket("/{pid}/attach")
async def attach(
    box: str, pid: int, socket: WebSocket, caller: CallerOf, replay: bool = True, lossy: bool = False
) -> None:
    """Join it: as the WebSocket of `exec`, from the second message on."""
    async with conversation(socket, caller.request_id):
        sandbox = await caller.tenant.box(box)
        process = await sandbox.attach(pid, replay=replay, lossy=lossy, text=False, max_output=1)
        await carry(socket, process, stdin=True)


async def _found(sandbox: AsyncSandbox, pid: int) -> results.ProcessInfo:
    for each in await sandbox.processes():
        if each.pid == pid:
            return each
    raise ProcessNotFound(f"there is no process {pid} in this sandbox", hint="see .../processes")


async def _told(sandbox: AsyncSandbox, pid: int, replay: bool, go_on: bool, encoding: Encoding) -> Events:
    # Lossy: someone who looks on must never hold the command up.
    newest = await sandbox.attach(pid, replay=False, lossy=True, text=False, max_output=1)
    await newest.detach()
    process = await sandbox.attach(pid, replay=replay, lossy=True, text=False, max_output=1)
    # What was there when we looked; a running command may print on while we read.
    kept = {1: newest.offsets[0] - process.offsets[0], 2: newest.offsets[1] - process.offsets[1]}
    texts, sent = Texts(encoding), {1: 0, 2: 0}
    try:
        yield event("started", {"pid": pid, "offsets": list(process.offsets)})
        pieces = process.__aiter__()
        while go_on or any(sent[channel] < most for channel, most in kept.items()):
            piece = await anext(pieces, None)
            if piece is None:
                go_on = True  # it has ended
                break
            channel, data = piece
            if not go_on:
                data = data[: max(0, kept[channel] - sent[channel])]
            sent[channel] += len(data)
            if data and (text := texts.of(channel, data)):
                yield event(CHANNELS[channel], {"data": text})
        for channel, name in CHANNELS.items():
            if text := texts.of(channel, b"", final=True):
                yield event(name, {"data": text})
        if go_on or not (await _found(sandbox, pid)).running:
            yield event("exit", ended(await process.wait(), sent))
        else:
            yield event("end", {})
    finally:
        await process.detach()
