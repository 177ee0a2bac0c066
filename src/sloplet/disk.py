"""Disk snapshots: the files that differ from the image, as the agent tells them, kept and brought back.

For engines that cannot save processes, and where nobody wants them saved. Kept are the records of CHANGES with
contents (docs/wire.md) as they came, those of a listing made complete (changes/listed.py), in pieces that snapshots
share (segments.py); nothing in them ever becomes a file of the host's.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import SaveFailed, SlopletError
from .live import Live
from .segments import Joined, Share, Writer
from .wire.fields import Fields
from .wire.mux import request
from .wire.schema import ChangesFlag, ListingFlag, Op, Tag
from .wire.streams import HostStream

if TYPE_CHECKING:
    from .state.draft import Draft
    from .state.opened import Opened

_PIECE = 1 << 18


def folder(live: Live) -> str | None:
    """Where the files are of a sandbox that has no root of its own; None for the others."""
    return None if live.engine.probe().capabilities.private_filesystem else live.info.workdir


def asked(op: Op, live: Live, *more: tuple[Tag, int]) -> Fields:
    """CHANGES or UNPACK of all that is the sandbox's own."""
    fields = request(op, *more)
    below = folder(live)
    return fields if below is None else fields.add(Tag.PATH, below)


async def pack(live: Live, draft: Draft, share: Share) -> None:
    """Write the sandbox's changes into the draft. SaveFailed."""
    writer = Writer(draft.fd, share)
    stream, started = await _begin(live)
    try:
        if started.integer(Tag.FLAGS, 0) & ListingFlag.COMPLETE:
            await _copy(stream, writer.feed)
        else:
            await _complete(live, stream, writer)
        await asyncio.to_thread(writer.finish)
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


async def _begin(live: Live) -> tuple[HostStream, Fields]:
    """A CHANGES that has started. An older agent, in a restored live state, knows no attributes, and told none ever."""
    flags = ChangesFlag.CONTENTS | ChangesFlag.ATTRIBUTES
    while True:
        stream = live.mux.open(asked(Op.CHANGES, live, (Tag.FLAGS, int(flags))))
        try:
            return stream, await stream.started()
        except BaseException:
            refused = stream.errno == errno.EINVAL
            stream.reset()
            if not refused or not flags & ChangesFlag.ATTRIBUTES:
                raise
            flags &= ~ChangesFlag.ATTRIBUTES


async def _copy(stream: HostStream, feed: Callable[[bytes], None]) -> None:
    while (piece := await stream.recv()) is not None:
        await asyncio.to_thread(feed, piece.data)
    await stream.result()


async def _complete(live: Live, stream: HostStream, writer: Writer) -> None:
    """The agent sees no layer, only what is there: what is gone of the image is found out here."""
    from .changes.base import base_of, closing_base
    from .changes.listed import Completed

    with closing_base(await asyncio.to_thread(base_of, live.image)) as base:
        completed = Completed(base)
        await _copy(stream, lambda data: writer.feed(completed.feed(data)))
        await asyncio.to_thread(lambda: writer.feed(completed.finish()))


async def unpack(live: Live, opened: Opened) -> None:
    """Bring the changes of a disk snapshot into a sandbox that has just started from the same image."""
    with Joined(opened.fd) as source:
        stream = live.mux.open(asked(Op.UNPACK, live))
        try:
            while data := await asyncio.to_thread(source.read, _PIECE):
                await stream.send(data)
            await stream.send_end()
            await stream.result()
        except BaseException:
            stream.reset()
            raise
