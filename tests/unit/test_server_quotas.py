"""What a tenant has running, and whether a key may have more: exact, also for creates that come at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sloplet.controller import SandboxInfo
from sloplet.errors import QuotaExceeded
from sloplet.keeper.client import KeeperClient
from sloplet.server.keys import Key, KeyLimits
from sloplet.server.quotas import Account, Quotas, Share, refusal
from sloplet.server.served import ServedKeeper
from sloplet.server.tenants import Tenant
from sloplet.server.tunnels import Tunnels
from sloplet.spec import SandboxSpec
from sloplet.wire.fields import Fields
from sloplet.wire.schema import Op, Tag

pytestmark = pytest.mark.anyone


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


SPEC = SandboxSpec.make(memory="256m", cpus=0.5, disk="1g")


class Records:
    """A keeper's list, which can be held back in the middle of an answer."""

    def __init__(self) -> None:
        self.infos: dict[str, SandboxInfo] = {}
        self.looks = 0
        self.answering: asyncio.Event | None = None
        self.asked = asyncio.Event()

    async def list(self) -> list[SandboxInfo]:
        self.looks += 1
        found = list(self.infos.values())
        self.asked.set()
        if self.answering is not None:
            await self.answering.wait()
        return found

    async def find(self, ref: str) -> SandboxInfo:
        return self.infos[ref]

    def put(self, sandbox_id: str, state: str = "running", spec: SandboxSpec = SPEC, **more: Any) -> SandboxInfo:
        info = SandboxInfo(
            sandbox_id, None, state, "fake", "process", "keeper", time.time(), None, "/", spec, **more
        )  # fmt: skip
        self.infos[sandbox_id] = info
        return info


def tenant_of(records: Records) -> Tenant:
    return cast(Tenant, SimpleNamespace(name="t", controller=records))


def key_of(**limits: Any) -> Key:
    return Key("k" * 12, "k", "t", False, KeyLimits(**limits), 0.0)


@pytest.mark.parametrize(
    ("limits", "used", "wanted", "named"),
    [
        (KeyLimits(), Share(1000, 2**50, 1000, 2**50), Share(1, 1, 1, 1), None),
        (KeyLimits(max_sandboxes=2), Share(1), Share(1), None),
        (KeyLimits(max_sandboxes=2), Share(2), Share(1), "2 of sandboxes"),
        (KeyLimits(max_sandboxes=0), Share(), Share(1), "sandboxes"),
        (KeyLimits(max_memory=2**30), Share(1, 2**29), Share(1, 2**29), None),
        (KeyLimits(max_memory=2**30), Share(1, 2**29), Share(1, 2**29 + 1), "1g of memory at a time: 512m in use"),
        (KeyLimits(max_cpus=1.0), Share(9, 0, 0.9), Share(1, 0, 0.1), None),  # 0.1 is not exact
        (KeyLimits(max_cpus=1.0), Share(9, 0, 0.9), Share(1, 0, 0.2), "cpus"),
        (KeyLimits(max_disk=10), Share(1, 0, 0, 5), Share(1, 0, 0, 6), "disk"),
        (KeyLimits(max_disk=10), Share(1, 0, 0, 50), Share(1, 5, 1, 0), None),  # over it already, and not more
    ],
)
def test_refusal(limits: KeyLimits, used: Share, wanted: Share, named: str | None) -> None:
    error = refusal(limits, used, wanted)
    assert (error is None) == (named is None)
    if error is not None and named is not None:
        assert named in error.message
        assert error.hint


async def make(quotas: Quotas, tenant: Tenant, key: Key, records: Records, name: str, wait: float = 0.0) -> str:
    try:
        async with quotas.room(tenant, key, Share.of(SPEC.limits)) as kept:
            info = records.put(name, "starting")
            await asyncio.sleep(wait)
            kept.made.append(records.put(info.id))
    except QuotaExceeded:
        return "refused"
    return "made"


@in_loop
async def test_many_at_once_get_exactly_what_the_limit_says() -> None:
    records = Records()
    quotas, tenant, key = Quotas(), tenant_of(records), key_of(max_sandboxes=20)
    outcomes = await asyncio.gather(
        *(make(quotas, tenant, key, records, f"box{n}", 0.001 * (n % 7)) for n in range(50))
    )
    assert outcomes.count("made") == 20
    assert len(records.infos) == 20
    assert quotas.account(tenant).used() == Share.of(SPEC.limits, 20)


@in_loop
async def test_what_failed_gives_its_room_back() -> None:
    records = Records()
    quotas, tenant, key = Quotas(), tenant_of(records), key_of(max_sandboxes=1)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            async with quotas.room(tenant, key, Share(1)):
                raise RuntimeError
    assert await make(quotas, tenant, key, records, "a") == "made"


@in_loop
async def test_nobody_is_refused_by_old_news() -> None:
    records = Records()
    quotas, tenant, key = Quotas(), tenant_of(records), key_of(max_sandboxes=1)
    assert await make(quotas, tenant, key, records, "a") == "made"
    quotas.account(tenant).looked_at = 0.0
    del records.infos["a"]  # its time was up; the server was not told
    assert await make(quotas, tenant, key, records, "b") == "made"
    assert await make(quotas, tenant, key, records, "c") == "refused"


@in_loop
async def test_what_others_made_counts_too() -> None:
    records = Records()
    records.put("by-cli")
    records.put("asleep", "paused")
    records.put("gone", "dead")
    quotas, tenant, key = Quotas(), tenant_of(records), key_of(max_sandboxes=2)
    assert await make(quotas, tenant, key, records, "a") == "made"
    assert await make(quotas, tenant, key, records, "b") == "refused"


@in_loop
async def test_a_look_knows_what_changed_meanwhile() -> None:
    records = Records()
    for name in ("stays", "ended"):
        records.put(name)
    account = Account(records)
    await account.look()
    records.answering = asyncio.Event()
    records.asked.clear()
    looking = asyncio.ensure_future(account.look(-1.0))
    await records.asked.wait()
    account.gone("ended")
    account.ran(replace(records.infos["stays"], id="new"))
    records.answering.set()
    await looking
    assert set(account.running) == {"stays", "new"}


@in_loop
async def test_those_who_ask_at_once_share_one_look() -> None:
    records = Records()
    account = Account(records)
    await asyncio.gather(*(account.look() for _ in range(100)))
    assert records.looks == 1


@in_loop
async def test_waking_needs_room_and_takes_it_once() -> None:
    records = Records()
    for name in ("a", "b", "c"):
        records.put(name, "paused")
    records.put("lost", "dead", saved="s")
    quotas, tenant, key = Quotas(), tenant_of(records), key_of(max_sandboxes=2)

    async def wake(name: str) -> str:
        try:
            await quotas.may_wake(tenant, key, name)
        except QuotaExceeded:
            return "refused"
        return "woken"

    assert await wake("a") == "woken"
    assert await wake("a") == "woken"
    assert (await asyncio.gather(wake("b"), wake("c"), wake("lost"))).count("woken") == 1
    assert await wake("unknown") == "woken"  # the keeper's to refuse
    assert quotas.account(tenant).used().sandboxes == 2


@in_loop
async def test_without_limits_nobody_looks() -> None:
    records = Records()
    quotas, tenant = Quotas(), tenant_of(records)
    assert await make(quotas, tenant, key_of(), records, "a") == "made"
    await quotas.may_wake(tenant, key_of(), "b")
    assert records.looks == 0


@in_loop
async def test_for_nobodys_key_the_largest_of_the_tenants_counts() -> None:
    records = Records()
    records.put("a", "paused")
    records.put("b")
    keys: list[Key] = []

    def of_tenant(tenant: str) -> Iterable[Key]:
        return keys

    quotas, tenant = Quotas(of_tenant), tenant_of(records)
    with pytest.raises(QuotaExceeded):  # a tenant without a key: whatever waits there sleeps on
        await quotas.may_wake(tenant, None, "a")
    keys += [key_of(max_sandboxes=1)]
    with pytest.raises(QuotaExceeded):
        await quotas.may_wake(tenant, None, "a")
    keys += [key_of(max_sandboxes=2)]
    await quotas.may_wake(tenant, None, "a")


@in_loop
async def test_what_was_made_may_be_more_than_was_asked_for() -> None:
    records = Records()
    quotas, tenant, key = Quotas(), tenant_of(records), key_of(max_memory=2**30)
    large = SandboxSpec.make(memory="2g")
    async with quotas.room(tenant, key, Share(1)) as kept:
        with pytest.raises(QuotaExceeded):
            quotas.check_made(tenant, key, kept, [records.put("a", spec=large)])
        quotas.check_made(tenant, key, kept, [records.put("b")])


@in_loop
async def test_what_is_kept_ready_counts() -> None:
    records = Records()
    quotas, tenant, key = Quotas(), tenant_of(records), key_of(max_sandboxes=5)
    pool = SandboxSpec.make(pool=3)
    with pytest.raises(QuotaExceeded):
        async with quotas.room(tenant, key, Share.of(pool.limits), SandboxSpec.make(pool=5)):
            pass
    for name in ("a", "b"):
        async with quotas.room(tenant, key, Share.of(pool.limits), pool) as kept:  # the same pool: counted once
            kept.made.append(records.put(name))
    assert quotas.account(tenant).used().sandboxes == 5
    assert await make(quotas, tenant, key, records, "c") == "refused"


@in_loop
async def test_what_is_used_while_it_is_paused_runs_and_counts() -> None:
    """Who comes while it falls asleep was let through, and wakes it at once."""
    records, key = Records(), key_of(max_sandboxes=1)
    quotas, tenant = Quotas(), tenant_of(records)
    info = records.put("one")
    account = quotas.account(tenant)
    await account.look()
    with account.pausing("one"):
        with account.pausing("one"):
            await quotas.may_wake(tenant, key, "one")
            records.put("one", "paused")
            account.slept(replace(info, state="paused"))
        await account.look(0)
        account.slept(replace(info, state="paused"))
    with pytest.raises(QuotaExceeded):
        async with quotas.room(tenant, key, Share.of(SPEC.limits)):
            pass
    with account.pausing("one"):
        account.slept(replace(info, state="paused"))
    async with quotas.room(tenant, key, Share.of(SPEC.limits)):
        pass


@in_loop
async def test_what_is_woken_while_it_is_told_to_sleep_runs_and_counts() -> None:
    """It slept already, and wakes after the keeper has said so."""
    records, key = Records(), key_of(max_sandboxes=1)
    quotas, tenant = Quotas(), tenant_of(records)
    info = records.put("one", "paused")
    account = quotas.account(tenant)
    await account.look()
    with account.pausing("one"):
        await quotas.may_wake(tenant, key, "one")
        account.slept(info)
    assert list(account.running) == ["one"]
    with account.pausing("one"):  # the control
        account.slept(info)
    assert (list(account.running), list(account.sleeping)) == ([], ["one"])


@pytest.mark.parametrize("ttl", [600, None, 0])
def test_a_time_that_is_set_while_somebody_wakes_it(ttl: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper tells that it sleeps; before that is heard, somebody else is let through."""
    records, key = Records(), key_of(max_sandboxes=1)
    info = records.put("one", "paused")

    async def work(woken: bool) -> list[str]:
        quotas, tenant = Quotas(), cast(Any, SimpleNamespace(name="t", controller=records, home=None))
        await quotas.account(tenant).look()
        permits = SimpleNamespace(ttl=lambda key, ttl: ttl)
        served = ServedKeeper(tenant, cast(Any, SimpleNamespace(quotas=quotas, permits=permits)))

        async def set_ttl(self: KeeperClient, sandbox_id: str, ttl: float | None) -> SandboxInfo:
            if woken:
                await quotas.may_wake(tenant, key, sandbox_id)
            return info

        monkeypatch.setattr(KeeperClient, "set_ttl", set_ttl)
        assert await served.set_ttl("one", ttl) == info
        return list(quotas.account(tenant).running)

    assert asyncio.run(work(woken=True)) == ["one"]
    assert asyncio.run(work(woken=False)) == []


@in_loop
async def test_a_stream_that_wakes_nobody_needs_no_room() -> None:
    records, key = Records(), key_of(max_sandboxes=1)
    records.put("one", "paused")
    records.put("two")
    quotas, tenant = Quotas(), tenant_of(records)
    audit = SimpleNamespace(record=lambda *args, **facts: None)
    tunnels = Tunnels(cast(Any, SimpleNamespace(quotas=quotas, audit=audit)), 1.0)
    session = cast(Any, SimpleNamespace(tenant=tenant, key=key, address=""))
    asked = Fields((Tag.OP, int(Op.METRICS)))
    with pytest.raises(QuotaExceeded):
        await tunnels.check_open(session, Op.METRICS, "one", asked)
    await tunnels.check_open(session, Op.METRICS, "one", asked.add(Tag.STATE, 0))
    assert list(quotas.account(tenant).sleeping) == ["one"]


@in_loop
async def test_what_is_kept_ready_counts_for_as_long_as_it_is_kept() -> None:
    """Each create gives a pool its whole time anew: in the keeper, and so here."""
    from sloplet.server import quotas as module

    records, key = Records(), key_of(max_sandboxes=3)
    quotas, tenant = Quotas(), tenant_of(records)
    spec = replace(SPEC, pool=2)
    for _ in range(2):
        async with quotas.room(tenant, key, Share.of(SPEC.limits), spec):
            pass
        account = quotas.account(tenant)
        share, until = account.pools[spec]
        assert until > time.monotonic() + module.POOL_KEPT - 5
        assert share.sandboxes == 2
        account.pools[spec] = (share, time.monotonic() + 1)  # nearly over
