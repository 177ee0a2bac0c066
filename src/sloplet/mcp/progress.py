"""Progress notifications: a word now and then on what a long call does. Never in the way of the work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from .bounded import one_line

#: Seconds since the call began, how many there will be (nobody knows), and a message.
Report = Callable[[float, float | None, str | None], Awaitable[None]]
#: Sets what the next notification says. Any thread.
Say = Callable[[str], None]

_INTERVAL = 0.5  # between two notifications
_HEARTBEAT = 5.0  # the longest silence: clients' patience begins anew with each


def nobody(message: str) -> None:
    """Where nobody asked for progress."""


def image_words(image: str, stage: str, done: int, total: int | None) -> str:
    """How far an image is, in words; "": nothing worth saying."""
    if not total or stage not in ("download", "unpack"):
        return ""
    return f"image {image}: {stage} {min(100, 100 * done // total)} % of {total / 2**20:.1f} MiB"


@asynccontextmanager
async def telling(report: Report | None, message: str) -> AsyncIterator[Say]:
    """For a block: what is said in it is sent by a task of its own, the newest word at a time. ``report`` None: nobody
    wants to know."""
    if report is None:
        yield nobody
        return
    words = _Words(message)
    task = asyncio.ensure_future(_tell(report, words))
    try:
        yield words.say
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Words:
    """The newest word, and that there is one."""

    def __init__(self, message: str) -> None:
        self.latest = message
        self.fresh = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def say(self, text: str) -> None:
        self.latest = text
        if not self.fresh.is_set():
            with suppress(RuntimeError):  # the loop has ended: nobody listens
                self._loop.call_soon_threadsafe(self.fresh.set)

    async def wait(self, seconds: float) -> None:
        """Until there is a new one, or so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.fresh.wait()
        self.fresh.clear()


async def _tell(report: Report, words: _Words) -> None:
    """What is said first is told at once, so that short stages are seen; of the rest the newest, now and then."""
    began = time.monotonic()
    await words.wait(_INTERVAL)
    while True:
        await report(round(time.monotonic() - began, 1), None, one_line(words.latest) or None)
        await asyncio.sleep(_INTERVAL)
        await words.wait(_HEARTBEAT - _INTERVAL)
