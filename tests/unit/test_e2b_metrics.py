"""E2B's metrics: what is computed, who is looked at and when, and that it has an end."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sloplet.engines.base import HostStats
from sloplet.errors import SandboxPaused
from sloplet.server.e2b import metrics
from sloplet.server.e2b.metrics import Metrics, Sample, percent
from sloplet.server.quotas import Share
from sloplet.wire.fields import Fields
from sloplet.wire.schema import Tag


def sample(at: float, cpu: float) -> Sample:
    return Sample(at, 2, cpu, 0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("before", "at", "cpu", "uptime", "found"),
    [
        (None, 100.0, 1.0, 10.0, 5.0),  # since it began
        (sample(90.0, 1.0), 100.0, 11.0, 500.0, 50.0),  # since the look before
        (sample(90.0, 50.0), 100.0, 1.0, 2.0, 25.0),  # it began anew
        (sample(99.9, 0.0), 100.0, 5.0, 500.0, 100.0),  # clocks are not exact
        (None, 100.0, 1.0, 0.0, 0.0),
    ],
)
def test_percent(before: Sample | None, at: float, cpu: float, uptime: float, found: float) -> None:
    assert percent(before, at, cpu, uptime, 2) == found


class Stream:
    def __init__(self) -> None:
        self.fields = Fields().add(Tag.CPU_US, 1).add(Tag.UPTIME_MS, 1000).add(Tag.MEMORY, 7).add(Tag.DISK_USED, 8)

    async def result(self) -> Fields:
        return self.fields

    def reset(self) -> None: ...


class Keeper:
    def __init__(self) -> None:
        self.opened: list[tuple[str, bool]] = []
        self.failing: set[str] = set()

    async def open(self, sandbox: str, request: Fields, *, wake: bool = True) -> Stream:
        self.opened.append((sandbox, wake))
        await asyncio.sleep(0)
        if sandbox in self.failing:
            raise SandboxPaused("it sleeps")
        return Stream()

    async def stats(self, sandbox: str) -> HostStats:
        return HostStats(cpu_us=2_000_000, memory=9)


def parts(count: int) -> tuple[Metrics, Any, Keeper]:
    keeper = Keeper()
    tenant = SimpleNamespace(name="main", controller=keeper)
    account = SimpleNamespace(running={f"s{number}": Share(1, 1024, 2, 2048) for number in range(count)})
    server = SimpleNamespace(
        tenants=SimpleNamespace(connected=[tenant]), quotas=SimpleNamespace(account=lambda tenant: account)
    )
    known = {f"s{number}" for number in range(count)}
    facade: Any = SimpleNamespace(
        server=server, records=SimpleNamespace(find=lambda each: each if each in known else None), known=known
    )
    return Metrics(facade), facade, keeper


def test_nobody_is_woken_and_nobody_elses_are_looked_at() -> None:
    made, facade, keeper = parts(2)
    facade.known.discard("s1")  # one that E2B's way did not make

    async def main() -> None:
        for each in made._due():
            await made._take(*each)

    asyncio.run(main())
    assert keeper.opened == [("s0", False)]
    assert made._due() == []  # not again so soon
    (found,) = made._samples["s0"]
    assert found.of_api() | {"timestamp": "", "timestampUnix": 0} == {
        "timestamp": "", "timestampUnix": 0, "cpuCount": 2, "cpuUsedPct": 100.0, "memUsed": 9, "memTotal": 1024,
        "memCache": 0, "diskUsed": 8, "diskTotal": 2048,
    }  # fmt: skip


def test_many_are_looked_at_in_turn() -> None:
    made, _, keeper = parts(300)

    async def main() -> None:
        while due := made._due():
            assert len(due) <= metrics.RATE
            for each in due:
                await made._take(*each)

    asyncio.run(main())
    assert [each for each, _ in keeper.opened] == [f"s{number}" for number in range(300)]


def test_one_that_does_not_answer_is_not_asked_all_the_time() -> None:
    made, _, keeper = parts(1)
    keeper.failing.add("s0")
    assert asyncio.run(made._take(*made._due()[0])) is None
    assert made._due() == []
    assert not made._samples.get("s0")


def test_who_asks_at_the_same_time_gets_the_same() -> None:
    made, _, keeper = parts(1)

    async def main() -> None:
        (due,) = made._due()
        found = await asyncio.gather(*(made._take(*due) for _ in range(5)))
        assert len(set(map(id, found))) == 1

    asyncio.run(main())
    assert len(keeper.opened) == 1


def test_what_is_old_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    made, facade, _ = parts(2)
    clock = [time.time()]
    monkeypatch.setattr(metrics.time, "time", lambda: clock[0])

    async def main() -> None:
        due = made._due()
        for _ in range(3):
            for each in due:
                await made._take(*each)
            clock[0] += metrics.KEPT / 2 + 1
        assert [len(made._samples[each]) for each in ("s0", "s1")] == [2, 2]

    asyncio.run(main())
    facade.known.discard("s0")
    made._forget()
    assert set(made._samples) == set(made._tried) == {"s1"}
    clock[0] += metrics.KEPT
    made._forget()
    assert not made._samples
