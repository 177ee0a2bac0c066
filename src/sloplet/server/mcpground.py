"""Sandboxes of a tenant for one MCP session. What the key may is the tenant's controller's to say."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ..controller import SandboxInfo
from ..errors import ImageNotFound, SandboxNotFound, SpecError
from ..finding import create_or_find
from ..images import adopting
from ..images.progress import ImageProgress
from ..images.pull import pull
from ..images.reference import parse
from ..images.resolve import is_tar
from ..images.standard import standard_name
from ..labels import check_labels
from ..mcp.progress import Say, image_words
from ..sandbox import AsyncSandbox
from ..spec import SandboxSpec
from .caller import Caller
from .imaging import access_for, opened
from .mcpasked import SessionAsked
from .names.parts import Place

if TYPE_CHECKING:
    from .state import ServerState

BACKSTOP = 86_400.0  #: seconds that a sandbox of a session lives at most, if the URL has no ttl


class ServerGround:
    """``caller`` is who opened the session, ``word`` the session's own, for uses and leases."""

    def __init__(self, server: ServerState, caller: Caller, asked: SessionAsked, word: str) -> None:
        self._server = server
        self._caller = caller
        self._asked = asked
        self._word = word
        self._controller = caller.tenant.controller

    async def make(self, say: Say, *, main: bool) -> AsyncSandbox:
        asked = self._asked
        if main and asked.sandbox and not asked.said:
            with suppress(SandboxNotFound):
                return self._used(await self._awake(asked.sandbox, say))
        name = asked.sandbox if main and asked.sandbox else _new_name() if asked.keep else None
        labels = check_labels({"mcp": self._word, **dict(asked.spec.labels)})
        spec = replace(asked.spec, name=name, labels=labels, ttl=asked.spec.ttl or (BACKSTOP if name is None else None))
        spec = await self._server.permits.create(self._caller.key, self._controller, spec)
        await self._bring(spec, say)
        say("starting the sandbox")
        return self._used(await create_or_find(self._controller, spec))

    async def _awake(self, name: str, say: Say) -> SandboxInfo:
        info = await self._controller.find(name)
        if info.state == "paused" or (info.state == "dead" and info.saved is not None):
            say(f"waking {name}")
            return await self._controller.resume(info.id)
        return info

    def _used(self, info: SandboxInfo) -> AsyncSandbox:
        self._server.uses.use(self._caller.tenant.name, self._word, info.id)
        return AsyncSandbox._adopt(self._controller, info)

    async def _bring(self, spec: SandboxSpec, say: Say) -> None:
        """An image of a registry, which the keeper would bring without a word. All else is the keeper's matter."""
        text = spec.image
        if text == "host" or spec.template or text.startswith(("dir:", "/", ".", "~")) or is_tar(text):
            return
        try:
            reference = parse(text)
        except SpecError:
            return
        if standard_name(reference) is not None:
            return

        def told(progress: ImageProgress) -> None:
            if words := image_words(text, progress.stage, progress.done, progress.total):
                say(words)

        tenant = self._caller.tenant
        async with opened(tenant.home) as store:
            try:
                await asyncio.to_thread(adopting.find, store, text)
            except ImageNotFound:
                with self._server.images.pulls.take(tenant.name):
                    await pull(reference, store, access=await access_for(self._caller), progress=told)

    async def fork(self, box: AsyncSandbox, count: int, snapshot: str | None) -> Sequence[AsyncSandbox]:
        names = [_new_name() for _ in range(count)] if self._asked.keep else None
        return await box.fork(count, names=names, snapshot=snapshot)

    async def url(self, box: AsyncSandbox, port: int) -> str:
        """Its public name. A private one opens with its token, which is in the URL once: a browser keeps it."""
        names = self._server.names
        there = names.published.find(box.id, port)
        made = names.publish(self._caller.tenant.name, box.id, port, public=there is not None and there.public)
        url = names.url(Place(port, box.id))
        return f"{url}/" if made.public else f"{url}/?sloplet_token={made.token}"

    async def end(self, box: AsyncSandbox) -> None:
        if box.name is None:
            await self._controller.kill(box.id)
        elif self._server.uses.release(self._caller.tenant.name, self._word, box.id):
            await self._controller.release(box.id)

    def lent(self, box: AsyncSandbox) -> bool:
        return box.name is not None and box.name == self._asked.sandbox


def _new_name() -> str:
    return f"mcp-{secrets.token_hex(4)}"
