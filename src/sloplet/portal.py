"""The loop thread behind the synchronous API: one per process, started when first needed.

Refuses to be called from its own thread (that would wait for itself for ever), is made anew in a
forked child, and is stopped at interpreter exit after every sandbox has been told to end.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from .errors import EngineError

T = TypeVar("T")
_FULL = "are too many files open, or too many processes running?"

_portal: Portal | None = None
_portal_lock = threading.Lock()


class Portal:
    """Runs coroutines on a background loop for threads that have none."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._ready = threading.Event()
        try:
            self.loop = asyncio.new_event_loop()
        except OSError as error:
            raise EngineError(f"no event loop can be made: {error.strerror}", hint=_FULL) from error
        self.thread = threading.Thread(target=self._main, name="sloplet-loop", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:
            self.loop.close()
            raise EngineError(f"no thread can be started: {error}", hint=_FULL) from error
        self._ready.wait()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._ready.set)
        try:
            self.loop.run_forever()
        finally:
            self._let_go()
            self.loop.close()

    def _let_go(self) -> None:
        """Cancel what still runs and give it a moment: a task that is dropped while it waits complains on stderr."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            done, _ = self.loop.run_until_complete(asyncio.wait(tasks, timeout=2))
            for task in done:
                if not task.cancelled():
                    task.exception()  # seen: it is too late to do anything about it
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and wait. Ctrl-C in the waiting thread cancels it and waits for its clean-up."""
        if threading.current_thread() is self.thread:
            coroutine.close()
            raise RuntimeError("a synchronous Sandbox was used inside its own event loop: use AsyncSandbox there")
        work = _Work(coroutine)
        try:
            return asyncio.run_coroutine_threadsafe(work.run(), self.loop).result()
        except (KeyboardInterrupt, SystemExit):  # perhaps before there was a future to cancel
            self.loop.call_soon_threadsafe(work.give_up)
            work.over.wait(timeout=5)
            raise

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """The items of an async iterator, one at a time; closed when the caller stops."""
        end = object()

        async def step() -> Any:
            return await anext(source, end)

        async def close() -> None:
            aclose = getattr(source, "aclose", None)
            if aclose is not None:
                await aclose()

        try:
            while (item := self.call(step())) is not end:
                yield item
        finally:
            if threading.current_thread() is self.thread:  # the garbage collector came by there: nobody waits for it
                asyncio.run_coroutine_threadsafe(close(), self.loop)
            elif not self.loop.is_closed():
                self.call(close())

    def stop(self) -> None:
        if self.thread.is_alive() and self.pid == os.getpid():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(timeout=5)


class _Work(Generic[T]):
    """A coroutine that can be given up at any moment, also in that between its being handed over and its start."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.over = threading.Event()
        self._coroutine = coroutine
        self._task: asyncio.Task[Any] | None = None
        self._wanted = True

    async def run(self) -> T:
        if not self._wanted:
            self._coroutine.close()
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        try:
            return await self._coroutine
        finally:
            self.over.set()

    def give_up(self) -> None:
        """On the loop."""
        self._wanted = False
        if self._task is None:
            self.over.set()
        else:
            self._task.cancel()


def portal() -> Portal:
    """This process's portal."""
    global _portal
    with _portal_lock:
        if _portal is None or _portal.pid != os.getpid() or not _portal.thread.is_alive():
            _portal = Portal()
        return _portal


def _stop_at_exit() -> None:
    if _portal is not None and _portal.pid == os.getpid():
        _portal.stop()


def _forget_in_child() -> None:
    global _portal, _portal_lock
    _portal = None
    _portal_lock = threading.Lock()


atexit.register(_stop_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
