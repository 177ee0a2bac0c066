"""Idempotency keys: done once, whoever asks again when, and whatever was killed in between."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel
from starlette.requests import Request

from sloplet.errors import KeeperError, QuotaExceeded, RequestInvalid, SandboxError, SlopletError, SpecError
from sloplet.server import idempotency
from sloplet.server.caller import Caller
from sloplet.server.idempotency import Done, Job, Once
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


class Made(BaseModel):
    number: int


@dataclass
class Maker:
    """What is asked for: it counts how often."""

    error: SlopletError | None = None
    gate: asyncio.Event | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    count: int = 0

    async def __call__(self) -> Made:
        self.count += 1
        self.began.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Made(number=self.count)


def request(key: str | None = "k", secret: str = "slp_a", path: str = "/v1/sandboxes", query: str = "") -> Request:
    headers = [(b"authorization", f"Bearer {secret}".encode())]
    if key is not None:
        headers.append((b"idempotency-key", key.encode("latin-1")))
    scope = {
        "type": "http", "method": "POST", "path": path, "query_string": query.encode(), "headers": headers,
        "server": ("localhost", 80), "scheme": "http", "root_path": "",
    }  # fmt: skip
    return Request(scope)


def caller(key: str = "key1", tenant: str = "t") -> Caller:
    return cast(Caller, SimpleNamespace(tenant=SimpleNamespace(name=tenant), key=SimpleNamespace(id=key)))


def run(tmp_path: Path, work: Callable[[Once], Awaitable[None]]) -> None:
    async def whole() -> None:
        once = Once(Done(Home(tmp_path / "home").open()))
        try:
            await work(once)
        finally:
            await once.aclose()

    asyncio.run(whole())


def test_the_same_again_is_the_same_answer(tmp_path: Path) -> None:
    async def work(once: Once) -> None:
        make = Maker()
        first = await once.answer(request(), caller(), b"{}", Job(make))
        again = await once.answer(request(), caller(), b"{}", Job(make))
        assert (first.status_code, json.loads(bytes(first.body))) == (201, {"number": 1})
        assert "idempotent-replayed" not in first.headers
        assert (again.status_code, again.body) == (201, first.body)
        assert again.headers["idempotent-replayed"] == "true"
        assert make.count == 1

    run(tmp_path, work)


@pytest.mark.parametrize(
    ("second", "who", "body"),
    [
        (request("other"), caller(), b"{}"),
        (request(None), caller(), b"{}"),
        (request(), caller("key2"), b"{}"),
        (request(), caller("key1", "other"), b"{}"),
    ],
)
def test_what_is_another_request(tmp_path: Path, second: Request, who: Caller, body: bytes) -> None:
    async def work(once: Once) -> None:
        make = Maker()
        await once.answer(request(), caller(), b"{}", Job(make))
        await once.answer(second, who, body, Job(make))
        assert make.count == 2

    run(tmp_path, work)


@pytest.mark.parametrize(
    ("second", "body"),
    [(request(), b"{} "), (request(path="/v1/templates"), b"{}"), (request(query="name=x"), b"{}")],
)
def test_one_key_for_two_requests(tmp_path: Path, second: Request, body: bytes) -> None:
    async def work(once: Once) -> None:
        make = Maker()
        await once.answer(request(), caller(), b"{}", Job(make))
        with pytest.raises(SpecError):
            await once.answer(second, caller(), body, Job(make))
        assert make.count == 1

    run(tmp_path, work)


@pytest.mark.parametrize("key", ["", " ", "a b", "x" * 256, "ä", "a\n"])
def test_keys_that_are_none(tmp_path: Path, key: str) -> None:
    async def work(once: Once) -> None:
        with pytest.raises(RequestInvalid):
            await once.answer(request(key), caller(), b"{}", Job(Maker()))

    run(tmp_path, work)


def test_who_comes_meanwhile_waits(tmp_path: Path) -> None:
    async def work(once: Once) -> None:
        make = Maker(gate=asyncio.Event())
        asked = [asyncio.ensure_future(once.answer(request(), caller(), b"{}", Job(make))) for _ in range(20)]
        await make.began.wait()
        with pytest.raises(SpecError):
            await once.answer(request(), caller(), b"other", Job(make))
        assert make.gate is not None
        make.gate.set()
        answers = await asyncio.gather(*asked)
        assert {answer.body for answer in answers} == {b'{"number":1}'}
        assert sum("idempotent-replayed" in answer.headers for answer in answers) == 19

    run(tmp_path, work)


def test_who_goes_away_does_not_undo_it(tmp_path: Path) -> None:
    async def work(once: Once) -> None:
        make = Maker(gate=asyncio.Event())
        first = asyncio.ensure_future(once.answer(request(), caller(), b"{}", Job(make)))
        await make.began.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        again = asyncio.ensure_future(once.answer(request(), caller(), b"{}", Job(make)))
        assert make.gate is not None
        make.gate.set()
        assert (await again).body == b'{"number":1}'

    run(tmp_path, work)


def test_what_was_refused_can_be_asked_again(tmp_path: Path) -> None:
    async def work(once: Once) -> None:
        make = Maker(error=QuotaExceeded("full"))
        for _ in range(2):
            with pytest.raises(QuotaExceeded):
                await once.answer(request(), caller(), b"{}", Job(make))
        make.error = None
        assert (await once.answer(request(), caller(), b"other", Job(make))).body == b'{"number":3}'

    run(tmp_path, work)


@pytest.mark.parametrize("found", [True, False])
def test_what_was_cut_off(tmp_path: Path, found: bool) -> None:
    """The keeper ended in the middle: it may have been made."""

    async def work(once: Once) -> None:
        make, seen = Maker(error=KeeperError("it ended")), []

        async def look(since: float) -> Made | None:
            seen.append(since)
            return Made(number=99) if found else None

        with pytest.raises(KeeperError):
            await once.answer(request(), caller(), b"{}", Job(make, look))
        make.error = None
        with pytest.raises(SpecError):
            await once.answer(request(), caller(), b"other", Job(make, look))
        for _ in range(2):
            answer = await once.answer(request(), caller(), b"{}", Job(make, look))
            assert answer.body == (b'{"number":99}' if found else b'{"number":2}')
        assert len(seen) == 1, "the answer is known from then on"

    run(tmp_path, work)


def test_after_a_crash_nobody_guesses(tmp_path: Path) -> None:
    """What has no name cannot be found."""

    async def crash(once: Once) -> None:
        make = Maker(gate=asyncio.Event())
        asyncio.ensure_future(once.answer(request(), caller(), b"{}", Job(make)))  # noqa: RUF006
        await make.began.wait()  # and the loop ends here, as a killed server does

    async def again(once: Once) -> None:
        make = Maker()
        for _ in range(2):
            with pytest.raises(SandboxError):
                await once.answer(request(), caller(), b"{}", Job(make))
        assert make.count == 0

    run(tmp_path, crash)
    run(tmp_path, again)


def test_answers_survive_a_restart_and_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()

    async def work(once: Once) -> None:
        await once.answer(request(), caller(), b"{}", Job(make))

    run(tmp_path, work)
    run(tmp_path, work)
    assert make.count == 1
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + idempotency.KEPT + 1)
    run(tmp_path, work)
    assert make.count == 2


def test_they_are_not_kept_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MOST", 5)
    monkeypatch.setattr(idempotency, "_CLEAN", -1.0)

    async def work(once: Once) -> None:
        for number in range(20):
            await once.answer(request(f"k{number}"), caller(), b"{}", Job(Maker()))
        rows = once.done._read("SELECT count(*) FROM server_done", ())
        assert rows[0][0] <= 7

    run(tmp_path, work)


def test_nothing_of_the_request_is_stored(tmp_path: Path) -> None:
    async def work(once: Once) -> None:
        body = b'{"secrets": {"TOKEN": {"value": "correct-horse-battery"}}}'
        await once.answer(request(secret="slp_secretkey"), caller(), body, Job(Maker()))
        (row,) = once.done._read("SELECT request FROM server_done", ())
        import hashlib

        assert row[0] != hashlib.sha256(body).hexdigest(), "who guesses the value cannot tell"

    run(tmp_path, work)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "home").glob("state.db*"))
    assert b"server_done" in stored, "control"
    assert b"correct-horse" not in stored
    assert b"slp_secretkey" not in stored


def test_large_answers(tmp_path: Path) -> None:
    class Many(BaseModel):
        items: list[str]

    async def work(once: Once) -> None:
        many = Many(items=["x" * 1000] * 2000)

        async def make() -> Any:
            return many

        first = await once.answer(request(), caller(), b"{}", Job(make))
        again = await once.answer(request(), caller(), b"{}", Job(make))
        assert first.body == again.body
        assert len(first.body) > 2_000_000

    run(tmp_path, work)


def test_an_answer_is_given_before_it_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks again meanwhile has it, too; and it is on record when the server has ended in peace."""
    make, hold, real = Maker(), threading.Event(), Done.finish

    def slow(done: Done, owner: str, key: str, answer: bytes) -> None:
        assert hold.wait(30)
        real(done, owner, key, answer)

    monkeypatch.setattr(Done, "finish", slow)

    async def work(once: Once) -> None:
        first = await once.answer(request(), caller(), b"{}", Job(make))
        again = await once.answer(request(), caller(), b"{}", Job(make))
        assert (first.body, make.count) == (again.body, 1)
        assert again.headers["idempotent-replayed"] == "true"
        hold.set()

    run(tmp_path, work)
    monkeypatch.undo()

    async def later(once: Once) -> None:
        again = await once.answer(request(), caller(), b"{}", Job(make))
        assert again.headers["idempotent-replayed"] == "true"

    run(tmp_path, later)
    assert make.count == 1
