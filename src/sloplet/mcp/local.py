"""Sandboxes of this machine, or of whatever Controller is given, for the one session of ``sloplet mcp``.

Without a name they end with the session, and with this process, however that ends. With ``keep`` they have names, are
held by the keeper and stay: ``sloplet ls`` shows them.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ..controller import Controller
from ..errors import SandboxNotFound
from ..sandbox import AsyncSandbox
from .progress import Say

#: Brings an image here before a sandbox is made of it, and says how far that is.
Bring = Callable[[Say], Awaitable[None]]


class LocalGround:
    """``arguments`` are those of ``AsyncSandbox``. ``name``: the session's own is that one, found or made; it stays.
    ``as_it_is``: nothing was said about its settings, so one that is there is taken as it is."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        name: str | None = None,
        as_it_is: bool = False,
        keep: bool = False,
        controller: Controller | None = None,
        bring: Bring | None = None,
    ) -> None:
        self._arguments = dict(arguments)
        self._name = name
        self._as_it_is = as_it_is
        self._keep = keep
        self._controller = controller
        self._bring = bring
        self._more = {**self._arguments, "ports": dict.fromkeys(_inside(self._arguments.get("ports", ())), 0)}

    def check(self) -> AsyncSandbox:
        """Refuse nonsense before anybody is served. Nothing is started."""
        return self._new(self._name, self._arguments)

    async def make(self, say: Say, *, main: bool) -> AsyncSandbox:
        if main and self._name is not None and self._as_it_is:
            try:
                box = await AsyncSandbox.connect(self._name, controller=self._controller)
            except SandboxNotFound:
                pass
            else:
                if (await box.info()).state in ("paused", "dead"):
                    say(f"waking {self._name}")
                    await box.resume()
                return box
        if self._bring is not None:
            await self._bring(say)
        name = self._name if main and self._name is not None else _new_name() if self._keep else None
        say("starting the sandbox")
        box = self._new(name, self._arguments if main else self._more)
        await box.start()
        return box

    def _new(self, name: str | None, arguments: Mapping[str, Any]) -> AsyncSandbox:
        return AsyncSandbox(name, **arguments, controller=self._controller)

    async def fork(self, box: AsyncSandbox, count: int, snapshot: str | None) -> Sequence[AsyncSandbox]:
        names = [_new_name() for _ in range(count)] if self._keep else None
        return await box.fork(count, names=names, snapshot=snapshot)

    async def url(self, box: AsyncSandbox, port: int) -> str:
        return await box.url(port)

    async def end(self, box: AsyncSandbox) -> None:
        if self._keep or self.lent(box):
            await box.close()
        else:
            await box.kill()

    def lent(self, box: AsyncSandbox) -> bool:
        return box.name is not None and box.name == self._name


def _new_name() -> str:
    return f"mcp-{secrets.token_hex(4)}"


def _inside(ports: Any) -> list[int]:
    """The ports inside: at which of this machine they are can be said for one sandbox only."""
    return list(ports)
