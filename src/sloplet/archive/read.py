"""Reading an archive that may come from anybody. What it declares bounds what is written; every byte is checked before
anything of it is used."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from ..controller import Snapshot
from ..engines.base import ResolvedImage
from ..errors import FileMissing, ImageInvalid, SnapshotDamaged, SnapshotError, StateUnwritable
from ..fs import FOLDER, NEW_FILE, write_all
from ..images.tarstream import BLOCK, Entry, TarReader
from ..state.draft import Draft
from ..state.home import Home, unwritable
from ..state.locks import FileLock
from ..state.opened import Opened, image_facts
from . import layout
from .images import Incoming
from .layout import Manifest, Member, damaged
from .work import Work

_WINDOW = 8 << 20  # what level 3 uses, and some: a header may ask for gigabytes
_RESERVE = 64 << 20  # of the disk, for others
_HOLE = 1 << 16
_ZEROS = bytes(_HOLE)


class Archive:
    """An open archive: its mark and its manifest are read and checked, the rest is yet to come. A context manager.
    Raises FileMissing, SnapshotDamaged, SnapshotIncompatible, SnapshotError (it cannot be read)."""

    def __init__(self, path: str) -> None:
        self.shown = path if len(path) <= 300 else path[:140] + "..." + path[-140:]
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise _unreadable(self.shown, error) from error
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise SnapshotDamaged(f"{self.shown} is no plain file", hint="name a file that `sloplet export` wrote")
        self._file = os.fdopen(fd, "rb", buffering=0)
        try:
            self._begin(info.st_size)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, size: int) -> None:
        self._body = _Body(self._file, self.shown, size - layout.TRAILER_BYTES)
        layout.check_mark(self._body.read(layout.MARK_BYTES), self.shown)
        self._stream = _Unpacked(self._body)
        self._reader = TarReader(self._stream)
        self._entries = iter(self._reader)
        entry = self._next(layout.MANIFEST_MEMBER)
        if entry.size > layout.MOST_MANIFEST:
            raise damaged(f"its manifest has {entry.size} bytes")
        self.manifest = layout.parse(b"".join(self._data()))

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def receive(self, draft: Draft, incoming: Incoming, work: Work) -> None:
        """All members: the state into the draft, the image where ``incoming`` wants it. Whole and checked afterwards,
        or an exception: the caller then drops both."""
        work.total = self.manifest.total
        try:
            for member in self.manifest.members:
                entry = self._next(member.name)
                if entry.size != member.bytes:
                    raise damaged(f"{member.name} has {entry.size} bytes, and its manifest says {member.bytes}")
                if member is self.manifest.packed:
                    self._image(member, incoming, work)
                else:
                    self._state(draft.fd, member, work)
            self._end()
        except OSError as error:
            raise unwritable(draft.path, error) from error

    def _state(self, folder: int, member: Member, work: Work) -> None:
        name = member.name.removeprefix(layout.STATE_PREFIX)
        hashed, holes = hashlib.sha256(), 0
        fd = os.open(name, NEW_FILE, 0o644, dir_fd=folder)
        try:
            os.fchmod(fd, 0o644)  # whatever the umask is
            for piece in self._data():
                hashed.update(piece)
                holes = _write(fd, piece, holes)
                work.step(len(piece))
            if holes:
                os.ftruncate(fd, member.bytes)
        finally:
            os.close(fd)
        if hashed.hexdigest() != member.sha256:
            raise damaged(f"{member.name} is not what was written")

    def _image(self, member: Member, incoming: Incoming, work: Work) -> None:
        digest = incoming.take(cast(BinaryIO, _Member(self._data(), work)), member.bytes)
        if digest != member.sha256:
            raise damaged(f"{member.name} is not what was written")

    def _next(self, name: str) -> Entry:
        try:
            entry = next(self._entries, None)
        except ImageInvalid as error:
            raise damaged(error.message) from error
        if entry is None:
            raise damaged(f"{name} is missing")
        if entry.name != name.encode("ascii") or entry.kind != "file":
            raise damaged(f"{entry.name[:80]!r} is in the place of {name}")
        return entry

    def _data(self) -> Iterator[bytes]:
        try:
            yield from self._reader.data()
        except ImageInvalid as error:
            raise damaged(error.message) from error

    def _end(self) -> None:
        """Nothing may follow, and all before it is what was written."""
        try:
            more = next(self._entries, None)
        except ImageInvalid as error:
            raise damaged(error.message) from error
        if more is not None:
            raise damaged(f"{more.name[:80]!r} is not in its manifest")
        if self._stream.read(BLOCK) != bytes(BLOCK) or self._stream.read(1, at_end=True):
            raise damaged("something follows its end")
        if self._file.read(layout.TRAILER_BYTES + 1) != layout.trailer(self._body.finish()):
            raise damaged("its digest is not that of its content")


class _Body:
    """The archive without its trailer, hashed as it is read."""

    def __init__(self, file: Any, shown: str, length: int) -> None:
        self._file, self._shown, self._left = file, shown, length
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        try:
            data: bytes = self._file.read(min(size, self._left)) if self._left > 0 and size > 0 else b""
        except OSError as error:
            raise _unreadable(self._shown, error) from error
        self._left -= len(data)
        self._hash.update(data)
        return data

    def finish(self) -> bytes:
        """The digest of all of it; what nobody asked for is read first."""
        while self.read(1 << 20):
            pass
        return self._hash.digest()


class _Unpacked:
    """The tar in the archive; it never just ends."""

    def __init__(self, body: _Body) -> None:
        import zstandard

        self._error: type[Exception] = zstandard.ZstdError
        unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        self._stream: Any = unpacker.stream_reader(cast(Any, body), read_size=1 << 18, read_across_frames=True)

    def read(self, size: int, /, *, at_end: bool = False) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except self._error as error:
            raise damaged(str(error)) from error
        if not data and not at_end:
            raise damaged("it is cut short")
        return data


class _Member:
    """A member's data as a file, for those who want to read it."""

    def __init__(self, pieces: Iterator[bytes], work: Work) -> None:
        self._pieces, self._work = pieces, work
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        if not self._rest:
            self._rest = next(self._pieces, b"")
            self._work.step(len(self._rest))
        data, self._rest = (self._rest, b"") if size < 0 else (self._rest[:size], self._rest[size:])
        return data


def _write(fd: int, piece: bytes, holes: int) -> int:
    """Write it, leaving holes where a whole block is zero; returns how many blocks that makes."""
    view = memoryview(piece)
    start = 0
    for at in range(0, len(piece), _HOLE):
        if piece.startswith(_ZEROS if len(piece) - at >= _HOLE else bytes(len(piece) - at), at):
            if start < at:
                write_all(fd, cast(bytes, view[start:at]))
            start = min(at + _HOLE, len(piece))
            os.lseek(fd, start - at, os.SEEK_CUR)
            holes += 1
    if start < len(piece):
        write_all(fd, cast(bytes, view[start:]))
    return holes


def check_room(home: Home, manifest: Manifest, *, image: bool) -> None:
    """StateUnwritable if the disk has no room for what the archive says it holds."""
    needed = sum(member.bytes for member in manifest.state)
    if image and manifest.packed is not None:
        needed += manifest.packed.bytes
    room = os.statvfs(home.path)
    free = room.f_bavail * room.f_frsize - _RESERVE
    if needed > free:
        raise StateUnwritable(
            f"the archive holds {needed >> 20} MiB, and {home.path} has room for {max(free, 0) >> 20} MiB",
            hint="free some space (`sloplet gc`, or delete snapshots)",
        )


def adopt(draft: Draft, manifest: Manifest, image: ResolvedImage) -> Opened:
    """What was received, as a state to start from. It has no record: it serves this one start, and goes with the
    draft's lock, also if we are killed."""
    snapshot = Snapshot(
        draft.id, None, "export", manifest.kind, manifest.sandbox, manifest.spec.name, None, manifest.engine,
        manifest.created_at, sum(member.bytes for member in manifest.state), manifest.spec,
    )  # fmt: skip
    files = {member.name: {"bytes": member.bytes, "sha256": member.sha256} for member in manifest.state}
    described = {
        **snapshot.to_dict(), "format": manifest.format.to_dict(), "image": image_facts(image), "files": files,
        "extra": manifest.extra,
    }  # fmt: skip
    fd = lock = -1
    try:
        os.fchmod(draft.fd, 0o755)  # as one of our own: an engine may run as another user
        fd = os.open(".", FOLDER, dir_fd=draft.fd)
        lock = os.open(".", FOLDER, dir_fd=draft.fd)  # nobody else's: fd goes to other programs
        held = FileLock.hold_open(draft.path, lock, shared=True)
        assert held is not None, "nobody else knows of it"
        return Opened(snapshot, described, draft.path, fd, held)
    except BaseException as error:
        for opened in (fd, lock):
            if opened >= 0:
                os.close(opened)
        if isinstance(error, OSError):
            raise unwritable(draft.path, error) from error
        raise


def _unreadable(shown: str, error: Exception) -> SnapshotError | FileMissing:
    number = getattr(error, "errno", None)
    text = getattr(error, "strerror", None) or str(error)
    if number == errno.ENOENT:
        return FileMissing(f"there is no {shown!r} on this machine", hint="name a file that `sloplet export` wrote")
    return SnapshotError(f"the archive {shown!r} cannot be read: {text}")
