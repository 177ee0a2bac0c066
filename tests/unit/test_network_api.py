"""``box.network`` over a controller of records: who is asked, what an answer means, and what is sent of a secret."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest
from cli_controller import Records, info

from sloplet import AsyncSandbox, Network, Sandbox, Secret
from sloplet.errors import SandboxDead, SecretUnavailable, SpecError
from sloplet.netchange import NetworkChange
from sloplet.netspec import NetworkSpec
from sloplet.network.asks import Ask
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

ASK = Ask(1, "id-dev", "x.org", "", 443, "no rule")


class Asking(Records):
    """Questions are put by a test, answers are kept."""

    def __init__(self) -> None:
        super().__init__(info("dev"))
        self.put_in: asyncio.Queue[Ask] = asyncio.Queue()
        self.answers: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.listening = 0
        self.killed: list[str] = []
        self.failing: Exception | None = None

    async def create(self, spec: SandboxSpec) -> Any:
        return replace(info(spec.name or "dev"), name=spec.name, spec=spec)

    async def asks(self, sandbox_id: str) -> AsyncIterator[Ask]:
        self.listening += 1
        try:
            while True:
                yield await self.put_in.get()
        finally:
            self.listening -= 1

    async def answer(self, sandbox_id: str, ask_id: int, verdict: str) -> None:
        self.answers.put_nowait((ask_id, verdict))

    async def set_secrets(self, sandbox_id: str, values: Mapping[str, str | None]) -> None:
        if self.failing is not None:
            raise self.failing
        await super().set_secrets(sandbox_id, values)

    async def kill(self, sandbox_id: str) -> None:
        self.killed.append(sandbox_id)


def asked(ask: Any, work: Callable[[Asking], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            held: Any = Asking()
            async with AsyncSandbox(network=Network(ask=ask), controller=held):
                await work(held)
            while held.listening:
                await asyncio.sleep(0.005)

    asyncio.run(main())


async def _verdict(held: Asking, question: Ask = ASK) -> str:
    held.put_in.put_nowait(question)
    number, verdict = await held.answers.get()
    assert number == question.id
    return verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [(True, "once"), (False, "no"), ("once", "once"), ("always", "always"), ("never", "never"), ("no", "no"),
     (None, "no"), ("yes please", "no"), (1, "no")],
)  # fmt: skip
def test_what_an_answer_means(answer: Any, verdict: str) -> None:
    async def work(held: Asking) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        assert await _verdict(held) == verdict

    asked(lambda question: answer, work)


def test_a_coroutine_may_be_asked() -> None:
    async def ask(question: Ask) -> str:
        await asyncio.sleep(0)
        return "always" if question.target == "x.org:443" else "no"

    async def work(held: Asking) -> None:
        assert await _verdict(held) == "always"

    asked(ask, work)


def test_what_a_function_raises_is_a_no_and_is_told() -> None:
    told: list[Any] = []

    def ask(question: Ask) -> str:
        raise RuntimeError("a bug of the user's")

    async def work(held: Asking) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        assert await _verdict(held) == "no"
        assert [type(error) for error in told] == [RuntimeError]

    asked(ask, work)


def test_a_function_that_waits_for_a_person_holds_up_nobody() -> None:
    answered = threading.Event()

    def ask(question: Ask) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        if question.id == 1:
            return answered.wait(20)
        return True

    async def work(held: Asking) -> None:
        held.put_in.put_nowait(ASK)
        assert await _verdict(held, Ask(2, "id-dev", "y.org", "", 443, "")) == "once"
        answered.set()
        assert await held.answers.get() == (1, "once")

    asked(ask, work)


def test_the_synchronous_sandbox_is_asked_too() -> None:
    held: Any = None

    async def make() -> Any:
        return Asking()

    from sloplet.portal import portal

    held = portal().call(make())
    with Sandbox(network=Network(ask=lambda question: "never"), controller=held):
        assert portal().call(_verdict(held)) == "never"


# -- secrets ------------------------------------------------------------------------------------------


def _secret(**source: Any) -> dict[str, Any]:
    secret = Secret(**source, hosts=["api.example.com"])
    return {"network": Network(allow=["api.example.com"]), "secrets": {"TOKEN": secret}}


def run(work: Callable[[Asking], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await work(Asking())

    asyncio.run(main())


def test_values_are_read_here_and_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "from the environment")

    async def work(held: Any) -> None:
        box = AsyncSandbox("dev2", controller=held, **_secret(env="MINE"))
        assert "from the environment" not in str(box.spec)
        await box.start()
        assert held.values == {"TOKEN": "from the environment"}
        await box.network.set_secret("TOKEN", "rotated")
        await box.network.set_secret("TOKEN", Secret(command="echo again", hosts=["x.org"]))
        assert held.values == {"TOKEN": "again"}
        await box.network.set_secret("TOKEN", None)
        assert held.values == {"TOKEN": None}
        with pytest.raises(SpecError):
            await box.network.set_secret("TOKEN", 7)  # type: ignore[arg-type]

    run(work)


def test_a_missing_value_is_known_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINE", raising=False)

    async def work(held: Any) -> None:
        made = len(held.boxes)
        with pytest.raises(SecretUnavailable, match="MINE"):
            await AsyncSandbox(controller=held, **_secret(env="MINE")).start()
        assert (len(held.boxes), held.killed) == (made, [])

    run(work)


@pytest.mark.parametrize(("name", "killed"), [(None, ["id-dev"]), ("dev2", [])])
def test_one_that_cannot_be_given_its_values_is_not_left(name: str | None, killed: list[str]) -> None:
    async def work(held: Any) -> None:
        held.failing = SandboxDead("it died")
        with pytest.raises(SandboxDead):
            await AsyncSandbox(name, controller=held, **_secret(value="v")).start()
        assert held.killed == killed

    run(work)


# -- policies -----------------------------------------------------------------------------------------


def test_policies_are_changed_by_what_they_are() -> None:
    async def work(held: Any) -> None:
        box = AsyncSandbox(controller=held, network=Network(allow=["a.com"], budget="1g"))
        held.boxes["id-dev"] = await box.start()
        assert await box.network.policy() == box.spec.network
        assert (await box.network.allow("B.com.", "@github")).allow == ("@github", "a.com", "b.com")
        assert (await box.network.deny("a.com")).allow == ("@github", "b.com")
        assert (await box.network.policy()).budget == 2**30
        assert await box.network.set(allow=[]) == NetworkSpec("rules", (), ("a.com",), budget=2**30)
        assert await box.network.set(Network(learn=True)) == NetworkSpec("learn")
        for wrong in ({}, {"allow": "a.com"}, {"allow": ["http//x"]}, {"network": "none"}):
            with pytest.raises(SpecError):
                await box.network.set(**wrong)
        assert await box.network.policy() == NetworkSpec("learn")

    run(work)


def test_a_part_is_changed_by_whoever_holds_it() -> None:
    """It is never read here and written back: what another has changed in between would be lost."""

    class Holder(Asking):
        async def network(self, sandbox_id: str) -> NetworkSpec:
            raise AssertionError("it was read to be written back")

        set_network = network  # type: ignore[assignment]

        async def change_network(self, sandbox_id: str, change: NetworkChange) -> NetworkSpec:
            self.asked.append(change)  # type: ignore[arg-type]
            return NetworkSpec("rules")

    async def work(_: Any) -> None:
        held: Any = Holder()
        box = AsyncSandbox(controller=held, network=Network())
        await box.network.allow("A.com", "@github")
        await box.network.deny("b.com.")
        await box.network.remove("C.com")
        await box.network.set(allow=["d.com"])
        await box.network.set(deny=[])
        assert held.asked == [
            NetworkChange(add_allow=("a.com", "@github")),
            NetworkChange(add_deny=("b.com",)),
            NetworkChange(remove=("c.com",)),
            NetworkChange(allow=("d.com",)),
            NetworkChange(deny=()),
        ]
        for wrong in (box.network.allow, box.network.deny, box.network.remove):
            with pytest.raises(SpecError):
                await wrong("http//x")
        assert len(held.asked) == 5

    run(work)
