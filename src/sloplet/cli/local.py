"""What the CLI knows without a keeper: the records of this SLOPLET_HOME, after cleaning up behind the dead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..controller import SandboxInfo
    from ..state.reaper import Report


def known_sandboxes() -> list[SandboxInfo]:
    """All records, oldest first. Starts nothing; makes nothing if there is no state yet."""
    from ..state.home import Home
    from ..state.store import Store

    home = Home()
    if not home.database.exists():
        return []
    clean_up()
    store = Store(home)
    try:
        return store.list()
    finally:
        store.close()


def saved_sizes(infos: Iterable[SandboxInfo]) -> dict[str, int]:
    """By sandbox id: how large the state is that it would go on from."""
    saved = {info.saved: info.id for info in infos if info.saved is not None}
    if not saved:
        return {}
    from ..state.home import Home
    from ..state.store import Store

    store = Store(Home())
    try:
        return {saved[item.id]: item.bytes for item in store.list_snapshots() if item.id in saved}
    finally:
        store.close()


def clean_up(*, thorough: bool = False) -> Report:
    """Reap: end and remove what programs that died have left. ``thorough``: look at what lies in images/, too."""
    from ..engines import registry
    from ..state.home import Home
    from ..state.reaper import reap
    from ..state.store import Store

    home = Home()
    store = Store(home)
    try:
        return reap(home, store, registry.reap, thorough=thorough)
    finally:
        store.close()
