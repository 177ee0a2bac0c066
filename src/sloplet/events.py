"""What happens to sandboxes, for whoever listens. In memory, bounded, never blocks the one who tells."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from .controller import Event

_KEPT = 1000
_LAST = {"killed", "died", "expired"}


class _Listener:
    def __init__(self, sandbox: str | None) -> None:
        self.sandbox = sandbox
        self.queue: deque[Event] = deque()
        self.lost = 0
        self.changed = asyncio.Event()


class EventBus:
    """One per runtime."""

    def __init__(self) -> None:
        self._listeners: set[_Listener] = set()

    @property
    def wanted(self) -> bool:
        """Whether anybody listens: telling costs nothing otherwise."""
        return bool(self._listeners)

    def emit(self, sandbox: str, type: str, **data: Any) -> None:
        if not self._listeners:
            return
        event = Event(time.time(), sandbox, type, data)
        for listener in self._listeners:
            if listener.sandbox in (None, sandbox):
                if len(listener.queue) >= _KEPT:
                    listener.queue.popleft()
                    listener.lost += 1
                listener.queue.append(event)
                listener.changed.set()

    def listen(self, sandbox: str | None) -> AsyncIterator[Event]:
        """Events from this call on (not from the first ``anext``); ends with the sandbox if one was named."""
        listener = _Listener(sandbox)
        self._listeners.add(listener)
        return self._drain(listener)

    async def _drain(self, listener: _Listener) -> AsyncIterator[Event]:
        try:
            while True:
                while listener.queue:
                    if listener.lost:
                        count, listener.lost = listener.lost, 0
                        yield Event(time.time(), listener.sandbox or "", "events.lost", {"count": count})
                    event = listener.queue.popleft()
                    yield event
                    if listener.sandbox is not None and event.type in _LAST:
                        return
                listener.changed.clear()
                await listener.changed.wait()
        finally:
            self._listeners.discard(listener)
