"""From what a sandbox changed to the entries of a layer. Whatever the sandbox says is taken as hostile.

The agent tells its changes with contents (CHANGES, docs/wire.md); they are spooled to a file without a name, checked,
and become items. What the runtime itself laid out is no change; files of /etc that belong to a machine and not to an
image are left out, and so is what the caller names (mounts).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Self

from ..changes import made
from ..changes.read import REMOVED, Entry, Listing
from ..changes.stored import Contents, scan
from ..controller import Controller
from ..errors import BuildFailed, FileError, ProtocolError, SlopletError, SnapshotDamaged
from ..fs import write_all
from ..state.home import Home, unwritable
from ..wire.mux import request
from ..wire.schema import ChangesFlag, ListingFlag, Op, Tag
from .context import Found
from .layertar import Item
from .placing import Look
from .threads import in_thread

#: Not an image's: the machine's that it runs on, or mounts.
_NEVER = ("etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/mtab", "proc", "sys", "dev", "run/sloplet")


class Spool:
    """The records of CHANGES in a file without a name: it goes with its descriptor."""

    def __init__(self, home: Home) -> None:
        home.open()
        try:
            self._file = tempfile.TemporaryFile(dir=home.cache, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise unwritable(home.cache, error) from error
        self._fd = self._file.fileno()
        self._at = 0
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        """Returns where it begins."""
        start = self.size
        try:
            write_all(self._fd, data)
        except OSError as error:
            raise BuildFailed(
                f"the step's files could not be kept: {error.strerror}", hint="is the disk full?"
            ) from error
        self.size += len(data)
        return start

    def read(self, count: int, /) -> bytes:
        parts = []
        while count > 0 and (data := os.pread(self._fd, count, self._at)):
            parts.append(data)
            self._at += len(data)
            count -= len(data)
        return b"".join(parts)

    def skip(self, count: int, /) -> None:
        self._at += count

    def tell(self) -> int:
        return self._at

    def pread(self, count: int, position: int, /) -> bytes:
        return os.pread(self._fd, count, position)

    def rewind(self) -> None:
        self._at = 0

    def pieces(self, start: int, length: int) -> Callable[[], Iterator[bytes]]:
        """A part of it, as an Item's data."""

        def read() -> Iterator[bytes]:
            at, left = start, length
            while left > 0 and (data := self.pread(min(left, 1 << 18), at)):
                at, left = at + len(data), left - len(data)
                yield data

        return read


async def take_changes(controller: Controller, sandbox_id: str, spool: Spool) -> bool:
    """Fill the spool; whether removals are told too (else folders are listed). BuildFailed."""
    stream = await controller.open(sandbox_id, request(Op.CHANGES, (Tag.FLAGS, int(ChangesFlag.CONTENTS))))
    try:
        flags = (await stream.started()).integer(Tag.FLAGS, 0)
        while (piece := await stream.recv()) is not None:
            await in_thread(spool.write, piece.data)
        await stream.result()
    except BaseException as error:
        stream.reset()
        if isinstance(error, OSError) and not isinstance(error, BuildFailed):
            message = error.message if isinstance(error, SlopletError) else str(error.strerror)
            raise BuildFailed(f"what the step changed could not be read: {message}") from error
        raise
    return bool(flags & ListingFlag.COMPLETE)


def read_changes(spool: Spool, complete: bool) -> tuple[Listing, Contents]:
    """Blocking. BuildFailed: the sandbox says what makes no sense, or too much."""
    spool.rewind()
    try:
        return scan(spool, complete, "/")
    except (SnapshotDamaged, ProtocolError, FileError) as error:
        raise BuildFailed(f"what the step's sandbox tells of its files cannot be used: {error.message}") from error


def items_of(
    listing: Listing,
    contents: Contents,
    base: Look,
    *,
    owners: bool,
    names: Callable[[str], list[str]],
    dropped: Callable[[str], bool] = lambda path: False,
    read: Callable[[Found], Callable[[], Iterator[bytes]]] | None = None,
) -> list[Item]:
    """What belongs into a layer above ``base``. ``owners``: those that ``base`` tells are the ones inside; ``names``:
    what is in a folder of it; ``dropped``: what is no part of it, and nothing below is; ``read``: what is in a file of
    it. Blocking.

    The same whatever engine told it: a folder that was replaced comes as what it lacks of the old one, and a file that
    was written anew and is as it was does not come.
    """
    items: dict[str, Item] = {}
    present: dict[str, set[str]] = {path.strip("/"): set(found) for path, found in listing.names.items()}
    for absolute, entry in listing.entries.items():
        path = absolute.strip("/")
        if listing.complete and entry.type == "dir" and _replaced(listing, absolute):
            present.setdefault(path, set())
        above, _, name = path.rpartition("/")
        if listing.complete and above in present and entry.type != REMOVED:
            present[above].add(name)
    for absolute, entry in listing.entries.items():
        path = absolute.strip("/")
        if not path or never(path) or dropped(path):
            continue
        item = _item(path, absolute, entry, contents)
        if item is None:
            continue
        before = base(path)
        if item.kind == "whiteout" and before is None:
            continue  # the runtime's own, or made and removed again
        if item.kind == "folder" and _same_folder(item, before, owners):
            continue
        items[path] = item
    for folder, found in present.items():
        for name in names(folder):
            path = f"{folder}/{name}".lstrip("/")
            if name not in found and not never(path) and not dropped(path):
                items[path] = Item(path, "whiteout")
    if not listing.complete:
        _leave_out_ours(items, base)
    if read is not None and owners:
        _leave_out_same(items, base, read)
    return [_linked(item, items, listing, contents) for item in items.values()]


def _replaced(listing: Listing, absolute: str) -> bool:
    """Whether a folder, or one above it, hides the image's of that name."""
    while absolute.strip("/"):
        entry = listing.entries.get(absolute)
        if entry is not None and entry.opaque:
            return True
        absolute = absolute.rpartition("/")[0]
    return False


def _leave_out_ours(items: dict[str, Item], base: Look) -> None:
    """Where all folders are told, those too that the runtime made: empty ones that the image lacks."""
    for path in sorted(made.folders(), reverse=True):
        path = path.strip("/")
        item = items.get(path)
        empty = item is not None and not any(other.startswith(f"{path}/") for other in items)
        if item is not None and empty and item.kind == "folder" and base(path) is None:
            del items[path]


def _leave_out_same(items: dict[str, Item], base: Look, read: Callable[[Found], Callable[[], Iterator[bytes]]]) -> None:
    """Touched, given to its owner again, written with what was in it: all times are one, so nothing has changed."""
    linked = {item.link for item in items.values() if item.kind == "hardlink"}
    for path, item in list(items.items()):
        before = base(path) if item.kind == "file" and path not in linked else None
        if before is None or before.kind != "file" or item.data is None:
            continue
        facts = (before.size, before.mode, before.uid, before.gid)
        if facts == (item.size, item.mode, item.uid, item.gid) and _equal(item.data(), read(before)()):
            del items[path]


def _equal(some: Iterator[bytes], others: Iterator[bytes]) -> bool:
    """Whether two rows of pieces, cut anywhere, are the same bytes."""
    left = right = b""
    while True:
        left, right = left or next(some, b""), right or next(others, b"")
        count = min(len(left), len(right))
        if left[:count] != right[:count] or (not count and (left or right)):
            return False
        if not count:
            return True
        left, right = left[count:], right[count:]


def never(path: str) -> bool:
    """Whether a path is no file of an image's."""
    return path in _NEVER or path.startswith(("proc/", "sys/", "dev/", "run/sloplet/"))


def _item(path: str, absolute: str, entry: Entry, contents: Contents) -> Item | None:
    owner = (entry.uid, entry.gid)
    if not 0 <= entry.uid < 2**32 or not 0 <= entry.gid < 2**32:
        raise BuildFailed(f"/{path} has an owner that there cannot be: {entry.uid}:{entry.gid}")
    if entry.type == REMOVED:
        return Item(path, "whiteout")
    if entry.type == "dir":
        return Item(path, "folder", entry.mode, *owner)
    if entry.type == "symlink":
        return Item(path, "symlink", 0o777, *owner, link=entry.target)
    if entry.type != "file":
        return None  # a socket or a pipe is nothing without whoever served it
    if entry.link is not None:
        return Item(path, "hardlink", entry.mode, *owner, link=entry.link.strip("/"))
    return Item(path, "file", entry.mode, *owner, entry.size, data=lambda: contents.read_now(absolute, entry.size))


def _linked(item: Item, items: dict[str, Item], listing: Listing, contents: Contents) -> Item:
    """A hard link to what is not kept becomes a file of its own."""
    if item.kind != "hardlink" or item.link in items:
        return item
    absolute = f"/{item.link}"
    entry = listing.entries.get(absolute)
    if entry is None or entry.type != "file":
        raise BuildFailed(f"/{item.path} is a hard link to {absolute}, of which nothing is known")
    return Item(
        item.path, "file", item.mode, item.uid, item.gid, entry.size,
        data=lambda: contents.read_now(absolute, entry.size),
    )  # fmt: skip


def _same_folder(item: Item, before: Found | None, owners: bool) -> bool:
    if before is None or before.kind != "folder" or item.mode != before.mode:
        return False
    return owners and (item.uid, item.gid) == (before.uid, before.gid)
