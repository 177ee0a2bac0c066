"""What comes from now on, for whoever listens: as server-sent events, or as messages of a WebSocket.

The keeper has a bounded queue for each listener and drops the oldest for who is too slow; here nothing is queued: a
client that does not read holds its source up, and one that goes away closes it. What cannot be followed is told before
the answer begins.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.websockets import WebSocket

from ..keeper.followed import Followed
from .sse import Events, EventStream, event_stream, to_json
from .streams import conversation, send_json, watched

Shown = Callable[[Any], dict[str, Any]]


async def follow(source: Followed, shown: Shown, request_id: str) -> EventStream:
    """The answer begins at once: from then on nothing is missed."""
    return await event_stream(_told(source, shown), request_id)


async def _told(source: Followed, shown: Shown) -> Events:
    number = 0
    try:
        yield b": listening\n\n"
        async for item in source:
            number += 1
            yield b"id: %d\ndata: %b\n\n" % (number, to_json(shown(item)))
    finally:
        source.close()


async def follow_on(socket: WebSocket, begin: Callable[[], Awaitable[Followed]], shown: Shown, request_id: str) -> None:
    """The same as messages. The client has nothing to say."""
    async with conversation(socket, request_id):
        source = await begin()
        try:
            await watched(socket, _sent(socket, source, shown))
        finally:
            source.close()


async def _sent(socket: WebSocket, source: Followed, shown: Shown) -> None:
    async for item in source:
        await send_json(socket, shown(item))
