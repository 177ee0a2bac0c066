"""Sandboxes that live as long as the program that made them: unnamed ones of the library (``Sloplet-Lease: true``).

A program that ends says so, and its own are ended; one that was killed, or lost its way here, is gone after a while
(`sloplet serve --grace`) without a tunnel and without a request. What is leased is on record, so that a server that was
restarted knows it, too: everybody then has that while anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from ..errors import SlopletError
from ..state.connection import Connected
from ..state.home import Home
from .intent import Intent
from .uses import Uses

_LOOK = 2.0
_TIDY = 600.0
_LAST = 5.0


class Leases(Connected):
    """``kill`` ends a sandbox of a tenant: (tenant, sandbox); ``there`` tells which a tenant has."""

    def __init__(
        self,
        home: Home,
        uses: Uses,
        kill: Callable[[str, str], Awaitable[None]],
        there: Callable[[str], Awaitable[set[str]]],
    ) -> None:
        super().__init__(home)
        self._uses = uses
        self._kill = kill
        self._there = there
        self._held: dict[str, tuple[str, str]] = {}  # by sandbox: its tenant, and its program
        self._making: set[str] = set()  # on record, and not yet on any keeper's
        self._removing: set[asyncio.Future[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()

    def start(self) -> None:
        rows = self._read("SELECT sandbox, tenant, client FROM server_leases", ())
        self._held = {str(sandbox): (str(tenant), str(client)) for sandbox, tenant, client in rows}
        self._task = asyncio.ensure_future(self._watch())

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._removing:
            await asyncio.wait(set(self._removing), timeout=_LAST)
        self.close()

    async def hold(self, tenant: str, client: str, sandboxes: Iterable[str], intent: Intent | None = None) -> None:
        """These go with that program ("": with none). Returns when that is on record, and with it the intent to make
        the first of them; not on the loop, where others would wait."""
        made = list(sandboxes)
        fresh = [each for each in made if client and each not in self._held]
        if not fresh and intent is None:
            return
        rows = [(each, tenant, client, time.time()) for each in fresh]
        self._held.update((each, (tenant, client)) for each in fresh)
        await asyncio.get_running_loop().run_in_executor(None, self._enter, rows, intent, made[0])

    @contextmanager
    def making(self, sandbox: str) -> Iterator[None]:
        """For a block: it is being made, under an id that is held already."""
        self._making.add(sandbox)
        try:
            yield
        finally:
            self._making.discard(sandbox)

    def gone(self, sandbox: str) -> None:
        """It has ended, or is to stay. Idempotent. The record goes after a while."""
        if self._held.pop(sandbox, None) is not None:
            removing = asyncio.get_running_loop().run_in_executor(None, self._remove, sandbox)
            self._removing.add(removing)
            removing.add_done_callback(self._removed)

    def _enter(self, rows: list[tuple[str, str, str, float]], intent: Intent | None, made: str) -> None:
        with self._write() as db:
            db.executemany("INSERT OR IGNORE INTO server_leases VALUES (?, ?, ?, ?)", rows)
            if intent is not None:
                intent.enter(db, made)

    def _remove(self, sandbox: str) -> None:
        with self._write() as db:
            db.execute("DELETE FROM server_leases WHERE sandbox = ?", (sandbox,))

    def _removed(self, removing: asyncio.Future[None]) -> None:
        self._removing.discard(removing)
        if not removing.cancelled():
            removing.exception()  # seen: the next server finds it, and that there is no such sandbox

    def look_soon(self) -> None:
        """A program has left: need not wait for the next look."""
        self._soon.set()

    def __len__(self) -> int:
        return len(self._held)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        tidied = loop.time()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._soon.wait()
            self._soon.clear()
            over = [each for each, (tenant, client) in self._held.items() if not self._uses.present(tenant, client)]
            await asyncio.gather(*(self._end(each) for each in over))
            if loop.time() - tidied > _TIDY:
                tidied = loop.time()
                await self._tidy()

    async def _tidy(self) -> None:
        """Forget those that ended by themselves (a time to live, say), while their programs live on."""
        # What is made meanwhile is not on the lists below.
        held = {sandbox: whose for sandbox, whose in self._held.items() if sandbox not in self._making}
        for tenant in {tenant for tenant, _ in held.values()}:
            try:
                there = await self._there(tenant)
            except SlopletError:
                continue
            for sandbox, (whose, _) in held.items():
                if whose == tenant and sandbox not in there:
                    self.gone(sandbox)

    async def _end(self, sandbox: str) -> None:
        try:
            await self._kill(self._held[sandbox][0], sandbox)
        except SlopletError:
            return  # its keeper cannot be asked just now: the next look comes
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a sandbox whose program is gone could not be ended", "exception": error}
            )
            return
        self.gone(sandbox)
