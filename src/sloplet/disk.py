"""Disk snapshots: the files that differ from the image, as the agent tells them, kept in one file and brought back.

For engines that cannot save processes. The file holds the records of CHANGES with contents (docs/wire.md) as they came;
nothing in it ever becomes a file of the host's.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from .errors import SaveFailed, SlopletError
from .fs import write_all
from .live import Live
from .wire.fields import Fields
from .wire.mux import request
from .wire.schema import ChangesFlag, Op, Tag

if TYPE_CHECKING:
    from .state.draft import Draft
    from .state.opened import Opened

FILE = "changes"
_PIECE = 1 << 18
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def folder(live: Live) -> str | None:
    """Where the files are of a sandbox that has no root of its own; None for the others."""
    return None if live.engine.probe().capabilities.private_filesystem else live.info.workdir


def asked(op: Op, live: Live, *more: tuple[Tag, int]) -> Fields:
    """CHANGES or UNPACK of all that is the sandbox's own."""
    fields = request(op, *more)
    below = folder(live)
    return fields if below is None else fields.add(Tag.PATH, below)


async def pack(live: Live, draft: Draft) -> None:
    """Write the sandbox's changes into the draft. SaveFailed."""
    target = os.open(FILE, _WRITE, 0o600, dir_fd=draft.fd)
    stream = live.mux.open(asked(Op.CHANGES, live, (Tag.FLAGS, int(ChangesFlag.CONTENTS))))
    try:
        while (piece := await stream.recv()) is not None:
            await asyncio.to_thread(write_all, target, piece.data)
        await stream.result()
    except OSError as error:
        stream.reset()
        if isinstance(error, SlopletError):
            raise
        raise SaveFailed(
            f"the state could not be saved: {error.strerror}", hint="is the disk full? The sandbox runs on"
        ) from error
    except BaseException:
        stream.reset()
        raise
    finally:
        os.close(target)


async def unpack(live: Live, opened: Opened) -> None:
    """Bring the changes of a disk snapshot into a sandbox that has just started from the same image."""
    source = os.open(FILE, _READ, dir_fd=opened.fd)
    stream = live.mux.open(asked(Op.UNPACK, live))
    try:
        while data := await asyncio.to_thread(os.read, source, _PIECE):
            await stream.send(data)
        await stream.send_end()
        await stream.result()
    except BaseException:
        stream.reset()
        raise
    finally:
        os.close(source)
