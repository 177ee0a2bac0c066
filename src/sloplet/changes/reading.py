"""A file's bytes, out of a sandbox or out of an image, never more than was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from ..errors import CommandError, FileDenied
from ..files import AsyncFiles
from .base import Base, Pieces
from .read import Listing

#: A file's bytes from its start, at most as many as the number says. FileError where it cannot be read.
Reader = Callable[[str, int], AsyncGenerator[bytes, None]]

_PIECE = 256 * 1024


@dataclass(frozen=True)
class OldState:
    """What to compare with, if not the image: another sandbox (``compare.state_of``) or a stored one
    (``stored.read_stored``). It lies over the same image as the sandbox that is compared with it."""

    listing: Listing
    read: Reader


def sandbox_reader(files: AsyncFiles) -> Reader:
    """Reads as the sandbox's user, and as root inside what he may not."""

    async def read(path: str, most: int) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(_bounded(files, path, most, None)) as pieces:
                async for piece in pieces:
                    yield piece
        except FileDenied as denied:
            try:
                async with aclosing(_bounded(files, path, most, "0:0")) as pieces:
                    async for piece in pieces:
                        yield piece
            except CommandError:  # there is one user only
                raise denied from None

    return read


async def _bounded(files: AsyncFiles, path: str, most: int, user: str | None) -> AsyncGenerator[bytes, None]:
    left = most
    stream = cast("AsyncGenerator[bytes, None]", files.stream(path, length=most, user=user))
    async with aclosing(stream) as pieces:
        async for piece in pieces:
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return


async def base_pieces(base: Base, path: str, most: int) -> AsyncGenerator[bytes, None]:
    """The same of a file of the image. Unreadable."""
    with await asyncio.to_thread(Pieces, base, path) as file:
        while most > 0 and (piece := await asyncio.to_thread(file.read, min(most, _PIECE))):
            most -= len(piece)
            yield piece


async def whole(pieces: AsyncGenerator[bytes, None]) -> bytes:
    async with aclosing(pieces):
        return b"".join([piece async for piece in pieces])


async def same(one: AsyncGenerator[bytes, None], other: AsyncGenerator[bytes, None]) -> bool:
    """Whether two files hold the same bytes; reads no further than the first difference."""
    async with aclosing(one), aclosing(other):
        left = right = b""
        while True:
            left = left or await anext(one, b"")
            right = right or await anext(other, b"")
            if not left or not right:
                return left == right
            count = min(len(left), len(right))
            if left[:count] != right[:count]:
                return False
            left, right = left[count:], right[count:]
