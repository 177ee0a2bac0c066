"""Questions: put to whoever listens, answered once for all who wait, and never by silence."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator

import pytest
from net_inside import Inside, World, echo, with_world

from sloplet.errors import SpecError
from sloplet.netspec import Network, NetworkSpec
from sloplet.network.asks import Ask, Asks

pytestmark = pytest.mark.anyone

PUBLIC = "93.184.216.34"


async def first(questions: AsyncIterator[Ask]) -> Ask:
    return await asyncio.wait_for(anext(questions), 5)


def test_without_anybody_to_ask_the_answer_is_no() -> None:
    async def main() -> None:
        assert await Asks("box").decide("a.example.com", "", 443, "why") == ("no", "nobody is there to be asked")

    asyncio.run(main())


def test_equal_questions_share_one_answer() -> None:
    async def main() -> None:
        asks = Asks("box")
        questions = asks.listen()
        waiting = [asyncio.ensure_future(asks.decide("a.example.com", "", 443, "why")) for _ in range(5)]
        other = asyncio.ensure_future(asks.decide("a.example.com", "", 444, "why"))
        ask = await first(questions)
        assert (ask.name, ask.port, ask.sandbox, ask.target) == ("a.example.com", 443, "box", "a.example.com:443")
        assert asks.answer(ask.id, "once")
        assert not asks.answer(ask.id, "never")  # too late
        assert await asyncio.gather(*waiting) == [("once", "")] * 5
        assert not other.done()
        assert asks.answer((await first(questions)).id, "no")
        assert await other == ("no", "")
        with pytest.raises(SpecError):
            asks.answer(1, "perhaps")

    asyncio.run(main())


def test_silence_and_leaving_are_no() -> None:
    async def main() -> None:
        asks = Asks("box", patience=0.05)
        questions = asks.listen()
        answer, why = await asks.decide("a.example.com", "", 443, "why")
        assert answer == "no"
        assert "nobody answered" in why
        assert asks.pending == []
        asks = Asks("box")
        questions = asks.listen()
        waiting = asyncio.ensure_future(asks.decide("a.example.com", "", 443, "why"))
        await first(questions)
        await questions.aclose()  # type: ignore[attr-defined]
        assert (await waiting)[0] == "no"
        waiting = asyncio.ensure_future(asks.decide("a.example.com", "", 443, "why"))
        assert (await waiting)[0] == "no"

    asyncio.run(main())


def test_who_gives_up_does_not_leave_its_question_behind() -> None:
    """A program that connects and leaves, again and again: neither is anybody bothered, nor is the room used up."""

    async def main() -> None:
        asks = Asks("box")
        questions = asks.listen()
        for number in range(1000):
            waiting = asyncio.ensure_future(asks.decide(f"a{number}.example.com", "", 443, "why"))
            while not asks.pending:
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert asks.pending == []
        assert all(len(asker.queue) <= 64 for asker in asks._askers)
        one = asyncio.ensure_future(asks.decide("last.example.com", "", 443, "why"))
        other = asyncio.ensure_future(asks.decide("last.example.com", "", 443, "why"))
        ask = await first(questions)
        assert ask.name == "last.example.com"
        one.cancel()  # somebody else still waits
        await asyncio.gather(one, return_exceptions=True)
        assert asks.answer(ask.id, "once")
        assert await other == ("once", "")

    asyncio.run(main())


def test_who_comes_later_sees_what_waits() -> None:
    async def main() -> None:
        asks = Asks("box")
        one = asks.listen()
        waiting = asyncio.ensure_future(asks.decide("a.example.com", "", 443, "why"))
        seen = await first(one)
        assert await first(asks.listen()) == seen
        asks.answer(seen.id, "always")
        assert await waiting == ("always", "")
        asks.close()
        with pytest.raises(StopAsyncIteration):
            await first(one)

    asyncio.run(main())


def test_answers_decide_connections_once_or_by_a_rule() -> None:
    async def scenario(world: World) -> None:
        for number, name in enumerate(("once", "always", "no", "never")):
            await world.serve(f"93.184.216.{number + 1}", 7000, echo, f"{name}.example.com")
        inside = await Inside(Network(ask=True), world).hello()
        kept: list[NetworkSpec] = []
        inside.egress.on_policy = kept.append
        questions = inside.egress.asks.listen()
        answers: list[str] = []

        async def person() -> None:
            async for ask in questions:
                answers.append(ask.name)
                inside.egress.asks.answer(ask.id, ask.name.partition(".")[0])

        asking = asyncio.ensure_future(person())
        for _ in range(2):
            for name in ("once", "always", "no", "never"):
                program = await inside.connect(f"{name}.example.com", 7000)
                assert program.replied.is_set() == (name in ("once", "always"))
        assert [name.partition(".")[0] for name in answers] == ["once", "always", "no", "never", "once", "no"]
        spec = inside.egress.spec
        assert (spec.allow, spec.deny) == (("always.example.com:7000",), ("never.example.com:7000",))
        assert kept[-1] == spec
        assert inside.egress.open == 4  # answers to others have cut nobody
        told = [row.reason for row in inside.log.read() if row.name == "never.example.com"]
        assert told[0] == "never.example.com:7000 was asked for, and the answer was: never"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert (await inside.connect("once.example.com", 7000)).errno == errno.EACCES
        await inside.close()

    with_world(scenario)


def test_a_question_about_nothing_public_is_not_put() -> None:
    async def scenario(world: World) -> None:
        inside = await Inside(Network(ask=True), world).hello()
        questions = inside.egress.asks.listen()
        program = await inside.connect("169.254.169.254", 80)
        assert program.errno == errno.EACCES
        assert inside.egress.asks.pending == []
        await questions.aclose()  # type: ignore[attr-defined]
        await inside.close()

    with_world(scenario)
