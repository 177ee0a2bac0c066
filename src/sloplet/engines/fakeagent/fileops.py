"""The wire's file operations on the fake's files (docs/wire.md, operations 10 to 22)."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable

from ...wire.fields import Fields, encode_record
from ...wire.mux import AgentStream
from ...wire.schema import (
    FileType,
    ListFlag,
    MkdirFlag,
    MoveFlag,
    Op,
    RemoveFlag,
    StatFlag,
    Tag,
    WatchFlag,
    WatchMask,
    WriteFlag,
)
from .attributes import Extras, prefix_of, read_attributes, set_attributes
from .kernel import Kernel
from .streams import Bell, Device
from .vfs import EXECUTE, READ, WRITE, Cred, Node, Watcher, fail

_PIECE = 65536
_MAX_PENDING = 4096
_MAX_DEPTH = 10_000


class FileOps:
    """Answers file requests. ``workdir`` is where relative paths begin."""

    def __init__(self, kernel: Kernel, workdir: str, default: Cred) -> None:
        self.kernel = kernel
        self.vfs = kernel.vfs
        self.workdir = workdir
        self.default = default
        self.handlers: dict[int, Callable[[AgentStream, Fields, str, Cred], Awaitable[Fields]]] = {
            Op.READ: self.read, Op.WRITE: self.write, Op.LIST: self.list, Op.STAT: self.stat, Op.MKDIR: self.mkdir,
            Op.REMOVE: self.remove, Op.MOVE: self.move, Op.CHMOD: self.chmod, Op.CHOWN: self.chown,
            Op.SYMLINK: self.symlink, Op.WATCH: self.watch,
            Op.GETXATTRS: self.getxattrs, Op.SETXATTRS: self.setxattrs,
        }  # fmt: skip

    async def answer(self, stream: AgentStream, request: Fields, cred: Cred) -> Fields:
        path = os.fsdecode(request.raw(Tag.PATH, b""))
        if not path or "\0" in path:
            raise fail(errno.EINVAL, path)
        return await self.handlers[request.integer(Tag.OP)](stream, request, path, cred)

    async def read(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        node = self.vfs.find(path, self.workdir, cred)
        if node.is_dir or node.device:
            raise fail(errno.EISDIR if node.is_dir else errno.EINVAL, path)
        if not node.allows(cred, READ):
            raise fail(errno.EACCES, path)
        stream.reply(stat_fields(node))
        at, count = request.integer(Tag.OFFSET, 0), 0
        left = request.integer(Tag.LENGTH, 2**62)
        while left > 0 and not stream.was_reset:
            most = min(_PIECE, left)
            piece = bytes(node.data[at : at + most])
            if not piece:
                break
            await stream.send(piece)
            at, left, count = at + len(piece), left - len(piece), count + len(piece)
        return Fields((Tag.BYTES, count))

    async def write(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        flags = request.integer(Tag.FLAGS, 0)
        mode = request.integer(Tag.MODE) if Tag.MODE in request else None
        owner = self._owner(request, cred, path)
        if owner is not None:
            try:
                node = self._may_write(path, flags, owner)
                cred, owner = owner, None
            except PermissionError:
                if cred.uid != 0:
                    raise
                cred = cred._replace(wary=True)
                node = self._may_write(path, flags, cred, owner)
        else:
            node = self._may_write(path, flags, cred)
        if flags & WriteFlag.IN_PLACE and not (node is not None and node.device):
            append = bool(flags & WriteFlag.APPEND)
            return await self._in_place(stream, path, cred, mode, append=append, given=owner)
        if flags & WriteFlag.APPEND:
            return await self._append(stream, path, cred, mode)
        if node is not None and node.device:
            device, count = Device(node.device), 0
            while (item := await stream.recv()) is not None:
                await device.write(item.data)
                count += len(item.data)
            return Fields((Tag.BYTES, count))
        held = bytearray()
        try:
            while (item := await stream.recv()) is not None:
                if self.vfs.used + len(item.data) > self.vfs.limit:
                    raise fail(errno.ENOSPC, path)
                self.vfs.used += len(item.data)  # the temporary file takes room too
                held += item.data
        finally:
            self.vfs.used -= len(held)
        if stream.was_reset:
            raise fail(errno.ECANCELED, path)
        if flags & WriteFlag.EXCLUSIVE and self.vfs.locate(path, self.workdir, cred)[2] is not None:
            raise fail(errno.EEXIST, path)
        self.vfs.publish(path, self.workdir, cred, bytes(held), mode)
        if owner is not None and node is None:
            self.vfs.chown(path, self.workdir, cred, owner.uid, owner.gid)
        return Fields((Tag.BYTES, len(held)))

    def _may_write(self, path: str, flags: int, cred: Cred, owner: Cred | None = None) -> Node | None:
        """What is there. ``owner``: who cannot do it himself; no link is followed for him."""
        if flags & WriteFlag.PARENTS and "/" in path.strip("/"):
            self.vfs.mkdir(path.rstrip("/").rpartition("/")[0], self.workdir, cred, parents=True, owner=owner)
        folder, _, node = self.vfs.locate(path, self.workdir, cred, follow=owner is None)
        if node is not None and node.type is FileType.SYMLINK:
            raise fail(errno.ELOOP, path)
        if path.endswith("/") or (node is not None and node.is_dir):
            raise fail(errno.EISDIR, path)
        if node is not None and flags & WriteFlag.EXCLUSIVE:
            raise fail(errno.EEXIST, path)
        if node is not None and not node.allows(cred, WRITE):
            raise fail(errno.EACCES, path)
        if node is None and not folder.allows(cred, WRITE | EXECUTE):
            raise fail(errno.EACCES, path)
        return node

    def _owner(self, request: Fields, cred: Cred, path: str) -> Cred | None:
        """Whom what is made is given to; None: nobody was named."""
        if Tag.OWNER not in request:
            return None
        owner = self.kernel.user(request.text(Tag.OWNER))
        if cred.uid not in (0, owner.uid):
            raise fail(errno.EPERM, path)
        return Cred(owner.uid, owner.gid)

    async def _append(self, stream: AgentStream, path: str, cred: Cred, mode: int | None) -> Fields:
        node = self.vfs.create(path, self.workdir, cred, 0o644 if mode is None else mode)
        count = 0
        while (item := await stream.recv()) is not None:
            data = item.data
            while data:
                written = self.vfs.write(node, len(node.data), data)
                count, data = count + written, data[written:]
        folder, name, _ = self.vfs.locate(path, self.workdir, cred, follow=True)
        self.vfs.emit(WatchMask.MODIFIED, folder, name)
        return Fields((Tag.BYTES, count))

    async def _in_place(
        self, stream: AgentStream, path: str, cred: Cred, mode: int | None, *, append: bool, given: Cred | None
    ) -> Fields:
        owner = given or cred
        old = self.vfs.locate(path, self.workdir, cred, follow=True)[2]
        node = self.vfs.create(path, self.workdir, cred, 0o644 if mode is None else mode)
        folder, name, _ = self.vfs.locate(path, self.workdir, cred, follow=True)
        his = old is not None and (given is not None or (node.uid, node.gid) == (owner.uid, owner.gid))
        if cred.uid in (0, node.uid) and not his:
            node.uid, node.gid = owner.uid, owner.gid
            self.vfs.emit(WatchMask.ATTRIBUTES, folder, name)
        if mode is not None and node.mode != mode:
            self.vfs.chmod(path, self.workdir, cred, mode)
        if not append:
            self.vfs.truncate(node)
        count = 0
        try:
            while (item := await stream.recv()) is not None:
                data = item.data
                while data:
                    written = self.vfs.write(node, len(node.data), data)
                    count, data = count + written, data[written:]
        finally:
            self.vfs.emit(WatchMask.MODIFIED, folder, name)
        return Fields((Tag.BYTES, count))

    async def list(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        node = self.vfs.find(path, self.workdir, cred)
        if not node.is_dir:
            raise fail(errno.ENOTDIR, path)
        if not node.allows(cred, READ | EXECUTE):
            raise fail(errno.EACCES, path)
        recursive = request.integer(Tag.FLAGS, 0) & ListFlag.RECURSIVE
        depth = min(request.integer(Tag.DEPTH, _MAX_DEPTH), _MAX_DEPTH) if recursive else 1
        extras, base = Extras(self.kernel, request, cred), node.path().rstrip("/")
        buffer = b""
        for name, found in list(self.vfs.walk(node, cred, depth)):
            fields = Fields((Tag.NAME, name))
            for tag, value in stat_fields(found):
                fields.add(tag, value)
            buffer += encode_record(extras.add(fields, found, f"{base}/{name}"))
            if len(buffer) > _PIECE // 2:
                await stream.send(buffer)
                buffer = b""
        await stream.send(buffer)
        return Fields()

    async def stat(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        follow = not request.integer(Tag.FLAGS, 0) & StatFlag.NOFOLLOW
        node = self.vfs.find(path, self.workdir, cred, follow=follow)
        return Extras(self.kernel, request, cred).add(stat_fields(node), node, os.path.join(self.workdir, path))

    async def getxattrs(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        for attribute in read_attributes(self.vfs, path, self.workdir, cred, prefix_of(request)):
            await stream.send(encode_record(Fields((Tag.ATTRIBUTE, attribute))))
        return Fields()

    async def setxattrs(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        return Fields((Tag.COUNT, set_attributes(self.vfs, path, self.workdir, cred, request)))

    async def mkdir(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        parents = bool(request.integer(Tag.FLAGS, 0) & MkdirFlag.PARENTS)
        owner, mode = self._owner(request, cred, path), request.integer(Tag.MODE, 0o755)
        try:
            self.vfs.mkdir(path, self.workdir, owner or cred, mode, parents=parents)
        except PermissionError:
            if owner is None or cred.uid != 0:
                raise
            self.vfs.mkdir(path, self.workdir, cred._replace(wary=True), mode, parents=parents, owner=owner)
        return Fields()

    async def remove(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        flags = request.integer(Tag.FLAGS, 0)
        try:
            count = self.vfs.remove(path, self.workdir, cred, recursive=bool(flags & RemoveFlag.RECURSIVE))
        except FileNotFoundError:
            if not flags & RemoveFlag.MISSING_OK:
                raise
            count = 0
        return Fields((Tag.COUNT, count))

    async def move(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        target = os.fsdecode(request.raw(Tag.PATH2, b""))
        replace = bool(request.integer(Tag.FLAGS, 0) & MoveFlag.REPLACE)
        self.vfs.move(path, target, self.workdir, cred, replace=replace)
        return Fields()

    async def chmod(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        self.vfs.chmod(path, self.workdir, cred, request.integer(Tag.MODE))
        return Fields()

    async def chown(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        owner = self.kernel.user(request.text(Tag.OWNER))
        self.vfs.chown(path, self.workdir, cred, owner.uid, owner.gid)
        return Fields()

    async def symlink(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        self.vfs.symlink(path, os.fsdecode(request.raw(Tag.PATH2)), self.workdir, cred)
        return Fields()

    async def watch(self, stream: AgentStream, request: Fields, path: str, cred: Cred) -> Fields:
        node = self.vfs.find(path, self.workdir, cred)
        if not node.allows(cred, READ):
            raise fail(errno.EACCES, path)
        if not node.is_dir and request.integer(Tag.FLAGS, 0) & WatchFlag.FOLDER:
            raise fail(errno.ENOTDIR, path)
        bell, pending = Bell(), [b""]
        lost = False

        def tell(mask: int, name: str, new_name: str | None) -> None:
            nonlocal lost
            if len(pending) > _MAX_PENDING:
                lost = True
                return
            fields = Fields((Tag.MASK, mask), (Tag.NAME, name))
            if new_name is not None:
                fields.add(Tag.NAME2, new_name)
            pending.append(encode_record(fields))
            bell.ring()

        watcher = Watcher(node, bool(request.integer(Tag.FLAGS, 0) & WatchFlag.RECURSIVE), tell)
        self.vfs.watchers.append(watcher)
        try:
            stream.reply(Fields())
            while not stream.was_reset:
                if len(pending) == 1:
                    await bell.wait()
                    continue
                batch, pending[:] = b"".join(pending), [b""]
                await stream.send(batch)
                if lost:
                    lost = False
                    await stream.send(encode_record(Fields((Tag.MASK, int(WatchMask.OVERFLOW)), (Tag.NAME, ""))))
        finally:
            self.vfs.watchers.remove(watcher)
        return Fields()


def stat_fields(node: Node) -> Fields:
    kind = FileType.OTHER if node.device else node.type
    fields = Fields((Tag.TYPE, int(kind)), (Tag.SIZE, node.size), (Tag.MODE, node.mode))
    fields.add(Tag.UID, node.uid).add(Tag.GID, node.gid).add(Tag.MTIME_NS, node.mtime_ns)
    if node.type is FileType.SYMLINK:
        fields.add(Tag.LINK, node.target)
    return fields
