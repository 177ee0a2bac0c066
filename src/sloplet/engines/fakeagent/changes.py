"""CHANGES and UNPACK on the fake's files (docs/wire.md, operations 34 and 35)."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Iterator

from ...errors import ProtocolError
from ...wire.fields import Fields, RecordDecoder, encode_record
from ...wire.mux import AgentStream
from ...wire.schema import ChangeFlag, ChangesFlag, FileType, ListingFlag, Tag
from .fileops import stat_fields
from .vfs import ROOT, Node, Vfs, fail

_PIECE = 61440
_OWN = "run/sloplet"

_Look = tuple[int, int, int, int, int, tuple[tuple[bytes, bytes], ...]]


def _look(node: Node) -> _Look:
    return node.ino, node.mode, node.uid, node.gid, node.mtime_ns, tuple(node.attributes.items())


def _walk(node: Node, name: str = "") -> Iterator[tuple[str, Node]]:
    """Everything, folders before what is in them; the root is ``.``."""
    yield name or ".", node
    for below, child in list(node.entries.items()):
        path = f"{name}/{below}" if name else below
        if path != _OWN:
            yield from _walk(child, path)


class Changes:
    """Knows how the files were in the beginning."""

    def __init__(self, vfs: Vfs, workdir: str) -> None:
        self._vfs, self._workdir = vfs, workdir
        self._baseline = {path: _look(node) for path, node in _walk(vfs.root)}

    async def tell(self, stream: AgentStream, request: Fields) -> Fields:
        flags = request.integer(Tag.FLAGS, 0)
        if flags & ~(ChangesFlag.CONTENTS | ChangesFlag.ATTRIBUTES):
            raise fail(errno.EINVAL, "a flag this operation does not know")
        root, baseline = self._vfs.root, self._baseline
        if Tag.PATH in request:
            root, baseline = self._folder(request), {}
        stream.reply(Fields((Tag.FLAGS, int(ListingFlag.COMPLETE))))
        found = dict(_walk(root))
        gone = [path for path in baseline if path not in found]
        for path in gone:
            await stream.send(encode_record(Fields((Tag.NAME, path), (Tag.TYPE, int(FileType.REMOVED)))))
        count, size = len(gone), 0
        for path, node in found.items():
            if baseline.get(path) == _look(node) or stream.was_reset:
                continue
            fields = Fields((Tag.NAME, path), *stat_fields(node))
            for name, value in node.attributes.items() if flags & ChangesFlag.ATTRIBUTES else ():
                fields.add(Tag.ATTRIBUTE, name + b"\0" + value)
            await stream.send(encode_record(fields))
            count += 1
            if flags & ChangesFlag.CONTENTS and node.type is FileType.FILE:
                size += await self._content(stream, node)
        return Fields((Tag.COUNT, count), (Tag.BYTES, size))

    def _folder(self, request: Fields) -> Node:
        path = os.fsdecode(request.raw(Tag.PATH))
        node = self._vfs.find(path, self._workdir, ROOT)
        if not node.is_dir:
            raise fail(errno.ENOTDIR, path)
        return node

    @staticmethod
    async def _content(stream: AgentStream, node: Node) -> int:
        data, sent = bytes(node.data), 0
        for at in range(0, len(data), _PIECE):
            piece = data[at : at + _PIECE]
            if piece.strip(b"\0"):
                await stream.send(encode_record(Fields((Tag.OFFSET, at), (Tag.BODY, piece))))
                sent += len(piece)
        return sent

    async def unpack(self, stream: AgentStream, request: Fields) -> Fields:
        unpacking = _Unpacking(self._vfs, self._folder(request) if Tag.PATH in request else self._vfs.root)
        async for record in _records(stream):
            unpacking.take(record)
        if stream.was_reset:
            raise fail(errno.ECANCELED, "unpack")
        return unpacking.finish()


async def _records(stream: AgentStream) -> AsyncIterator[Fields]:
    decoder = RecordDecoder()
    while (item := await stream.recv()) is not None:
        for record in decoder.feed(item.data):
            yield record
    decoder.finish()


class _Unpacking:
    """Makes what records tell of, below a folder."""

    def __init__(self, vfs: Vfs, root: Node) -> None:
        self._vfs, self._root = vfs, root
        self._file: Node | None = None
        self._times: list[tuple[Node, int]] = []
        self._count = self._bytes = 0

    def take(self, record: Fields) -> None:
        if Tag.NAME in record:
            self._file = None
            self._make(record)
            self._count += 1
            return
        data, offset = record.raw(Tag.BODY), record.integer(Tag.OFFSET)
        if self._file is None or not 0 <= offset <= len(self._file.data) - len(data):
            raise ProtocolError("content that belongs to no file, or lies outside it")
        self._file.data[offset : offset + len(data)] = data
        self._bytes += len(data)

    def finish(self) -> Fields:
        for node, mtime in self._times:
            node.mtime_ns = mtime
        return Fields((Tag.COUNT, self._count), (Tag.BYTES, self._bytes))

    def _make(self, record: Fields) -> None:
        kind = FileType(record.integer(Tag.TYPE))
        name = os.fsdecode(record.raw(Tag.NAME))
        node = self._root
        if name != ".":
            folder, last = self._find(name)
            old = folder.entries.get(last)
            keeps = kind is FileType.DIR and not record.integer(Tag.FLAGS, 0) & ChangeFlag.OPAQUE
            if old is not None and not (keeps and old.is_dir):
                self._vfs._remove(folder, last, old, ROOT, True, name)
                old = None
            if kind in (FileType.REMOVED, FileType.OTHER):
                return
            node = old or self._vfs._add(folder, last, self._new(kind, record))
        node.mode, node.uid, node.gid = (record.integer(tag, 0) for tag in (Tag.MODE, Tag.UID, Tag.GID))
        for raw in record.all(Tag.ATTRIBUTE):
            key, _, value = raw.partition(b"\0")
            node.attributes[key] = value
        self._times.append((node, record.integer(Tag.MTIME_NS, 0)))

    def _new(self, kind: FileType, record: Fields) -> Node:
        if record.integer(Tag.FLAGS, 0) & ChangeFlag.HARD_LINK:
            folder, last = self._find(os.fsdecode(record.raw(Tag.PATH2)))
            return folder.entries[last]
        node = Node(kind, 0)
        if kind is FileType.SYMLINK:
            node.target = os.fsdecode(record.raw(Tag.LINK))
        elif kind is FileType.FILE:
            size = record.integer(Tag.SIZE)
            if self._vfs.used + size > self._vfs.limit:
                raise fail(errno.ENOSPC, os.fsdecode(record.raw(Tag.NAME)))
            self._vfs.used += size
            node.data = bytearray(size)
            self._file = node
        return node

    def _find(self, name: str) -> tuple[Node, str]:
        """The folder that holds a name, made if missing, and the last part."""
        *above, last = name.split("/")
        folder = self._root
        for part in (*above, last):
            if part in ("", ".", ".."):
                raise ProtocolError(f"a NAME that is none: {name[:100]!r}")
        for part in above:
            below = folder.entries.get(part) or self._vfs._add(folder, part, Node(FileType.DIR, 0o755))
            if not below.is_dir:
                raise fail(errno.ELOOP, name)
            folder = below
        return folder, last
