"""How much a run does, and the images it works with: made here, no registry is asked."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....images import media
from ....images.config import ImageConfig
from ....images.reference import parse
from ....images.store import ImageStore, StoredImage
from ..memory import MIB
from ..rootfs import make_rootfs
from ..stats import Report


@dataclass(frozen=True)
class ImagesPlan:
    """How much of everything."""

    only: tuple[str, ...] = ()
    quick: bool = False
    rounds: int = 5  #: of unpacking
    starts: int = 60
    files: int = 8000  #: in the layer that is unpacked
    bytes: int = 160 * MIB
    together: int = 100
    shared: int = 64 * MIB  #: a file that all of them read
    layer: str = ""  #: a tar to unpack instead of what is made here


def quick_plan(**changes: Any) -> ImagesPlan:
    few = {
        "rounds": 2,
        "starts": 10,
        "files": 1500,
        "bytes": 24 * MIB,
        "together": 10,
        "shared": 16 * MIB,
        "quick": True,
    }
    return ImagesPlan(**{**few, **changes})


@dataclass(frozen=True)
class Bench:
    """What a suite works with. ``place``: a folder to unpack in, in memory if there is room."""

    plan: ImagesPlan
    report: Report
    store: ImageStore
    place: Path


def layer_of_host(files: int, most: int) -> bytes:
    """A tar of some of this machine's own programs and libraries: sizes and folders as a distribution's image has."""
    made, taken = io.BytesIO(), 0
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for base, folders, names in os.walk("/usr"):
            folders.sort()
            archive.add(base, base.lstrip("/"), recursive=False)
            for name in sorted(names):
                path = os.path.join(base, name)
                try:
                    size = os.lstat(path).st_size
                    if taken + size > most or not os.access(path, os.R_OK):
                        continue
                    archive.add(path, path.lstrip("/"), recursive=False, filter=_plain)
                except OSError:
                    continue
                taken, files = taken + size, files - 1
                if not files:
                    return made.getvalue() + bytes(1024)
    return made.getvalue()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = 0
    return None if info.isdev() else info


def small_root(folder: Path, size: int) -> bytes:
    """A root filesystem with a ``true`` and one large file."""
    make_rootfs(folder)
    folder.chmod(0o755)
    if size:
        (folder / "large").write_bytes(os.urandom(size))
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.add(folder, ".", filter=_plain)
    return made.getvalue()


def packed(data: bytes) -> bytes:
    return gzip.compress(data, 6, mtime=0)


def add_image(store: ImageStore, layer: bytes, name: str) -> StoredImage:
    platform = media.host_platform()
    with store.adding():
        diff = "sha256:" + hashlib.sha256(layer).hexdigest()
        described = media.Descriptor(media.OCI_LAYER, store.blobs.add_bytes(layer), len(layer))
        raw = ImageConfig(
            architecture=platform.architecture, variant=platform.variant, diff_ids=(diff,), env=(("PATH", "/bin"),)
        ).to_json()
        config = media.Descriptor(media.OCI_CONFIG, store.blobs.add_bytes(raw), len(raw))
        manifest = media.make_manifest(config, (described,))
        return store.record(store.blobs.add_bytes(manifest.raw), reference=parse(name))
