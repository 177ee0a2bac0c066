"""A request's body into a file of a sandbox, as it comes.

Only a body that has come whole is ended (END on the wire): the agent then puts the new file in the old one's place. A
client that goes away, a body that breaks off and an error all give the stream up (RESET), and the old file stays (one
that is written in place keeps what has come).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from ..controller import Controller
from ..errors import FileError
from ..files import AsyncFiles
from ..wire.fields import Fields
from ..wire.mux import request as wire_request
from ..wire.schema import Op, Tag, WriteFlag
from .streams import ClientGone


async def pieces(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    """The body, as it comes. ClientGone if it breaks off; 413 if it is more than ``most`` bytes."""
    said = request.headers.get("content-length")
    if said is not None and said.isdigit() and int(said) > most:
        raise _too_large(most)
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise _too_large(most)
            if piece:
                yield piece
    except ClientDisconnect:
        raise ClientGone from None


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {most} bytes, which the server's operator allows")


def write_request(
    path: str,
    user: str | None,
    mode: int | None,
    *,
    append: bool = False,
    exclusive: bool = False,
    parents: bool = True,
    in_place: bool = False,
) -> Fields:
    fields = wire_request(Op.WRITE, (Tag.PATH, path))
    if user is not None:
        fields.add(Tag.USER, user)
    flags = WriteFlag.APPEND if append else WriteFlag(0)
    flags |= WriteFlag.EXCLUSIVE if exclusive else 0
    flags |= WriteFlag.PARENTS if parents else 0
    flags |= WriteFlag.IN_PLACE if in_place else 0
    fields.add(Tag.FLAGS, int(flags))
    return fields if mode is None else fields.add(Tag.MODE, mode)


async def write(controller: Controller, sandbox: str, fields: Fields, body: AsyncIterator[bytes]) -> int:
    """Its number of bytes. What the sandbox says against it (no right, no room) ends it at once."""
    stream = await controller.open(sandbox, fields)
    outcome = asyncio.ensure_future(stream.result())
    try:
        async for piece in body:
            await stream.send(piece)
            if outcome.done():
                break
        else:
            await stream.send_end()
        return (await outcome).integer(Tag.BYTES)
    finally:
        stream.reset()
        outcome.cancel()
        await asyncio.gather(outcome, return_exceptions=True)


async def existed(files: AsyncFiles, path: str, user: str | None) -> bool:
    """Whether there is something already; what cannot be looked at is the write's matter."""
    try:
        await files.stat(path, user=user)
    except FileError:
        return False
    return True
