"""What sandboxes use, over time: looked at every few seconds while they run, and remembered for an hour.

How often depends on how many there are: in a second only so many are looked at. Nobody is woken, and no keeper is
asked that has nothing running: it could not leave otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...controller import SandboxInfo
from ...errors import SlopletError
from ...wire.mux import request
from ...wire.schema import Op, Tag
from ..quotas import Share
from .answers import Answer, refused
from .api import Asked, Route
from .documents import time_of

if TYPE_CHECKING:
    from ..tenants import Tenant
    from .door import Facade

EVERY = 5.0  #: seconds between two looks at one sandbox, at the least
KEPT = 3600.0  #: seconds
RATE = 20  #: looks in a second
_MOST = int(KEPT / EVERY)
_AT_ONCE = 8
_PATIENCE = 3.0
_MOST_ASKED = 100
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    cpus: float
    cpu_seconds: float  #: since it began
    cpu_pct: float  #: of all its processors
    memory: int
    memory_total: int
    disk: int
    disk_total: int

    @property
    def _cpu_count(self) -> int:
        return max(1, round(self.cpus))

    def of_api(self) -> dict[str, Any]:
        return {
            "timestamp": time_of(self.at), "timestampUnix": int(self.at), "cpuCount": self._cpu_count,
            "cpuUsedPct": self.cpu_pct, "memUsed": self.memory, "memTotal": self.memory_total, "memCache": 0,
            "diskUsed": self.disk, "diskTotal": self.disk_total,
        }  # fmt: skip

    def of_envd(self) -> dict[str, Any]:
        return {
            "ts": int(self.at), "cpu_count": self._cpu_count, "cpu_used_pct": self.cpu_pct,
            "mem_total": self.memory_total, "mem_used": self.memory, "mem_cache": 0,
            "mem_total_mib": self.memory_total // _MIB, "mem_used_mib": self.memory // _MIB,
            "disk_used": self.disk, "disk_total": self.disk_total,
        }  # fmt: skip


def percent(before: Sample | None, at: float, cpu_seconds: float, uptime: float, cpus: float) -> float:
    """Since the look before, or since it began; of one that began anew in between, since then."""
    seconds, used = uptime, cpu_seconds
    if before is not None and cpu_seconds >= before.cpu_seconds and at > before.at:
        seconds, used = at - before.at, cpu_seconds - before.cpu_seconds
    if seconds <= 0:
        return 0.0
    return round(max(0.0, min(100.0, 100.0 * used / seconds / max(cpus, 0.01))), 2)


class Metrics:
    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self._samples: dict[str, deque[Sample]] = {}
        self._tried: dict[str, float] = {}
        self._taking: dict[str, asyncio.Task[Sample | None]] = {}
        self._work: asyncio.Task[None] | None = None
        self.routes = (
            Route("GET", "/sandboxes/metrics", self.many),
            Route("GET", "/sandboxes/{sandbox}/metrics", self.one),
        )

    def start(self) -> None:
        self._work = asyncio.ensure_future(self._run())

    async def aclose(self) -> None:
        tasks = [task for task in (self._work, *self._taking.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- routes --------------------------------------------------------------------------

    async def one(self, asked: Asked) -> Answer:
        start, end = _second(asked.query, "start"), _second(asked.query, "end")
        if start is not None and end is not None and start > end:
            raise refused(400, "start is later than end")
        info, _ = await self._facade.sandboxes.find(asked)
        if info.state == "running":
            await self.now(asked.caller.tenant, info)
        found = [
            each.of_api() for each in self._samples.get(info.id, ())
            if (start is None or int(each.at) >= start) and (end is None or int(each.at) <= end)
        ]  # fmt: skip
        return Answer(200, found)

    async def many(self, asked: Asked) -> Answer:
        """The last of each. Those that are not the caller's are left out, as if there were none."""
        wanted = list(dict.fromkeys(filter(None, asked.query.get("sandbox_ids", "").split(","))))
        if len(wanted) > _MOST_ASKED:
            raise refused(400, f"at most {_MOST_ASKED} sandboxes can be asked for at a time")
        tenant, found = asked.caller.tenant, {}
        for sandbox in wanted:
            record = self._facade.records.find(sandbox)
            if record is None or record.tenant != tenant.name:
                continue
            if samples := self._samples.get(sandbox):
                found[sandbox] = samples[-1].of_api()
        return Answer(200, {"sandboxes": found})

    # -- looking -------------------------------------------------------------------------

    async def now(self, tenant: Tenant, info: SandboxInfo) -> Sample | None:
        """What it uses, as of a few seconds ago at the most. None if it does not answer."""
        samples = self._samples.get(info.id)
        if samples and time.time() - samples[-1].at < EVERY:
            return samples[-1]
        return await self._take(tenant, info.id, Share.of(info.spec.limits))

    async def _take(self, tenant: Tenant, sandbox: str, share: Share) -> Sample | None:
        """Who asks while somebody else looks gets what that one sees."""
        task = self._taking.get(sandbox)
        if task is None:
            task = self._taking[sandbox] = asyncio.ensure_future(self._look(tenant, sandbox, share))
            task.add_done_callback(lambda _: self._taking.pop(sandbox, None))
        return await asyncio.shield(task)

    async def _look(self, tenant: Tenant, sandbox: str, share: Share) -> Sample | None:
        self._tried[sandbox] = time.monotonic()
        controller = tenant.controller
        try:
            async with asyncio.timeout(_PATIENCE):
                stream = await controller.open(sandbox, request(Op.METRICS), wake=False)
                try:
                    inside, outside = await stream.result(), await controller.stats(sandbox)
                finally:
                    stream.reset()
        except (SlopletError, OSError, TimeoutError):
            return None
        at = time.time()
        cpu = (inside.integer(Tag.CPU_US) if outside.cpu_us is None else outside.cpu_us) / 1e6
        samples = self._samples.get(sandbox) or deque(maxlen=_MOST)
        used = percent(samples[-1] if samples else None, at, cpu, inside.integer(Tag.UPTIME_MS) / 1000, share.cpus)
        memory = inside.integer(Tag.MEMORY) if outside.memory is None else outside.memory
        disk_total = inside.integer(Tag.DISK_TOTAL, 0) or share.disk
        sample = Sample(at, share.cpus, cpu, used, memory, share.memory, inside.integer(Tag.DISK_USED), disk_total)
        samples.append(sample)
        self._samples[sandbox] = samples
        while samples[0].at < at - KEPT:
            samples.popleft()
        return sample

    async def _run(self) -> None:
        turns, step = asyncio.Semaphore(_AT_ONCE), 0

        async def look(tenant: Tenant, sandbox: str, share: Share) -> None:
            async with turns:
                with suppress(SlopletError, OSError):
                    await self._take(tenant, sandbox, share)

        while True:
            await asyncio.sleep(1.0)
            step += 1
            await asyncio.gather(*(look(*each) for each in self._due()))
            if step % 60 == 0:
                self._forget()

    def _due(self) -> list[tuple[Tenant, str, Share]]:
        """Who was looked at longest ago, as many as may be in a second."""
        server, records = self._facade.server, self._facade.records
        running = [
            (tenant, sandbox, share)
            for tenant in server.tenants.connected
            for sandbox, share in server.quotas.account(tenant).running.items()
            if records.find(sandbox) is not None
        ]
        latest = time.monotonic() - max(EVERY, len(running) / RATE)
        due = [each for each in running if self._tried.get(each[1], 0.0) <= latest]
        return sorted(due, key=lambda each: self._tried.get(each[1], 0.0))[:RATE]

    def _forget(self) -> None:
        """Those that are gone."""
        oldest = time.time() - KEPT
        for sandbox in [*self._samples]:
            if self._facade.records.find(sandbox) is None or self._samples[sandbox][-1].at < oldest:
                del self._samples[sandbox]
        for sandbox in [each for each in self._tried if each not in self._samples]:
            if self._facade.records.find(sandbox) is None:
                del self._tried[sandbox]


def _second(query: dict[str, str], name: str) -> int | None:
    given = query.get(name, "")
    if not given:
        return None
    if not given.isascii() or not given.isdecimal() or len(given) > 12:
        raise refused(400, f"{name} is a number of seconds")
    return int(given)
