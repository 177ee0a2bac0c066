"""An open file of SFTP, over operations of the wire that read and write files from front to back.

Reading at rising offsets is one stream. Writing is one stream, too: at rising offsets what lies between is copied from
the file as it is. A step back finishes the stream (the file is replaced, whole) and begins another. Whoever goes away
without closing leaves the old file as it was.
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
import secrets
from contextlib import suppress
from typing import cast

from ...controller import Stream
from ...errors import FileError, FileExists, FileMissing
from ...files import AsyncFiles, file_info
from ...results import FileInfo
from ...wire.fields import Fields
from ...wire.mux import request
from ...wire.schema import Op, Tag, WriteFlag
from ...wire.streams import HostStream
from .ahead import Ahead, Opener

MAX_READ = 256 * 1024  #: bytes of one answer
_MAX_GAP = 1 << 30  # bytes of zeros that a write behind the file's end may ask for
_ZEROS = bytes(65536)
_ENDED = 1.0  # seconds for which the end of a file is believed to be there


class Reading:
    """A file to be read."""

    def __init__(self, opener: Opener, path: str, ahead: Ahead) -> None:
        self._opener, self._path, self._ahead = opener, path, ahead
        self._stream: Stream | None = None
        self._buffer = bytearray()
        self._at = 0  # where the buffer begins
        self._ended = -1e9  # when the end was seen, by the loop's clock

    @property
    def holds(self) -> bool:
        return self._stream is not None or bool(self._buffer)

    async def read(self, offset: int, size: int) -> bytes:
        """b"" at the end."""
        self._ahead.begins(self)
        try:
            return await self._read(offset, size)
        finally:
            self._ahead.rests(self)

    async def _read(self, offset: int, size: int) -> bytes:
        size = min(size, MAX_READ)
        now = asyncio.get_running_loop().time()
        if offset != self._at or (self._stream is None and now - self._ended > _ENDED):
            await self._begin(offset)
        while self._stream is not None and len(self._buffer) < size:
            piece = await self._stream.recv()
            if piece is None:
                await self._stream.result()
                self._stream, self._ended = None, now
            else:
                self._buffer += piece.data
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._at += len(found)
        return found

    async def _begin(self, offset: int) -> None:
        self.close()
        self._at = offset
        self._stream = await self._opener(request(Op.READ, (Tag.PATH, self._path), (Tag.OFFSET, offset)))

    def close(self) -> None:
        """Hold nothing. The next read begins anew."""
        if self._stream is not None:
            self._stream.reset()
        self._stream, self._ended = None, -1e9
        self._buffer = bytearray()

    def drop(self) -> None:
        """Nobody reads it any more. Idempotent."""
        self._ahead.begins(self)
        self.close()


class Writing:
    """A file to be written. ``keep``: what it holds stays where nothing else is written. ``create``: it need not be
    there. ``mode``: of a new one."""

    def __init__(
        self, opener: Opener, path: str, *, mode: int, create: bool, keep: bool, append: bool, exclusive: bool
    ) -> None:
        self.path = path
        self._opener, self._mode = opener, mode
        self._create, self._keep, self._append, self._exclusive = create, keep, append, exclusive
        self._new = False
        self._stream: HostStream | None = None
        self._appending = append  # the stream adds to the file's end
        self._at = 0  # where the next byte of the stream goes
        self._size = 0  # of the file as it is
        #: To be set when all is written.
        self.mode: int | None = None
        self.modified: float | None = None

    async def open(self) -> None:
        """Errors that can be known now are raised now."""
        try:
            self._size = (await self._stat()).size
            self._at = self._size if self._append else 0
            if self._exclusive:
                raise FileExists("the file is there already", errno=errno.EEXIST)
        except FileMissing:
            if not self._create:
                raise
            self._new, self._keep = True, False
        if self._new or not (self._keep or self._append):
            await self._begin(append=self._append)
            # The agent answers in order: a refusal of the write has come before this answer has.
            with suppress(FileMissing):
                await self._stat()
            await self._check()

    async def _stat(self) -> FileInfo:
        stream = await self._opener(request(Op.STAT, (Tag.PATH, self.path), (Tag.FLAGS, 0)))
        return file_info(await stream.result(), name="")

    @property
    def size(self) -> int:
        return max(self._at, self._size) if self._keep else self._at

    async def write(self, offset: int, data: bytes) -> None:
        if self._append:
            offset = self._at
        if self._stream is not None and offset < self._at:
            await self.finish()
        if self._stream is None:
            # What goes to the very end needs no copy of the rest.
            adds = self._append or offset == self._size
            await self._begin(append=adds)
            self._at = offset if adds else 0
        if offset > self._at:
            await self._fill(offset)
        assert self._stream is not None
        await self._stream.send(data)
        self._at += len(data)
        await self._check()

    async def truncate(self, size: int) -> None:
        """Make it that long."""
        await self.finish()
        if size != self._size:
            await self._begin(append=False)
            self._at = 0
            await self._fill(size)
            await self._end()

    async def finish(self) -> None:
        """All that was written is the file. The next write begins anew."""
        if self._stream is not None:
            if self._keep and not self._appending:
                await self._fill(self._size)
            await self._end()

    def drop(self) -> None:
        """Leave the file as it was."""
        if self._stream is not None:
            self._stream.reset()
            self._stream = None

    async def _begin(self, *, append: bool) -> None:
        if self._keep and not append:
            await self._can_replace()
        flags = (WriteFlag.APPEND if append else WriteFlag(0)) | (WriteFlag.EXCLUSIVE if self._exclusive else 0)
        fields = request(Op.WRITE, (Tag.PATH, self.path), (Tag.FLAGS, int(flags)))
        if self._new:
            fields.add(Tag.MODE, self._mode)
        self._appending = append
        self._at = 0
        self._stream = cast(HostStream, await self._opener(fields))

    async def _can_replace(self) -> None:
        """In a folder that may not be written a file is written in place, and what it held would be gone before it is
        copied: that is refused."""
        probe = posixpath.join(posixpath.dirname(self.path) or ".", f".sloplet-{secrets.token_hex(8)}")
        stream = await self._opener(request(Op.WRITE, (Tag.PATH, probe), (Tag.FLAGS, int(WriteFlag.EXCLUSIVE))))
        await stream.send_end()
        await stream.result()
        stream = await self._opener(request(Op.REMOVE, (Tag.PATH, probe), (Tag.FLAGS, 0)))
        await stream.result()

    async def _check(self) -> None:
        if self._stream is not None and self._stream.outcome is not None:
            stream, self._stream = self._stream, None
            await stream.result()
            raise FileError("the sandbox ended the write before its time")

    async def _fill(self, until: int) -> None:
        """Up to there: what the file holds, then zeros."""
        assert self._stream is not None
        held = self._size if self._keep and not self._appending else 0
        if until - max(self._at, held) > _MAX_GAP:
            raise FileError("a write so far behind the end of a file is not done here")
        if self._at < min(until, held):
            length = min(until, held) - self._at
            async for piece in AsyncFiles(self._open).stream(self.path, offset=self._at, length=length):
                await self._stream.send(piece)
                self._at += len(piece)
                await self._check()
        while self._at < until and self._stream is not None:
            count = min(len(_ZEROS), until - self._at)
            await self._stream.send(_ZEROS[:count])
            self._at += count
            await self._check()

    async def _open(self, fields: Fields) -> Stream:
        return await self._opener(fields)

    async def _end(self) -> None:
        assert self._stream is not None
        stream, self._stream = self._stream, None
        try:
            await stream.send_end()
            await stream.result()
        finally:
            stream.reset()
        self._size, self._keep, self._new, self._exclusive = self._at, True, False, False
