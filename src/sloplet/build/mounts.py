"""RUN --mount."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from ..changes.read import Listing
from ..changes.stored import Contents
from ..sandbox import AsyncSandbox
from ..state.home import Home
from .context import Folder
from .scope import RunWork

FolderOf = Callable[[str | None], Awaitable[Folder]]


class Mounts:
    def __init__(self, home: Home, secrets: Mapping[str, bytes]) -> None:
        self._home = home
        self._secrets = secrets

    async def prepare(self, work: RunWork, folder_of: FolderOf) -> Mounted:
        if work.mounts:
            raise work.line.wrong("--mount is not supported yet")
        return Mounted()


class Mounted:
    facts: Any = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def enter(self, box: AsyncSandbox) -> None:
        pass

    async def leave(self, box: AsyncSandbox) -> None:
        pass

    def covers(self, path: str) -> bool:
        return False

    def keep(self, listing: Listing, contents: Contents) -> None:
        pass
