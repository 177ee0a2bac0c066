"""Archives on their way: files in a private folder of the server's, for as long as one is written or read. What a
killed server left goes when the next one starts."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import DiskFull
from ..fs import NEW_FILE, write_all
from ..state.home import Home
from .incoming import too_large

T = TypeVar("T")
_NAME_RE = re.compile(r"([0-9]+)-[0-9a-f]{24}(?:\.partial)?\Z")
_RESERVE = 256 << 20  # bytes of the disk that stay free, for sandboxes
_LOOK = 64 << 20  # bytes after which the disk is looked at again
_AT_ONCE = 4  # archives of one tenant at a time; others wait


@dataclass(frozen=True)
class Received:
    path: str
    size: int
    digest: bytes


class Exchange:
    """One per server, in its loop."""

    def __init__(self, home: Home, most: int) -> None:
        self._folder = home.path / "server" / "exchange"
        self._most = most
        self._turns: dict[str, asyncio.Semaphore] = {}

    def start(self) -> None:
        """Make the folder, and remove what dead servers left in it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in os.listdir(self._folder):
            match = _NAME_RE.match(entry.lstrip("."))
            if match is None or int(match[1]) == os.getpid() or not Path(f"/proc/{match[1]}").exists():
                with suppress(OSError):
                    os.unlink(self._folder / entry)

    async def turn(self, tenant: str) -> asyncio.Semaphore:
        """Few of a tenant's at a time. To be released when the file is gone."""
        turns = self._turns.setdefault(tenant, asyncio.Semaphore(_AT_ONCE))
        await turns.acquire()
        return turns

    @asynccontextmanager
    async def place(self) -> AsyncIterator[str]:
        """A path for a new file, which is gone afterwards. DiskFull. For who has a turn."""
        path = str(self._folder / f"{os.getpid()}-{secrets.token_hex(12)}")
        self._check_room()
        try:
            yield path
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)

    @asynccontextmanager
    async def receive(self, tenant: str, body: AsyncIterator[bytes]) -> AsyncIterator[Received]:
        """A body as a file. RequestInvalid (413) if it is too long, DiskFull."""
        turn = await self.turn(tenant)
        try:
            async with self.place() as path:
                hashed, size, looked = hashlib.sha256(), 0, 0
                fd = await _off_loop(lambda: os.open(path, NEW_FILE, 0o600))
                try:
                    async for piece in body:
                        size += len(piece)
                        if size > self._most:
                            raise too_large(self._most)
                        if size - looked >= _LOOK:
                            looked = size
                            self._check_room()
                        await _off_loop(lambda data=piece: _take(fd, hashed, data))  # type: ignore[misc]
                except OSError as error:
                    if isinstance(error, DiskFull):
                        raise
                    raise _full() from error
                finally:
                    os.close(fd)
                yield Received(path, size, hashed.digest())
        finally:
            turn.release()

    def _check_room(self) -> None:
        room = os.statvfs(self._folder)
        if room.f_bavail * room.f_frsize < _RESERVE:
            raise _full()


def _take(fd: int, hashed: hashlib._Hash, data: bytes) -> None:
    hashed.update(data)
    write_all(fd, data)


def _full() -> DiskFull:
    return DiskFull("the server's disk has no room for the archive", hint="delete snapshots or images, or try later")


async def _off_loop(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work)
