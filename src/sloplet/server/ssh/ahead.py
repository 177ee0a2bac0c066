"""What SFTP reads ahead of its clients, bounded: for each key of the server, over all of its connections.

An open file of which a piece was read holds the next quarter of a megabyte, a folder that is being listed about as
much. Handles cost nothing and clients may have many, so it is not they that are counted.
"""

from __future__ import annotations

import errno
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from ...controller import Stream
from ...errors import FileError
from ...files import file_info
from ...results import FileInfo
from ...wire.fields import Fields, RecordDecoder
from ...wire.mux import request
from ...wire.schema import Op, Tag

Opener = Callable[[Fields], Awaitable[Stream]]
MOST_FILES = 64  #: that hold something while nobody reads them
MOST_FOLDERS = 64  #: that are being listed at a time


class Holds(Protocol):
    @property
    def holds(self) -> bool:
        """Whether it keeps anything."""

    def close(self) -> None:
        """Keep nothing; it can be begun again."""


class Ahead:
    """Those of one key."""

    def __init__(self, files: int = MOST_FILES, folders: int = MOST_FOLDERS) -> None:
        self._files, self._folders = files, folders
        self._resting: OrderedDict[Holds, None] = OrderedDict()
        self._listing = 0

    def begins(self, reading: Holds) -> None:
        """It is read from: nobody takes from it now what it holds."""
        self._resting.pop(reading, None)

    def rests(self, reading: Holds) -> None:
        """It was read from. Those that rest longest give up what they hold."""
        if reading.holds:
            self._resting[reading] = None
        while len(self._resting) > self._files:
            self._resting.popitem(last=False)[0].close()

    def lists(self) -> None:
        """A folder is listed, until ``listed``. FileError."""
        if self._listing >= self._folders:
            raise FileError("too many folders are being listed at once", errno=errno.EMFILE)
        self._listing += 1

    def listed(self) -> None:
        self._listing -= 1


class Listing:
    """What is in a folder, as it comes: however many there are, few of them are here at a time."""

    def __init__(self, opener: Opener, path: str, ahead: Ahead) -> None:
        self._opener, self._path, self._ahead = opener, path, ahead
        self._stream: Stream | None = None
        self._decoder = RecordDecoder()
        self._found: deque[Fields] = deque()
        self._begun = self._counted = False

    async def next(self) -> FileInfo | None:
        """None: there is no more."""
        if not self._begun:
            self._begun = True
            self._ahead.lists()
            self._counted = True
            self._stream = await self._opener(request(Op.LIST, (Tag.PATH, self._path), (Tag.FLAGS, 0)))
        while not self._found and self._stream is not None:
            piece = await self._stream.recv()
            if piece is not None:
                self._found.extend(self._decoder.feed(piece.data))
                continue
            await self._stream.result()
            self._decoder.finish()
            self.drop()
        return file_info(self._found.popleft()) if self._found else None

    def drop(self) -> None:
        """Nobody wants the rest. Idempotent."""
        if self._stream is not None:
            self._stream.reset()
            self._stream = None
        if self._counted:
            self._counted = False
            self._ahead.listed()
