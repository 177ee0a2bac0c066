"""Who holds the sandboxes that verbs are about: this machine's keeper, or the server of --server and SLOPLET_URL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..controller import Controller, SandboxInfo, Snapshot


async def holder() -> Controller:
    """Nothing is connected or started yet. What is made through it stays, also without a name."""
    from ..finding import holder_at, place_of

    return await holder_at(place_of(), named=True, leasing=False)


def elsewhere() -> str | None:
    """The URL of the server that is meant; None: this machine."""
    from ..finding import place_of

    place = place_of()
    return None if place is None else place.url


def known_sandboxes() -> list[SandboxInfo]:
    """All, oldest first. Starts nothing."""
    if elsewhere() is None:
        from .local import known_sandboxes

        return known_sandboxes()

    async def ask() -> list[SandboxInfo]:
        return await (await holder()).list()

    return asyncio.run(ask())


def saved_sizes(infos: Iterable[SandboxInfo]) -> dict[str, int]:
    """By sandbox id: how large the state is that it would go on from."""
    if elsewhere() is None:
        from .local import saved_sizes

        return saved_sizes(infos)

    async def ask() -> list[Snapshot]:
        return await (await holder()).snapshots(role=None)

    saved = {info.saved: info.id for info in infos if info.saved is not None}
    return {saved[item.id]: item.bytes for item in (asyncio.run(ask()) if saved else ()) if item.id in saved}
