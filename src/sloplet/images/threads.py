"""Work in threads for who may be cancelled: a thread cannot be, so nothing that it uses goes away before its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Abandoned(Exception):
    """Whoever wanted it has given up."""


class Patient:
    """Asynchronous work for a thread that has no event loop, which another thread can put an end to."""

    def __init__(self) -> None:
        self._deciding = threading.Lock()
        self._cancel: Callable[[], object] | None = None
        self._over = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """``asyncio.run``. Raises Abandoned after ``give_up``, which may come first."""

        async def inside() -> T:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert task is not None
            with self._deciding:
                self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
                if self._over:
                    task.cancel()
            try:
                return await work
            finally:
                with self._deciding:
                    self._cancel = None

        try:
            return asyncio.run(inside())
        except asyncio.CancelledError:
            raise Abandoned from None

    def give_up(self) -> None:
        """From any thread. What is done in threads meanwhile comes to its end first."""
        with self._deciding:
            self._over = True
            if self._cancel is not None:
                self._cancel()


async def whole(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``asyncio.to_thread``; who is cancelled goes on only when the thread is done. For what does not take long."""
    return await seen_through(asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs)))


async def seen_through(task: asyncio.Task[T], give_up: Callable[[], None] = lambda: None) -> T:
    """What becomes of a task that is not to be left alone: who is cancelled calls ``give_up``, and goes on only when
    the task is done."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        give_up()
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
