"""Blobs by digest: ``images/blobs/ALGORITHM/HEX``. What has its name is whole; what is not whole lies in
``images/blobs/partial`` and is gone on with by whoever writes the same blob next.

A writer holds the lock on its partial file, so one blob is written by one process at a time, and a writer that is
killed leaves what the next one resumes from.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

from ..errors import ImageInvalid, ImageNotFound, StateBusy
from ..fs import NO_LINK, write_all
from ..state.home import Home, new_id, unwritable
from ..state.locks import FileLock
from .reference import DIGEST_RE

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1 << 20


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class BlobStore:
    """Constructing does no I/O. Any thread, any number of processes. Besides the named ones StateUnwritable."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.path = home.images / "blobs"
        self.partial = self.path / "partial"

    def path_of(self, digest: str) -> Path:
        """Where it lies, or would. ImageInvalid for what is no digest."""
        algorithm, hexadecimal = _split(digest)
        return self.path / algorithm / hexadecimal

    def has(self, digest: str) -> bool:
        return self._stat(digest) is not None

    def size(self, digest: str) -> int:
        """ImageNotFound."""
        info = self._stat(digest)
        if info is None:
            raise missing(digest)
        return info.st_size

    def open(self, digest: str) -> BinaryIO:
        """ImageNotFound. What was written was checked; a disk may have changed it since."""
        try:
            return os.fdopen(os.open(self.path_of(digest), _READ), "rb", buffering=0)
        except FileNotFoundError:
            raise missing(digest) from None
        except OSError as error:
            raise unwritable(self.path_of(digest), error) from error

    def read(self, digest: str, most: int) -> bytes:
        """All of a small one, checked against its digest. ImageNotFound; ImageInvalid: larger than ``most`` bytes, or
        damaged on disk."""
        with self.open(digest) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise ImageInvalid(f"the blob {digest[:19]} has {size} bytes; at most {most} are allowed here")
            data = file.read(most + 1)
        algorithm, hexadecimal = _split(digest)
        if hashlib.new(algorithm, data).hexdigest() != hexadecimal:
            raise damaged(digest, self.path_of(digest))
        return data

    def add_bytes(self, data: bytes) -> str:
        """Returns its digest (sha256)."""
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        with self.writer(digest, len(data)) as writer:
            if not writer.done:
                writer.restart()
                writer.write(data)
            return writer.commit()

    def writer(self, digest: str | None = None, size: int | None = None, *, wait: bool = True) -> BlobWriter:
        """For a blob that comes in pieces. Waits while another process or thread writes the same digest (so call it in
        a thread, never on an event loop), or raises StateBusy without ``wait``."""
        if digest is not None:
            _split(digest)
        return BlobWriter(self, digest, size, wait=wait)

    def link_from(self, other: BlobStore, digest: str) -> None:
        """Have a blob of another store here, too: another name of the same file; a copy where that cannot be. The
        caller keeps it from going there. ImageNotFound."""
        if self.has(digest):
            return
        self.make_folders(_split(digest)[0])
        source, target = other.path_of(digest), self.path_of(digest)
        try:
            os.link(source, target, follow_symlinks=False)
            _sync_folder(target.parent)
        except FileExistsError:
            pass  # it has come into being meanwhile
        except FileNotFoundError:
            raise missing(digest) from None
        except OSError as error:
            if error.errno not in NO_LINK:
                raise unwritable(target, error) from error
            with other.open(digest) as file, self.writer(digest, other.size(digest)) as writer:
                if not writer.done:
                    writer.restart()
                    while piece := file.read(_PIECE):
                        writer.write(piece)
                writer.commit()

    def digests(self) -> list[str]:
        """All that are whole."""
        found = []
        for algorithm in ("sha256", "sha512"):
            with suppress(FileNotFoundError):
                names = os.listdir(self.path / algorithm)
                found += [each for name in names if DIGEST_RE.match(each := f"{algorithm}:{name}")]
        return found

    def remove(self, digest: str) -> int:
        """The bytes that went; 0 if there was none. The caller knows that no image needs it (``ImageStore``)."""
        path = self.path_of(digest)
        try:
            size = os.lstat(path).st_size
            os.unlink(path)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise unwritable(path, error) from error
        return size

    def room_for(self, wanted: Mapping[str, int]) -> None:
        """StateUnwritable if what is missing of these (digest -> size) is more than the disk has left: better said
        before it is full."""
        missing = 0
        for digest, size in wanted.items():
            if not self.has(digest):
                with suppress(OSError):
                    size -= os.lstat(self.partial / _partial_name(digest)).st_size
                missing += max(0, size)
        with suppress(OSError):
            disk = os.statvfs(self._home.path)
            free = disk.f_bavail * disk.f_frsize
            if missing > free:
                text = f"{os.strerror(errno.ENOSPC)}: {missing} bytes are still to come, and {free} are free"
                raise unwritable(self.path, OSError(errno.ENOSPC, text))

    def make_folders(self, algorithm: str) -> None:
        try:
            self._home.open()
            for folder in (self._home.images, self.path, self.partial, self.path / algorithm):
                folder.mkdir(0o700, exist_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def _stat(self, digest: str) -> os.stat_result | None:
        path = self.path_of(digest)
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unwritable(path, error) from error
        return info if stat.S_ISREG(info.st_mode) else None


class BlobWriter:
    """A context manager. Leaving it without ``commit`` keeps what is there of a blob whose digest is known, for the
    next writer; of another nothing is kept. If the blob has come into being meanwhile, ``done`` is True: nothing needs
    to be written, and ``commit`` returns at once."""

    def __init__(self, store: BlobStore, digest: str | None, size: int | None, *, wait: bool = True) -> None:
        self._store = store
        self._digest = digest
        self._size = size
        self._algorithm = "sha256" if digest is None else _split(digest)[0]
        self._hash: _Hash = hashlib.new(self._algorithm)
        self._fd = -1
        self._lock: FileLock | None = None
        self.offset = 0  #: bytes that are there already
        self.done = False
        store.make_folders(self._algorithm)
        self._path = store.partial / (new_id() if digest is None else _partial_name(digest))
        self._take(wait)

    def _take(self, wait: bool) -> None:
        if self._found():
            return
        self._lock = FileLock.take(self._path, wait=wait)
        if self._lock is None:
            raise StateBusy(f"the blob {(self._digest or '')[:19]} is being written by somebody else", hint="try again")
        try:
            if self._found():  # by whom we waited for
                self._lock.release()
                return
            self._fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._resume()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise unwritable(self._path, error) from error
            raise

    def _found(self) -> bool:
        if self._digest is None or not self._store.has(self._digest):
            return False
        self.offset, self.done = self._store.size(self._digest), True
        return True

    def _resume(self) -> None:
        """Hash what an earlier writer left. More than there should be was never ours: it goes."""
        there = os.fstat(self._fd).st_size
        if self._size is not None and there > self._size:
            os.ftruncate(self._fd, 0)
            return
        while piece := os.read(self._fd, _PIECE):
            self._hash.update(piece)
            self.offset += len(piece)

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """ImageInvalid beyond the size that was told; what is there then goes."""
        if self.done:
            return
        if self._size is not None and self.offset + len(data) > self._size:
            self._refuse(f"more than the {self._size} bytes that it was said to have came")
        try:
            write_all(self._fd, data)
        except OSError as error:
            with suppress(OSError):  # a full disk takes a part, which whoever goes on must not write behind
                os.ftruncate(self._fd, self.offset)
                os.lseek(self._fd, self.offset, os.SEEK_SET)
            raise unwritable(self._path, error) from error
        self._hash.update(data)
        self.offset += len(data)

    def restart(self) -> None:
        """Throw away what is there: it comes from its beginning."""
        if self.done or not self.offset:
            return
        try:
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
        except OSError as error:
            raise unwritable(self._path, error) from error
        self._hash, self.offset = hashlib.new(self._algorithm), 0

    def commit(self) -> str:
        """Check digest and size, make it durable and give it its name. ImageInvalid: it is another blob than was told,
        and what is there goes."""
        if self.done:
            assert self._digest is not None
            return self._digest
        if self._size is not None and self.offset != self._size:
            self._refuse(f"{self.offset} bytes came, and it was said to have {self._size}")
        digest = f"{self._algorithm}:{self._hash.hexdigest()}"
        if self._digest is not None and digest != self._digest:
            self._refuse(f"its digest is {digest}")
        if os.fstat(self._fd).st_size != self.offset:
            self._refuse("something else was written to it here")
        final = self._store.path_of(digest)
        try:
            os.fsync(self._fd)
            os.rename(self._path, final)
            _sync_folder(final.parent)
        except OSError as error:
            raise unwritable(final, error) from error
        self._digest, self.done = digest, True
        return digest

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        lock, self._lock = self._lock, None
        if fd >= 0:
            os.close(fd)
        if lock is not None and lock.held:
            keep = self._digest is not None and self.offset > 0
            lock.release(remove=not (self.done or keep))

    def _refuse(self, what: str) -> None:
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
        self._hash, self.offset = hashlib.new(self._algorithm), 0
        self.close()
        shown = self._digest or "of unknown digest"
        raise ImageInvalid(f"the blob {shown} is not what it was said to be: {what}", hint="nothing of it was kept")


def _partial_name(digest: str) -> str:
    return digest.replace(":", "-")


def missing(digest: str) -> ImageNotFound:
    return ImageNotFound(f"the blob {digest} is not here", hint="pull the image again")


def damaged(digest: str, path: Path) -> ImageInvalid:
    return ImageInvalid(f"the blob {digest} is damaged on this disk", hint=f"remove {path} and pull the image again")


def _split(digest: str) -> tuple[str, str]:
    if not DIGEST_RE.match(digest):
        raise ImageInvalid(f"{digest[:100]!r} is no digest")
    algorithm, _, hexadecimal = digest.partition(":")
    return algorithm, hexadecimal


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
