"""What a verb shows while it works: after a second, one line on the stderr of a terminal; nothing anywhere else."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import click

from ..errors import SlopletError
from .output import EXIT_INTERRUPTED, complain, note, plain, size

T = TypeVar("T")
#: Bytes done, and of how many (None: nobody knows).
Measure = Callable[[], tuple[int, int | None]]

_PATIENCE = 1.0
_INTERVAL = 0.1
_LOOK_TIMEOUT = 5.0
_WHEEL = "|/-\\"


def shown() -> bool:
    """Whether anybody sees progress."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


async def working(text: str, work: Awaitable[T], measure: Measure | None = None) -> T:
    """Await ``work``. If that takes over a second, say what is going on and for how long."""
    if not shown():
        return await work
    ticker = asyncio.ensure_future(_tick(text, measure))
    try:
        return await work
    finally:
        ticker.cancel()
        await asyncio.gather(ticker, return_exceptions=True)


async def _tick(text: str, measure: Measure | None) -> None:
    began = time.monotonic()
    await asyncio.sleep(_PATIENCE)
    try:
        for turn in range(10**9):
            measured = measure() if measure else None
            width = max(20, os.get_terminal_size(2).columns - 1)
            complain("\r\x1b[K" + progress_line(text, turn, time.monotonic() - began, measured, width))
            await asyncio.sleep(_INTERVAL)
    finally:
        complain("\r\x1b[K")


def progress_line(
    text: str, turn: int, seconds: float, measured: tuple[int, int | None] | None, width: int = 79
) -> str:
    """``/ saving dev 2.3 s``, with a bar where both numbers are known. What is too long is the text."""
    facts = f" {seconds:.1f} s"
    done, total = measured or (0, None)
    if total:
        part = min(1.0, done / total)
        filled = round(part * 20)
        facts += f" {part:4.0%} [{'#' * filled}{'-' * (20 - filled)}] {size(done)} of {size(total)}"
    elif done:
        facts += f", {size(done)}"
    return f"{_WHEEL[turn % len(_WHEEL)]} {plain(text, max(8, width - 2 - len(facts)))}{facts}"


def finish(work: Coroutine[Any, Any, T], look: Callable[[], Awaitable[str]]) -> T:
    """Run a verb. Ctrl-C gives up waiting, and says what is there now (``look``)."""

    async def interruptible() -> T:
        try:
            return await work
        except asyncio.CancelledError:
            await _say_what_is(look)
            raise

    try:
        return asyncio.run(interruptible())
    except KeyboardInterrupt:
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None  # click would add an empty line


async def _say_what_is(look: Callable[[], Awaitable[str]]) -> None:
    try:
        async with asyncio.timeout(_LOOK_TIMEOUT):
            now = await look()
    except (SlopletError, TimeoutError):
        now = "`sloplet ls` shows what is there"
    if shown():
        complain("\r\x1b[K")  # over the terminal's ^C
    note(f"interrupted. {now}")
