"""Words that a shell can complete, from the records of this SLOPLET_HOME. A prompt is no place for errors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..state.store import Store


def sandboxes(incomplete: str) -> list[str]:
    """What the keeper holds: names, ids of those without."""
    try:
        store = _store()
        known = store.list() if store is not None else []
    except Exception:
        return []
    refs = [info.name or info.id for info in known if info.holder == "keeper"]
    return [ref for ref in refs if ref.startswith(incomplete)]


def snapshots(sandbox: str | None, incomplete: str) -> list[str]:
    """Those of a sandbox: names, ids of those without."""
    try:
        store = _store()
        known = store.list_snapshots(store.find(sandbox).id, "snapshot") if store is not None and sandbox else []
    except Exception:
        return []
    return [ref for item in known if (ref := item.name or item.id).startswith(incomplete)]


def templates(incomplete: str) -> list[str]:
    try:
        store = _store()
        known = store.list_snapshots(None, "template") if store is not None else []
    except Exception:
        return []
    return [item.name for item in known if item.name is not None and item.name.startswith(incomplete)]


def secrets(sandbox: str | None, incomplete: str) -> list[str]:
    """The names of a sandbox's secrets."""
    try:
        store = _store()
        if store is None or not sandbox:
            return []
        spec = store.find(sandbox).spec
        known = {item.name for item in spec.secrets}
        if spec.template is not None:
            known |= {item.name for item in store.find_snapshot(spec.template).spec.secrets}
    except Exception:
        return []
    return sorted(name for name in known if name.startswith(incomplete))


def images(incomplete: str) -> list[str]:
    """As people write them."""
    try:
        from ..images.reference import parse
        from ..state.home import Home
        from ..state.image_rows import ImageRows

        home = Home()
        known = ImageRows(home).all() if home.database.exists() and not os.environ.get("SLOPLET_URL") else []
    except Exception:
        return []
    names = {parse(each).familiar for row in known for each in row.references}
    return sorted(name for name in names if name.startswith(incomplete))


def _store() -> Store | None:
    from ..state.home import Home
    from ..state.store import Store

    home = Home()
    return Store(home) if home.database.exists() and not os.environ.get("SLOPLET_URL") else None
