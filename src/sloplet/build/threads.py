"""Work that is waited for also by who is cancelled: threads, and endings. Nothing is closed under what uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As ``asyncio.to_thread``; but who is cancelled returns when the thread has ended."""
    return await made_in_thread(lambda: job(*args, **kwargs), lambda result: None)


async def made_in_thread(make: Callable[[], T], undo: Callable[[T], None]) -> T:
    """What ``make`` makes; who is cancelled meanwhile leaves nothing of it (``undo``)."""
    work = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            await asyncio.wait({work})
        if not work.cancelled() and work.exception() is None:
            undo(work.result())
        raise


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Its result; who is cancelled meanwhile returns when it is done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            await asyncio.wait({task})
        raise
