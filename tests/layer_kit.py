"""Tars and images by hand, hostile ones among them, for tests of the image store."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sloplet.engines import jail
from sloplet.engines.machine import machine
from sloplet.images import media, userns
from sloplet.images.config import ImageConfig
from sloplet.images.reference import Reference, parse
from sloplet.images.store import ImageStore, StoredImage
from sloplet.state.home import Home

Member = tuple[tarfile.TarInfo, bytes]
#: Who files of images can belong to here: root, range, single (see engines.jail).
MODE = jail.mode(machine())


def member(name: str | bytes, data: bytes = b"", **facts: Any) -> Member:
    info = tarfile.TarInfo(os.fsdecode(name))
    info.size = len(data)
    info.mode = 0o644
    for key, value in facts.items():
        setattr(info, key, value)
    return info, data


def folder(name: str, mode: int = 0o755, **facts: Any) -> Member:
    return member(name, type=tarfile.DIRTYPE, mode=mode, **facts)


def symlink(name: str, to: str) -> Member:
    return member(name, type=tarfile.SYMTYPE, linkname=to)


def hardlink(name: str, to: str) -> Member:
    return member(name, type=tarfile.LNKTYPE, linkname=to)


def tar(*members: Member, form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, errors="surrogateescape") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def patched(data: bytes, at: int, field: bytes) -> bytes:
    """A header field changed and the checksum made right again."""
    block = bytearray(data[:512])
    block[at : at + len(field)] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data[512:]


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def make_image(
    store: ImageStore,
    *layers: bytes,
    name: str | Reference | None = None,
    pack: Callable[[bytes], bytes] = bytes,
    diff_ids: tuple[str, ...] | None = None,
    **config: Any,
) -> StoredImage:
    """An image of these tars, each packed by ``pack`` (its media type says gzip if it is not ``bytes``)."""
    kind = media.OCI_LAYER + ("" if pack is bytes else "+gzip")
    with store.adding():
        descriptors = []
        for layer in layers:
            packed = pack(layer)
            descriptors.append(media.Descriptor(kind, store.blobs.add_bytes(packed), len(packed)))
        diffs = tuple(digest(layer) for layer in layers) if diff_ids is None else diff_ids
        values = {"architecture": media.host_platform().architecture, **config}
        raw = ImageConfig(diff_ids=diffs, **values).to_json()
        described = media.Descriptor(media.OCI_CONFIG, store.blobs.add_bytes(raw), len(raw))
        manifest = media.make_manifest(described, tuple(descriptors))
        reference = parse(name) if isinstance(name, str) else name
        return store.record(store.blobs.add_bytes(manifest.raw), reference=reference)


def zipped(data: bytes) -> bytes:
    return gzip.compress(data, 6, mtime=0)


@contextmanager
def opened(store: ImageStore, image: StoredImage) -> Iterator[Path]:
    """The tree of an image, for as long as the block lasts."""
    found = store.resolve(image)
    try:
        assert found.path is not None
        yield found.path
    finally:
        found.close()


def tree(root: Path) -> dict[str, str]:
    """Path -> content, link target or '/'; without what this user cannot see."""
    found = {}
    for base, folders, files in os.walk(root):
        for name in folders + files:
            path = Path(base, name)
            shown = str(path.relative_to(root))
            found[shown] = (
                f"-> {os.readlink(path)}" if path.is_symlink() else "/" if path.is_dir() else path.read_text("latin-1")
            )
    return found


def inside(info: os.stat_result) -> tuple[int, int]:
    """The owner that a sandbox sees, of a file on this disk."""
    here = machine()
    if MODE != "range":
        return info.st_uid, info.st_gid
    assert here.subuid is not None
    assert here.subgid is not None
    uid = 0 if info.st_uid == here.uid else info.st_uid - here.subuid[0] + 1
    return uid, 0 if info.st_gid == here.gid else info.st_gid - here.subgid[0] + 1


def left(home: Home) -> set[str]:
    """What lies in images/, but for what always may."""
    found = set()
    for base, folders, files in os.walk(home.images):
        for name in folders + files:
            found.add(str(Path(base, name).relative_to(home.images)))
        if Path(base).parent.name == "layers" or len(Path(base).name) == 64:
            folders.clear()
    return found - {"blobs", "blobs/lock", "blobs/partial", "blobs/sha256", "layers"}


def empty(path: Path) -> None:
    """Remove all images of the homes below ``path``: an ordinary user cannot remove what is his subordinate ids'."""
    if MODE == "range":
        for base, folders, _ in os.walk(path):
            if "images" in folders and os.path.isdir(os.path.join(base, "images", "blobs")):
                userns.remove(Path(base), "images")
                folders.remove("images")
