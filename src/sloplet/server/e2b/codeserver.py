"""The HTTP server of E2B's code interpreter, port 49999: cells as lines of JSON, and contexts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

from ...errors import SlopletError
from . import connect, interpreter
from .answers import Gone, dump, refused
from .calls import Call
from .envd import answer, cut
from .interpreter import InterpreterError

Handler = Callable[[Call], Awaitable[None]]


class CodeServer:
    async def serve(self, call: Call) -> None:
        handler = self._find(call)
        call.scope["endpoint"] = handler
        try:
            await handler(call)
        except InterpreterError as error:
            raise refused(error.status, str(error)) from None
        except SlopletError as error:
            raise call.gone(error) from None

    def _find(self, call: Call) -> Handler:
        method, words = call.scope["method"], call.scope["path"].split("/")[1:]
        if words == ["health"] and method == "GET":
            return health
        if words == ["execute"] and method == "POST":
            return execute
        if words == ["contexts"] and method in ("GET", "POST"):
            return contexts if method == "GET" else create_context
        if len(words) == 2 and words[0] == "contexts" and method == "DELETE":
            return remove_context
        if len(words) == 3 and words[0] == "contexts" and words[2] == "restart" and method == "POST":
            return restart_context
        raise refused(404, "Not Found")


async def health(call: Call) -> None:
    await answer(call, b'"OK"')


async def execute(call: Call) -> None:
    """Each line is told as it comes. Who goes away interrupts the cell."""
    body = await connect.unary(call.receive)
    lines = await interpreter.execute(call.box, body)
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


async def contexts(call: Call) -> None:
    await _answer(call, await interpreter.list_contexts(call.box))


async def create_context(call: Call) -> None:
    await _answer(call, await interpreter.create_context(call.box, await connect.unary(call.receive)))


async def restart_context(call: Call) -> None:
    await interpreter.restart_context(call.box, _context(call))
    await answer(call, b"null")


async def remove_context(call: Call) -> None:
    await interpreter.remove_context(call.box, _context(call))
    await answer(call, b"null")


def _context(call: Call) -> str:
    return unquote(call.scope["path"].split("/")[2])


async def _answer(call: Call, document: Any) -> None:
    await answer(call, dump(document))
