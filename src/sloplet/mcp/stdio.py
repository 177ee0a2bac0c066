"""One session over a pair of pipes: the SDK's stdio transport, read and written in a way that can be cancelled.

The SDK would read stdin in a thread that nothing can interrupt, so that a TERM would wait for the client's next line.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

MAX_LINE = 32 * 2**20  #: bytes of one message; a longer one is not kept, and not understood
_TOO_LONG = "a message that is too long"  # no JSON: the SDK says so to its log

Write = Callable[[bytes], Awaitable[None]]


async def serve(server: Server[Any], chunks: AsyncIterator[bytes], write: Write) -> None:
    """Until the client's side ends. Cancelling it is safe."""
    gone = asyncio.Event()
    pipes = cast(Any, Incoming(chunks)), cast(Any, Outgoing(write, gone))
    serving = asyncio.ensure_future(_serve(server, *pipes))
    deaf = asyncio.ensure_future(gone.wait())  # nobody reads our answers: as good as the end
    try:
        await asyncio.wait([serving, deaf], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (serving, deaf):
            task.cancel()
        await asyncio.gather(serving, deaf, return_exceptions=True)
    if not serving.cancelled() and (failure := serving.exception()) is not None:
        raise failure


async def _serve(server: Server[Any], incoming: Any, outgoing: Any) -> None:
    async with stdio_server(incoming, outgoing) as (read, write):
        await server.run(read, write, server.create_initialization_options())


class Incoming:
    """Lines, as the SDK iterates over a file. Blank ones are left out."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[str]:
        line, too_long = bytearray(), False
        async for chunk in self._chunks:
            *complete, rest = chunk.split(b"\n")
            for part in complete:
                line += part
                if too_long or len(line) > MAX_LINE:
                    yield _TOO_LONG
                elif line.strip():
                    yield line.decode("utf-8", "replace")
                line, too_long = bytearray(), False
            if not too_long:
                line += rest
            if len(line) > MAX_LINE:
                line, too_long = bytearray(), True


class Outgoing:
    """As the SDK writes to a file."""

    def __init__(self, write: Write, gone: asyncio.Event) -> None:
        self._write = write
        self._gone = gone

    async def write(self, text: str) -> None:
        if self._gone.is_set():
            return
        try:
            await self._write(text.encode())
        except OSError:
            self._gone.set()

    async def flush(self) -> None:
        """Nothing is held back."""
