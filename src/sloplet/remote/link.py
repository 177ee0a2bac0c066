"""What a program has of one server: a tunnel and an HTTP client, one of each per event loop, address and key.

Made when first needed. Goodbye is said when the loop ends (its tasks are cancelled), so that the server knows at once
that the program is gone; a forked child makes its own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from .. import __version__
from ..network.ports import Ports
from ..wire.fields import Fields
from ..wire.schema import Tag
from ..wire.streams import HostStream
from .http import Http
from .place import Place
from .told import Told
from .tunnel import Tunnel

_LAST_WORDS = 5.0
_SUBSCRIBING = 10.0
_AWAKE = 1.0
_MOST_TOUCHED = 10_000


class Link:
    """Belongs to one loop."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.client = f"py-{secrets.token_hex(8)}"  #: the word by which the server knows this program
        headers = {
            "Authorization": f"Bearer {place.key}",
            "Sloplet-Client": self.client,
            "User-Agent": f"sloplet/{__version__}",
        }
        self.http = Http(place, headers)
        self.tunnel = Tunnel(place, headers)
        self.ports = Ports(self, self._is_awake)
        self._touched: dict[str, float] = {}  # when sandboxes were last used from here
        self._guard: asyncio.Task[None] | None = None
        self._coming: set[asyncio.Future[None]] = set()  # subscriptions that the server has not taken yet
        self._begun: set[asyncio.Task[Any]] = set()

    def use(self) -> None:
        """Before the first request: from now on it is closed with its loop."""
        if self._guard is None or self._guard.done():
            self._guard = asyncio.ensure_future(self._stay())

    async def open(self, sandbox_id: str, request: Fields, *, wake: bool = True) -> HostStream:
        """A stream to a sandbox. What was subscribed to before this call is told about what it does."""
        if self._coming:
            await asyncio.wait(set(self._coming), timeout=_SUBSCRIBING)
        mux = (await self.tunnel.session()).mux
        self.touch(sandbox_id)
        if mux.congested:
            await mux.drained()
        asked = Fields(*request).add(Tag.SANDBOX, sandbox_id)
        return mux.open(asked if wake else asked.add(Tag.STATE, 0))

    def touch(self, sandbox_id: str) -> None:
        """It is awake just now."""
        if len(self._touched) > _MOST_TOUCHED:
            self._touched.clear()
        self._touched[sandbox_id] = asyncio.get_running_loop().time()

    def _is_awake(self, sandbox_id: str) -> bool:
        """Most likely. What listens in one that was asleep is given a moment."""
        return asyncio.get_running_loop().time() - self._touched.get(sandbox_id, -_AWAKE) < _AWAKE

    def slept(self, sandbox_id: str) -> None:
        self._touched.pop(sandbox_id, None)

    def subscribe(self, path: str) -> AsyncIterator[Any]:
        """What the server tells at that route, from now on."""
        told = Told(self.http, path)
        self._coming.add(told.heard)
        told.heard.add_done_callback(self._coming.discard)
        return told.items()

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """To be done even if nobody waits for it: undoing what was given up."""
        task = asyncio.ensure_future(work)
        self._begun.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._begun.discard(task)
        if not task.cancelled():
            task.exception()  # seen: what cannot be undone from here the server ends itself

    async def aclose(self) -> None:
        """Say goodbye: what was made for this program alone ends. The next call begins anew."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.cancel()
            await asyncio.gather(guard, return_exceptions=True)

    def forget(self) -> None:
        """In a forked child: all of it is the parent's."""
        self.ports.forget()
        self.http.forget()
        self.tunnel.forget()
        _graveyard.append(self)

    async def _stay(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            if self._begun:
                await asyncio.wait(set(self._begun), timeout=_LAST_WORDS)
            self.ports.close_all()
            await self.tunnel.aclose()
            await self.http.aclose()


_links: dict[asyncio.AbstractEventLoop, dict[Place, Link]] = {}
#: Objects of a forked child's parent: never to be collected, which would close what is not the child's.
_graveyard: list[Link] = []


def link_of(place: Place) -> Link:
    """The one of this event loop. Nothing is connected yet."""
    loop = asyncio.get_running_loop()
    for other in [other for other in _links if other.is_closed()]:
        del _links[other]
    links = _links.setdefault(loop, {})
    if place not in links:
        links[place] = Link(place)
    return links[place]


def used_link(place: Place) -> Link:
    """The same, about to be used: from now on it is closed with its loop."""
    link = link_of(place)
    link.use()
    return link


def _forget_in_child() -> None:
    for links in _links.values():
        for link in links.values():
            link.forget()
    _links.clear()


os.register_at_fork(after_in_child=_forget_in_child)
