"""Commands that have only just begun. E2B's pauses take a while, in which the sandbox goes on: a command that was
started right before is on its way by then, and programs count on it (`sleep 2` is in its second second when the sandbox
wakes). Ours are over before a shell has read its profile, so a pause waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SETTLING = 0.5  #: seconds in which a command has surely got going, also on a machine that is busy
_STEP = 0.02


class Young:
    def __init__(self) -> None:
        self._of: dict[str, set[object]] = {}

    def began(self, sandbox: str) -> Callable[[], None]:
        """A command of that sandbox begins now. To be called when it ends, if it ends before it is grown up."""
        mark = object()
        self._of.setdefault(sandbox, set()).add(mark)

        def grown() -> None:
            timer.cancel()
            marks = self._of.get(sandbox, set())
            marks.discard(mark)
            if not marks:
                self._of.pop(sandbox, None)

        timer = asyncio.get_running_loop().call_later(SETTLING, grown)
        return grown

    async def settled(self, sandbox: str) -> None:
        """Once those that had begun before this are grown up, or have ended."""
        waiting = set(self._of.get(sandbox, ()))
        while waiting:
            await asyncio.sleep(_STEP)
            waiting &= self._of.get(sandbox, set())
