"""The data plane: what E2B runs inside of each sandbox on port 49983, served from out here over the sandbox's wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.types import Message, Scope

from ...errors import SlopletError
from ...wire.mux import request
from ...wire.schema import Op
from . import connect
from .answers import Gone, Speaker, dump, gone, refused, rpc_error, speak_plain, speak_rpc
from .calls import Call, Label
from .filesystem import Filesystem, told
from .processes import Processes
from .transfers import compose, download, upload
from .watchers import Watchers

_ENDING, _AGAIN = 10.0, 0.05  # seconds that an end may take after its beginning, and between two looks

Unary = Callable[[Call, dict[str, Any]], Awaitable[dict[str, Any]]]
Streamed = Callable[[Call, connect.Out], Awaitable[None]]
Plain = Callable[[Call], Awaitable[None]]


def speaker_of(path: str) -> Speaker:
    """How errors are told to who asks for this path."""
    return speak_rpc if path.startswith(("/process.", "/filesystem.")) else speak_plain


class Envd:
    """One per server."""

    def __init__(self) -> None:
        processes, files = Processes(), Filesystem()
        self._watchers = watchers = Watchers()
        self._unary: dict[str, Unary] = {
            "/process.Process/List": processes.list,
            "/process.Process/SendSignal": processes.send_signal,
            "/process.Process/SendInput": processes.send_input,
            "/process.Process/CloseStdin": processes.close_stdin,
            "/process.Process/Update": processes.update,
            "/filesystem.Filesystem/Stat": files.stat,
            "/filesystem.Filesystem/MakeDir": files.make_dir,
            "/filesystem.Filesystem/Move": files.move,
            "/filesystem.Filesystem/ListDir": files.list_dir,
            "/filesystem.Filesystem/Remove": files.remove,
            "/filesystem.Filesystem/CreateWatcher": watchers.create,
            "/filesystem.Filesystem/GetWatcherEvents": watchers.events,
            "/filesystem.Filesystem/RemoveWatcher": watchers.remove,
        }
        self._streams: dict[str, Streamed] = {
            "/process.Process/Start": processes.start,
            "/process.Process/Connect": processes.connect,
            "/process.Process/StreamInput": processes.stream_input,
            "/filesystem.Filesystem/WatchDir": watchers.watch_dir,
        }
        self._plain: dict[tuple[str, str], Plain] = {
            ("GET", "/health"): health,
            ("GET", "/metrics"): metrics,
            ("GET", "/envs"): environment,
            ("GET", "/files"): download,
            ("POST", "/files"): upload,
            ("POST", "/files/compose"): compose,
        }

        self._paths = {*self._unary, *self._streams, *(each[1] for each in self._plain)}

    def close(self) -> None:
        self._watchers.close()

    async def serve(self, call: Call) -> None:
        path, method = call.scope["path"], call.scope["method"]
        if path in self._paths:
            call.scope["route"] = Label(path)
        if (plain := self._plain.get((method, path))) is not None:
            call.scope["endpoint"] = plain
            await _plainly(plain, call)
        elif method != "POST" and path.startswith(("/process.", "/filesystem.")):
            raise refused(405, "Connect's calls are POSTs")
        elif (unary := self._unary.get(path)) is not None:
            call.scope["endpoint"] = unary
            await _unary(unary, call)
        elif (streamed := self._streams.get(path)) is not None:
            call.scope["endpoint"] = streamed
            await _stream(streamed, call)
        elif path.startswith(("/process.", "/filesystem.")):
            raise rpc_error("unimplemented", f"there is no {path[:80]}")
        else:
            raise refused(404, "404 page not found")


async def _watched(call: Call, work: Callable[[], Awaitable[None]]) -> None:
    """It ends with its client, who may go as soon as he has said all."""
    read, given = asyncio.Event(), call.receive
    if call.scope["method"] in ("GET", "HEAD"):
        read.set()

    async def receive() -> Any:
        message = await given()
        if message["type"] != "http.request" or not message.get("more_body", False):
            read.set()
        return message

    async def gone() -> None:
        await read.wait()
        await connect.until_gone(given)

    async def run() -> None:
        await work()

    call.receive = receive
    await connect.either(asyncio.ensure_future(run()), asyncio.ensure_future(gone()))


async def _plainly(handler: Plain, call: Call) -> None:
    begun, given = False, call.send

    async def send(message: Message) -> None:
        nonlocal begun
        begun = True
        await given(message)

    async def work() -> None:
        try:
            await handler(call)
        except SlopletError as error:
            found = call.gone(error)
            if not begun or not isinstance(found, Gone):
                raise found from None
            await cut(call)

    call.send = send
    await _watched(call, work)


async def _unary(handler: Unary, call: Call) -> None:
    async def work() -> None:
        try:
            found = await handler(call, await connect.unary(call.receive))
        except SlopletError as error:
            raise told(call.gone(error)) from None
        await answer(call, dump(found))

    await _watched(call, work)


async def _stream(handler: Streamed, call: Call) -> None:
    """A sandbox that ends cuts the connection, which clients take for that."""
    out = connect.Out(call.send)

    async def work() -> None:
        try:
            await handler(call, out)
            await out.end()
        except SlopletError as error:
            found = call.gone(error)
            if not isinstance(found, Gone):
                await out.end(found)
            elif out.begun:
                await cut(call)
            else:
                raise found from None

    await _watched(call, work)


def abort(scope: Scope) -> None:
    """Reset the connection: an answer that only stops would be taken for a whole one by some, a fault by others."""
    if (reset := scope.get("sloplet.abort")) is not None:
        reset()


async def cut(call: Call) -> None:
    """``abort`` the answer of a sandbox that is not there any more. Clients ask at once whether it runs, so it is
    waited for until it is known that it does not."""
    with suppress(TimeoutError, SlopletError):
        async with asyncio.timeout(_ENDING):
            while True:
                info = await call.tenant.controller.find(call.record.sandbox)
                if info.state not in ("running", "starting"):
                    break
                await asyncio.sleep(_AGAIN)
    abort(call.scope)


async def answer(call: Call, body: bytes, status: int = 200, kind: str = "application/json") -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await call.send({"type": "http.response.start", "status": status, "headers": headers})
    await call.send({"type": "http.response.body", "body": body})


async def answers(call: Call) -> None:
    """Raises why it does not: one that is on its way out does not. Nobody is woken: clients ask this when a stream has
    ended, as it does when a sandbox goes to sleep."""
    stream = await call.open(request(Op.METRICS), wake=False)
    try:
        await stream.result()
    finally:
        stream.reset()


async def health(call: Call) -> None:
    """204 if it answers. One that is on its way to sleep, or out, is not waited for."""
    info = await call.tenant.controller.find(call.record.sandbox)
    if call.facade.told(info).state in ("paused", "ended"):
        raise gone(call.record.sandbox)
    await answers(call)
    await call.send({"type": "http.response.start", "status": 204, "headers": []})
    await call.send({"type": "http.response.body", "body": b""})


async def metrics(call: Call) -> None:
    """What it uses now."""
    info = await call.tenant.controller.find(call.record.sandbox)
    sample = await call.facade.metrics.now(call.tenant, info)
    if sample is None:
        raise gone(call.record.sandbox)
    await answer(call, dump(sample.of_envd()))


async def environment(call: Call) -> None:
    """What every command finds in its environment."""
    info = await call.tenant.controller.find(call.record.sandbox)
    await answer(call, dump({**call.facade.environment(call.record), **dict(info.spec.env)}))
