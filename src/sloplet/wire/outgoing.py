"""Bytes on their way to the other side: written at once if the descriptor takes them, queued otherwise.

Raw non-blocking system calls, because a round trip is the product's pulse. A large payload is never joined to its
header.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from .pipes import BUSY

_AT_ONCE = 64  # pieces a system call; Linux takes 1,024


class WayOut(Protocol):
    """What a multiplexer needs of whoever takes its bytes; ``Outgoing`` says what each means."""

    @property
    def size(self) -> int: ...

    @property
    def sent(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def end(self) -> int: ...

    def hold(self) -> None: ...

    def let_go(self) -> None: ...

    def put(self, *parts: bytes) -> None: ...

    def stop(self) -> None: ...


class Outgoing:
    """The queue of one descriptor. ``on_empty`` is called when what had to wait has gone, ``on_error`` if it cannot,
    ``on_busy`` once, when much has gone."""

    def __init__(
        self,
        fd: int,
        on_empty: Callable[[], None],
        on_error: Callable[[OSError], None],
        on_busy: Callable[[], None],
    ) -> None:
        self._fd = fd
        self._on_empty = on_empty
        self._on_error = on_error
        self._on_busy: Callable[[], None] | None = on_busy
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes | memoryview] = deque()
        self._watched = False
        self._stopped = False
        self._held: list[tuple[bytes, ...]] | None = None
        self._held_size = 0
        self._sent = 0
        self.size = 0  #: bytes that wait for the descriptor
        os.set_blocking(fd, False)

    @property
    def sent(self) -> int:
        """Bytes that the descriptor has taken, ever."""
        return self._sent

    @property
    def waiting(self) -> int:
        """Bytes that wait for the descriptor, or are held back."""
        return self.size + self._held_size

    @property
    def end(self) -> int:
        """What ``sent`` will be when all that was put has gone."""
        return self._sent + self.waiting

    def hold(self) -> None:
        """Keep what is put from now on until ``let_go``."""
        if self._held is None:
            self._held = []

    def let_go(self) -> None:
        held, self._held, self._held_size = self._held, None, 0
        for parts in held or ():
            self.put(*parts)
        if held and not self._queue:
            self._on_empty()

    def put(self, *parts: bytes) -> None:
        if self._stopped:
            return
        if self._held is not None:
            self._held.append(parts)
            self._held_size += sum(map(len, parts))
            return
        done = 0
        if not self._queue:
            try:
                done = os.write(self._fd, parts[0]) if len(parts) == 1 else os.writev(self._fd, parts)
            except BlockingIOError:
                pass
            except OSError as error:
                self._cannot(error)
                return
            self._sent += done
        for part in parts:
            if done >= len(part):
                done -= len(part)
                continue
            rest = memoryview(part)[done:] if done else part
            done = 0
            self._queue.append(rest)
            self.size += len(rest)
        if self._queue and not self._watched:
            self._watched = True
            self._loop.add_writer(self._fd, self._on_writable)

    def stop(self) -> None:
        """Forget what waits, and do not use the descriptor any more. Idempotent."""
        self._stopped = True
        self._unwatch()
        self._queue.clear()
        self._held = None
        self.size = self._held_size = 0

    def _on_writable(self) -> None:
        queue = self._queue
        if self._on_busy is not None and self._sent > BUSY:
            self._on_busy()
            self._on_busy = None
        while queue:
            try:
                done = os.writev(self._fd, list(islice(queue, _AT_ONCE)))
            except BlockingIOError:
                return
            except OSError as error:
                queue.clear()
                self.size = 0
                self._cannot(error)
                break
            self._sent += done
            self.size -= done
            while queue and done >= len(queue[0]):
                done -= len(queue.popleft())
            if done:
                queue[0] = memoryview(queue[0])[done:]
        self._unwatch()
        self._on_empty()

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_writer(self._fd)

    def _cannot(self, error: OSError) -> None:
        # If nobody reads, our reading side will see EOF and tell the reason; what we say no longer matters. Otherwise
        # (no memory for the pipe's pages) a frame is lost, and its stream would wait for ever.
        if error.errno not in (errno.EPIPE, errno.ECONNRESET):
            self._on_error(error)
