"""A tar, as it arrives, into a folder of a sandbox.

The headers are read by the project's own reader, here over bytes that come asynchronously; nothing of the tar is ever
on the host's disk. Each member is made inside by the agent, as the sandbox's user, with the rights of that user. Names
that are absolute or have ``..`` in them are refused. Links are made last, so that nothing of a tar can be written
through a link of the same tar. A hard link becomes a copy. Devices, sockets and pipes are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field

from ..errors import FileExists, ImageInvalid, RequestInvalid
from ..files import AsyncFiles
from ..images.tarstream import BLOCK, Entry, TarReader, show

_MOST_HEADERS = 256 << 10  # bytes of headers in front of one member: nobody else is served while they are read
_MOST_LATER = 16 << 20  # bytes of names that are remembered until the end: links, folders of odd modes
_SMALL = 256 << 10  # a file up to here is read whole and written beside others
_AT_ONCE = 8
_ZEROS = bytes(1 << 16)
_MOST_SKIPPED = 100


class _Starved(Exception):
    """More bytes must come first: so many."""

    def __init__(self, missing: int) -> None:
        self.missing = missing


class ArrivingTar(TarReader):
    """``TarReader`` over pieces that are awaited. RequestInvalid for what is no tar."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        super().__init__(self)
        self._pieces = pieces
        self._buffer = b""
        self._at = 0
        self._over = False

    def read(self, size: int, /) -> bytes:
        """For the parser: of what is here."""
        missing = self._at + size - len(self._buffer)
        if missing > 0 and not self._over:
            raise _Starved(missing)
        piece = self._buffer[self._at : self._at + size]
        self._at += len(piece)
        return piece

    async def next(self) -> Entry | None:
        """The next member; None after the last, when the body has come to its end."""
        while True:
            async for _ in self.content():
                pass
            start = self._at
            try:
                block = self._exactly(BLOCK)
                found = self._plain(block)
                if found is None:
                    if not self._begins(block):
                        await self._finish()
                        return None
                    found = self._entry(block)
                if found is not None:
                    return found
            except _Starved as error:
                self._at, self._left, self._padding = start, 0, 0
                if len(self._buffer) - start + error.missing > _MOST_HEADERS:
                    raise RequestInvalid("the tar has headers that are too long") from None
                await self._fill(max(error.missing, len(self._buffer) - start))  # else it is read again and again
            except ImageInvalid as error:
                raise RequestInvalid(error.message, hint="send a tar that is not compressed") from None

    async def content(self) -> AsyncIterator[bytes]:
        """What is left of the current member's data, and past it."""
        while self._left or self._padding:
            if self._at >= len(self._buffer):
                await self._fill(1)
                if self._at >= len(self._buffer):
                    raise RequestInvalid("the tar is cut short: it ends inside of a file")
            if not self._left:
                taken = min(self._padding, len(self._buffer) - self._at)
                self._padding -= taken
                self._at += taken
                continue
            piece = self._buffer[self._at : self._at + self._left]
            self._left -= len(piece)
            self._at += len(piece)
            yield piece

    async def _fill(self, missing: int) -> None:
        parts = [self._buffer[self._at :]] if self._at < len(self._buffer) else []
        while missing > 0 and not self._over:
            piece = await anext(self._pieces, None)
            if piece is None:
                self._over = True
            else:
                parts.append(piece)
                missing -= len(piece)
        self._buffer = parts[0] if len(parts) == 1 else b"".join(parts)
        self._at = 0

    async def _finish(self) -> None:
        """Only a body that has come whole is one: what breaks off here is told by its reader."""
        self._buffer, self._at = b"", 0
        async for _ in self._pieces:
            pass


@dataclass
class Unpacked:
    """What was made."""

    files: int = 0
    folders: int = 0
    links: int = 0
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


async def unpack(files: AsyncFiles, base: str, user: str | None, pieces: AsyncIterator[bytes], most: int) -> Unpacked:
    """Make what a tar holds below the folder ``base``, which is made if it is missing. What was made before an error
    stays. ``most``: bytes, counted as they are written, holes too."""
    job = _Unpacking(files, base.rstrip("/") or "/", user, most)
    try:
        return await job.run(ArrivingTar(pieces))
    finally:
        await job.stop()


class _Unpacking:
    def __init__(self, files: AsyncFiles, base: str, user: str | None, most: int) -> None:
        self._files = files
        self._base = base
        self._user = user
        self._left = most
        self._made = Unpacked()
        self._writing: dict[str, asyncio.Task[None]] = {}
        self._links: dict[str, str] = {}
        self._modes: dict[str, int] = {}
        self._later = 0

    async def run(self, tar: ArrivingTar) -> Unpacked:
        await self._files.mkdir(self._base, user=self._user)
        while (entry := await tar.next()) is not None:
            await self._member(entry, tar)
        await self._settled()
        for name, text in self._links.items():
            await self._link(self._path(name), text)
            self._made.links += 1
        for name, mode in reversed(self._modes.items()):
            await self._files.chmod(self._path(name), mode, user=self._user)
        return self._made

    async def stop(self) -> None:
        tasks = list(self._writing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _member(self, entry: Entry, tar: ArrivingTar) -> None:
        name = name_of(entry.name)
        if entry.kind == "folder":
            await self._folder(name, entry.mode & 0o777)
            return
        if not name:
            raise RequestInvalid("the tar's own folder is not a folder in it")
        if name in self._writing:  # the last of a name counts
            await self._settled()
        if entry.kind == "file":
            await self._file(name, entry, tar)
        elif entry.kind == "symlink":
            self._remember(name, entry.link)
            self._links[name] = _link_text(name, entry.link)
        elif entry.kind == "hardlink":
            await self._copy(name, name_of(entry.link))
        elif len(self._made.skipped) < _MOST_SKIPPED:
            self._made.skipped.append(name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))

    async def _folder(self, name: str, mode: int) -> None:
        if not name:
            return
        self._links.pop(name, None)
        await self._files.mkdir(self._path(name), mode=mode | 0o700, user=self._user)
        self._made.folders += 1
        if mode & 0o700 != 0o700:
            self._remember(name, b"")
            self._modes[name] = mode

    async def _file(self, name: str, entry: Entry, tar: ArrivingTar) -> None:
        self._links.pop(name, None)
        mode = entry.mode & 0o777
        if entry.sparse is None and entry.size <= _SMALL:
            data = b"".join([piece async for piece in tar.content()])
            await self._room()
            self._writing[name] = asyncio.ensure_future(self._write(name, _whole(data), mode))
            return
        await self._write(name, _dense(entry, tar), mode)

    async def _write(self, name: str, content: AsyncIterator[bytes], mode: int) -> None:
        await self._files.write(self._path(name), self._counted(content), mode=mode, user=self._user)
        self._made.files += 1

    async def _counted(self, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in content:
            self._left -= len(piece)
            self._made.bytes += len(piece)
            if self._left < 0:
                raise RequestInvalid("the tar holds more than a body may hold")
            yield piece

    async def _copy(self, name: str, source: str) -> None:
        if not source:
            raise RequestInvalid("a hard link in the tar leads to a folder")
        if source in self._links:
            self._remember(name, self._links[source].encode("utf-8", "surrogateescape"))
            self._links[name] = self._links[source]
            return
        if name == source:
            return
        await self._settled()
        self._links.pop(name, None)
        info = await self._files.stat(self._path(source), user=self._user)
        await self._write(name, self._files.stream(self._path(source), user=self._user), info.mode & 0o777)

    async def _link(self, path: str, text: str) -> None:
        try:
            await self._files.symlink(path, text, user=self._user)
        except FileExists:
            if (await self._files.stat(path, follow=False, user=self._user)).type == "dir":
                raise
            await self._files.remove(path, missing_ok=True, user=self._user)
            await self._files.symlink(path, text, user=self._user)

    def _remember(self, name: str, more: bytes) -> None:
        self._later += len(name) + len(more) + 200
        if self._later > _MOST_LATER:
            raise RequestInvalid("the tar has too many links", hint="send it in parts")

    def _path(self, name: str) -> str:
        return f"{self._base.rstrip('/')}/{name}"

    async def _room(self) -> None:
        """Wait until another file may be begun; raises what a former one raised."""
        while len(self._writing) >= _AT_ONCE:
            await asyncio.wait(self._writing.values(), return_when=asyncio.FIRST_COMPLETED)
            for name, task in list(self._writing.items()):
                if task.done():
                    del self._writing[name]
                    task.result()

    async def _settled(self) -> None:
        while self._writing:
            name, task = next(iter(self._writing.items()))
            await asyncio.wait((task,))
            del self._writing[name]
            task.result()


def name_of(raw: bytes) -> str:
    """The path below the folder; "" is the folder itself. RequestInvalid for one that leads out of it."""
    parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
    if raw.startswith(b"/") or b".." in parts or len(raw) > 4095 or b"\0" in raw:
        raise RequestInvalid(
            f"{show(raw)} in the tar is not a name below its folder", hint="names are relative and have no '..'"
        )
    return b"/".join(parts).decode("utf-8", "surrogateescape")


def _link_text(name: str, raw: bytes) -> str:
    if not raw or b"\0" in raw or len(raw) > 4095:
        raise RequestInvalid(f"the link {show(name.encode('utf-8', 'surrogateescape'))} in the tar leads nowhere")
    return raw.decode("utf-8", "surrogateescape")


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data


async def _dense(entry: Entry, tar: ArrivingTar) -> AsyncIterator[bytes]:
    """A file's bytes, its holes as zeros."""
    if entry.sparse is None:
        async for piece in tar.content():
            yield piece
        return
    at, rest, pieces = 0, b"", tar.content()
    for offset, length in (*entry.sparse.extents, (entry.sparse.size, 0)):
        while at < offset:
            zeros = _ZEROS[: offset - at]
            at += len(zeros)
            yield zeros
        while length:
            if not rest:
                rest = await anext(pieces)
            piece, rest = rest[:length], rest[length:]
            length -= len(piece)
            at += len(piece)
            yield piece
