"""What a server tells as it happens: server-sent events, from the moment of the call on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ..errors import ServerError, ServerUnreachable, SlopletError
from .http import Http
from .problems import error_of

if TYPE_CHECKING:
    import httpx

_MOST_EVENT = 64 << 20  # bytes of one
_KEPT = 64  # events that wait for whoever reads; then the server waits


class Told:
    """One subscription. ``heard`` is done when the server listens for us, or cannot."""

    def __init__(self, http: Http, path: str) -> None:
        self.heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue: asyncio.Queue[Any] = asyncio.Queue(_KEPT)
        self._task = asyncio.ensure_future(self._listen(http, path))

    async def items(self) -> AsyncIterator[Any]:
        """The events' data, until there are no more."""
        try:
            while isinstance(item := await self._queue.get(), tuple):
                yield item[0]
            if item is not None:
                raise item
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self, http: Http, path: str) -> None:
        last: SlopletError | None = None
        try:
            async with http.stream("GET", path, headers={"Accept": "text/event-stream"}) as response:
                self.heard.set_result(None)
                async for name, data in server_sent(lines_of(response)):
                    if name == "error":
                        raise error_of(data)
                    await self._queue.put((data,))
        except SlopletError as error:
            last = error
        finally:
            if not self.heard.done():
                self.heard.set_result(None)
        await self._queue.put(last)


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of a text/event-stream. Not ``aiter_lines``: that takes a line of any length."""
    kept, size = list[bytes](), 0
    async for piece in response.aiter_raw():
        first, *more = piece.split(b"\n")
        kept.append(first)
        size += len(first)
        if size > _MOST_EVENT:
            raise ServerError("the server tells more at once than is taken", hint="is it a Sloplet server?")
        for each in more:
            yield b"".join(kept).rstrip(b"\r").decode("utf-8", "replace")
            kept, size = [each], len(each)


async def server_sent(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, Any]]:
    """(event, data) of a text/event-stream whose data is JSON."""
    name, data, size = "message", list[str](), 0
    async for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
            size += len(value) + 1
            if size > _MOST_EVENT:
                raise ServerError("the server tells more at once than is taken", hint="is it a Sloplet server?")
        elif not line and data:
            try:
                yield name, json.loads("\n".join(data))
            except (ValueError, RecursionError):
                raise ServerError("the server tells something that is not understood") from None
            name, data, size = "message", [], 0
    if data:
        raise ServerUnreachable("the connection to the server was lost")
