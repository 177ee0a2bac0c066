"""Large bodies of requests on their way to the disk: into a file without a name, so that none is ever left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import DiskFull
from ..fs import write_all
from ..images.threads import kept, whole
from ..state.home import Home, unwritable

_BATCH = 1 << 20
_RESERVE = 1 << 30


@asynccontextmanager
async def spooled(body: AsyncIterator[bytes], home: Home) -> AsyncIterator[BinaryIO]:
    """All of a body, to be read from its beginning, on the disk of ``home``. DiskFull, StateUnwritable."""
    file = await kept(lambda made: made.close(), _make, home)
    try:
        pieces: list[bytes] = []
        size = 0
        async for piece in body:
            pieces.append(piece)
            size += len(piece)
            if size >= _BATCH:
                data, pieces, size = b"".join(pieces), [], 0
                await whole(_write, file, data, home)
        if pieces:
            await whole(_write, file, b"".join(pieces), home)
        file.seek(0)
        yield file
    finally:
        file.close()


def _make(home: Home) -> BinaryIO:
    home.open()
    folder: Path = home.cache
    try:
        folder.mkdir(0o700, exist_ok=True)
        return cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=0))
    except OSError as error:
        raise unwritable(folder, error) from error


def check_room(home: Home) -> None:
    """DiskFull if what is left is for the server and its keepers themselves: without it nothing of anybody's would be
    recorded. What tenants bring stops before that. Blocking."""
    try:
        disk = os.statvfs(home.path)
    except OSError as error:
        raise unwritable(home.path, error) from error
    if disk.f_bavail * disk.f_frsize < min(_RESERVE, disk.f_blocks * disk.f_frsize // 20):
        raise DiskFull("the disk of the server is nearly full", hint="remove images or volumes, or ask its operator")


def _write(file: BinaryIO, data: bytes, home: Home) -> None:
    check_room(home)
    try:
        write_all(file.fileno(), data)
    except OSError as error:
        raise unwritable(home.cache, error) from error
