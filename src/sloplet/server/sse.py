"""Server-sent events: a generator of events as an HTTP answer.

What fails before the first event is an HTTP error with its own status; what fails later is an ``error`` event with the
same document. While nothing happens a comment goes out now and then, so that no proxy takes the connection for dead. A
client that does not read holds the generator up, and one that goes away closes it: whoever writes the generator ends in
its ``finally`` what nobody follows any more.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import ServerError, SlopletError
from .problems import problem
from .streams import ClientGone, while_connected

MEDIA_TYPE = "text/event-stream"
_KEEP_ALIVE = 15.0  # seconds without an event after which a comment is sent
_COMMENT = b": still here\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on as they come
)
_log = logging.getLogger(__name__)

Events = AsyncGenerator[bytes, None]

#: One event, as the OpenAPI document tells of it.
_EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
    "required": ["event", "data"],
}

#: For ``responses=`` of a route that answers with events.
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {"schema": _EVENT}}, "description": "Server-sent events"}
}


def event(name: str, data: Any) -> bytes:
    """One event. Its data is one line of JSON."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(data))


def to_json(data: Any) -> bytes:
    """A lone surrogate (of a name that is no text) becomes JSON's own escape for it."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


async def event_stream(events: Events, request_id: str) -> EventStream:
    """The answer, once the first event is there. Raises what the generator raises until then."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, request_id)


class EventStream(Response):
    """Made by ``event_stream``."""

    def __init__(self, first: bytes, events: Events, request_id: str) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        self._first = first
        self._events = events
        self._request_id = request_id
        self._sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            await while_connected(receive, self._pour(send))
        except ClientGone:
            pass
        finally:
            await self._events.aclose()

    async def _pour(self, send: Send) -> None:
        ticker = asyncio.ensure_future(self._keep_alive(send))
        try:
            await self._put(send, self._first)
            async with aclosing(self._events) as events:
                async for piece in events:
                    await self._put(send, piece)
        except SlopletError as error:
            await self._put(send, event("error", problem(error, self._request_id)))
        except Exception:
            _log.exception("request %s failed while it was being answered", self._request_id)
            failed = ServerError("the server failed", hint="its log tells more, by the request's id")
            await self._put(send, event("error", problem(failed, self._request_id)))
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, send: Send, piece: bytes) -> None:
        self._sent += 1
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        """Each message is written whole, so a comment can never stand inside of an event."""
        while True:
            before = self._sent
            await asyncio.sleep(_KEEP_ALIVE)
            if self._sent == before:
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
