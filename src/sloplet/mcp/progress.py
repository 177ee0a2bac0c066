"""Progress notifications: a word now and then on what a long call does. Never in the way of the work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

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
    latest = [message]

    def say(text: str) -> None:
        latest[0] = text

    task = asyncio.ensure_future(_tell(report, latest))
    try:
        yield say
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _tell(report: Report, latest: list[str]) -> None:
    began = told_at = time.monotonic()
    told = ""
    while True:
        await asyncio.sleep(_INTERVAL)
        now = time.monotonic()
        if latest[0] == told and now - told_at < _HEARTBEAT:
            continue
        told, told_at = latest[0], now
        await report(round(now - began, 1), None, one_line(told) or None)
