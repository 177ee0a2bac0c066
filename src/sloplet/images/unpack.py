"""Unpacking a tar of a root filesystem into an empty folder: see ``extract`` for what comes out of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from ..errors import ImageInvalid
from .decompress import Ahead, HashedFile, Unpacked
from .extract import Extractor, UnpackLimits
from .owners import Owners, all_ids_are_ours
from .tarstream import TarReader, show

__all__ = ["Unpack", "UnpackLimits", "unpack"]


@dataclass
class Unpack:
    """What came of it, for image.json."""

    digest: str = ""  #: SHA-256 of the archive file as it lies there
    packing: str = ""
    entries: int = 0
    bytes: int = 0  #: of file contents
    owners_kept: bool = False
    skipped: int = 0  #: device nodes and fifos
    stripped: int = 0  #: files and folders that lost setuid or setgid
    attributes: int = 0  #: extended attributes that were left out

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def unpack(file: BinaryIO, root_fd: int, limits: UnpackLimits | None = None) -> Unpack:
    """Unpack the (packed) tar in ``file`` into the empty folder ``root_fd``.

    Raises ImageInvalid for what is wrong with the archive, OSError for what is wrong with the disk; the caller
    removes the folder then.
    """
    limits = limits or UnpackLimits()
    owners = Owners(kept=all_ids_are_ours())
    hashed = HashedFile(file)
    packed = Unpacked(hashed, most=limits.stream, ratio=limits.ratio, ratio_from=limits.ratio_from)
    with Ahead(packed) as ahead, Extractor(root_fd, limits, owners) as extractor:
        reader = TarReader(ahead)
        for entry in reader:
            extractor.add(entry, reader)
        for name, target in extractor.finish():
            shown = [show(b"/".join(each)) for each in (name, target)]
            raise ImageInvalid(f"{shown[0]} in the tar is a link to {shown[1]}, which is missing")
        while ahead.read(1 << 20):  # to the end: the packing's own checksum comes last
            pass
    if not extractor.entries:
        raise ImageInvalid("the tar is empty")
    return Unpack(
        hashed.finish(), packed.packing, extractor.entries, extractor.bytes, owners.kept, extractor.skipped,
        len(extractor.stripped), extractor.attributes,
    )  # fmt: skip
