"""Connections beyond the limit wait a moment: a program that has closed one and opens the next is ahead of what the
host has heard of it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

from ..wire.mux import AgentStream
from .relay import closing
from .target import Target

PATIENCE = 0.5  # seconds
_Fate = Callable[[AgentStream, Target], None]


class Crowd:
    """Of one sandbox, first come first served. Who waits costs a stream of the agent's, and there are only so many."""

    def __init__(self, admit: _Fate, refuse: _Fate) -> None:
        self._admit = admit
        self._refuse = refuse
        self._waiting: dict[AgentStream, tuple[Target, asyncio.TimerHandle]] = {}

    def wait(self, stream: AgentStream, target: Target) -> None:
        """Admitted by ``move_up``, or refused when its time is over."""
        timer = asyncio.get_running_loop().call_later(PATIENCE, self._leave, stream, self._refuse)
        self._waiting[stream] = (target, timer)
        stream.on_change(lambda: self._changed(stream))

    def move_up(self, room: Callable[[], bool]) -> None:
        """Something has ended, or the limit is another one."""
        while self._waiting and room():
            self._leave(next(iter(self._waiting)), self._admit)

    def _changed(self, stream: AgentStream) -> None:
        """Its program has given up, or said something already."""
        if stream.was_reset or stream.mux.error is not None:
            self._leave(stream, self._refuse)

    def _leave(self, stream: AgentStream, fate: _Fate) -> None:
        target, timer = self._waiting.pop(stream)
        timer.cancel()
        stream.on_change(None)
        if stream.was_reset or stream.mux.error is not None:
            stream.close(closing(errno.ECONNRESET))  # nobody is refused anything, but each is answered
        else:
            fate(stream, target)

    def close(self) -> None:
        """All of them are refused."""
        while self._waiting:
            self._leave(next(iter(self._waiting)), self._refuse)
