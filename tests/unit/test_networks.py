"""The networks of a runtime: what outlives a wire, what a fork inherits, what is stored, and what is not."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from net_inside import World

from sloplet.controller import SandboxInfo
from sloplet.errors import SandboxNotFound, SpecError, StartFailed
from sloplet.events import EventBus
from sloplet.netspec import Network, NetworkSpec, Secret
from sloplet.netstart import check_served, environment
from sloplet.network.channel import Refused
from sloplet.networks import Networks, looks_into, with_authority, with_denied, with_placeholders
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home, new_id
from sloplet.state.store import Store
from sloplet.wire.fields import Fields
from sloplet.wire.schema import Feature, Tag

pytestmark = pytest.mark.anyone

OWNER = "owner-0001"


class Holder:
    """As much of a runtime as a network needs."""

    def __init__(self, path: Path) -> None:
        self.home = Home(path).open()
        self.store = Store(self.home)
        self.bus = EventBus()
        self.holder, self.elsewhere = "keeper", None
        self.exposed = SimpleNamespace(dial=self._dial)
        self.timeline = SimpleNamespace(asleep=self._asleep)
        self.here: set[str] = set()  # what runs here
        self.tasks: list[asyncio.Task[Any]] = []
        self.done: list[tuple[str, ...]] = []
        self.networks = Networks(self, World())  # type: ignore[arg-type]

    def make(self, spec: SandboxSpec) -> SandboxInfo:
        made = self.store.reserve(new_id(), spec, engine="fake", rung="process", holder="keeper", owner=OWNER)
        self.here.add(made.id)
        return made

    async def find(self, ref: str) -> SandboxInfo:
        return self.store.find(ref)

    def find_live(self, sandbox_id: str) -> Any:
        if sandbox_id not in self.here:
            return None
        info = self.store.find(sandbox_id)
        return SimpleNamespace(info=info, spec=info.spec)

    held_live = find_live

    async def _asleep(self, sandbox_id: str) -> bool:
        return False

    async def on_state(self, job: Callable[[], Any]) -> Any:
        return job()

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def pause(self, sandbox_id: str) -> None:
        self.done.append(("pause", sandbox_id))

    async def give_up(self, sandbox_id: str, reason: str) -> None:
        assert "budget" in reason
        self.done.append(("give up", sandbox_id))

    async def _dial(self, sandbox_id: str, port: int, elsewhere: Any) -> Any:
        self.done.append(("dial", sandbox_id, str(port)))
        raise OSError(errno.ECONNREFUSED, "refused")

    async def settle(self) -> None:
        await asyncio.gather(*self.tasks)


def with_holder(path: Path, scenario: Callable[[Holder], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        holder = Holder(path)
        try:
            await scenario(holder)
        finally:
            holder.networks.close()
            holder.store.close()

    asyncio.run(main())


def spec(**settings: Any) -> SandboxSpec:
    return SandboxSpec.make(**{"network": Network(allow=["a.example.com"]), **settings})


def made(**settings: Any) -> SandboxSpec:
    """What it runs as."""
    return with_placeholders(with_authority(spec(**settings)))


def test_placeholders_are_each_sandboxes_own() -> None:
    settings = {"secrets": {"A": Secret("a", hosts=["x.org"]), "B": Secret("b", hosts=["x.org"], placeholder="b" * 12)}}
    one, other = made(**settings), made(**settings)
    assert spec(**settings).secrets[0].placeholder == ""
    assert len({one.secrets[0].placeholder, other.secrets[0].placeholder, ""}) == 3
    assert one.secrets[1].placeholder == other.secrets[1].placeholder == "b" * 12
    assert with_placeholders(one) is one


def test_a_policy_outlives_its_holder_and_secrets_do_not(tmp_path: Path) -> None:
    asked = spec(name="box", secrets={"KEY": Secret(value="v" * 20, hosts=["a.example.com"])})
    narrow = Network(allow=["b.example.com:22"], deny=["c.example.com"]).spec

    async def first(holder: Holder) -> None:
        info = holder.make(asked)
        egress = await holder.networks.for_start(info, with_placeholders(with_authority(asked)))
        assert egress is not None
        assert egress is await holder.networks.for_start(info, asked)  # a rollback, a pause: the same
        assert egress.spec == asked.network
        await holder.networks.set_secrets(info.id, {"KEY": "s3cret-value-0123456789"})
        await holder.networks.set(info.id, narrow)
        assert await holder.networks.current(info.id) == egress.spec == narrow
        egress.log.add("x.example.com", "", 443, "deny", reason="no")

    with_holder(tmp_path / "home", first)

    async def second(holder: Holder) -> None:
        info = holder.store.find("box")
        holder.here.add(info.id)
        assert info.spec.network == asked.network
        assert await holder.networks.current(info.id) == narrow
        assert [row.name for row in await holder.networks.log(info.id, 0, 10)] == ["x.example.com"]
        egress = holder.networks.find(info.id)
        assert egress is not None
        assert egress.secrets is not None
        assert egress.secrets.values() == {}

    with_holder(tmp_path / "home", second)
    everything = b"".join(each.read_bytes() for each in (tmp_path / "home").rglob("*") if each.is_file())
    assert b"b.example.com:22" in everything  # the positive control
    assert b"s3cret-value" not in everything


def test_a_fork_has_its_parents_policy_and_values_and_a_log_of_its_own(tmp_path: Path) -> None:
    asked = made(secrets={"KEY": Secret(value="v" * 20, hosts=["a.example.com"])})

    async def scenario(holder: Holder) -> None:
        parent = holder.make(asked)
        await holder.networks.for_start(parent, asked)
        await holder.networks.set_secrets(parent.id, {"KEY": "before-that"})
        await holder.networks.set_secrets(parent.id, {"KEY": "v" * 24})
        await holder.networks.set(parent.id, Network(allow=["b.example.com"]).spec)
        holder.networks.find(parent.id).log.add("x", "", 1, "deny")  # type: ignore[union-attr]
        child = holder.make(asked)
        await holder.networks.inherit(parent.id, child.id)
        egress = await holder.networks.for_start(child, asked)
        assert egress is not None
        assert egress.spec.allow == ("b.example.com",)
        assert egress.secrets is not None
        assert egress.secrets.values() == {"KEY": "v" * 24}
        assert b"before-that" in egress.secrets.shown(asked.secrets), "hidden in what it is sent, too"
        assert await holder.networks.log(child.id, 0, 10) == []
        assert json.loads(holder.store.network(child.id) or "")["allow"] == ["b.example.com"]
        await holder.networks.set(child.id, Network().spec)
        await holder.networks.set_secrets(child.id, {"KEY": None})
        assert (await holder.networks.current(parent.id)).allow == ("b.example.com",)
        assert holder.networks.find(parent.id).secrets.values()  # type: ignore[union-attr]

    with_holder(tmp_path / "home", scenario)


def test_values_of_headers_and_the_proxy_are_the_holders_only(tmp_path: Path) -> None:
    def network(**more: Any) -> Network:
        proxy = "socks5://me:p4ss-word@proxy.example.com:1080"
        return Network(allow=["a.example.com"], headers={"a.example.com": {"X-A": "v4lue-a", **more}}, proxy=proxy)

    asked = made(name="box", network=network())

    async def first(holder: Holder) -> None:
        info = holder.make(asked)
        egress = await holder.networks.for_start(info, asked)
        assert egress is not None
        assert holder.networks.with_values() == set()
        with pytest.raises(SpecError, match="without secrets"):
            await holder.networks.set_secrets(info.id, {"KEY": "x", "x-a@a.example.com": "x"})
        assert holder.networks.with_values() == set()
        await holder.networks.set_secrets(info.id, dict(network().values))
        assert holder.networks.with_values() == {info.id}
        child = holder.make(replace(asked, name=None))
        await holder.networks.inherit(info.id, child.id)
        copy = await holder.networks.for_start(child, asked)
        assert copy is not None
        await holder.networks.set(info.id, network(**{"X-B": "v4lue-b"}).spec, {"x-b@a.example.com": "v4lue-b"})
        assert egress.injected.values() == {
            "x-a@a.example.com": "v4lue-a", "x-b@a.example.com": "v4lue-b", "@proxy": "p4ss-word",
        }  # fmt: skip
        assert copy.injected.values() == {"x-a@a.example.com": "v4lue-a", "@proxy": "p4ss-word"}, "of that moment"
        holder.networks.forget_values(child.id)
        assert holder.networks.with_values() == {info.id}

    with_holder(tmp_path / "home", first)

    async def second(holder: Holder) -> None:
        info = holder.store.find("box")
        holder.here.add(info.id)
        found = await holder.networks.of(info.id)
        assert found is not None
        assert found.spec.headers == (("a.example.com", ("X-A", "X-B")),)
        assert found.injected.values() == {}
        with pytest.raises(Refused, match="X-A"):
            found.injected.fields("a.example.com", 443)

    with_holder(tmp_path / "home", second)
    everything = b"".join(each.read_bytes() for each in (tmp_path / "home").rglob("*") if each.is_file())
    assert b"X-B" in everything  # the positive control
    assert b"v4lue" not in everything
    assert b"p4ss" not in everything


def test_what_is_gone_is_forgotten(tmp_path: Path) -> None:
    async def scenario(holder: Holder) -> None:
        info = holder.make(spec())
        egress = await holder.networks.for_start(info, info.spec)
        assert egress is not None
        holder.networks.drop(info.id)
        holder.networks.drop(info.id)
        assert holder.networks.find(info.id) is None
        holder.store.remove(info.id)
        holder.here.clear()
        with pytest.raises(SandboxNotFound):
            await holder.networks.current(info.id)

    with_holder(tmp_path / "home", scenario)


def test_what_cannot_be_changed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async def scenario(holder: Holder) -> None:
        without = holder.make(SandboxSpec.make())
        assert await holder.networks.for_start(without, without.spec) is None
        assert await holder.networks.current(without.id) == NetworkSpec()
        assert await holder.networks.log(without.id, 0, 10) == []
        with pytest.raises(SpecError, match="without a network"):
            await holder.networks.set(without.id, Network().spec)
        with pytest.raises(SpecError, match="without secrets"):
            await holder.networks.set_secrets(without.id, {"KEY": "x"})
        plain = holder.make(spec())
        with pytest.raises(SpecError, match="without secrets"):
            await holder.networks.set_secrets(plain.id, {"KEY": "x"})
        with pytest.raises(SpecError, match="taken away"):
            await holder.networks.set(plain.id, NetworkSpec())
        for network in (
            Network(allow=["GET https://a.example.com/x"]),
            Network(inspect=True),
            Network(inspect="on-demand"),
            Network(headers={"a.example.com": {"X-A": "1"}}),
        ):
            with pytest.raises(SpecError, match="not made for that"):
                await holder.networks.set(plain.id, network.spec)
        with pytest.raises(SpecError):
            await holder.networks.set(plain.id, replace(Network().spec, allow=("not a rule",)))
        assert await holder.networks.current(plain.id) == plain.spec.network
        assert holder.store.network(plain.id) is None

    with_holder(tmp_path / "home", scenario)


def test_answers_are_kept_and_a_budget_acts(tmp_path: Path) -> None:
    asked = spec(network=Network(ask=True, budget=1000, on_budget="kill"))

    async def scenario(holder: Holder) -> None:
        info = holder.make(asked)
        egress = await holder.networks.for_start(info, asked)
        assert egress is not None
        questions = holder.networks.asks(info.id)
        waiting = asyncio.ensure_future(anext(questions))
        await asyncio.sleep(0)
        deciding = asyncio.ensure_future(egress.asks.decide("b.example.com", "", 22, "why"))
        ask = await waiting
        await holder.networks.answer(info.id, ask.id, "always")
        assert await deciding == ("always", "")
        egress.set(replace(egress.spec, allow=("b.example.com:22",)))
        egress.on_policy(egress.spec)  # type: ignore[misc]
        await holder.settle()
        assert json.loads(holder.store.network(info.id) or "")["allow"] == ["b.example.com:22"]
        egress.meter.count(1000)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await holder.settle()
        assert holder.done == [("give up", info.id)]

    with_holder(tmp_path / "home", scenario)


def test_who_listens_hears_of_decisions(tmp_path: Path) -> None:
    async def scenario(holder: Holder) -> None:
        info = holder.make(spec())
        egress = await holder.networks.for_start(info, info.spec)
        assert egress is not None
        events = holder.bus.listen(info.id)
        egress.log.add("x.example.com", "", 443, "deny", reason="no")
        egress.log.add("y.example.com", "", 443, "fail", reason="gone")
        egress.log.add("a.example.com", "1.2.3.4", 443, "allow", state="open")
        egress.fail("a test says so")
        heard = [await anext(events) for _ in range(3)]
        assert [event.type for event in heard] == ["network.denied", "network.allowed", "network.failed"]
        assert heard[0].data["reason"] == "no"

    with_holder(tmp_path / "home", scenario)


def test_an_authority_only_where_tls_is_opened() -> None:
    assert with_authority(SandboxSpec.make()).authority == ""
    assert with_authority(spec()).authority == ""
    opened = with_authority(spec(network=Network(inspect=True)))
    assert opened.authority
    assert with_authority(opened).authority == opened.authority
    assert with_authority(spec(network=Network(inspect="on-demand"))).authority
    assert with_authority(spec(network=Network(headers={"a.example.com": {"X-A": "1"}}))).authority
    assert with_authority(spec(network=Network(allow=["GET https://a.example.com/x/*"]))).authority
    assert with_authority(spec(secrets={"KEY": Secret(value="v" * 20, hosts=["a.example.com"])})).authority
    assert looks_into(Network(deny=["POST https://a.example.com/x"]).spec)
    assert not looks_into(Network(allow=["@github"]).spec)


def test_variables_are_placeholders_and_never_values(tmp_path: Path) -> None:
    asked = made(secrets={"KEY": Secret(value="v" * 20, hosts=["a.example.com"])})

    async def scenario(holder: Holder) -> None:
        info = holder.make(asked)
        egress = await holder.networks.for_start(info, asked)
        await holder.networks.set_secrets(info.id, {"KEY": "s3cret-value-0123456789"})
        found = environment(egress, single_user=False)
        assert found["KEY"] == asked.secrets[0].placeholder
        assert "SSL_CERT_FILE" in found
        assert "s3cret" not in str(found)
        assert environment(None, single_user=False) == {}

    with_holder(tmp_path / "home", scenario)


def test_a_network_that_the_agent_does_not_serve_is_no_start(tmp_path: Path) -> None:
    async def scenario(holder: Holder) -> None:
        info = holder.make(spec())
        egress = await holder.networks.for_start(info, info.spec)
        check_served(egress, Fields((Tag.FEATURES, int(Feature.EGRESS))))
        check_served(None, Fields())
        for answer in (Fields(), Fields((Tag.FEATURES, 0))):
            with pytest.raises(StartFailed, match="network could not be set up"):
                check_served(egress, answer)

    with_holder(tmp_path / "home", scenario)


def test_a_link_leads_to_a_sandbox_by_its_name(tmp_path: Path) -> None:
    async def scenario(holder: Holder) -> None:
        other = holder.make(SandboxSpec.make("pg"))
        info = holder.make(spec(links={"db": "pg:5432"}))
        egress = await holder.networks.for_start(info, info.spec)
        assert egress is not None
        assert egress.links == {"db": ("pg", 5432)}
        with pytest.raises(OSError, match="refused"):
            await egress.dial_link("pg", 5432)
        assert holder.done == [("dial", other.id, "5432")]
        with pytest.raises(SandboxNotFound):
            await egress.dial_link("nobody", 5432)

    with_holder(tmp_path / "home", scenario)


def test_only_what_was_refused_here_is_told_as_refused() -> None:
    lie = Fields((Tag.EXIT_CODE, 1), (Tag.DENIED, "an agent's word"))
    told = with_denied(lie, ["a reason", "x" * 5000])
    assert told.integer(Tag.EXIT_CODE) == 1
    assert told.all(Tag.DENIED) == [b"a reason", b"x" * 500]
    assert Tag.DENIED not in with_denied(lie, [])
