"""E2B: what is told of a sandbox that is about to sleep or to end, and who comes meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakValueDictionary

import pytest

from sloplet.controller import SandboxInfo
from sloplet.errors import SandboxNotFound, SlopletError, UnsupportedOperation
from sloplet.server.e2b.door import Facade
from sloplet.server.e2b.records import Record
from sloplet.server.e2b.sandboxes import Sandboxes
from sloplet.server.e2b.young import Young
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone


def info_of(state: str = "running", left: float | None = 300.0, **settings: Any) -> SandboxInfo:
    expires = None if left is None else time.time() + left
    spec = SandboxSpec.make(None, **settings)
    return SandboxInfo("a1", None, state, "gvisor", "gvisor", "keeper", time.time(), expires, "/", spec)


class Slow:
    """A controller whose pauses take until they are let."""

    def __init__(self, info: SandboxInfo) -> None:
        self.info, self.let, self.begun = info, asyncio.Event(), asyncio.Event()
        self.times: list[float | None] = []
        self.problem: SlopletError | None = None

    async def find(self, _ref: str) -> SandboxInfo:
        if self.info.state == "gone":
            raise SandboxNotFound("it is gone")
        return self.info

    async def list(self) -> list[SandboxInfo]:
        return [self.info]

    async def pause(self, _sandbox: str, *, memory: bool) -> SandboxInfo:
        self.begun.set()
        await self.let.wait()
        if self.problem is not None:
            raise self.problem
        self.info = replace(self.info, state="paused")
        return self.info

    async def resume(self, _sandbox: str) -> SandboxInfo:
        self.info = replace(self.info, state="running")
        return self.info

    async def set_ttl(self, _sandbox: str, ttl: float | None) -> SandboxInfo:
        self.times.append(ttl)
        self.info = replace(self.info, expires_at=None if ttl is None else time.time() + ttl)
        return self.info


async def nothing(*_: object) -> None:
    pass


class Desk:
    """The routes of sandboxes, before such a controller."""

    def __init__(self, info: SandboxInfo, **record: Any) -> None:
        self.controller = Slow(info)
        self.record = Record("a1", "main", "k1", "base", **record)
        tenant = SimpleNamespace(name="main", controller=self.controller)
        self.caller = cast(Any, SimpleNamespace(tenant=tenant, key=SimpleNamespace(id="k1")))
        facade = self.facade = cast(Any, Facade.__new__(Facade))
        keys = SimpleNamespace(current=lambda _key: object())
        facade.server = SimpleNamespace(background=asyncio.ensure_future, keys=keys)
        facade.records = SimpleNamespace(find=lambda _sandbox: self.record)
        facade.young = Young()
        facade.tokens = SimpleNamespace(of=lambda *_: "token")
        facade.networks = SimpleNamespace(told=lambda _sandbox, network: network, refresh=nothing)
        facade.domain = lambda _host: "boxes.test"
        facade.pausing, facade._waking = {}, WeakValueDictionary()
        self.sandboxes = Sandboxes(facade)

    def asked(self, **body: Any) -> Any:
        return SimpleNamespace(caller=self.caller, path={"sandbox": "a1"}, body=body, query={}, host="")

    async def state(self) -> str:
        return str((await self.sandboxes.info(self.asked())).body["state"])


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def test_who_connects_while_it_falls_asleep_wakes_it() -> None:
    async def work() -> None:
        desk = Desk(info_of())
        pausing = asyncio.ensure_future(desk.sandboxes.pause(desk.asked()))
        await desk.controller.begun.wait()
        assert await desk.state() == "paused"
        again = asyncio.ensure_future(desk.sandboxes.pause(desk.asked()))
        connecting = asyncio.ensure_future(desk.sandboxes.connect(desk.asked(timeout=60)))
        await asyncio.sleep(0.01)
        assert not connecting.done()
        desk.controller.let.set()
        assert (await pausing).status == 204
        with pytest.raises(SlopletError, match="already paused"):
            await again
        assert (await connecting).status == 201
        assert (await desk.state(), desk.controller.times) == ("running", [None, 60.0])

    run(work())


def test_a_pause_goes_on_when_nobody_waits_for_it() -> None:
    async def work() -> None:
        desk = Desk(info_of())
        pausing = asyncio.ensure_future(desk.sandboxes.pause(desk.asked()))
        await desk.controller.begun.wait()
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        assert await desk.state() == "paused"
        desk.controller.let.set()
        while desk.facade.pausing:
            await asyncio.sleep(0)
        assert (desk.controller.info.state, desk.controller.times) == ("paused", [None])

    run(work())


def test_its_time_does_not_end_what_is_being_paused() -> None:
    async def work() -> None:
        desk = Desk(info_of(left=5.0))
        desk.controller.let.set()
        await desk.sandboxes.pause(desk.asked())
        more, last = desk.controller.times
        assert more is not None
        assert more >= 60
        assert last is None

    run(work())


def test_one_that_cannot_be_paused_has_its_time_again() -> None:
    async def work() -> None:
        desk = Desk(info_of(left=5.0))
        desk.controller.problem = UnsupportedOperation("it cannot")
        desk.controller.let.set()
        with pytest.raises(UnsupportedOperation):
            await desk.sandboxes.pause(desk.asked())
        last = desk.controller.times[-1]
        assert last is not None
        assert 0 < last <= 5
        assert await desk.state() == "running"

    run(work())


def test_whose_time_is_up_is_told_as_gone_or_asleep() -> None:
    async def work() -> None:
        desk = Desk(info_of(left=-1.0))
        with pytest.raises(SlopletError, match="doesn't exist"):
            await desk.sandboxes.info(desk.asked())
        assert (await desk.sandboxes.list(desk.asked())).body == []
        for how, kept in (("pause", "full"), ("pause-disk", "filesystem")):
            desk = Desk(info_of(left=-1.0, on_ttl=how, ttl=60))
            told = (await desk.sandboxes.info(desk.asked())).body
            assert (told["state"], told["pauseMode"]) == ("paused", kept)
            (listed,) = (await desk.sandboxes.list(desk.asked())).body
            assert listed["state"] == "paused"
        assert await Desk(info_of(left=1.0)).state() == "running"

    run(work())


def test_one_that_a_visitor_woke_in_passing_has_an_end() -> None:
    async def work() -> None:
        desk = Desk(info_of(left=None), auto_resume=True, timeout=600.0)
        await desk.facade._limit(desk.record, desk.caller)
        assert desk.controller.times == [600.0]
        for info in (info_of("paused", None), info_of(left=20.0)):
            desk = Desk(info, auto_resume=True)
            await desk.facade._limit(desk.record, desk.caller)
            assert desk.controller.times == []

    run(work())
