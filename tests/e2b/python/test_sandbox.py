"""Made, found, listed, ended, and when."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from e2b.exceptions import AuthenticationException, NotFoundException

from conftest import until
from e2b import Sandbox, SandboxException, SandboxQuery, SandboxState


def ids(**query: object) -> list[str]:
    """All pages."""
    pages, found = Sandbox.list(query=SandboxQuery(**query)), []  # type: ignore[arg-type]
    while pages.has_next:
        found += [item.sandbox_id for item in pages.next_items()]
    return found


def test_it_runs_until_it_is_killed(make: Callable[..., Sandbox]) -> None:
    box = make()
    assert box.is_running()
    assert box.kill() is True
    assert not box.is_running()
    assert box.kill() is False
    with pytest.raises(NotFoundException):
        Sandbox.connect(box.sandbox_id)
    with pytest.raises(NotFoundException):
        box.get_info()


def test_a_template_that_is_none() -> None:
    with pytest.raises(SandboxException, match=r"404.*not found"):
        Sandbox.create("no-such-template")


def test_a_key_that_is_none() -> None:
    with pytest.raises(AuthenticationException, match="401"):
        Sandbox.create(api_key="e2b_" + "0" * 40)


def test_what_is_known_of_it(make: Callable[..., Sandbox], word: str) -> None:
    box = make(metadata={"user": word, "odd": "a b&c=%d/é"}, envs={"A": "1"}, timeout=100)
    info = box.get_info()
    assert (info.sandbox_id, info.state) == (box.sandbox_id, SandboxState.RUNNING)
    assert info.metadata == {"user": word, "odd": "a b&c=%d/é"}
    assert timedelta(seconds=99) < info.end_at - info.started_at < timedelta(seconds=103)
    assert ids(metadata={"user": word}) == [box.sandbox_id]
    assert ids(metadata={"user": word, "odd": "a b&c=%d/é"}) == [box.sandbox_id]
    assert ids(metadata={"user": word, "odd": "other"}) == []
    assert ids(metadata={"user": word}, state=[SandboxState.PAUSED]) == []


def test_pages_are_newest_first(make: Callable[..., Sandbox], word: str) -> None:
    made = [make(metadata={"group": word}).sandbox_id for _ in range(3)]
    pages = Sandbox.list(query=SandboxQuery(metadata={"group": word}), limit=2)
    first = [item.sandbox_id for item in pages.next_items()]
    assert first == made[:0:-1]
    assert pages.has_next
    assert pages.next_token
    assert [item.sandbox_id for item in pages.next_items()] == made[:1]
    assert not pages.has_next
    assert pages.next_token is None


def test_connecting_never_takes_time_away(box: Sandbox) -> None:
    before = box.get_info().end_at
    assert Sandbox.connect(box.sandbox_id, timeout=5).get_info().end_at == before
    assert Sandbox.connect(box.sandbox_id, timeout=600).get_info().end_at > before


def test_its_time_can_be_set(make: Callable[..., Sandbox]) -> None:
    box = make(timeout=300)
    box.set_timeout(30)
    info = box.get_info()
    assert info.end_at - info.started_at < timedelta(seconds=60)
    box.set_timeout(0)
    until(lambda: not box.is_running())


def test_its_time_is_over(make: Callable[..., Sandbox]) -> None:
    box = make(timeout=2)
    until(lambda: not box.is_running(), 10)
    with pytest.raises(NotFoundException):
        box.set_timeout(10)


def test_connected_from_elsewhere(box: Sandbox) -> None:
    box.files.write("note", "from the first")
    other = Sandbox.connect(box.sandbox_id)
    assert other.files.read("note") == "from the first"
    assert other.commands.run("cat note").stdout == "from the first"


def test_metrics_come(box: Sandbox) -> None:
    until(lambda: bool(box.get_metrics()))
    one = box.get_metrics()[-1]
    assert one.cpu_count >= 1
    assert one.mem_total > one.mem_used > 0
    assert one.disk_total > 0
