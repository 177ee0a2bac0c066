"""Unpacking one layer of an image into an empty folder, and what is known of it besides its files.

A layer says what is added, and by names that begin with ``.wh.`` what goes of the layers below (OCI image spec,
"Representing Changes"). Those names are never made; ``trees`` applies them. What a layer only implies (folders that it
puts something into), and links to files of lower layers, are written down too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ..errors import ImageInvalid
from .decompress import Ahead, HashedFile, Unpacked
from .extract import Blame, Extractor, Parts, UnpackLimits, split_name
from .owners import Owners
from .tarstream import Entry, TarReader, show

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_AUFS = b".wh..wh."  # what that filesystem kept for itself
_TELL = 1 << 22  # bytes
_PACKINGS = ("tar", "gzip", "zstd")


@dataclass(frozen=True)
class LayerFacts:
    """``layer.json``. Paths are as they lie in the layer's tree, by names without symlinks."""

    diff_id: str
    entries: int = 0
    size: int = 0  #: of file contents, in bytes
    whiteouts: tuple[bytes, ...] = ()  #: what goes of the layers below
    opaque: tuple[bytes, ...] = ()  #: folders of which all goes that lower layers put there
    implied: tuple[bytes, ...] = ()  #: folders that the layer says nothing of, but for what is in them
    links: tuple[tuple[bytes, bytes], ...] = ()  #: (name, target): hard links to files of lower layers
    owners: dict[bytes, tuple[int, int]] = field(default_factory=dict)  #: where files on disk are all the caller's
    skipped: int = 0  #: device nodes and fifos
    stripped: int = 0  #: setuid and setgid
    attributes: int = 0  #: extended attributes that were left out
    foreign: int = 0  #: files of owners that no sandbox knows, given to nobody
    modes: dict[bytes, int] = field(default_factory=dict)  #: with setuid or setgid, which the files on disk lack

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "diff_id": self.diff_id, "entries": self.entries, "size": self.size,
                "whiteouts": _texts(self.whiteouts), "opaque": _texts(self.opaque), "implied": _texts(self.implied),
                "links": [_texts(pair) for pair in self.links],
                "owners": {_text(name): list(ids) for name, ids in self.owners.items()},
                "skipped": self.skipped, "stripped": self.stripped, "attributes": self.attributes,
                "foreign": self.foreign, "modes": {_text(name): mode for name, mode in self.modes.items()},
            }
        ).encode("ascii")  # fmt: skip

    @staticmethod
    def from_json(data: bytes) -> LayerFacts:
        """Raises ValueError, KeyError or TypeError for what we did not write."""
        raw: dict[str, Any] = json.loads(data)
        counts = {name: int(raw[name]) for name in ("entries", "size", "skipped", "stripped", "attributes", "foreign")}
        return LayerFacts(
            diff_id=str(raw["diff_id"]),
            whiteouts=_raws(raw["whiteouts"]),
            opaque=_raws(raw["opaque"]),
            implied=_raws(raw["implied"]),
            links=tuple((_raw(name), _raw(target)) for name, target in raw["links"]),
            owners={_raw(name): (int(ids[0]), int(ids[1])) for name, ids in raw["owners"].items()},
            modes={_raw(name): int(mode) for name, mode in raw.get("modes", {}).items()},
            **counts,
        )


def unpack_layer(
    file: BinaryIO,
    root_fd: int,
    diff_id: str,
    owners: Owners,
    limits: UnpackLimits | None = None,
    tell: Callable[[int], None] = lambda done: None,
) -> LayerFacts:
    """Unpack the (packed) layer in ``file`` into the empty folder ``root_fd``. ``diff_id``: the digest of its tar;
    ``tell`` is called now and then with how many bytes of the file were read.

    Raises ImageInvalid for what is wrong with the layer, also if it is another one; OSError for what is wrong with the
    disk. The caller removes the folder then.
    """
    limits = limits or UnpackLimits()
    source = HashedFile(file, hashing=False)
    packed = Unpacked(source, most=limits.stream, ratio=limits.ratio, ratio_from=limits.ratio_from, hashing=True)
    if packed.packing not in _PACKINGS:
        raise ImageInvalid(f"the layer is packed with {packed.packing}; it may be gzip, zstd or nothing")
    links: list[tuple[bytes, bytes]] = []
    extractor = _LayerExtractor(root_fd, limits, owners)
    with Ahead(packed) as ahead, extractor:
        reader = TarReader(ahead, may_end=True)  # its digest is known
        told = 0
        for entry in reader:
            extractor.add(entry, reader)
            if source.count - told >= _TELL:
                told = source.count
                tell(told)
        links += [(b"/".join(name), b"/".join(target)) for name, target in extractor.finish()]
        while ahead.read(1 << 20):  # to the end: the digest is of all of it
            pass
    if f"sha256:{packed.digest}" != diff_id:
        raise ImageInvalid(
            f"a layer is not what the image says: its content is sha256:{packed.digest}, and should be {diff_id}",
            hint="nothing of it was kept; pull the image again",
        )
    return LayerFacts(
        diff_id,
        extractor.entries,
        extractor.bytes,
        _joined(extractor.whiteouts),
        _joined(extractor.opaque),
        _joined(extractor.implied - extractor.spoken_of),
        tuple(links),
        owners.recorded,
        extractor.skipped,
        len(extractor.stripped),
        extractor.attributes,
        owners.foreign,
        extractor.stripped,
    )


class _LayerExtractor(Extractor):
    def __init__(self, root_fd: int, limits: UnpackLimits, owners: Owners) -> None:
        super().__init__(root_fd, limits, owners)
        self.whiteouts: set[Parts] = set()
        self.opaque: set[Parts] = set()

    def add(self, entry: Entry, reader: TarReader) -> None:
        if _WHITEOUT in entry.name:
            parts = split_name(entry.name, self.limits)
            if any(part.startswith(_WHITEOUT) for part in parts[:-1]):
                raise ImageInvalid(f"{show(entry.name)} in the layer lies in what can only be a mark")
            if parts and parts[-1].startswith(_WHITEOUT):
                self.count()
                self._mark(entry, parts)
                return
        super().add(entry, reader)

    def _mark(self, entry: Entry, parts: Parts) -> None:
        name = parts[-1]
        with Blame(entry):
            where = self.landing(parts)[:-1]
        if name == _OPAQUE:
            self.opaque.add(where)
        elif not name.startswith(_AUFS):
            gone = name.removeprefix(_WHITEOUT)
            if gone in (b"", b".", b".."):
                raise ImageInvalid(f"{show(entry.name)} in the layer is a mark that names nothing")
            self.whiteouts.add((*where, gone))


def _joined(paths: Iterable[Parts]) -> tuple[bytes, ...]:
    return tuple(sorted(b"/".join(parts) for parts in paths))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _texts(raws: Iterable[bytes]) -> list[str]:
    return [_text(raw) for raw in raws]


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _raws(texts: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(_raw(text) for text in texts)
