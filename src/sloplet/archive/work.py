"""An export or an import that is under way: how far it is, and whether whoever asked for it has gone."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import SnapshotError

_EVERY = 0.25


class Work:
    """``tell(done, total)`` is called a few times per second, in the thread that works."""

    def __init__(self, what: str, tell: Callable[[int, int], None] | None = None) -> None:
        self._what = what
        self._tell = tell
        self._told = 0.0
        self.total = 0
        self.done = 0
        self.given_up = False

    def give_up(self) -> None:
        """The next step raises; what was made so far goes. Any thread."""
        self.given_up = True

    def check(self) -> None:
        if self.given_up:
            raise SnapshotError(f"the {self._what} was given up")

    def step(self, count: int) -> None:
        """So many bytes more are done."""
        self.check()
        self.done += count
        now = time.monotonic()
        if self._tell is not None and (now - self._told >= _EVERY or self.done == self.total):
            self._told = now
            self._tell(self.done, self.total)
