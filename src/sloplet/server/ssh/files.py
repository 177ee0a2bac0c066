"""SFTP: files of the sandbox, and of nothing else. Every method of asyncssh's server that would touch a file of this
machine is replaced here; a test compares the two lists.
"""

from __future__ import annotations

import errno
import posixpath
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import asyncssh
from asyncssh.sftp import SFTPServerHandler

from ...errors import FileError, SlopletError
from ...results import FileInfo
from ..problems import without_paths
from .ahead import Ahead, Listing
from .openfile import Reading, Writing

if TYPE_CHECKING:
    from asyncssh import SFTPAttrs, SFTPName, SSHReader, SSHServerChannel, SSHWriter

    from ...sandbox import AsyncSandbox
    from .ahead import Opener

P = ParamSpec("P")
T = TypeVar("T")

VERSION = 3  #: of SFTP: what OpenSSH speaks
_MOST_OPEN = 256
_TYPES = {"file": stat.S_IFREG, "dir": stat.S_IFDIR, "symlink": stat.S_IFLNK}
_READ, _WRITE, _APPEND, _CREATE, _TRUNCATE, _EXCLUSIVE = 1, 2, 4, 8, 16, 32
_UMASK = 0o022
_KNOWN = tuple(
    f"{name}@openssh.com".encode() for name in ("posix-rename", "fsync", "lsetstat", "limits", "statvfs", "fstatvfs")
)
_TOUCH = 30.0


def _told(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Errors of ours as SFTP tells them. Those about files are OSErrors, which asyncssh knows."""

    @wraps(method)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except FileError:
            raise
        except SlopletError as error:
            raise asyncssh.SFTPFailure(without_paths(str(error))[:500]) from error

    return wrapped


class Handler(SFTPServerHandler):
    """asyncssh's, but for three things: an upload whose client has gone is dropped instead of kept half done, a client
    that does not read its answers is not read from, and extensions that work on files of this machine are not there."""

    _extensions = [each for each in SFTPServerHandler._extensions if each[0] in _KNOWN]  # noqa: RUF012
    _packet_handlers = {  # noqa: RUF012
        kind: handler
        for kind, handler in SFTPServerHandler._packet_handlers.items()
        if isinstance(kind, int) or kind in _KNOWN
    }

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._dir_handles = Folders()

    async def _process_packet(self, pkttype: int, pktid: int, packet: Any) -> None:
        if len(self._file_handles) + len(self._dir_handles) > _MOST_OPEN:
            raise asyncssh.SFTPFailure("too many open files")
        await super()._process_packet(pkttype, pktid, packet)
        if self._writer is not None:
            await self._writer.drain()

    def drop(self) -> None:
        """What is open is not finished by anybody. Idempotent."""
        for handle in self._file_handles.values():
            if isinstance(handle, Open):
                handle.drop()
        for folder in self._dir_handles.values():
            if isinstance(folder, Folder):
                folder.drop()

    async def _cleanup(self, exc: Exception | None) -> None:
        self.drop()
        if exc is None and self._writer is not None:
            self._server.channel.exit(0)  # `scp` wants to hear it, and what follows closes the channel
        await super()._cleanup(exc)


async def serve(
    box: AsyncSandbox,
    opener: Opener,
    ahead: Ahead,
    channel: SSHServerChannel[bytes],
    reader: SSHReader[bytes],
    writer: SSHWriter[bytes],
) -> None:
    """Until the client is done."""
    handler = Handler(SandboxFiles(box, opener, ahead, channel), reader, writer, VERSION)
    try:
        await handler.run()
    finally:
        handler.drop()


class Open:
    """An open file: to be read, written, or both."""

    def __init__(self, path: str, reading: Reading | None, writing: Writing | None) -> None:
        self.path, self.reading, self.writing = path, reading, writing

    def drop(self) -> None:
        if self.reading is not None:
            self.reading.drop()
        if self.writing is not None:
            self.writing.drop()


class Folder:
    """A folder that is listed: ``first``, then what it holds."""

    def __init__(self, first: list[Callable[[], Awaitable[FileInfo]]], listing: Listing) -> None:
        self._first, self._listing = first, listing

    def __aiter__(self) -> Folder:
        return self

    @_told
    async def __anext__(self) -> SFTPName:
        info = await self._first.pop(0)() if self._first else await self._listing.next()
        if info is None:
            raise StopAsyncIteration
        return asyncssh.SFTPName(info.name.encode("utf-8", "surrogateescape"), attrs=attributes(info))

    def drop(self) -> None:
        self._listing.drop()


class Folders(dict[bytes, AsyncIterator["SFTPName"]]):
    """Those that are open. One that is closed is given up at once."""

    def pop(self, *args: Any) -> Any:
        found = super().pop(*args)
        if isinstance(found, Folder):
            found.drop()
        return found


class SandboxFiles(asyncssh.SFTPServer):
    """Requests come one after another; each is answered before the next is read."""

    def __init__(
        self, box: AsyncSandbox, opener: Opener, ahead: Ahead, channel: SSHServerChannel[bytes]
    ) -> None:  # fmt: skip
        super().__init__(channel)
        self._box, self._opener, self._ahead = box, opener, ahead

    def _path(self, path: bytes) -> str:
        """Absolute: so that it is never taken for an option, either."""
        return posixpath.join(self._box.workdir, path.decode("utf-8", "surrogateescape"))

    # -- files -------------------------------------------------------------------------

    @_told
    async def open(self, path: bytes, pflags: int, attrs: SFTPAttrs) -> object:
        where = self._path(path)
        reading = writing = None
        if pflags & _WRITE:
            mode = 0o666 if attrs.permissions is None else attrs.permissions
            writing = Writing(
                self._opener, where, mode=mode & 0o777 & ~_UMASK, create=bool(pflags & _CREATE),
                keep=not pflags & _TRUNCATE, append=bool(pflags & _APPEND), exclusive=bool(pflags & _EXCLUSIVE),
            )  # fmt: skip
            await writing.open()
        if pflags & _READ or not pflags & _WRITE:
            if writing is None and (await self._box.files.stat(where)).type == "dir":
                raise FileError("this is a directory", errno=errno.EISDIR)
            reading = Reading(self._opener, where, self._ahead)
        return Open(where, reading, writing)

    def open56(self, path: bytes, desired_access: int, flags: int, attrs: SFTPAttrs) -> Any:
        raise NotImplementedError

    @_told
    async def close(self, file_obj: object) -> None:
        assert isinstance(file_obj, Open)
        writing = file_obj.writing
        try:
            if writing is not None:
                await writing.finish()
                if writing.mode is not None:
                    await self._box.files.chmod(file_obj.path, writing.mode)
                if writing.modified is not None:
                    await self._touch(file_obj.path, writing.modified)
        finally:
            file_obj.drop()

    @_told
    async def read(self, file_obj: object, offset: int, size: int) -> bytes:
        assert isinstance(file_obj, Open)
        if file_obj.reading is None:
            raise FileError("this file was opened for writing", errno=errno.EACCES)
        if file_obj.writing is not None:
            await file_obj.writing.finish()
        return await file_obj.reading.read(offset, size)

    @_told
    async def write(self, file_obj: object, offset: int, data: bytes) -> int:
        assert isinstance(file_obj, Open)
        if file_obj.writing is None:
            raise FileError("this file was opened for reading", errno=errno.EACCES)
        if file_obj.reading is not None:
            file_obj.reading.close()
        await file_obj.writing.write(offset, data)
        return len(data)

    @_told
    async def fsync(self, file_obj: object) -> None:
        """It is as safe as the sandbox when it is closed."""

    # -- what they are -----------------------------------------------------------------

    @_told
    async def stat(self, path: bytes) -> SFTPAttrs:
        return attributes(await self._box.files.stat(self._path(path)))

    @_told
    async def lstat(self, path: bytes) -> SFTPAttrs:
        return attributes(await self._box.files.stat(self._path(path), follow=False))

    @_told
    async def fstat(self, file_obj: object) -> SFTPAttrs:
        assert isinstance(file_obj, Open)
        writing = file_obj.writing
        try:
            found = attributes(await self._box.files.stat(file_obj.path))
        except FileNotFoundError:
            if writing is None:
                raise
            found = asyncssh.SFTPAttrs(permissions=stat.S_IFREG | 0o644)
        if writing is not None:
            found.size = writing.size
        return found

    @_told
    async def setstat(self, path: bytes, attrs: SFTPAttrs) -> None:
        await self._set(self._path(path), attrs)

    @_told
    async def lsetstat(self, path: bytes, attrs: SFTPAttrs) -> None:
        where = self._path(path)
        if (await self._box.files.stat(where, follow=False)).type == "symlink":
            raise asyncssh.SFTPOpUnsupported("attributes of links themselves are not set here")
        await self._set(where, attrs)

    @_told
    async def fsetstat(self, file_obj: object, attrs: SFTPAttrs) -> None:
        assert isinstance(file_obj, Open)
        writing = file_obj.writing
        if writing is None:
            await self._set(file_obj.path, attrs)
            return
        if attrs.size is not None:
            await writing.truncate(attrs.size)
        if attrs.permissions is not None:
            writing.mode = attrs.permissions & 0o7777
        if attrs.mtime is not None:
            writing.modified = attrs.mtime

    async def _set(self, path: str, attrs: SFTPAttrs) -> None:
        files = self._box.files
        if attrs.size is not None:
            writing = Writing(
                self._opener, path, mode=0, create=False, keep=True, append=False, exclusive=False
            )  # fmt: skip
            await writing.open()
            try:
                await writing.truncate(attrs.size)
            finally:
                writing.drop()
        if attrs.uid is not None and attrs.gid is not None:
            await files.chown(path, f"{attrs.uid}:{attrs.gid}")
        if attrs.permissions is not None:
            await files.chmod(path, attrs.permissions & 0o7777)
        if attrs.mtime is not None:
            await self._touch(path, attrs.mtime)

    async def _touch(self, path: str, modified: float) -> None:
        """The wire has no operation for it; every image with a shell has this program."""
        try:
            done = await self._box.run(
                ["touch", "-c", "-d", f"@{int(modified)}", path], timeout=_TOUCH, max_output=4096
            )  # fmt: skip
        except SlopletError as error:
            raise asyncssh.SFTPOpUnsupported("times cannot be set: the sandbox has no `touch`") from error
        if not done.ok:
            raise asyncssh.SFTPFailure(f"the time could not be set: {done.stderr.strip()[:200]}")

    @_told
    async def statvfs(self, path: bytes) -> asyncssh.SFTPVFSAttrs:
        used = await self._box.metrics()
        free = max(0, used.disk_limit - used.disk_used) // 4096
        return asyncssh.SFTPVFSAttrs(
            bsize=4096, frsize=4096, blocks=used.disk_limit // 4096, bfree=free, bavail=free, files=0, ffree=0,
            favail=0, fsid=0, flag=0, namemax=255,
        )  # fmt: skip

    async def fstatvfs(self, file_obj: object) -> asyncssh.SFTPVFSAttrs:
        return await self.statvfs(b".")

    # -- folders and names -------------------------------------------------------------

    def scandir(self, path: bytes) -> AsyncIterator[SFTPName]:
        where = self._path(path)
        return Folder(self._special(where), Listing(self._opener, where, self._ahead))

    def _special(self, path: str) -> list[Callable[[], Awaitable[FileInfo]]]:
        def one(name: str) -> Callable[[], Awaitable[FileInfo]]:
            async def found() -> FileInfo:
                return replace(await self._box.files.stat(posixpath.join(path, name)), name=name)

            return found

        return [one("."), one("..")]

    @_told
    async def mkdir(self, path: bytes, attrs: SFTPAttrs) -> None:
        mode = 0o777 if attrs.permissions is None else attrs.permissions & 0o777
        await self._box.files.mkdir(self._path(path), parents=False, mode=mode & ~_UMASK)

    @_told
    async def rmdir(self, path: bytes) -> None:
        where = self._path(path)
        if (await self._box.files.stat(where, follow=False)).type != "dir":
            raise FileError("this is not a directory", errno=errno.ENOTDIR)
        await self._box.files.remove(where)

    @_told
    async def remove(self, path: bytes) -> None:
        where = self._path(path)
        if (await self._box.files.stat(where, follow=False)).type == "dir":
            raise FileError("this is a directory", errno=errno.EISDIR)
        await self._box.files.remove(where)

    @_told
    async def rename(self, oldpath: bytes, newpath: bytes) -> None:
        await self._box.files.move(self._path(oldpath), self._path(newpath))

    @_told
    async def posix_rename(self, oldpath: bytes, newpath: bytes) -> None:
        await self._box.files.move(self._path(oldpath), self._path(newpath), replace=True)

    @_told
    async def readlink(self, path: bytes) -> bytes:
        target = (await self._box.files.stat(self._path(path), follow=False)).target
        if target is None:
            raise FileError("this is not a symbolic link", errno=errno.EINVAL)
        return target.encode("utf-8", "surrogateescape")

    @_told
    async def symlink(self, oldpath: bytes, newpath: bytes) -> None:
        await self._box.files.symlink(self._path(newpath), oldpath.decode("utf-8", "surrogateescape"))

    def realpath(self, path: bytes) -> bytes:
        return posixpath.normpath(self._path(path)).encode("utf-8", "surrogateescape")

    def link(self, oldpath: bytes, newpath: bytes) -> Any:
        raise NotImplementedError

    def lock(self, file_obj: object, offset: int, length: int, flags: int) -> Any:
        raise NotImplementedError

    def unlock(self, file_obj: object, offset: int, length: int) -> Any:
        raise NotImplementedError

    def map_path(self, path: bytes) -> bytes:
        raise NotImplementedError  # nothing here is a file of this machine

    def reverse_map_path(self, path: bytes) -> bytes:
        raise NotImplementedError

    def format_user(self, uid: int | None) -> str:
        """Not by this machine's list of users."""
        return "" if uid is None else str(uid)

    def format_group(self, gid: int | None) -> str:
        return "" if gid is None else str(gid)


def attributes(info: FileInfo) -> SFTPAttrs:
    when = int(min(max(info.modified, 0), 2**32 - 1))
    return asyncssh.SFTPAttrs(
        size=max(0, info.size), uid=info.uid & 0xFFFFFFFF, gid=info.gid & 0xFFFFFFFF, atime=when, mtime=when,
        permissions=_TYPES.get(info.type, stat.S_IFIFO) | (info.mode & 0o7777),
    )  # fmt: skip
