"""Changes of a policy by parts: what becomes of it, and that none is lost whoever else changes it at the same time."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_networks import Holder, spec, with_holder

from sloplet.errors import SpecError
from sloplet.netchange import NetworkChange
from sloplet.netspec import Network, NetworkSpec
from sloplet.network.target import Target
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

KNOWN = Network(allow=["a.com", "GET https://b.com/x"], deny=["c.com"], budget="1g", ask=True).spec
ALLOW = ("GET https://b.com/x", "a.com")


@pytest.mark.parametrize(
    ("change", "allow", "deny"),
    [
        ({}, ALLOW, ("c.com",)),
        ({"add_allow": ("d.com", "a.com")}, (*ALLOW, "d.com"), ("c.com",)),
        ({"add_allow": ("C.COM.",)}, (*ALLOW, "c.com"), ()),
        ({"add_deny": ("A.com", "@github")}, ("GET https://b.com/x",), ("@github", "a.com", "c.com")),
        ({"remove": ("a.com", "C.com")}, ("GET https://b.com/x",), ()),
        ({"remove": ("GET https://B.com/x",)}, ("a.com",), ("c.com",)),
        ({"allow": ()}, (), ("c.com",)),
        ({"deny": ("a.com",)}, ALLOW, ("a.com",)),
        ({"allow": ("x.com",), "remove": ("x.com",), "add_deny": ("y.com",)}, (), ("c.com", "y.com")),
    ],
)
def test_what_becomes_of_a_policy(change: dict[str, Any], allow: tuple[str, ...], deny: tuple[str, ...]) -> None:
    made = NetworkChange(**change)
    assert made.applied(KNOWN) == replace(KNOWN, allow=allow, deny=deny)
    assert NetworkChange.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize(
    "change", [{"add_allow": ("http//x",)}, {"deny": ("@nothing",)}, {"remove": ("d.com",)}, {"remove": ("b.com",)}]
)
def test_what_cannot_be_done(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        NetworkChange(**change).applied(KNOWN)


@pytest.mark.parametrize("data", [{"alow": []}, {"allow": "a.com"}, {"remove": None}, {"add_deny": [1]}])
def test_what_another_process_may_not_send(data: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        NetworkChange.from_dict(data)


class Slow(Holder):
    """Its records take a moment, one after the other; a network was looked for, and others had their turn."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock = asyncio.Lock()

    async def find(self, ref: str) -> Any:
        await asyncio.sleep(0)
        return await super().find(ref)

    async def on_state(self, job: Any) -> Any:
        async with self._lock:
            await asyncio.sleep(0)
            return job()


def test_changes_at_the_same_time_are_all_made_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_networks.Holder", Slow)
    asked: SandboxSpec = spec(name="box", network=Network(ask=True))

    async def scenario(holder: Holder) -> None:
        networks, info = holder.networks, holder.make(asked)
        egress = await networks.for_start(info, asked)
        assert egress is not None
        changes = [NetworkChange(add_allow=(f"a{number}.com",)) for number in range(5)]
        changes += [NetworkChange(add_deny=(f"d{number}.com",)) for number in range(5)]
        at_work = [asyncio.ensure_future(networks.set(info.id, change)) for change in changes]
        egress._remember(Target("asked.com", "", 443), "never")  # somebody answers meanwhile
        await asyncio.gather(*at_work)
        await holder.settle()
        made = await networks.current(info.id)
        assert made.allow == tuple(f"a{number}.com" for number in range(5))
        assert made.deny == ("asked.com:443", *(f"d{number}.com" for number in range(5)))
        assert NetworkSpec.from_dict(json.loads(holder.store.network(info.id) or "")) == made

    with_holder(tmp_path / "home", scenario)


def test_what_is_stored_is_the_last_whoever_is_written_first(tmp_path: Path) -> None:
    asked = spec(name="box", network=Network(ask=True))

    async def scenario(holder: Holder) -> None:
        info = holder.make(asked)
        egress = await holder.networks.for_start(info, asked)
        assert egress is not None
        egress._remember(Target("asked.com", "", 443), "always")  # is written in the background, after the next one
        await holder.networks.set(info.id, NetworkChange(add_deny=("asked.com:443",)))
        await holder.settle()
        stored = NetworkSpec.from_dict(json.loads(holder.store.network(info.id) or ""))
        assert (stored.allow, stored.deny) == ((), ("asked.com:443",))

    with_holder(tmp_path / "home", scenario)


def test_one_without_a_network_is_told_so_whatever_is_asked(tmp_path: Path) -> None:
    async def scenario(holder: Holder) -> None:
        info = holder.make(SandboxSpec.make("box"))
        for wanted in (NetworkChange(add_allow=("a.com",)), Network().spec):
            with pytest.raises(SpecError, match="was made without a network"):
                await holder.networks.set(info.id, wanted)

    with_holder(tmp_path / "home", scenario)
