"""Questions about connections, put to the person at this terminal."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .output import plain

if TYPE_CHECKING:
    from ..network.asks import Ask
    from ..sandbox import AsyncSandbox

_CHOICES = {"o": "once", "y": "once", "a": "always", "n": "no", "": "no", "v": "never"}
_WORDS = {"once": "once", "yes": "once", "always": "always", "no": "no", "never": "never"}
QUESTION = "[o]nce, [a]lways, [n]o, ne[v]er? "


def terminal() -> int | None:
    """The terminal that questions can be put to, if there is one."""
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    if os.isatty(fd) and os.isatty(2):
        return fd
    os.close(fd)
    return None


def asker(fd: int) -> Callable[[Ask], Awaitable[str]]:
    """A function for ``Network(ask=)``: one question at a time, in the order they come."""
    turn: asyncio.Lock | None = None

    async def ask(question: Ask) -> str:
        nonlocal turn
        turn = turn or asyncio.Lock()
        async with turn:
            return await _put(fd, question)

    return ask


@asynccontextmanager
async def answering(box: AsyncSandbox, ask: Any) -> AsyncIterator[None]:
    """While the block runs, questions of this sandbox go to ``ask``; to nobody if it is none to call."""
    if not callable(ask):
        yield
        return
    from ..network_api import Asker
    from .holding import holder

    listening = Asker()
    listening.listen(await holder(), box.id, ask)
    try:
        yield
    finally:
        listening.let_go()


async def _put(fd: int, question: Ask) -> str:
    from .streams import read_chunks

    os.write(fd, f"sloplet: may it connect to {plain(question.target, 200)}? {QUESTION}".encode())
    line = b""
    async for data in read_chunks(fd):
        line += data
        if b"\n" not in line:
            continue
        word = line.partition(b"\n")[0].decode("utf-8", "replace").strip().lower()
        if (verdict := judge(word)) is not None:
            return verdict
        line = b""
        os.write(fd, f"sloplet: {QUESTION}".encode())
    return "no"


def judge(word: str) -> str | None:
    """What a typed word means; None: nothing."""
    return _CHOICES.get(word) or _WORDS.get(word)
