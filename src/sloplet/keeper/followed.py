"""What a keeper tells as it happens: events, questions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ..wire.fields import RecordDecoder
from ..wire.mux import HostStream
from ..wire.schema import Tag
from . import from_body


class Followed:
    """What a keeper tells, item by item, until it has no more or ``close``, which who has it must call."""

    def __init__(self, stream: HostStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[Any]:
        decoder = RecordDecoder()
        await self._stream.started()
        while (piece := await self._stream.recv()) is not None:
            for record in decoder.feed(piece.data):
                yield from_body(record.raw(Tag.BODY))
        await self._stream.result()

    def close(self) -> None:
        """Idempotent."""
        self._stream.reset()
