"""``box.contexts``: kernels by their names."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from ..errors import KernelError, SpecError
from ..spec import check_env
from . import languages
from .cell import Kernel, attach_request, interrupt
from .registry import Registry, Settings, check_context, check_user, described, gone, name_of, no_such
from .results import CodeContext

_list = list


class AsyncContexts:
    """The contexts of a sandbox: kernels that run code cells, each with variables of its own."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def create(
        self,
        language: str = "python",
        *,
        name: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        python: str | None = None,
    ) -> CodeContext:
        """Start a kernel of its own. ``name`` is what ``context=`` takes (made up if not given); ``python`` is another
        interpreter than the sandbox's python3."""
        spoken = languages.language_of(language)
        if python is not None and spoken != "python":
            raise SpecError(f"python={python!r} is for Python contexts, not for {spoken}")
        chosen = check_context(name) if name is not None else f"{spoken}-{secrets.token_hex(4)}"
        settings = Settings(spoken, cwd, dict(check_env(env or {})), check_user(user), python)
        async with self._registry.turn(chosen):
            if await self._registry.look(chosen) is not None:
                raise KernelError(f"there is a context {chosen!r} already", hint="remove it first, or use its name")
            kernel = await self._registry.begin(chosen, settings)
        return described(kernel, settings)

    async def list(self) -> _list[CodeContext]:
        """All of them, the default ones too, by name."""
        return await self._registry.list()

    async def restart(self, context: str | CodeContext) -> CodeContext:
        """End its process and start it anew, with the settings it was made with. Its variables are gone."""
        name = name_of(context)
        async with self._registry.turn(name):
            there = await self._registry.look(name)
            if there is None:
                raise no_such(name)
            settings = await self._registry.remembered(there)
            await self._registry.end(name)
            kernel = await self._registry.spawn(name, settings)
        return described(kernel, settings)

    async def interrupt(self, context: str | CodeContext) -> None:
        """Interrupt what runs in it, as Ctrl-C does; its variables stay."""
        name = name_of(context)
        there = await self._registry.look(name)
        if there is None:
            raise no_such(name)
        if not there.running:
            raise gone(there)
        kernel = self._registry.known[name]
        stream = await self._registry.open(attach_request(Kernel(name, kernel.language, kernel.key, kernel.pid)))
        try:
            await stream.started()
            interrupt(stream, kernel)
            await stream.send(languages.after_interrupt(kernel.language))
        finally:
            stream.reset()

    async def remove(self, context: str | CodeContext) -> None:
        """End it and forget it. Idempotent."""
        await self._registry.discard(name_of(context))
