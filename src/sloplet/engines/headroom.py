"""Room to be saved in. gVisor builds all that it is going to write in its memory first, and takes some twenty times as
much for what lies unread in sockets and pipes. That counts as the sandbox's: at its limit it would die of being saved.

So the limit of its group is lifted for as long as that takes, by a bounded amount, and is set again once what gVisor
still holds fits: Go gives memory back slowly, over minutes. What programs inside may use is the agent's to watch, all
the time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress

from .cgroups import GroupPlan, write

#: at most; 512 connections that are full in one direction take this much
MOST = 3 << 30
_SLACK = 32 << 20  # of what the kernel counts besides, when the limit is set again
_FIRST_LOOK, _LAST_LOOK = 0.5, 15.0  # seconds
_LIMITS = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max")  # in the order to lower them in


class Headroom:
    """Of one sandbox's group; without a memory limit it does nothing. Never raises: a limit that cannot be lifted is
    one that saving has to do with."""

    def __init__(self, group: GroupPlan) -> None:
        limits = {os.path.basename(path): (path, int(text)) for path, text in group.writes if _is_limit(path)}
        self._limits = tuple(limits[name] for name in _LIMITS if name in limits)
        self._lowering: asyncio.Task[None] | None = None
        self._writing = threading.Lock()
        self._lifted = False

    async def lift(self) -> None:
        """When this returns there is more room."""
        self.close()
        if self._limits:
            await asyncio.to_thread(self._lift)

    def _lift(self) -> None:
        more = _room()
        with self._writing:
            self._lifted = True
            for path, most in reversed(self._limits):
                with suppress(OSError):
                    write(path, str(most + more))

    def lower(self) -> None:
        """It is not needed any more: the limit is set again as soon as what is held fits into it."""
        self.close()
        self._lifted = False
        if self._limits:
            self._lowering = asyncio.ensure_future(self._lower())

    async def _lower(self) -> None:
        pause = _FIRST_LOOK
        while not await asyncio.to_thread(self._try_to_lower):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)

    def _try_to_lower(self) -> bool:
        """The kernel drops cached files for it, and takes its time. What cannot be dropped must fit: version 2 would
        kill for it."""
        path, most = self._limits[0]
        held = _held(os.path.dirname(path))
        if held is None:
            return True  # the group is gone
        if held + _SLACK > most:
            return False
        try:
            with self._writing:
                for each, value in self._limits if not self._lifted else ():
                    write(each, str(value))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Lower nothing any more: it has ended, or is saved again. Idempotent."""
        if self._lowering is not None:
            self._lowering.cancel()
            self._lowering = None


def _is_limit(path: str) -> bool:
    return os.path.basename(path) in _LIMITS


def _room() -> int:
    """Half of what the machine has left: others may be saved at the same time."""
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return min(MOST, int(line.split()[1]) * 1024 // 2)
    return MOST


def _held(folder: str) -> int | None:
    """What cannot be dropped: memory of processes, and what is kept in files that are memory."""
    try:
        with open(folder + "/memory.stat", encoding="ascii") as file:
            counts = dict(line.split() for line in file)
    except (OSError, ValueError):
        return None
    return int(counts.get("rss", counts.get("anon", 0))) + int(counts.get("shmem", 0))
