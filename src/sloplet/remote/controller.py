"""The Controller over a server: streams through the tunnel, everything else by its HTTP routes.

Ports are listened on by this program, on this machine: each connection is a stream through the tunnel. What is made
without a name goes with this program (a lease), unless ``leasing`` is off.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..controller import Event, SandboxInfo, Stream
from ..engines.base import Guarantee, HostStats
from ..errors import SlopletError
from ..spec import SandboxSpec
from ..wire.fields import Fields
from .arguments import spec_arguments
from .history import RemoteHistory
from .link import Link, used_link
from .network import RemoteNetwork
from .paths import box_path, info_of
from .place import Place

if TYPE_CHECKING:
    from ..images.config import ImageConfig

_PAGE = 1000


class RemoteController(RemoteHistory, RemoteNetwork):
    """See ``Controller`` for what each method promises."""

    is_remote = True  #: paths that specs tell of are of another machine

    def __init__(self, place: Place, *, leasing: bool = True) -> None:
        self.place = place
        self.leasing = leasing

    # -- making ------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        return await self._create(spec, reuse=False)

    async def create_or_find(self, spec: SandboxSpec) -> SandboxInfo:
        """See ``finding.create_or_find``: compared with what is there by the server, which may have made less of it
        than was asked for (a key's limits)."""
        return await self._create(spec, reuse=spec.name is not None)

    async def _create(self, spec: SandboxSpec, *, reuse: bool) -> SandboxInfo:
        body = spec_arguments(replace(spec, ports=()))  # ports are this machine's
        if reuse:
            body["reuse"] = True
        self.link.tunnel.begin()  # it will be needed
        made = info_of(await self._make("/v1/sandboxes", body, leased=spec.name is None, undo=not reuse))
        self.link.touch(made.id)
        try:
            for port in spec.ports:
                self.link.ports.expose(made.id, port.inside, port.outside)
        except BaseException:
            if not reuse:
                self.link.background(self.kill(made.id))
            raise
        return made

    async def _make(self, path: str, body: Any, *, leased: bool, undo: bool = True) -> Any:
        """Ask for something to be made. Asked again after a broken connection it is not made twice; given up, it is
        undone."""
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        if leased and self.leasing:
            headers["Sloplet-Lease"] = "true"
        link = self.link
        try:
            return await link.http.post(path, body, headers=headers)
        except SlopletError:
            raise
        except BaseException:
            if undo:
                link.background(self._undo(link, path, body, headers))
            raise

    async def _undo(self, link: Link, path: str, body: Any, headers: Mapping[str, str]) -> None:
        """It may have been made, or be about to be: only who asks again knows what it is."""
        made = await link.http.post(path, body, headers=headers)
        for item in made.get("items", [made]):
            await link.http.ask("DELETE", box_path(item["id"]))

    # -- finding and ending ------------------------------------------------------------

    async def find(self, ref: str) -> SandboxInfo:
        return info_of(await self._get(box_path(ref)))

    async def list(self) -> list[SandboxInfo]:
        found: list[SandboxInfo] = []
        cursor: str | None = None
        while True:
            page = await self._get("/v1/sandboxes", {"limit": _PAGE, **({"cursor": cursor} if cursor else {})})
            found += [info_of(item) for item in page["items"]]
            cursor = page.get("next")
            if not cursor:
                return found

    async def kill(self, sandbox_id: str) -> None:
        await self.link.http.ask("DELETE", box_path(sandbox_id))
        self.link.ports.close(sandbox_id)

    # -- using -------------------------------------------------------------------------

    async def open(self, sandbox_id: str, request: Fields, *, wake: bool = True) -> Stream:
        return await self.link.open(sandbox_id, request, wake=wake)

    async def guarantees(self, sandbox_id: str) -> tuple[Guarantee, ...]:
        found = await self._get(box_path(sandbox_id, "guarantees"))
        return tuple(Guarantee(**item) for item in found["items"])

    async def image_config(self, sandbox_id: str) -> ImageConfig | None:
        found = await self._get(box_path(sandbox_id, "image-config"))
        if found is None:
            return None
        import json

        from ..images.config import parse_config

        return parse_config(json.dumps(found).encode())

    async def stats(self, sandbox_id: str) -> HostStats:
        return HostStats(**await self._get(box_path(sandbox_id, "stats")))

    def events(self, sandbox_id: str | None = None) -> AsyncIterator[Event]:
        path = "/v1/events" if sandbox_id is None else box_path(sandbox_id, "events")
        return _events(self.link.subscribe(path))

    async def aclose(self) -> None:
        """Let go: what was made for this program alone ends, the rest goes on. The next call connects again."""
        await self.link.aclose()

    async def me(self) -> dict[str, Any]:
        """Who the key is, and what it may."""
        return dict(await self._get("/v1/me"))

    # -- asking ------------------------------------------------------------------------

    @property
    def link(self) -> Link:
        return used_link(self.place)

    async def _get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        return await self.link.http.get(path, params)

    async def _ask(self, method: str, path: str, body: Any = None, params: Mapping[str, Any] | None = None) -> Any:
        return await self.link.http.ask(method, path, body=body, params=params)


async def _events(source: AsyncIterator[Any]) -> AsyncIterator[Event]:
    async for item in source:
        yield Event(item["time"], item["sandbox"], item["type"], item["data"])
