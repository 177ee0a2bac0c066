"""A folder of a sandbox as a tar, as it is read.

The list of what is there is read while the files are, so a folder of a million files costs no more than one of ten. A
few files ahead are asked for, which hides the round trips. Who unpacks the tar is protected from a sandbox that lies:
names stay below the folder, nothing stands below a link, and there are no setuid bits and no special files in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..archive.tarwrite import END, header, padding
from ..controller import Controller, Stream
from ..errors import FileError, FileMissing, FileNotDirectory, ProtocolError, SlopletError
from ..files import records
from ..wire.fields import Fields
from ..wire.mux import request
from ..wire.schema import FileType, ListFlag, Op, Tag
from .reading import AT_ONCE, beginning, read_request
from .streams import ClientGone, broke_off, while_connected

MEDIA_TYPE = "application/x-tar"
_AHEAD = 8  # files that are open at a time
_PIECE = 64 << 10
_KINDS = {FileType.FILE: "file", FileType.DIR: "folder", FileType.SYMLINK: "symlink"}


class Ancestors:
    """The folders above what a walk tells next, parents before what is in them. ProtocolError for a name that is none,
    or that stands below something else than a folder."""

    def __init__(self) -> None:
        self._stack: list[bytes] = []

    def check(self, name: bytes, is_folder: bool) -> None:
        parts = name.split(b"/")
        if b"\0" in name or len(name) > 65535 or any(p in (b"", b".", b"..") or len(p) > 255 for p in parts):
            raise ProtocolError(f"the sandbox names a file {name[:200]!r}, which is not a name")
        if self._stack[: len(parts) - 1] != parts[:-1]:
            raise ProtocolError(f"the sandbox names {name[:200]!r} without the folder that it would be in")
        del self._stack[len(parts) - 1 :]
        if is_folder:
            self._stack.append(parts[-1])


class FolderTar(Response):
    """Made by ``folder_tar``."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], first: bytes) -> None:
        super().__init__(media_type=MEDIA_TYPE, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(receive, self._pour(send))
        except ClientGone:
            pass
        except SlopletError as error:
            broke_off(scope, error)
        finally:
            await self._pieces.aclose()

    async def _pour(self, send: Send) -> None:
        """An answer that breaks off is not completed: the client sees that something is missing."""
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def folder_tar(controller: Controller, sandbox: str, path: str, user: str | None) -> FolderTar:
    """The answer to GET. FileError if there is no such folder, or it may not be read."""
    pieces = _Tar(controller, sandbox, path, user).pieces()
    try:
        first = await anext(pieces)
    except BaseException:
        await pieces.aclose()
        raise
    return FolderTar(pieces, first)


class _Tar:
    def __init__(self, controller: Controller, sandbox: str, path: str, user: str | None) -> None:
        self._controller = controller
        self._sandbox = sandbox
        self._path = path.rstrip("/") or "/"
        self._user = user
        self._ancestors = Ancestors()
        self._pending: deque[tuple[Fields, Stream | None]] = deque()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Its bytes; small ones are joined."""
        parts: list[bytes] = []
        size = 0
        try:
            async for piece in self._members():
                parts.append(piece)
                size += len(piece)
                if size >= _PIECE:
                    yield b"".join(parts) if len(parts) > 1 else piece
                    parts, size = [], 0
            yield b"".join([*parts, END])
        finally:
            for _, stream in self._pending:
                if stream is not None:
                    stream.reset()

    async def _members(self) -> AsyncIterator[bytes]:
        listing = await self._list()
        try:
            more = True
            while more or self._pending:
                while more and len(self._pending) < _AHEAD:
                    record = await anext(listing, None)
                    if record is None:
                        more = False
                    else:
                        await self._ask(record)
                if self._pending:
                    async for piece in self._member(*self._pending[0]):
                        yield piece
                    self._pending.popleft()
        finally:
            await listing.aclose()

    async def _list(self) -> AsyncGenerator[Fields, None]:
        fields = request(Op.LIST, (Tag.PATH, self._path), (Tag.FLAGS, int(ListFlag.RECURSIVE)))
        if self._user is not None:
            fields.add(Tag.USER, self._user)
        listing = records(await self._controller.open(self._sandbox, fields))
        assert isinstance(listing, AsyncGenerator)
        return listing

    async def _ask(self, record: Fields) -> None:
        kind = record.integer(Tag.TYPE)
        name = record.raw(Tag.NAME)
        self._ancestors.check(name, kind == FileType.DIR)
        stream = None
        if kind == FileType.FILE:
            path = f"{self._path.rstrip('/')}/{name.decode('utf-8', 'surrogateescape')}"
            stream = await self._controller.open(self._sandbox, read_request(path, self._user))
        self._pending.append((record, stream))

    async def _member(self, record: Fields, stream: Stream | None) -> AsyncIterator[bytes]:
        name = record.raw(Tag.NAME)
        if stream is None:
            if record.integer(Tag.TYPE) in (FileType.DIR, FileType.SYMLINK):
                yield _header(name, record)
            return
        try:
            try:
                facts = await stream.started()
            except (FileMissing, FileNotDirectory):
                return  # gone since it was listed
            size = max(0, facts.integer(Tag.SIZE))
            if size <= AT_ONCE:  # the kernel's own files (/proc, /sys) are of another size than they say
                data, _ = await beginning(stream)
                yield _header(name, facts, len(data)) + data + padding(len(data))
                return
            yield _header(name, facts, size)
            left = size
            while left:
                piece = await stream.recv()
                if piece is None:
                    await stream.result()
                    raise FileError(f"{name[:200]!r} has become shorter while it was read", hint="try again")
                data = piece.data if len(piece.data) <= left else piece.data[:left]
                left -= len(data)
                yield data
            yield padding(size)
        finally:
            stream.reset()


def _header(name: bytes, facts: Fields, size: int = 0) -> bytes:
    kind = facts.integer(Tag.TYPE)
    return header(
        name + b"/" if kind == FileType.DIR else name,
        kind=_KINDS[FileType(kind)],
        size=size,
        mode=facts.integer(Tag.MODE) & 0o777,
        uid=max(0, facts.integer(Tag.UID)),
        gid=max(0, facts.integer(Tag.GID)),
        mtime_ns=facts.integer(Tag.MTIME_NS),
        link=facts.raw(Tag.LINK, b"")[:4095].replace(b"\0", b""),
    )
