"""A place for a build or an upload: who comes when there is none waits, since E2B's clients would not ask again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

from ....errors import ServerBusy
from ...imaging import Places

_LOOK = 0.2  # seconds


@asynccontextmanager
async def waited(places: Places, tenant: str, tell: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
    """One of the places, for a block. ``tell`` is called once if it is not to be had at once."""
    stack, told = ExitStack(), False
    while True:
        try:
            stack.enter_context(places.take(tenant))
            break
        except ServerBusy:
            if not told:
                told = True
                tell()
        await asyncio.sleep(_LOOK)
    with stack:
        yield
