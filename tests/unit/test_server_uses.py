"""Which program uses which sandbox, whether it is there, and what goes with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sloplet.errors import KeeperError
from sloplet.server import leases as leases_module
from sloplet.server.leases import Leases
from sloplet.server.uses import Uses
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def uses(clock: Clock) -> Uses:
    return Uses(60.0, clock)


def test_the_last_who_lets_go(uses: Uses) -> None:
    uses.use("t", "one", "a", "b")
    uses.use("t", "two", "a")
    assert not uses.release("t", "one", "a")
    assert uses.release("t", "two", "a")
    assert uses.release("t", "one", "b")
    assert uses.release("t", "one", "never")


def test_tenants_know_nothing_of_each_other(uses: Uses) -> None:
    uses.use("t", "same", "a")
    uses.use("other", "same", "a")
    assert uses.release("t", "same", "a")


def test_what_turned_out_not_to_be_there_is_forgotten(uses: Uses) -> None:
    uses.use("t", "a", "made-up", "box")
    uses.forget("t", "a", "made-up")
    uses.forget("t", "nobody", "box")
    assert uses.release("t", "b", "made-up")
    assert not uses.release("t", "b", "box")


def test_who_says_no_name_uses_nothing(uses: Uses) -> None:
    uses.use("t", "", "a")
    uses.heard("t", "")
    assert uses.release("t", "x", "a")
    uses.use("t", "x", "a")
    assert not uses.release("t", "", "a")


def test_who_is_gone_uses_nothing(uses: Uses, clock: Clock) -> None:
    uses.use("t", "gone", "a")
    clock.now += 59
    assert not uses.release("t", "x", "a")
    clock.now += 2
    assert uses.release("t", "x", "a")


def test_a_tunnel_is_being_there(uses: Uses, clock: Clock) -> None:
    uses.came("t", "c")
    uses.use("t", "c", "a")
    clock.now += 10_000
    assert uses.present("t", "c")
    assert not uses.release("t", "x", "a")
    uses.came("t", "c")
    uses.went("t", "c", ended=True)
    assert uses.present("t", "c")  # it has another one
    uses.went("t", "c", ended=False)
    assert uses.present("t", "c")  # it may come back
    assert uses.release("t", "x", "a")  # but what it used is nobody's
    clock.now += 61
    assert not uses.present("t", "c")


def test_goodbye(uses: Uses) -> None:
    uses.came("t", "c")
    uses.went("t", "c", ended=True)
    assert not uses.present("t", "c")
    uses.heard("t", "c")  # it has changed its mind
    assert uses.present("t", "c")


def test_after_a_start_everybody_has_a_while(uses: Uses, clock: Clock) -> None:
    assert uses.present("t", "unknown")
    clock.now += 61
    assert not uses.present("t", "unknown")


def test_what_is_remembered_is_bounded(uses: Uses, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloplet.server.uses._MOST", 100)
    uses.came("t", "stays")
    for number in range(1000):
        uses.heard("t", f"c{number}")
        clock.now += 1
    assert len(uses._programs) <= 101
    assert uses.present("t", "stays")


# -- leases --------------------------------------------------------------------------------------------------------


class Ground:
    """Sandboxes that are there, and those that were ended."""

    def __init__(self, *there: str) -> None:
        self.there = set(there)
        self.killed: list[tuple[str, str]] = []
        self.failing = False

    async def kill(self, tenant: str, sandbox: str) -> None:
        if self.failing:
            raise KeeperError("not now")
        self.killed.append((tenant, sandbox))
        self.there.discard(sandbox)

    async def ids(self, tenant: str) -> set[str]:
        return self.there


async def wait_for(wanted: object) -> None:
    for _ in range(1000):
        if wanted():  # type: ignore[operator]
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")


def test_what_goes_with_its_program(tmp_path: Path, uses: Uses, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "_LOOK", 0.01)
    home, ground = Home(tmp_path / "home").open(), Ground("a", "b", "c")

    async def scenario() -> None:
        leases = Leases(home, uses, ground.kill, ground.ids)
        leases.start()
        uses.came("t", "one")
        uses.came("t", "two")
        await leases.hold("t", "one", ["a", "b"])
        await leases.hold("t", "two", ["c"])
        await leases.hold("t", "", ["nobody's"])
        assert len(leases) == 3
        leases.gone("b")
        clock.now += 1000
        uses.went("t", "one", ended=True)
        leases.look_soon()
        await wait_for(lambda: ground.killed == [("t", "a")])
        ground.failing = True
        uses.went("t", "two", ended=True)
        leases.look_soon()
        await asyncio.sleep(0.05)
        assert ("t", "c") not in ground.killed
        assert len(leases) == 1
        ground.failing = False
        await wait_for(lambda: ("t", "c") in ground.killed)
        await wait_for(lambda: not len(leases))
        await leases.aclose()

    asyncio.run(scenario())


def test_the_next_server_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "_LOOK", 0.01)
    home, ground, clock = Home(tmp_path / "home").open(), Ground("a"), Clock()

    async def first() -> None:
        leases = Leases(home, Uses(60, clock), ground.kill, ground.ids)
        leases.start()
        await leases.hold("t", "one", ["a"])
        await leases.aclose()

    async def second() -> None:
        leases = Leases(home, Uses(60, clock), ground.kill, ground.ids)
        leases.start()
        assert len(leases) == 1
        await asyncio.sleep(0.05)
        assert ground.killed == []  # it has its while anew
        clock.now += 61
        await wait_for(lambda: ground.killed == [("t", "a")])
        await leases.aclose()

    asyncio.run(first())
    asyncio.run(second())


def test_those_that_ended_by_themselves(tmp_path: Path, uses: Uses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "_LOOK", 0.01)
    monkeypatch.setattr(leases_module, "_TIDY", 0.02)
    ground = Ground("a")

    async def scenario() -> None:
        leases = Leases(Home(tmp_path / "home").open(), uses, ground.kill, ground.ids)
        leases.start()
        uses.came("t", "one")
        with leases.making("made"):  # which is on no keeper's list yet
            await leases.hold("t", "one", ["a", "expired", "made"])
            await wait_for(lambda: len(leases) == 2)
            await asyncio.sleep(0.1)
            assert len(leases) == 2
        await wait_for(lambda: len(leases) == 1)
        assert ground.killed == []
        await leases.aclose()

    asyncio.run(scenario())
