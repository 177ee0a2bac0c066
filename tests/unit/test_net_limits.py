"""The meter: connections, bytes a second, bytes in all."""

from __future__ import annotations

import asyncio

import pytest

from sloplet.network.limits import Meter

pytestmark = pytest.mark.anyone


def test_without_limits_there_is_always_room() -> None:
    async def main() -> None:
        meter = Meter()
        meter.set(2, None, None)
        meter.count(10**12)
        assert meter.room() >= 65536
        assert meter.refuses() == ""
        meter.connections = 2
        assert "2 connections" in meter.refuses()

    asyncio.run(main())


def test_a_budget_is_exact_and_told_once() -> None:
    async def main() -> None:
        told: list[int] = []
        meter = Meter(lambda: told.append(meter.moved))
        meter.set(1, None, 100)
        assert meter.room() == 100
        meter.count(60)
        assert meter.room() == 40
        meter.count(40)
        meter.count(0)
        await asyncio.sleep(0)
        assert told == [100]
        assert meter.room() == 0
        assert "budget" in meter.refuses()
        meter.set(1, None, 150)  # what was moved counts
        assert meter.room() == 50
        meter.count(50)
        await asyncio.sleep(0)
        assert told == [100, 150]

    asyncio.run(main())


def test_bandwidth_gives_room_as_time_passes_and_wakes_who_waits() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        meter = Meter()
        meter.set(1, 100_000, None)
        began, moved, woken = loop.time(), 0, asyncio.Event()
        while moved < 60_000:
            room = min(meter.room(), 60_000 - moved)
            if not room:
                woken.clear()
                meter.wait(woken.set)
                await asyncio.wait_for(woken.wait(), 5)
                continue
            meter.count(room)
            moved += room
        assert loop.time() - began >= 0.45  # 60 kB at 100 kB/s, 10 kB of it at once
        meter.wait(woken.set)
        woken.clear()
        meter.set(1, None, None)  # no limit any more: whoever waits goes on
        assert woken.is_set()
        meter.close()

    asyncio.run(main())
