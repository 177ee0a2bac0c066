"""Files -> a layer: a tar that is the same for the same files, packed so that its digest is, too.

Sorted by path, owners as numbers, no times but one (``epoch``), PAX records only where ustar has no room; gzip with a
header that tells nothing. So a step that is done again gives the same layer, if what it did is the same.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..archive.tarwrite import END, header, padding
from ..errors import BuildFailed
from ..images.blobs import BlobStore, BlobWriter
from ..images.extract import UnpackLimits
from ..images.media import OCI_LAYER, Descriptor

#: 1980-01-01: ZIP knows no earlier time, and programs that zip an image's files would fail.
DEFAULT_EPOCH = 315532800
WHITEOUT = ".wh."
GZIP_LEVEL = 4
MAX_BYTES = UnpackLimits().bytes  #: of all files of a layer
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_PIECE = 1 << 18

#: Raises what should stop the work.
Check = Callable[[], None]


@dataclass(frozen=True)
class Item:
    """One entry of a layer. ``path`` has no slash at either end, and surrogates for bytes that are not UTF-8."""

    path: str
    kind: str  #: file, folder, symlink, hardlink, whiteout
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    size: int = 0
    link: str = ""  #: of a symlink its text, of a hardlink the path of the other
    data: Callable[[], Iterator[bytes]] | None = None  #: exactly ``size`` bytes


@dataclass(frozen=True)
class Layer:
    """A layer that is a blob."""

    descriptor: Descriptor
    diff_id: str  #: digest of its tar


def never() -> None:
    """A Check that stops nothing."""


def write_layer(items: Iterable[Item], blobs: BlobStore, *, epoch: int = DEFAULT_EPOCH, check: Check = never) -> Layer:
    """Blocking. BuildFailed where the items make no tree; OSError and the blob store's errors."""
    ordered = arranged(items)
    with blobs.writer() as writer:
        packer = _Packer(writer)
        for piece in tar_pieces(ordered, epoch, check):
            packer.write(piece)
        diff_id = packer.finish()
        size = writer.offset
        return Layer(Descriptor(f"{OCI_LAYER}+gzip", writer.commit(), size), diff_id)


class _Packer:
    """gzip, as two digests see it."""

    def __init__(self, writer: BlobWriter) -> None:
        self._writer = writer
        self._deflate = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._hash = hashlib.sha256()
        self._crc = self._count = 0
        writer.write(_GZIP_HEADER)

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self._crc = zlib.crc32(data, self._crc)
        self._count += len(data)
        if packed := self._deflate.compress(data):
            self._writer.write(packed)

    def finish(self) -> str:
        tail = self._crc.to_bytes(4, "little") + (self._count & 0xFFFFFFFF).to_bytes(4, "little")
        self._writer.write(self._deflate.flush() + tail)
        return "sha256:" + self._hash.hexdigest()


def arranged(items: Iterable[Item]) -> list[Item]:
    """In order of their paths; of the names of one file the first has its content. BuildFailed for what is no tree."""
    by_path: dict[str, Item] = {}
    for item in items:
        by_path[item.path] = item
    ordered = [by_path[path] for path in sorted(by_path, key=_order)]
    _check_tree(by_path)
    _check_size(ordered)
    first: dict[str, str] = {}  # the path that has the content -> the first of its names
    for item in ordered:
        root = item.link if item.kind == "hardlink" else item.path
        if item.kind in ("file", "hardlink"):
            first.setdefault(root, item.path)
    return [_relinked(item, by_path, first) for item in ordered]


def _relinked(item: Item, by_path: dict[str, Item], first: dict[str, str]) -> Item:
    if item.kind == "file" and first[item.path] != item.path:
        return replace(item, kind="hardlink", link=first[item.path], size=0, data=None)
    if item.kind != "hardlink":
        return item
    content = by_path.get(item.link)
    if content is None or content.kind != "file":
        raise BuildFailed(f"/{item.path} is a hard link to /{item.link}, which is no file of the same layer")
    if first[item.link] == item.path:
        return replace(content, path=item.path)
    return replace(item, link=first[item.link])


def _check_size(items: list[Item]) -> None:
    """A sparse file is as large as it says, in a tar; nobody could unpack it."""
    total = 0
    for item in items:
        total += item.size
        if total > MAX_BYTES:
            raise BuildFailed(
                f"the layer would be larger than {MAX_BYTES >> 30} GiB, the limit: /{item.path} has {item.size} bytes",
                hint="remove what is not needed in the same step",
            )


def _check_tree(by_path: dict[str, Item]) -> None:
    folders: set[str] = set()
    for path, item in by_path.items():
        parts = path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise BuildFailed(f"{path[:200]!r} cannot be a path in a layer")
        if any(part.startswith(WHITEOUT) for part in parts):
            raise BuildFailed(
                f"/{path} cannot be kept: in a layer, names that begin with .wh. mean that something is removed",
                hint="rename or remove it in the same step",
            )
        above = path.rpartition("/")[0]
        while above and above not in folders:
            other = by_path.get(above)
            if other is not None and other.kind != "folder":
                raise BuildFailed(f"/{path} is to be in /{above}, which is no folder ({item.kind} below {other.kind})")
            folders.add(above)
            above = above.rpartition("/")[0]


def _order(path: str) -> list[bytes]:
    return _raw(path).split(b"/")


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def tar_pieces(items: Iterable[Item], epoch: int, check: Check = never) -> Iterator[bytes]:
    """The tar. ``items`` are arranged."""
    for item in items:
        check()
        yield from _member(item, epoch * 10**9, check)
    yield END


def _member(item: Item, time_ns: int, check: Check) -> Iterator[bytes]:
    facts: dict[str, Any] = {"mode": item.mode & 0o7777, "uid": item.uid, "gid": item.gid, "mtime_ns": time_ns}
    name = _raw(item.path)
    if item.kind == "whiteout":
        above, _, last = item.path.rpartition("/")
        yield header(_raw(f"{above}/{WHITEOUT}{last}".lstrip("/")), mode=0, mtime_ns=time_ns)
    elif item.kind == "folder":
        yield header(name + b"/", kind="folder", **facts)
    elif item.kind in ("symlink", "hardlink"):
        mode = 0o777 if item.kind == "symlink" else item.mode & 0o7777
        yield header(name, kind=item.kind, link=_raw(item.link), **{**facts, "mode": mode})
    else:
        yield header(name, size=item.size, **facts)
        left = item.size
        for piece in item.data() if item.data else ():
            check()
            left -= len(piece)
            if left < 0:
                break
            yield piece
        if left:
            raise BuildFailed(f"/{item.path} changed while it was being read", hint="try again when nothing writes it")
        yield padding(item.size)


def text_data(content: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: iter((content,) if content else ())
