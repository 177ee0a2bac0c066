"""Work in threads for who may be cancelled: a thread cannot be, so nothing that it uses goes away before its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def whole(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``asyncio.to_thread``; who is cancelled goes on only when the thread is done. For what does not take long."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()  # seen; nobody waits for it
        raise


async def kept(undo: Callable[[T], object], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``asyncio.to_thread``; if nobody waits any more for what it makes, that is undone as soon as it is made: by the
    thread itself, as the event loop may be over by then."""
    deciding = threading.Lock()
    made: list[T] = []
    unwanted = False

    def work() -> None:
        found = function(*args, **kwargs)
        with deciding:
            if not unwanted:
                made.append(found)
                return
        undo(found)

    try:
        await asyncio.to_thread(work)
    except asyncio.CancelledError:
        with deciding:
            unwanted = True
        if made:
            undo(made[0])
        raise
    return made[0]
