"""How fast and how much at once: requests a second and at a time for each key, and turns for what is costly.

A request counts until its answer begins to stream. From then on, and as a WebSocket, it is a *stream*: those have a
limit of their own (beyond it they go on to count as requests), so nobody is locked out by what he watches. Both are
also limited for each tenant, so that no one takes all the connections that the server can have.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..errors import RateLimited, ServerBusy
from .keys import Key

#: Of one tenant, at a time.
MAX_REQUESTS = 1600
MAX_STREAMS = 1600
_ADDRESSES = 4096  # that are remembered for failed attempts
_ATTEMPTS, _ATTEMPTS_RATE = 20.0, 0.5  # of wrong keys: so many at once, so many a second
_STRANGERS, _STRANGERS_RATE = 1000.0, 5.0  # lines of the audit log about those without a key


_PLACE_RATE, _MOST_PLACES = 100.0, 4096


class Bucket:
    """So many at once, so many a second after that."""

    __slots__ = ("_at", "_level", "burst", "rate")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self._level = burst
        self._at = time.monotonic()

    def take(self, now: float) -> float:
        """0: taken. Otherwise nothing was, and after so many seconds there is one."""
        self._level = min(self.burst, self._level + (now - self._at) * self.rate)
        self._at = now
        if self._level >= 1:
            self._level -= 1
            return 0.0
        return (1 - self._level) / self.rate


class Ticket:
    """A request or a stream that is under way."""

    __slots__ = ("_key", "_limits", "_stream", "_tenant")

    def __init__(self, limits: RequestLimits, key: str, tenant: str, stream: bool) -> None:
        self._limits, self._key, self._tenant, self._stream = limits, key, tenant, stream
        self._count(1)

    def streams(self) -> None:
        """It has begun to stream its answer."""
        if not self._stream and self._limits.streams.get(self._tenant, 0) < MAX_STREAMS:
            self._count(-1)
            self._stream = True
            self._count(1)

    def leave(self) -> None:
        self._count(-1)

    def _count(self, step: int) -> None:
        if self._stream:
            _add(self._limits.streams, self._tenant, step)
        else:
            _add(self._limits.requests, self._tenant, step)
            _add(self._limits.requests_of_keys, self._key, step)


def _add(counts: dict[str, int], name: str, step: int) -> None:
    value = counts.get(name, 0) + step
    if value:
        counts[name] = value
    else:
        counts.pop(name, None)


class RequestLimits:
    """One per server; all in its loop. ``creating`` and ``waiting``: how many make sandboxes at a time, and how many
    may wait for that."""

    def __init__(self, creating: int = 16, waiting: int = 512) -> None:
        self.requests: dict[str, int] = {}  #: by tenant
        self.streams: dict[str, int] = {}
        self.requests_of_keys: dict[str, int] = {}
        self.turns = Turns(creating, waiting)
        self._buckets: dict[str, Bucket] = {}
        self._failures: OrderedDict[str, Bucket] = OrderedDict()
        self._places: OrderedDict[str, Bucket] = OrderedDict()
        self._strangers = Bucket(_STRANGERS_RATE, _STRANGERS)

    def enter(self, key: Key, tenant: str, *, stream: bool = False) -> Ticket:
        """RateLimited if it is too fast or too much at once; nothing counts then but the attempt."""
        if key.limits.rate is not None:
            self._check_rate(key.id, key.limits.rate)
        if stream:
            if self.streams.get(tenant, 0) >= MAX_STREAMS:
                raise _too_many(f"{MAX_STREAMS} streams are open", "close some that nobody reads")
        else:
            most = key.limits.concurrency
            if most is not None and self.requests_of_keys.get(key.id, 0) >= most:
                raise _too_many(f"this key may have {most} requests at a time", "wait until some are answered")
            if self.requests.get(tenant, 0) >= MAX_REQUESTS:
                raise _too_many(f"{MAX_REQUESTS} requests are under way", "wait until some are answered")
        return Ticket(self, key.id, tenant, stream)

    def stranger(self, place: str) -> None:
        """Somebody without a key or a token asks for what is anybody's: not at the expense of whose it is. RateLimited
        if that happens too often."""
        bucket = self._places.pop(place, None) or Bucket(_PLACE_RATE, 2 * _PLACE_RATE)
        self._places[place] = bucket
        while len(self._places) > _MOST_PLACES:
            self._places.popitem(last=False)
        if seconds := bucket.take(time.monotonic()):
            raise RateLimited("too many ask for this", hint="ask again more slowly", retry_after=seconds)

    def _check_rate(self, key: str, rate: float) -> None:
        bucket = self._buckets.get(key)
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[key] = Bucket(rate, max(1.0, rate))
        if seconds := bucket.take(time.monotonic()):
            raise RateLimited(
                f"this key may ask {rate:g} times a second", hint="ask again more slowly", retry_after=seconds
            )

    def failed(self, address: str) -> None:
        """A key that is none was tried from there. RateLimited if that happens too often. Those with a good key are
        never kept out by this: behind one address may be many."""
        bucket = self._failures.pop(address, None) or Bucket(_ATTEMPTS_RATE, _ATTEMPTS)
        self._failures[address] = bucket
        if len(self._failures) > _ADDRESSES:
            self._failures.popitem(last=False)
        if seconds := bucket.take(time.monotonic()):
            raise RateLimited("too many wrong keys from this address", hint="send a good one", retry_after=seconds)

    def worth_telling(self) -> bool:
        """Whether the audit log is to tell of one more who has shown no key: enough of them would push the rest out."""
        return not self._strangers.take(time.monotonic())

    @asynccontextmanager
    async def creating(self, tenant: str) -> AsyncIterator[None]:
        """A turn to make a sandbox. ServerBusy if too many wait already."""
        await self.turns.take(tenant)
        try:
            yield
        finally:
            self.turns.give()


class Turns:
    """So many at a time; who comes later waits, and tenants take turns: one that asks for much waits for itself."""

    def __init__(self, most: int, waiting: int) -> None:
        self.most, self.most_waiting = most, waiting
        self.active = 0
        self.waiting = 0
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, who: str) -> None:
        if self.active < self.most and not self.waiting:
            self.active += 1
            return
        if self.waiting >= self.most_waiting and not self._make_room(who):
            raise self._full()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(who, deque()).append(turn)
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give()  # it came just now, and nobody is here to use it
            raise
        finally:
            self.waiting -= 1

    def _make_room(self, who: str) -> bool:
        """If another has more that wait, his last one goes: whoever fills the queue fills his own part of it."""
        lengths = {name: sum(not turn.done() for turn in queue) for name, queue in self._queues.items()}
        longest = max(lengths, key=lengths.__getitem__, default=who)
        if lengths.get(longest, 0) <= lengths.get(who, 0) + 1:
            return False
        last = next(turn for turn in reversed(self._queues[longest]) if not turn.done())
        last.set_exception(self._full())  # what is done is passed over
        return True

    def _full(self) -> ServerBusy:
        return ServerBusy(
            f"{self.waiting} requests wait to make sandboxes already", hint="try again later", retry_after=2
        )

    def give(self) -> None:
        """Whoever had a turn is done: it goes to the next one who waits, of the tenant that has waited longest."""
        while self._queues:
            who, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[who] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self.active -= 1


def _too_many(what: str, hint: str) -> RateLimited:
    return RateLimited(what, hint=hint, retry_after=1)
