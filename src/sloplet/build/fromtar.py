"""A tar's files as entries of a layer: ADD of an archive, and what mmdebstrap makes. By our own reader, bounded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from ..errors import BuildFailed, ImageInvalid
from ..images.decompress import HashedFile, Unpacked
from ..images.extract import UnpackLimits, split_name
from ..images.tarstream import Entry, TarReader
from .commit import Spool, never
from .context import Folder, Found
from .layertar import Item

_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")
_USTAR = slice(257, 262)
_ZEROS = bytes(1 << 16)


def is_tar(folder: Folder, found: Found) -> bool:
    """Whether a file is a tar, packed or not: by what is in it, as Docker tells it."""
    head = b"".join(_first(folder, found, 512))
    if head[_USTAR] == b"ustar":
        return True
    if not head.startswith(_MAGIC):
        return False
    fd = folder.open(found.path)
    with os.fdopen(fd, "rb") as file:
        try:
            return _unpacked(cast(BinaryIO, file)).read(512)[_USTAR] == b"ustar"
        except ImageInvalid:
            return False


def _first(folder: Folder, found: Found, count: int) -> Iterator[bytes]:
    fd = folder.open(found.path)
    try:
        yield os.read(fd, count)
    finally:
        os.close(fd)


def _unpacked(file: BinaryIO) -> Unpacked:
    limits = UnpackLimits()
    return Unpacked(HashedFile(file), most=limits.stream, ratio=limits.ratio, ratio_from=limits.ratio_from)


def tar_items(folder: Folder, found: Found, spool: Spool) -> list[Item]:
    """BuildFailed for what cannot be in a layer. Blocking."""
    with os.fdopen(folder.open(found.path), "rb") as file:
        try:
            return read_tar(cast(BinaryIO, file), spool)
        except ImageInvalid as error:
            raise BuildFailed(f"{found.path} cannot be unpacked: {error.message}", hint=error.hint) from error


def read_tar(file: BinaryIO, spool: Spool, *, keep: Callable[[str], bool] = lambda path: True) -> list[Item]:
    """The members of a tar, packed or not; contents go to the spool. Devices and pipes are left out. ImageInvalid."""
    limits = UnpackLimits()
    reader = TarReader(_unpacked(file))
    items: dict[str, Item] = {}
    count = 0
    for entry in reader:
        count += 1
        if count > limits.entries:
            raise ImageInvalid(f"it has more than {limits.entries} entries, the limit")
        path = b"/".join(split_name(entry.name, limits)).decode("utf-8", "surrogateescape")
        if not path or not keep(path):
            continue
        item = _item(entry, path, reader, spool, limits)
        if item is not None:
            items.pop(path, None)  # of two of one name the last counts, in its place
            items[path] = item
    return list(items.values())


def _item(entry: Entry, path: str, reader: TarReader, spool: Spool, limits: UnpackLimits) -> Item | None:
    owner = (entry.uid, entry.gid)
    if max(owner) >= 2**32 - 1:
        raise ImageInvalid(f"{path[:200]!r} in the tar has an owner that there cannot be")
    link = entry.link.decode("utf-8", "surrogateescape")
    if entry.kind == "folder":
        return Item(path, "folder", entry.mode, *owner)
    if entry.kind == "symlink":
        return Item(path, "symlink", 0o777, *owner, link=link)
    if entry.kind == "hardlink":
        target = b"/".join(split_name(entry.link, limits)).decode("utf-8", "surrogateescape")
        return None if target == path else Item(path, "hardlink", entry.mode, *owner, link=target)
    if entry.kind != "file":
        return None
    start, length = spool.size, 0
    for piece in reader.data():
        spool.write(piece)
        length += len(piece)
    if entry.sparse is None:
        return Item(path, "file", entry.mode, *owner, length, data=spool.pieces(start, length))
    extents, size = entry.sparse.extents, entry.sparse.size
    return Item(path, "file", entry.mode, *owner, size, data=lambda: _sparse(spool, start, extents, size))


def _sparse(spool: Spool, start: int, extents: tuple[tuple[int, int], ...], size: int) -> Iterator[bytes]:
    at = 0
    for offset, length in (*extents, (size, 0)):
        while at < offset:
            piece = _ZEROS[: offset - at]
            at += len(piece)
            yield piece
        for data in spool.pieces(start, length)():
            at += len(data)
            yield data
        start += length


def image_items(items: list[Item]) -> list[Item]:
    """Of a root filesystem: without what is a machine's."""
    return [item for item in items if not never(item.path)]
