"""The network through a keeper: what is asked arrives as it was asked, errors come back as they are, values of secrets
are in no log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest
from keeper_toy import ToyRuntime, World, keeper, run

from sloplet.controller import Port, SandboxInfo
from sloplet.errors import PortUnavailable, SandboxNotFound, SpecError
from sloplet.netchange import NetworkChange
from sloplet.netspec import Network, NetworkSpec, SecretSpec
from sloplet.network.asks import Ask
from sloplet.network.log import Decision
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

VALUE = "hunter2-very-secret"
INFO = SandboxInfo(
    "toybox", "dev", "running", "fake", "process", "keeper", 1.0, None, "/workspace", SandboxSpec.make("dev")
)
ROW = Decision(3, 2, 1.5, "toybox", "pypi.org", "1.2.3.4", 443, "deny", "default", "not allowed")
SECRET = SecretSpec("TOKEN", ("api.example.com",), ("headers", "query"), "sloplet-secret-token-0123")
ASK = Ask(7, "toybox", "x.org", "", 443, "no rule")


class NetworkToy(ToyRuntime):
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__(_nothing)
        self.asked: list[tuple[Any, ...]] = []
        self.questions: asyncio.Queue[Ask] = asyncio.Queue()
        self.listening = 0
        self.changing = False

    def holds(self, sandbox_id: str) -> bool:
        return sandbox_id == INFO.id

    async def find(self, ref: str) -> SandboxInfo:
        if ref in (INFO.id, INFO.name):
            return INFO
        raise SandboxNotFound(f"there is no sandbox {ref!r}")

    async def set_network(
        self, sandbox_id: str, network: NetworkSpec, values: Mapping[str, str | None] | None = None
    ) -> None:
        self.asked.append((sandbox_id, network, *([dict(values)] if values else [])))

    async def change_network(self, sandbox_id: str, change: NetworkChange) -> NetworkSpec:
        self.asked.append((sandbox_id, change))
        return change.applied(NetworkSpec("rules", ("pypi.org",)))

    async def network(self, sandbox_id: str) -> NetworkSpec:
        return NetworkSpec("rules", ("pypi.org",), asks=True)

    async def network_log(self, sandbox_id: str, *, after: int, limit: int) -> list[Decision]:
        return [replace(ROW, seq=number) for number in range(after + 1, min(after + limit, 3000) + 1)]

    async def learned(self, sandbox_id: str) -> NetworkSpec:
        return NetworkSpec("rules", ("learned.org",))

    async def secrets(self, sandbox_id: str) -> tuple[SecretSpec, ...]:
        return (SECRET,)

    async def set_secrets(self, sandbox_id: str, values: Mapping[str, str | None]) -> None:
        self.asked.append((sandbox_id, dict(values)))
        if "REFUSED" in values:
            raise SpecError("the sandbox was made without secrets")

    async def asks(self, sandbox_id: str) -> AsyncIterator[Ask]:
        if sandbox_id != INFO.id:
            raise SpecError("the sandbox was made without a network")
        self.listening += 1
        try:
            while True:
                yield await self.questions.get()
        finally:
            self.listening -= 1

    async def answer(self, sandbox_id: str, ask_id: int, verdict: str) -> None:
        self.asked.append((sandbox_id, ask_id, verdict))

    async def expose(self, sandbox_id: str, port: int, *, host_port: int, address: str) -> Port:
        if host_port == 1:
            raise PortUnavailable("port 1 is taken", hint="another")
        return Port(port, address, host_port or 40000)

    async def ports(self, sandbox_id: str) -> list[Port]:
        return [Port(80, "127.0.0.1", 40000)]

    async def unexpose(self, sandbox_id: str, port: int) -> None:
        self.asked.append((sandbox_id, port))


async def _nothing(stream: object) -> None: ...


def with_toy(work: Callable[[World, NetworkToy], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        toy = NetworkToy()
        async with keeper(None, toy) as world:
            await work(world, toy)

    run(main())


def test_all_that_can_be_asked() -> None:
    async def work(world: World, toy: NetworkToy) -> None:
        client = world.client
        policy = NetworkSpec("rules", ("a.com",), ("b.com",), budget=2**40)
        await client.set_network("toybox", policy)
        assert toy.asked == [("toybox", policy)]
        valued = Network(headers={"a.com": {"X-A": "value"}}, proxy="socks5://me:pass@b.com:1")
        await client.set_network("toybox", valued.spec, valued.values)
        assert toy.asked[-1] == ("toybox", valued.spec, {"x-a@a.com": "value", "@proxy": "pass"})
        change = NetworkChange(deny=(), remove=("pypi.org",), add_allow=("a.com",), add_deny=("b.com",))
        assert await client.change_network("toybox", change) == NetworkSpec("rules", ("a.com",), ("b.com",))
        assert toy.asked[-1] == ("toybox", change)
        with pytest.raises(SpecError, match=r"there is no rule 'x\.org'"):
            await client.change_network("toybox", NetworkChange(remove=("x.org",)))
        assert await client.network("toybox") == NetworkSpec("rules", ("pypi.org",), asks=True)
        assert await client.learned("toybox") == NetworkSpec("rules", ("learned.org",))
        assert await client.secrets("toybox") == (SECRET,)
        assert await client.network_log("toybox", after=2, limit=1) == [ROW]
        assert len(await client.network_log("toybox", limit=5000)) == 3000  # more than a frame holds
        await client.answer("toybox", 7, "always")
        assert toy.asked[-1] == ("toybox", 7, "always")
        assert await client.expose("toybox", 80, host_port=8080) == Port(80, "127.0.0.1", 8080)
        assert await client.ports("toybox") == [Port(80, "127.0.0.1", 40000)]
        await client.unexpose("toybox", 80)
        assert toy.asked[-1] == ("toybox", 80)

    with_toy(work)


def test_errors_keep_their_class() -> None:
    async def work(world: World, toy: NetworkToy) -> None:
        with pytest.raises(PortUnavailable, match="port 1 is taken"):
            await world.client.expose("toybox", 80, host_port=1)
        with pytest.raises(SandboxNotFound):
            await world.client.network("nobody")
        with pytest.raises(SpecError, match="without a network"):
            await anext(world.client.asks("another"))

    with_toy(work)


def test_values_arrive_and_are_never_repeated() -> None:
    async def work(world: World, toy: NetworkToy) -> None:
        told: list[str] = []
        world.server.log = told.append
        await world.client.set_secrets("toybox", {"TOKEN": VALUE, "OLD": None})
        assert toy.asked == [("toybox", {"TOKEN": VALUE, "OLD": None})]
        for values in ({"REFUSED": VALUE}, {"TOKEN": [VALUE]}, {"TOKEN": 7}):
            with pytest.raises(SpecError) as error:
                await world.client.set_secrets("toybox", values)  # type: ignore[arg-type]
            assert VALUE not in str(error.value)
        assert VALUE not in "".join(told)

    with_toy(work)


def test_questions_come_as_they_are_asked_and_nobody_listens_after_the_last() -> None:
    async def work(world: World, toy: NetworkToy) -> None:
        await world.client.status()
        source = world.client.asks("toybox")
        while not toy.listening:  # from the call on, before anything is awaited of it
            await asyncio.sleep(0)
        toy.questions.put_nowait(ASK)
        assert await anext(source) == ASK
        await source.aclose()  # type: ignore[attr-defined]
        while toy.listening:
            await asyncio.sleep(0.005)

    with_toy(work)
