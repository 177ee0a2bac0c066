"""How much a sandbox may move: connections at once, bytes a second, bytes in all. Both directions count together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

_FREE = 1 << 30  # room where nothing limits it
_BURST = 0.1  # seconds of bandwidth that may be moved at once
_LEAST = 4096  # bytes of a burst


class Meter:
    """One per sandbox; it goes on counting through pauses and rollbacks. ``on_spent`` is called when the budget has
    been used up, once for each budget that is given."""

    def __init__(self, on_spent: Callable[[], None] | None = None) -> None:
        self.connections = 0  #: open now
        self.moved = 0  #: bytes, in all
        self.on_spent = on_spent
        self._most = 0
        self._rate: float | None = None
        self._budget: int | None = None
        self._tokens = 0.0
        self._at = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._told = False

    def set(self, connections: int, bandwidth: float | None, budget: int | None) -> None:
        """From now on these; what was moved before counts against the budget."""
        self._most = connections
        if bandwidth != self._rate:
            self._rate, self._at = bandwidth, asyncio.get_running_loop().time()
            self._tokens = self._burst()
        if budget != self._budget:
            self._budget, self._told = budget, False
        self._wake()

    def refuses(self) -> str:
        """Why there can be no further connection now; "" if there can."""
        if self.full:
            return (
                f"the sandbox has {self.connections} connections open, and may have {self._most}: close some, or ask "
                "for Network(connections=...)"
            )
        if self.spent:
            return f"the sandbox has moved the {self._budget} bytes that its budget allows: ask for a larger budget"
        return ""

    @property
    def full(self) -> bool:
        return self.connections >= self._most

    @property
    def spent(self) -> bool:
        return self._budget is not None and self.moved >= self._budget

    def room(self) -> int:
        """How many bytes may be moved now. 0: ``wait``."""
        if self._rate is None:
            return _FREE if self._budget is None else max(self._budget - self.moved, 0)
        now = asyncio.get_running_loop().time()
        self._tokens = min(self._tokens + (now - self._at) * self._rate, self._burst())
        self._at = now
        room = int(self._tokens)
        return room if self._budget is None else max(min(room, self._budget - self.moved), 0)

    def count(self, size: int) -> None:
        """So many were moved."""
        self.moved += size
        if self._rate is not None:
            self._tokens -= size
        if self._budget is not None and self.moved >= self._budget and not self._told:
            self._told = True
            if self.on_spent is not None:
                # Not from here: it ends the very connection that is in the middle of its work.
                asyncio.get_running_loop().call_soon(self.on_spent)

    def wait(self, callback: Callable[[], None]) -> None:
        """Call it once, when there may be room again. (A budget that is used up never gives any.)"""
        self._waiting.append(callback)
        if self._timer is None and self._rate is not None:
            least = min(_LEAST, self._burst())
            delay = max((least - self._tokens) / self._rate, 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay, self._wake)

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, deque()
        for callback in waiting:  # who finds no room waits again, behind those that had none before
            callback()

    def _burst(self) -> float:
        return 0.0 if self._rate is None else max(self._rate * _BURST, _LEAST)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting.clear()
