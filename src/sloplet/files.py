"""Files of a sandbox. Every operation is done inside it, by the agent, as the sandbox's user.

Paths are the sandbox's: absolute, or relative to ``workdir``. Errors are ``errors.FileError`` and, by
inheritance, Python's own (``FileNotFoundError``, ``PermissionError``, ...).
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Protocol

from .controller import Stream
from .errors import FileError, SpecError
from .results import FileChange, FileInfo, LinkTarget
from .wire.fields import Fields, RecordDecoder
from .wire.mux import request
from .wire.schema import (
    FileType,
    ListFlag,
    MkdirFlag,
    MoveFlag,
    Op,
    RemoveFlag,
    SetxattrsFlag,
    StatFlag,
    Tag,
    WatchFlag,
    WatchMask,
    WriteFlag,
)

Content = bytes | str | Iterable[bytes] | AsyncIterable[bytes]
_list = list  # the class has a method of that name
MAX_READ = 256 * 2**20
MAX_LISTED = 1_000_000
_MAX_LISTED_TEXT = 64 * 2**20
MAX_ATTRIBUTE_NAME = 255
MAX_ATTRIBUTE = 61440
_MAX_ATTRIBUTES = 1_000_000  # what one request holds
_MAX_TOLD_ATTRIBUTES = 2 * 2**20  # an agent tells 1 MiB of names and values, in as many records as there are
_TYPES = {FileType.FILE: "file", FileType.DIR: "dir", FileType.SYMLINK: "symlink", FileType.OTHER: "other"}


class Opener(Protocol):
    async def __call__(self, fields: Fields) -> Stream: ...


class AsyncFiles:
    """``box.files``. Reading and writing stream; ``read`` refuses more than ``max_bytes`` instead of filling memory."""

    def __init__(self, open_stream: Opener) -> None:
        self._open = open_stream

    async def read(
        self,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        max_bytes: int = MAX_READ,
        user: str | None = None,
    ) -> bytes:
        """A file's bytes."""
        parts: list[bytes] = []
        size = 0
        async for piece in self.stream(path, offset=offset, length=length, user=user):
            size += len(piece)
            if size > max_bytes:
                raise FileError(f"{path} is larger than {max_bytes} bytes", hint="use files.stream(), or download()")
            parts.append(piece)
        return b"".join(parts)

    async def read_text(self, path: str, *, encoding: str = "utf-8", user: str | None = None) -> str:
        """A file's text; bytes that are no text in this encoding become U+FFFD."""
        return (await self.read(path, user=user)).decode(encoding, "replace")

    async def stream(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncIterator[bytes]:
        """A file's bytes in pieces of up to 64 KiB, read as they are consumed."""
        fields = _path_request(Op.READ, path, user)
        if offset:
            fields.add(Tag.OFFSET, _count("offset", offset))
        if length is not None:
            fields.add(Tag.LENGTH, _count("length", length))
        stream = await self._open(fields)
        try:
            while (piece := await stream.recv()) is not None:
                yield piece.data
            await stream.result()
        finally:
            stream.reset()

    async def write(
        self,
        path: str,
        content: Content,
        *,
        mode: int | None = None,
        append: bool = False,
        exclusive: bool = False,
        parents: bool = True,
        in_place: bool = False,
        owner: str | None = None,
        user: str | None = None,
    ) -> int:
        """Write a file and return its number of bytes. Without ``append`` it is replaced at once when all has
        arrived: a reader sees the old file or the new one, and a broken upload leaves the old one. ``in_place``: the
        file itself is emptied, made the user's and written, as a program would; a broken upload leaves a part.
        ``owner``: whom it is given to, with the folders that were missing; a name, or ``uid[:gid]``."""
        fields = _path_request(Op.WRITE, path, user)
        flags = WriteFlag(0)
        flags |= WriteFlag.APPEND if append else 0
        flags |= WriteFlag.EXCLUSIVE if exclusive else 0
        flags |= WriteFlag.PARENTS if parents else 0
        flags |= WriteFlag.IN_PLACE if in_place else 0
        fields.add(Tag.FLAGS, int(flags))
        if mode is not None:
            fields.add(Tag.MODE, _mode(mode))
        if owner is not None:
            fields.add(Tag.OWNER, owner)
        stream = await self._open(fields)
        try:
            if isinstance(content, (str, bytes, bytearray, memoryview)):
                await stream.send(content.encode() if isinstance(content, str) else bytes(content))
            elif isinstance(content, AsyncIterable):
                async for piece in content:
                    await stream.send(piece)
            else:
                for piece in content:
                    await stream.send(piece)
            await stream.send_end()
            return (await stream.result()).integer(Tag.BYTES)
        finally:
            stream.reset()

    async def list(
        self,
        path: str = ".",
        *,
        recursive: bool = False,
        depth: int | None = None,
        owners: bool = False,
        targets: bool = False,
        attributes: str | None = None,
        user: str | None = None,
    ) -> _list[FileInfo]:
        """What a directory holds, sorted by name; with ``recursive`` everything below it. ``owners``, ``targets`` and
        ``attributes`` as of ``stat``."""
        fields = list_request(
            path, recursive=recursive, depth=depth, owners=owners, targets=targets, attributes=attributes, user=user
        )
        found: _list[FileInfo] = []
        size = 0
        async for record in records(await self._open(fields)):
            found.append(file_info(record))
            size += _weight(found[-1])
            if len(found) > MAX_LISTED or size > _MAX_LISTED_TEXT:
                raise FileError(f"{path} holds more than can be listed at once", hint="list its directories one by one")
        return sorted(found, key=lambda info: info.name)

    async def stat(
        self,
        path: str,
        *,
        follow: bool = True,
        owners: bool = False,
        targets: bool = False,
        attributes: str | None = None,
        user: str | None = None,
    ) -> FileInfo:
        """What a path is. ``owners``: with names of its user and group; ``targets``: with what a link leads to (for
        ``follow=False``); ``attributes``: with the extended ones whose names begin so (``"user."``), up to 16 KiB."""
        flags = StatFlag(0) if follow else StatFlag.NOFOLLOW
        flags |= StatFlag.NAMES if owners else 0
        flags |= StatFlag.TARGET if targets else 0
        fields = _path_request(Op.STAT, path, user).add(Tag.FLAGS, int(flags))
        if attributes is not None:
            fields.add(Tag.PREFIX, _prefix(attributes))
        return file_info(await self._result(fields), name=path.rstrip("/").rsplit("/", 1)[-1] or "/")

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether there is something at that path."""
        try:
            await self.stat(path, follow=False, user=user)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def mkdir(
        self,
        path: str,
        *,
        parents: bool = True,
        mode: int | None = None,
        owner: str | None = None,
        user: str | None = None,
    ) -> None:
        """Make a directory; with ``parents`` also those above it, and it may be there already. ``owner``: whom what is
        made is given to."""
        fields = _path_request(Op.MKDIR, path, user).add(Tag.FLAGS, int(MkdirFlag.PARENTS) if parents else 0)
        if mode is not None:
            fields.add(Tag.MODE, _mode(mode))
        if owner is not None:
            fields.add(Tag.OWNER, owner)
        await self._result(fields)

    async def remove(
        self, path: str, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Remove a file or an empty directory; with ``recursive`` a directory and all below it."""
        flags = (int(RemoveFlag.RECURSIVE) if recursive else 0) | (int(RemoveFlag.MISSING_OK) if missing_ok else 0)
        await self._result(_path_request(Op.REMOVE, path, user).add(Tag.FLAGS, flags))

    async def move(self, path: str, target: str, *, replace: bool = False, user: str | None = None) -> None:
        """Rename. An existing target is an error unless ``replace``."""
        fields = _path_request(Op.MOVE, path, user)
        fields.add(Tag.PATH2, _checked(target)).add(Tag.FLAGS, int(MoveFlag.REPLACE) if replace else 0)
        await self._result(fields)

    async def chmod(self, path: str, mode: int, *, user: str | None = None) -> None:
        """Change permission bits."""
        await self._result(_path_request(Op.CHMOD, path, user).add(Tag.MODE, _mode(mode)))

    async def chown(self, path: str, owner: str, *, user: str | None = None) -> None:
        """Change the owner: a name, or ``uid[:gid]``."""
        await self._result(_path_request(Op.CHOWN, path, user).add(Tag.OWNER, owner))

    async def symlink(self, path: str, target: str, *, user: str | None = None) -> None:
        """Make ``path`` a symbolic link that says ``target``."""
        await self._result(_path_request(Op.SYMLINK, path, user).add(Tag.PATH2, _checked(target)))

    async def attributes(self, path: str, *, prefix: str = "user.", user: str | None = None) -> dict[str, bytes]:
        """A file's extended attributes whose names begin with ``prefix``."""
        fields = _path_request(Op.GETXATTRS, path, user).add(Tag.PREFIX, _prefix(prefix))
        found: dict[str, bytes] = {}
        size = 0
        async for record in records(await self._open(fields)):
            told = _attributes(record)
            found.update(told)
            size += 1 + sum(len(name) + len(value) for name, value in told.items())
            if size > _MAX_TOLD_ATTRIBUTES:
                raise FileError(f"{path} has more attributes than can be told", hint="ask for fewer: prefix=...")
        return found

    async def set_attributes(
        self,
        path: str,
        attributes: Mapping[str, bytes | str | None],
        *,
        prefix: str = "user.",
        replace: bool = False,
        user: str | None = None,
    ) -> None:
        """Set extended attributes; None removes one. ``replace`` removes all others that begin with ``prefix``."""
        fields = _path_request(Op.SETXATTRS, path, user).add(Tag.PREFIX, _prefix(prefix))
        fields.add(Tag.FLAGS, int(SetxattrsFlag.REPLACE) if replace else 0)
        for name, value in attributes.items():
            fields.add(Tag.ATTRIBUTE, _attribute(name, value, prefix))
        if len(fields.encode()) > _MAX_ATTRIBUTES:
            raise SpecError("the attributes are too many to set at once", hint="at most 1 MB of names and values")
        await self._result(fields)

    async def watch(
        self, path: str = ".", *, recursive: bool = False, folder: bool = False, user: str | None = None
    ) -> AsyncIterator[FileChange]:
        """Changes below a path, as they happen, until you stop iterating. The first item is always
        ``FileChange("ready", "")``: what happens after it is not missed. ``folder``: a path that is none is
        NotADirectoryError; without it a single file can be watched, too."""
        flags = WatchFlag.RECURSIVE if recursive else WatchFlag(0)
        flags |= WatchFlag.FOLDER if folder else 0
        fields = _path_request(Op.WATCH, path, user).add(Tag.FLAGS, int(flags))
        stream = await self._open(fields)
        try:
            await stream.started()
            yield FileChange("ready", "")
            async for record in records(stream):
                yield file_change(record)
        finally:
            stream.reset()

    async def _result(self, fields: Fields) -> Fields:
        stream = await self._open(fields)
        try:
            return await stream.result()
        finally:
            stream.reset()


def list_request(
    path: str,
    *,
    recursive: bool = False,
    depth: int | None = None,
    owners: bool = False,
    targets: bool = False,
    attributes: str | None = None,
    user: str | None = None,
) -> Fields:
    """A LIST, as of ``AsyncFiles.list``, for whoever takes its records one by one."""
    flags = ListFlag.RECURSIVE if recursive else ListFlag(0)
    flags |= ListFlag.NAMES if owners else 0
    flags |= ListFlag.TARGET if targets else 0
    fields = _path_request(Op.LIST, path, user).add(Tag.FLAGS, int(flags))
    if attributes is not None:
        fields.add(Tag.PREFIX, _prefix(attributes))
    if depth is not None:
        fields.add(Tag.DEPTH, _count("depth", depth))
    return fields


async def records(stream: Stream) -> AsyncIterator[Fields]:
    """The records of a list answer; raises its error at the end."""
    decoder = RecordDecoder()
    try:
        while (piece := await stream.recv()) is not None:
            for record in decoder.feed(piece.data):
                yield record
        await stream.result()
        decoder.finish()
    finally:
        stream.reset()


def file_info(fields: Fields, name: str | None = None) -> FileInfo:
    return FileInfo(
        name=fields.text(Tag.NAME) if name is None else name,
        type=_type(fields.integer(Tag.TYPE)),
        size=fields.integer(Tag.SIZE),
        mode=fields.integer(Tag.MODE),
        uid=fields.integer(Tag.UID),
        gid=fields.integer(Tag.GID),
        modified=fields.integer(Tag.MTIME_NS) / 1e9,
        target=fields.text(Tag.LINK) if Tag.LINK in fields else None,
        owner=fields.text(Tag.OWNER) if Tag.OWNER in fields else None,
        group=fields.text(Tag.GROUP) if Tag.GROUP in fields else None,
        leads_to=_link_target(fields) if Tag.TARGET_TYPE in fields else None,
        attributes=_attributes(fields),
    )


def _type(number: int) -> str:
    return _TYPES[FileType(number)] if 0 <= number <= 3 else "other"


def _link_target(fields: Fields) -> LinkTarget:
    return LinkTarget(
        type=_type(fields.integer(Tag.TARGET_TYPE)),
        size=fields.integer(Tag.TARGET_SIZE),
        mode=fields.integer(Tag.TARGET_MODE),
        path=fields.text(Tag.TARGET) if Tag.TARGET in fields else None,
    )


def _attributes(fields: Fields) -> dict[str, bytes]:
    parts = [raw.partition(b"\0") for raw in fields.all(Tag.ATTRIBUTE)]
    return {name.decode("utf-8", "surrogateescape"): value for name, _, value in parts}


def _weight(info: FileInfo) -> int:
    """Roughly the bytes that are held for it."""
    more = sum(len(name) + len(value) for name, value in info.attributes.items())
    leads_to = (info.leads_to and info.leads_to.path) or ""
    return more + sum(map(len, (info.name, info.target or "", leads_to, info.owner or "", info.group or "")))


def file_change(record: Fields) -> FileChange:
    mask = record.integer(Tag.MASK)
    kinds = [flag.name.lower() for flag in WatchMask if mask & flag and flag.name]
    name2 = record.text(Tag.NAME2) if Tag.NAME2 in record else None
    return FileChange(kinds[0] if kinds else "other", record.text(Tag.NAME, ""), name2)


def _path_request(op: Op, path: str, user: str | None) -> Fields:
    fields = request(op, (Tag.PATH, _checked(path)))
    if user is not None:
        if not isinstance(user, str) or not user or "\0" in user:
            raise SpecError(f"user={str(user)[:80]!r} is not valid", hint="a name, or numbers as uid[:gid]")
        fields.add(Tag.USER, user)
    return fields


def _checked(path: object) -> str:
    if not isinstance(path, str) or not path or "\0" in path:
        raise SpecError(f"{str(path)[:80]!r} is not a path", hint="a non-empty string without NUL")
    if len(path.encode("utf-8", "surrogateescape")) > 4095:
        raise SpecError(f"the path {path[:40]!r}... is longer than 4095 bytes")
    return path


def _count(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SpecError(f"{what}={value!r} is not a whole number of 0 or more")
    return value


def _mode(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 0o7777:
        raise SpecError(f"mode={value!r} is not a file mode", hint="for example 0o644")
    return value


def _prefix(value: object) -> str:
    if not isinstance(value, str) or not value.startswith("user.") or "\0" in value:
        raise SpecError(f"{str(value)[:80]!r} is no beginning of attributes' names", hint='for example "user."')
    if len(_bytes(value)) > MAX_ATTRIBUTE_NAME:
        raise SpecError(f"the name {value[:40]!r}... is longer than {MAX_ATTRIBUTE_NAME} bytes")
    return value


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise SpecError(f"{text[:80]!r} is not text that can be written as UTF-8") from None


def _attribute(name: object, value: object, prefix: str) -> bytes:
    if _prefix(name) == "user." or not isinstance(name, str) or not name.startswith(prefix):
        raise SpecError(f"the attribute {str(name)[:80]!r} does not begin with {prefix!r}")
    raw = _bytes(name)
    if value is None:
        return raw
    data = _bytes(value) if isinstance(value, str) else value
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise SpecError(f"the attribute {name[:80]!r} is no bytes, nor text", hint="None removes it")
    if len(data) > MAX_ATTRIBUTE:
        raise SpecError(f"the attribute {name[:80]!r} has more than {MAX_ATTRIBUTE} bytes")
    return raw + b"\0" + bytes(data)
