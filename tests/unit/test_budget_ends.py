"""A sandbox that has used up its budget, and was to be killed then: it has died of that, and says so."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from live_fake import World, in_world

from sloplet.errors import SandboxDead

pytestmark = pytest.mark.anyone


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(work: Callable[[World], Coroutine[Any, Any, None]], holder: str) -> None:
        in_world(tmp_path / "home", monkeypatch, work, holder)

    return run


@pytest.mark.parametrize("holder", ["keeper", "embedded"])
def test_it_has_died_of_that(world: Callable[..., None], holder: str) -> None:
    async def work(made: World) -> None:
        box = await made.box("dev" if holder == "keeper" else None)
        await box.run("true")
        await made.runtime.networks._end_budget(box.id, "kill")
        found = await made.runtime.list()
        if holder == "keeper":  # on record until it is removed
            assert [(info.state, info.reason) for info in found] == [
                ("dead", "it has moved the bytes that its budget allows")
            ]
            await box.kill()
        else:
            assert found == []
            with pytest.raises(SandboxDead, match="is dead: it has moved the bytes that its budget allows"):
                await box.run("true")
        assert await made.runtime.list() == []

    world(work, holder)
