"""Names to addresses, asked once for many: what was found is kept for a few seconds, as short as a program's own way
from its question to its connection. What is kept is judged again whenever it is used."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import OrderedDict

from .upstream import Upstream

KEPT = 30.0
_MOST = 1024
_NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
PATIENCE = 10.0  # seconds that somebody waits for an answer
#: Names that are being asked for. A thread of the machine's resolver cannot be called back: one whose name server is
#: silent is held until it gives up by itself, so one sandbox gets a few of them, and the others are left theirs.
_AT_ONCE = 6
_MOST_ASKED = 256  # names that are asked for, or wait for that


class Resolver:
    """One per sandbox: what one has asked for, another cannot see by its speed."""

    def __init__(self, upstream: Upstream, *, patience: float = PATIENCE) -> None:
        self._upstream = upstream
        self._patience = patience
        self._known: OrderedDict[str, tuple[float, list[str]]] = OrderedDict()
        self._asked: dict[str, asyncio.Task[list[str]]] = {}
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def resolve(self, name: str) -> list[str]:
        """[]: there is no such name. OSError: it cannot be found out."""
        loop = asyncio.get_running_loop()
        known = self._known.get(name)
        if known is not None and known[0] > loop.time():
            return known[1]
        task = self._asked.get(name)
        if task is None:
            if len(self._asked) >= _MOST_ASKED:
                raise OSError(errno.EAGAIN, "too many names are being looked up")
            task = self._asked[name] = asyncio.ensure_future(self._ask(name))
            task.add_done_callback(lambda task: self._answered(name, task))
        try:
            async with asyncio.timeout(self._patience):
                return await asyncio.shield(task)  # one who gives up leaves the others their answer
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"the resolver did not answer within {self._patience:g} s") from None

    async def _ask(self, name: str) -> list[str]:
        async with self._room:
            try:
                return list(await self._upstream.resolve(name))
            except socket.gaierror as error:  # an OSError, whose errno is none
                if error.errno in _NO_SUCH_NAME:
                    return []
                raise OSError(errno.EAGAIN, f"the resolver failed: {error.strerror}") from error

    def _answered(self, name: str, task: asyncio.Task[list[str]]) -> None:
        self._asked.pop(name, None)
        if task.cancelled() or task.exception() is not None:
            return
        self._known.pop(name, None)
        self._known[name] = (asyncio.get_running_loop().time() + KEPT, task.result())
        if len(self._known) > _MOST:
            self._known.popitem(last=False)

    def forget(self) -> None:
        """What is asked for next is asked anew."""
        self._known.clear()

    def close(self) -> None:
        for task in list(self._asked.values()):
            task.cancel()
