"""What lasts: work that ends with its client, and WebSockets that carry a command.

Nothing here has a buffer that grows. A client that does not read holds the command up, as a pipe would; a command that
does not read its input holds the client up, after ``_AHEAD`` bytes, which are read so that a signal can overtake input
that nobody takes, and so that a client that goes away is noticed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from ..errors import RequestInvalid, ServerError, SlopletError
from ..process import AsyncProcess
from .documents import Request
from .incoming import check_parts
from .problems import problem, status_of

T = TypeVar("T")
_AHEAD = 1 << 20  # bytes of input that are read before the command takes them
_PIECE = 64  # bytes that a piece of input costs besides its own: many small ones are much, too
_MAX_CONTROL = 4096
_FIRST = 10.0  # seconds in which a client has to say what it wants
_log = logging.getLogger(__name__)


class ClientGone(HTTPException):
    """The client went away: what it had asked for was given up. Nobody sees the answer but the logs."""

    def __init__(self) -> None:
        super().__init__(499, "the client has gone")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, whose request was read to its end. It is cancelled, and has ended, if the client goes
    away first: ClientGone."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def broke_off(scope: Scope, error: SlopletError) -> None:
    """An answer cannot be completed, and it is too late to say why to anybody but the log."""
    from .caller import SCOPE_KEY  # which knows tenants, whose builds are told as events

    caller = scope.get(SCOPE_KEY)
    _log.warning("the answer to request %s broke off: %s", caller.request_id if caller is not None else "?", error)


# -- WebSockets ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def conversation(socket: WebSocket, request_id: str) -> AsyncIterator[None]:
    """Accept; close when the block ends. An error is told as ``{"type": "error", ...}`` first: code 1008 for what the
    client did wrong, 1011 for what is not its fault. That it goes away is no error."""
    await socket.accept()
    try:
        try:
            yield
        except SlopletError as error:
            await _tell(socket, error, request_id)
        except WebSocketDisconnect:
            pass
        except Exception:
            _log.exception("request %s failed", request_id)
            failed = ServerError("the server failed", hint="its log tells more, by the request's id")
            await _tell(socket, failed, request_id)
        else:
            if socket.application_state is WebSocketState.CONNECTED:
                await socket.close(1000)
    except (WebSocketDisconnect, RuntimeError):  # it went while it was being told
        pass


async def _tell(socket: WebSocket, error: SlopletError, request_id: str) -> None:
    document = {**problem(error, request_id), "type": "error"}  # in place of the urn: messages are told apart by it
    await send_json(socket, document)
    await socket.close(1008 if status_of(error) < 500 else 1011)


async def send_json(socket: WebSocket, data: Any) -> None:
    text = json.dumps(data, separators=(",", ":"))
    await socket.send({"type": "websocket.send", "text": text})


async def receive(socket: WebSocket) -> str | bytes:
    """The next message. WebSocketDisconnect."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005), message.get("reason"))
    text: str | None = message.get("text")
    data: bytes = message.get("bytes") or b""
    return text if text is not None else data


Model = TypeVar("Model", bound=Request)


async def first_message(socket: WebSocket, model: type[Model]) -> Model:
    """What the client wants. RequestInvalid if it does not say, or says nonsense."""
    try:
        async with asyncio.timeout(_FIRST):
            message = await receive(socket)
    except TimeoutError:
        raise RequestInvalid(f"no message came within {_FIRST:g} s", hint="the first says what to do") from None
    if isinstance(message, bytes):
        raise RequestInvalid("the first message is binary", hint="send JSON, as text, that says what to do")
    check_parts(message.encode("utf-8", "surrogatepass"))
    try:
        return model.model_validate_json(message)
    except ValidationError as error:
        raise _nonsense(error) from None


def _nonsense(error: ValidationError) -> RequestInvalid:
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return RequestInvalid(f"{where + ': ' if where else ''}{first['msg']}"[:500], hint="see docs/http.md")


async def watched(socket: WebSocket, work: Coroutine[Any, Any, T]) -> T:
    """``while_connected`` for a WebSocket whose client has nothing to say. WebSocketDisconnect."""

    async def listen() -> None:
        await receive(socket)
        raise RequestInvalid("nothing is to be sent on this WebSocket")

    return await _either(work, listen())


async def _either(work: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, None]) -> T:
    """The result of ``work``, or the first error of any; all have ended then. That another returns means nothing."""
    task = asyncio.ensure_future(work)
    rest = [asyncio.ensure_future(other) for other in others]
    waiting: set[asyncio.Future[Any]] = {task, *rest}
    try:
        while not task.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                if each is not task:
                    each.result()
        return task.result()
    finally:
        for each in (task, *rest):
            each.cancel()
        await asyncio.gather(task, *rest, return_exceptions=True)


# -- a command on a WebSocket --------------------------------------------------------------------------------------


class Resize(Request):
    type: Literal["resize"]
    rows: int = Field(ge=1, le=10000)
    cols: int = Field(ge=1, le=10000)


class Signal(Request):
    type: Literal["signal"]
    signal: Annotated[int, Field(ge=1, le=64)] | Annotated[str, Field(max_length=16)] = "TERM"
    tree: bool = True


class Eof(Request):
    type: Literal["eof"]


_CONTROL: TypeAdapter[Resize | Signal | Eof] = TypeAdapter(
    Annotated[Resize | Signal | Eof, Field(discriminator="type")]
)


class _Input:
    """Input on its way to a command. None is its end."""

    def __init__(self) -> None:
        self._pieces: deque[bytes | None] = deque()
        self._size = 0
        self._changed = asyncio.Event()

    async def put(self, piece: bytes | None) -> None:
        """Waits while there is plenty."""
        self._pieces.append(piece)
        self._size += len(piece or b"") + _PIECE
        self._changed.set()
        while self._size > _AHEAD:
            await self._wait()

    async def take(self) -> bytes | None:
        while not self._pieces:
            await self._wait()
        piece = self._pieces.popleft()
        self._size -= len(piece or b"") + _PIECE
        self._changed.set()
        return piece

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class CommandSocket:
    """A command and the WebSocket of whoever follows it."""

    def __init__(self, socket: WebSocket, process: AsyncProcess, *, stdin: bool) -> None:
        self._socket = socket
        self._process = process
        self._stdin = stdin
        self._input = _Input()
        self.sent = {1: 0, 2: 0}  #: bytes of output by channel

    async def run(self) -> None:
        """Both directions, until all of its output was sent. WebSocketDisconnect; RequestInvalid for a message that
        makes no sense. The command is the caller's to let go of."""
        await _either(self._outwards(), self._listen(), self._feed())

    async def _outwards(self) -> None:
        send, sent = self._socket.send, self.sent
        async for channel, data in self._process:
            sent[channel] += len(data)
            await send({"type": "websocket.send", "bytes": bytes((channel,)) + data})

    async def _listen(self) -> None:
        while True:
            message = await receive(self._socket)
            if isinstance(message, str):
                await self._control(message)
            elif not self._stdin:
                raise RequestInvalid("this command has no stdin", hint='ask for it with "stdin": true')
            elif message:
                await self._input.put(message)

    async def _control(self, text: str) -> None:
        if len(text) > _MAX_CONTROL:
            raise RequestInvalid("a message that controls the command is too long")
        try:
            asked = _CONTROL.validate_json(text)
        except ValidationError as error:
            raise _nonsense(error) from None
        if isinstance(asked, Resize):
            await self._process.resize(asked.rows, asked.cols)
        elif isinstance(asked, Signal):
            await self._process.signal(asked.signal, tree=asked.tree)
        else:
            await self._input.put(None)

    async def _feed(self) -> None:
        while (piece := await self._input.take()) is not None:
            await self._process.send(piece)
        await self._process.close_stdin()
