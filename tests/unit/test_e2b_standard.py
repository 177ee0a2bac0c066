"""The standard templates: ready before their first sandbox; which warm state is used again, when another is made."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layer_kit import make_image, member, tar
from sloplet.errors import SnapshotNotFound
from sloplet.images.store import ImageStore
from sloplet.server.e2b.templates import standard
from sloplet.state.home import Home

IMAGE = "sloplet/e2b-code"


def saved(**more: Any) -> SimpleNamespace:
    facts = {"id": "old", "role": "template", "kind": "live", "spec": SimpleNamespace(image=IMAGE), "created_at": 20.0}
    return SimpleNamespace(**{**facts, **more})


@pytest.mark.parametrize(
    ("found", "came", "used"),
    [
        (saved(), 10.0, "old"),
        (saved(), 30.0, "new"),  # the image was built anew since
        (saved(), None, "new"),
        (saved(kind="disk"), 10.0, "new"),
        (saved(spec=SimpleNamespace(image="another")), 10.0, "new"),
        (None, 10.0, "new"),
    ],
)
def test_a_warm_state_is_of_the_image_that_is_here(
    monkeypatch: pytest.MonkeyPatch, found: Any, came: float | None, used: str
) -> None:
    async def find_snapshot(name: str) -> Any:
        if found is None:
            raise SnapshotNotFound(name)
        return found

    async def warm(*_: Any, **__: Any) -> Any:
        return saved(id="new")

    monkeypatch.setattr(standard.recipes, "warm", warm)
    monkeypatch.setattr(standard, "_find", lambda *_: None if came is None else SimpleNamespace(created_at=came))
    tenant = SimpleNamespace(name="main", home=None, controller=SimpleNamespace(find_snapshot=find_snapshot))
    made = standard.Standard(SimpleNamespace())  # type: ignore[arg-type]
    asyncio.run(made._make_warm(SimpleNamespace(tenant=tenant), "code-interpreter-v1"))  # type: ignore[arg-type]
    assert made._warm == {("main", "code-interpreter-v1"): used}


def test_what_is_prepared_is_unpacked(tmp_path: Path) -> None:
    home = Home(tmp_path / "home").open()
    store = ImageStore(home)
    make_image(store, tar(member("file", b"text")), name=IMAGE)
    store.close()
    tenant = SimpleNamespace(name="main", home=home)
    facade = SimpleNamespace(server=SimpleNamespace(tenants={"main": tenant}))
    asyncio.run(standard.Standard(facade).prepare(["code-interpreter-v1"]))  # type: ignore[arg-type]
    assert len(list(home.images.glob("**/file"))) > 0
