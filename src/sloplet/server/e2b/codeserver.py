"""The HTTP server of E2B's code interpreter, port 49999: cells as lines of JSON, and contexts."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast
from urllib.parse import unquote

from ...controller import Controller, Stream
from ...errors import SlopletError
from ...sandbox import AsyncSandbox
from ...wire.fields import Fields
from . import connect, interpreter
from .answers import Gone, dump, refused
from .calls import Call, Label
from .envd import answer, answers, cut
from .interpreter import InterpreterError

Handler = Callable[[Call, AsyncSandbox], Awaitable[None]]
_MOST = 1024  # sandboxes whose kernels are known


class _Still:
    """A tenant's controller, by which nobody is woken."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def open(self, sandbox_id: str, request: Fields, *, wake: bool = True) -> Stream:
        return await self._controller.open(sandbox_id, request, wake=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)


class CodeServer:
    """One per server. It has one object for a sandbox: that knows its kernels, and lets cells wait for their turn."""

    def __init__(self) -> None:
        self._boxes: OrderedDict[str, AsyncSandbox] = OrderedDict()

    def forget(self, sandbox: str) -> None:
        self._boxes.pop(sandbox, None)

    async def serve(self, call: Call) -> None:
        label, handler = _find(call)
        call.scope["route"], call.scope["endpoint"] = Label(label), handler
        try:
            await handler(call, await self._box(call))
        except InterpreterError as error:
            raise refused(error.status, str(error)) from None
        except SlopletError as error:
            raise call.gone(error) from None

    async def _box(self, call: Call) -> AsyncSandbox:
        name = call.record.sandbox
        found = self._boxes.get(name)
        if found is None:
            controller: Controller = call.tenant.controller
            info = await controller.find(name)
            held = controller if call.record.auto_resume else cast(Controller, _Still(controller))
            found = self._boxes[name] = AsyncSandbox._adopt(held, info)
            while len(self._boxes) > _MOST:
                self._boxes.popitem(last=False)
        self._boxes.move_to_end(name)
        return found


def _find(call: Call) -> tuple[str, Handler]:
    method, words = call.scope["method"], call.scope["path"].split("/")[1:]
    if words == ["health"] and method == "GET":
        return "/health", health
    if words == ["execute"] and method == "POST":
        return "/execute", execute
    if words == ["contexts"] and method in ("GET", "POST"):
        return "/contexts", contexts if method == "GET" else create_context
    if len(words) == 2 and words[0] == "contexts" and method == "DELETE":
        return "/contexts/{id}", remove_context
    if len(words) == 3 and words[0] == "contexts" and words[2] == "restart" and method == "POST":
        return "/contexts/{id}/restart", restart_context
    raise refused(404, "Not Found")


async def health(call: Call, box: AsyncSandbox) -> None:
    await answers(call)
    await answer(call, b'"OK"')


async def execute(call: Call, box: AsyncSandbox) -> None:
    """Each line is told as it comes. Who goes away interrupts the cell."""
    body = await connect.unary(call.receive)
    lines = await interpreter.execute(box, body, call.facade.environment(call.record))
    begun = False

    async def work() -> None:
        nonlocal begun
        begun = True
        headers = [(b"content-type", b"application/x-ndjson")]
        await call.send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with aclosing(lines):
                async for line in lines:
                    await _tell(call, dump(line) + b"\n")
        except SlopletError as error:
            if not isinstance(call.gone(error), Gone):
                raise
            await cut(call)
            return
        await _tell(call, b"", more=False)

    await connect.either(asyncio.ensure_future(work()), asyncio.ensure_future(connect.until_gone(call.receive)))


async def _tell(call: Call, data: bytes, *, more: bool = True) -> None:
    await call.send({"type": "http.response.body", "body": data, "more_body": more})


async def contexts(call: Call, box: AsyncSandbox) -> None:
    await _answer(call, await interpreter.list_contexts(box))


async def create_context(call: Call, box: AsyncSandbox) -> None:
    await _answer(call, await interpreter.create_context(box, await connect.unary(call.receive)))


async def restart_context(call: Call, box: AsyncSandbox) -> None:
    await interpreter.restart_context(box, _context(call))
    await answer(call, b"null")


async def remove_context(call: Call, box: AsyncSandbox) -> None:
    await interpreter.remove_context(box, _context(call))
    await answer(call, b"null")


def _context(call: Call) -> str:
    return unquote(call.scope["path"].split("/")[2])


async def _answer(call: Call, document: Any) -> None:
    await answer(call, dump(document))
