"""Rates, requests at a time, turns: pure counting in one loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from sloplet.errors import RateLimited, ServerBusy, from_dict
from sloplet.server import limits as module
from sloplet.server.keys import Key, KeyLimits
from sloplet.server.limits import Bucket, RequestLimits, Turns
from sloplet.server.problems import headers_of, problem, status_of

pytestmark = pytest.mark.anyone


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def key_of(name: str = "k", **limits: Any) -> Key:
    return Key(name * 12, name, "t", False, KeyLimits(**limits), 0.0)


def test_bucket() -> None:
    bucket = Bucket(10.0, 3.0)
    now = bucket._at
    assert [bucket.take(now) for _ in range(3)] == [0, 0, 0]
    assert bucket.take(now) == pytest.approx(0.1)
    assert bucket.take(now + 0.05) == pytest.approx(0.05)
    assert bucket.take(now + 0.101) == 0
    assert [bool(bucket.take(now + 100)) for _ in range(4)] == [False, False, False, True]  # never above the burst


def test_rate_of_a_key() -> None:
    limits, slow = RequestLimits(), key_of(rate=0.001)
    limits.enter(slow, "t").leave()
    with pytest.raises(RateLimited) as refused:
        limits.enter(slow, "t")
    assert refused.value.retry_after is not None
    assert refused.value.retry_after > 100
    limits.enter(key_of("o", rate=0.001), "t").leave()  # another key of the same tenant


def test_requests_at_a_time() -> None:
    limits, key = RequestLimits(), key_of(concurrency=2)
    first, second = limits.enter(key, "t"), limits.enter(key, "t")
    with pytest.raises(RateLimited):
        limits.enter(key, "t")
    limits.enter(key_of("o"), "t").leave()
    first.streams()  # what streams is no request any more
    third = limits.enter(key, "t")
    with pytest.raises(RateLimited):
        limits.enter(key, "t")
    for ticket in (first, second, third):
        ticket.leave()
    assert (limits.requests, limits.streams, limits.requests_of_keys) == ({}, {}, {})


def test_streams_have_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STREAMS", 2)
    limits, key = RequestLimits(), key_of(concurrency=2)
    open_streams = [limits.enter(key, "t", stream=True) for _ in range(2)]
    with pytest.raises(RateLimited):
        limits.enter(key, "t", stream=True)
    limits.enter(key, "other", stream=True)
    events = limits.enter(key, "t")
    events.streams()  # there is no room: it goes on to count as a request
    ordinary = limits.enter(key, "t")
    with pytest.raises(RateLimited):
        limits.enter(key, "t")
    for ticket in (*open_streams, events, ordinary):
        ticket.leave()
    assert limits.streams == {"other": 1}
    assert limits.requests == {}


def test_a_tenant_cannot_take_more_than_its_keeper_takes() -> None:
    limits = RequestLimits()
    tickets = [limits.enter(key_of(str(n)), "t") for n in range(module.MAX_REQUESTS)]
    with pytest.raises(RateLimited):
        limits.enter(key_of(), "t")
    limits.enter(key_of(), "other").leave()
    tickets.pop().leave()
    limits.enter(key_of(), "t").leave()


def test_wrong_keys() -> None:
    limits = RequestLimits()
    for _ in range(20):
        limits.failed("10.0.0.1")
    with pytest.raises(RateLimited):
        limits.failed("10.0.0.1")
    limits.failed("10.0.0.2")
    for n in range(10_000):  # bounded, whatever comes
        limits.failed(f"10.1.{n // 250}.{n % 250}")
    assert len(limits._failures) <= module._ADDRESSES


@in_loop
async def test_turns_are_bounded() -> None:
    turns = Turns(2, 3)
    for _ in range(2):
        await turns.take("a")
    waiting = [asyncio.ensure_future(turns.take("a")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ServerBusy) as refused:
        await turns.take("a")
    assert status_of(refused.value) == 503
    assert int(headers_of(refused.value)["retry-after"]) >= 1
    for task in waiting:
        turns.give()
        await asyncio.wait_for(task, 1)
    turns.give()
    turns.give()
    assert (turns.active, turns.waiting) == (0, 0)


@in_loop
async def test_tenants_take_turns() -> None:
    turns, order = Turns(1, 100), []

    async def work(who: str) -> None:
        await turns.take(who)
        order.append(who)
        turns.give()

    await turns.take("first")
    tasks = [asyncio.ensure_future(work("greedy")) for _ in range(10)]
    await asyncio.sleep(0)
    tasks.append(asyncio.ensure_future(work("modest")))
    await asyncio.sleep(0)
    turns.give()
    await asyncio.gather(*tasks)
    assert order.index("modest") <= 1
    assert turns.active == 0


@in_loop
async def test_a_turn_that_is_given_up_goes_to_the_next() -> None:
    turns = Turns(1, 10)
    await turns.take("a")
    gone, late, last = (asyncio.ensure_future(turns.take("a")) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    turns.give()
    late.cancel()  # in the same step in which its turn came
    await asyncio.gather(gone, late, return_exceptions=True)
    await asyncio.wait_for(last, 1)
    turns.give()
    assert (turns.active, turns.waiting) == (0, 0)


@in_loop
async def test_who_fills_the_queue_fills_his_own_part_of_it() -> None:
    """One tenant's flood is no reason to send another away."""
    turns = Turns(1, 10)
    await turns.take("flood")
    many = [asyncio.ensure_future(turns.take("flood")) for _ in range(10)]
    await asyncio.sleep(0)
    few = [asyncio.ensure_future(turns.take("other")) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(ServerBusy):
        await turns.take("flood")
    with pytest.raises(ServerBusy):  # he has as many as the other by now
        await turns.take("other")
    await asyncio.wait(many[5:], timeout=5)
    assert [task.done() for task in many] == [False] * 5 + [True] * 5
    assert all(isinstance(task.exception(), ServerBusy) for task in many[5:])
    assert turns.waiting == 10
    many[0].cancel()
    for _ in range(9):
        turns.give()
        await asyncio.sleep(0)
    assert all(task.done() for task in (*many, *few))
    turns.give()
    assert (turns.active, turns.waiting) == (0, 0)


def test_errors_say_when_to_come_back() -> None:
    error = RateLimited("slow down", retry_after=2.2)
    assert status_of(error) == 429
    assert headers_of(error) == {"retry-after": "3"}
    assert problem(error)["retry_after"] == 2.2
    again = from_dict(error.to_dict())
    assert isinstance(again, RateLimited)
    assert again.retry_after == 2.2
