"""Networks through a sandbox's life: who may change them, what is kept while it sleeps, and what a start takes.

The engine is the fake one, given a network that leads nowhere: what is decided here happens before anything leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from keeper_toy import keeper
from live_fake import LiveAgent, World, in_world

from sloplet import AsyncSandbox, Network, Secret, holder
from sloplet.engines import fake
from sloplet.engines.fakeagent.vfs import ROOT
from sloplet.errors import SandboxDead, SandboxError, SandboxNotFound, SlopletError, StartFailed
from sloplet.keeper.client import KeeperClient
from sloplet.netchange import NetworkChange
from sloplet.netstart import furnish
from sloplet.network.trust import BUNDLES
from sloplet.runtime import Runtime
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home
from sloplet.wire.fields import Fields
from sloplet.wire.mux import AgentStream
from sloplet.wire.schema import Feature, Op, Tag

pytestmark = pytest.mark.anyone

VALUE = "hunter2-very-secret"
OPEN = Network(allow=["a.example.com"])
SECRETS = {"KEY": Secret(VALUE, hosts=["a.example.com"])}
Work = Callable[[World], Coroutine[Any, Any, None]]


class Networked(LiveAgent):
    """Serves a network, says it. ``spoiled``: no certificate can be put into its trust store. ``stuck``: it answers
    nothing after HELLO; "files": only nothing about files."""

    spoiled = False
    stuck = ""

    async def greet(self) -> None:
        hello = self.mux.hello

        def say(fields: Fields) -> None:
            if self.spoiled:
                self.kernel.vfs.mkdir(BUNDLES[0], "/", ROOT, parents=True)
            hello(Fields(*((tag, value) for tag, value in fields if tag is not Tag.FEATURES), (Tag.FEATURES, 1)))

        assert Feature.EGRESS == 1
        self.mux.hello = say  # type: ignore[method-assign]
        await super().greet()

    def accept(self, stream: AgentStream) -> None:
        if self.stuck == "wholly":
            self.loop.remove_reader(self.fd)
        elif self.stuck != "files" or stream.request.integer(Tag.OP) not in (Op.READ, Op.WRITE, Op.STAT):
            super().accept(stream)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(work: Work, holder: str = "embedded") -> None:
        async def networked(made: World) -> None:
            monkeypatch.setattr(fake, "FakeAgent", Networked)
            monkeypatch.setattr(fake, "wants_egress", lambda spec: False)
            await work(made)

        in_world(tmp_path / "home", monkeypatch, networked, holder)

    return run


@asynccontextmanager
async def beside(made: World) -> AsyncIterator[tuple[KeeperClient, Runtime]]:
    """A keeper of the same home."""
    runtime = Runtime(Home(made.path), holder="keeper")
    async with keeper(None, runtime) as found:  # type: ignore[arg-type]
        yield found.client, runtime


def changes(controller: Any, sandbox_id: str) -> list[Coroutine[Any, Any, Any]]:
    return [
        controller.set_network(sandbox_id, Network().spec),
        controller.change_network(sandbox_id, NetworkChange(deny=("a.example.com",))),
        controller.set_secrets(sandbox_id, {"KEY": None}),
        controller.answer(sandbox_id, 1, "always"),
        anext(controller.asks(sandbox_id)),
    ]


def looks(controller: Any, sandbox_id: str) -> list[Coroutine[Any, Any, Any]]:
    return [
        controller.network(sandbox_id),
        controller.secrets(sandbox_id),
        controller.network_log(sandbox_id),
        controller.learned(sandbox_id),
    ]


# -- whose it is ------------------------------------------------------------------------------------------------------


def test_only_its_holder_changes_the_network_of_one_that_runs(world: Callable[..., None]) -> None:
    """Else it is said to be changed, and is not."""

    async def work(made: World) -> None:
        box = await made.box(network=OPEN, secrets=SECRETS)
        async with beside(made) as (client, runtime):
            for asked in (*changes(client, box.id), *looks(client, box.id)):
                with pytest.raises(SandboxError, match="held by a running program"):
                    await asked
            for asked in (*changes(runtime, box.id), *looks(runtime, box.id)):
                with pytest.raises(SandboxNotFound):
                    await asked
            assert runtime.networks.find(box.id) is None
        assert await box.network.policy() == OPEN.spec
        assert made.runtime.networks.with_values() == {box.id}
        assert made.runtime.store.network(box.id) is None

    world(work)


def test_where_no_keeper_runs_it_is_said_too(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        box = await made.box(network=OPEN, secrets=SECRETS)
        client = KeeperClient(made.runtime.home, start=False)
        for asked in looks(client, box.id):
            with pytest.raises(SandboxError, match="held by a running program"):
                await asked

    world(work)


def test_one_that_sleeps_is_changed_by_who_held_it_or_wakes_it(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        box = await made.box(network=OPEN, secrets=SECRETS)
        await box.pause()
        async with beside(made) as (client, _):
            assert await client.network(box.id) == OPEN.spec
            for asked in changes(client, box.id):
                with pytest.raises(SandboxError, match="may wake it"):
                    await asked
            await box.network.allow("b.example.com")
            await client.resume(box.id)
            assert (await client.network(box.id)).allow == ("a.example.com", "b.example.com")
            await client.set_network(box.id, Network().spec)
            with pytest.raises(SlopletError):
                await box.network.policy()
            await client.kill(box.id)

    world(work)


def test_of_the_dead_there_is_only_the_log(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        async with beside(made) as (client, runtime):
            spec = SandboxSpec.make("dev", engine="fake", network=OPEN, secrets=SECRETS)
            box = await client.create(spec)
            await client.set_secrets(box.id, {"KEY": VALUE})
            egress = runtime.networks.find(box.id)
            assert egress is not None
            egress.log.add("x.example.com", "", 443, "deny")
            live = runtime.find_live(box.id)
            assert live is not None
            live.instance.kill()
            await live.gone.wait()
            for asked in changes(client, box.id):
                with pytest.raises(SandboxDead, match="is dead"):
                    await asked
            assert [row.name for row in await client.network_log(box.id)] == ["x.example.com"]
            assert await client.network(box.id) == OPEN.spec
            assert runtime.networks.with_values() == set()
            assert runtime.held == 0
            await client.kill(box.id)

    world(work)


# -- what it has of its template --------------------------------------------------------------------------------------


def test_what_a_template_gives_is_told(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        runtime = made.runtime
        box = await made.box("dev", network=OPEN, secrets=SECRETS)
        await box.template("warm")
        web = await made.box("web", template="warm", secrets={"MORE": Secret(VALUE, hosts=["b.example.com"])})
        assert web.spec.network.mode == "none"
        for asleep in (False, True):
            if asleep:
                await web.pause()
            assert await runtime.network(web.id) == OPEN.spec
            assert [item.name for item in await runtime.secrets(web.id)] == ["KEY", "MORE"]
        await runtime.set_secrets(web.id, {"KEY": VALUE, "MORE": None})

    world(work)


def test_of_a_dead_one_what_its_template_gave_is_told(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        runtime = made.runtime
        await (await made.box("dev", network=OPEN)).template("warm")
        web = await made.box("web", template="warm")
        live = runtime.find_live(web.id)
        assert live is not None
        live.instance.kill()
        await live.gone.wait()
        runtime.networks.drop(web.id)  # as if by the next keeper
        assert await runtime.network(web.id) == OPEN.spec

    world(work, holder="keeper")


# -- while it sleeps --------------------------------------------------------------------------------------------------


def test_who_has_the_values_of_a_sleeper_stays(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        box = await made.box("dev", network=OPEN, secrets=SECRETS)
        await box.pause()
        assert made.runtime.held == 1
        await made.runtime.set_secrets(box.id, {"KEY": None})
        assert made.runtime.held == 0
        await made.runtime.set_secrets(box.id, {"KEY": VALUE})  # it sleeps on
        assert made.engine.running == set()
        assert made.runtime.held == 1
        await box.kill()
        assert made.runtime.held == 0

    world(work, holder="keeper")


def test_until_its_time_is_over(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        gone = asyncio.Event()
        box = await made.box("dev", network=OPEN, secrets=SECRETS, ports=[80], ttl=1)
        await box.pause()
        assert made.runtime.held == 1
        made.runtime.on_gone = gone.set
        await gone.wait()
        assert made.runtime.held == 0
        with pytest.raises(SandboxNotFound, match="time to live"):
            await box.run("true")

    world(work, holder="keeper")


def test_one_that_was_woken_before_its_time_was_over_ends_once(world: Callable[..., None]) -> None:
    async def work(made: World) -> None:
        box = await made.box("dev", network=OPEN, secrets=SECRETS, ttl=1)
        await box.pause()
        await box.resume()
        live = made.runtime.find_live(box.id)
        assert live is not None
        await live.gone.wait()
        assert made.runtime.held == 0

    world(work, holder="keeper")


# -- what a start takes -----------------------------------------------------------------------------------------------


async def _wake(box: AsyncSandbox) -> AsyncSandbox:
    await box.pause()
    await box.resume()
    return box


async def _roll_back(box: AsyncSandbox) -> AsyncSandbox:
    await box.rollback("base")
    return box


async def _fork(box: AsyncSandbox) -> AsyncSandbox:
    return (await box.fork(1))[0]


AGAIN = [_wake, _roll_back, _fork]


async def _inspection(box: AsyncSandbox) -> str:
    return next(item.how for item in await box.guarantees() if item.control == "inspection")


def test_what_cannot_be_trusted_does_not_start(world: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(made: World) -> None:
        monkeypatch.setattr(Networked, "spoiled", True)
        with pytest.raises(StartFailed, match=BUNDLES[0]):
            await made.box(network=OPEN, secrets=SECRETS)
        await made.box(network=OPEN)  # its TLS is not opened

    world(work)


def test_the_first_certificate_of_what_was_saved_without_one(
    world: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts from a saved state, but nothing in there trusts anybody yet: a first start."""

    async def work(made: World) -> None:
        await (await made.box("dev", network=OPEN)).template("warm")
        monkeypatch.setattr(Networked, "spoiled", True)
        with pytest.raises(StartFailed, match=BUNDLES[0]):
            await made.box(template="warm", secrets=SECRETS)

    world(work)


@pytest.mark.parametrize("again", AGAIN)
def test_what_was_saved_wakes_whatever_became_of_its_trust_store(
    world: Callable[..., None], monkeypatch: pytest.MonkeyPatch, again: Callable[[AsyncSandbox], Any]
) -> None:
    async def work(made: World) -> None:
        box = await made.box(network=OPEN, secrets=SECRETS)
        assert "not trust" not in await _inspection(box)
        await box.snapshot("base")
        events = made.runtime.events()
        monkeypatch.setattr(Networked, "spoiled", True)
        woken = await again(box)
        assert (await woken.run("echo here")).stdout == "here\n"
        while (event := await anext(events)).type != "trust.failed":
            pass
        assert BUNDLES[0] in event.data["reason"]
        assert BUNDLES[0] in await _inspection(woken)
        monkeypatch.setattr(Networked, "spoiled", False)
        assert "not trust" not in await _inspection(await again(box))

    world(work)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is waited for is short; what would be waited for otherwise."""
    found: list[float] = []

    async def hasty(live: Any, timeout: float, *, again: bool) -> None:
        found.append(timeout)
        await furnish(live, 0.05, again=again)

    monkeypatch.setattr(holder, "furnish", hasty)
    return found


@pytest.mark.parametrize("stuck", ["wholly", "files"])
def test_an_agent_that_answers_hello_and_nothing_more_is_no_start(
    world: Callable[..., None], monkeypatch: pytest.MonkeyPatch, patience: list[float], stuck: str
) -> None:
    async def work(made: World) -> None:
        monkeypatch.setattr(Networked, "stuck", stuck)
        with pytest.raises(StartFailed, match="does not answer"):
            await made.box(network=OPEN, secrets=SECRETS)
        assert patience == [holder._START_TIMEOUT]

    world(work)


def test_what_wakes_must_answer(world: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it slept in would be gone else. Files alone that are not to be had are like others that are in the way."""

    async def work(made: World) -> None:
        box = await made.box(network=OPEN, secrets=SECRETS)
        await box.pause()

        async def hasty(live: Any, timeout: float, *, again: bool) -> None:
            await furnish(live, 0.05, again=again)

        monkeypatch.setattr(holder, "furnish", hasty)
        monkeypatch.setattr(Networked, "stuck", "wholly")
        with pytest.raises(StartFailed, match="does not answer"):
            await box.resume()
        assert (await box.info()).state == "paused"
        monkeypatch.setattr(Networked, "stuck", "files")
        await box.resume()
        assert "does not answer" in await _inspection(box)

    world(work)
