"""Taking images away: one by name, or those that nobody needs. Records go first, files after them (``cleaning``)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ImageInUse, SpecError
from ..state.image_rows import ImageRow
from . import lease, media
from .cleaning import GRACE, Swept, layer_size, sweep
from .config import parse_config
from .layers import Layers, key_of
from .reference import parse

if TYPE_CHECKING:
    from .store import ImageStore

_PATIENCE = 2.0
_SHOWN = 5


@dataclass(frozen=True)
class Removed:
    """What ``remove`` did."""

    references: tuple[str, ...]  #: names that mean nothing any more
    image: str | None  #: the id of the image that went; None: it is still here
    bytes: int = 0  #: that the disk got back
    later: bool = False  #: its files go another time (`sloplet gc`): somebody adds an image just now

    def to_dict(self) -> dict[str, Any]:
        return {"references": list(self.references), "image": self.image, "bytes": self.bytes, "later": self.later}


@dataclass(frozen=True)
class Pruned:
    """What ``prune`` did."""

    images: tuple[str, ...] = ()  #: ids of those that went
    used: tuple[str, ...] = ()  #: ids of those that would have gone, and are in use
    bytes: int = 0
    blobs: int = 0
    layers: int = 0
    trees: int = 0
    later: bool = False
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)  #: what they were called

    def to_dict(self) -> dict[str, Any]:
        return {
            "images": list(self.images), "used": list(self.used), "bytes": self.bytes, "blobs": self.blobs,
            "layers": self.layers, "trees": self.trees, "later": self.later,
        }  # fmt: skip


def remove(store: ImageStore, text: str, *, force: bool) -> Removed:
    """See ``ImageStore.remove``."""
    users: list[str] | None = None
    dropped = False
    while not dropped and users is None:
        row = store.row(text)
        name = _name_in(text, row)
        if name is not None and len(row.references) > 1:
            store.rows.untag(name)
            return Removed((name,), None)
        dropped, users = _drop(store, row)  # neither: it has another name by now, or none
    if users is not None:
        if not force:
            raise _in_use(row, users)
        store.rows.untag_image(row.id)
        return Removed(row.references, None)
    swept = sweep(store.home, store.rows, known=_blobs(row), patience=_PATIENCE)
    return Removed(row.references, row.id, swept.bytes, swept.later)


def prune(store: ImageStore, *, older_than: float | None, keep_bytes: int | None, everything: bool) -> Pruned:
    """See ``ImageStore.prune``."""
    rows = store.rows.all()
    if everything:
        chosen = rows
    elif older_than is None and keep_bytes is None:
        chosen = [row for row in rows if not row.references]
    else:
        chosen = _chosen(store, rows, older_than, keep_bytes)
    gone: list[ImageRow] = []
    used: list[str] = []
    for row in chosen:
        dropped, users = _drop(store, row)
        if dropped:
            gone.append(row)
        elif users is not None:
            used.append(row.id)
    known = frozenset().union(*map(_blobs, gone))
    swept = sweep(
        store.home, store.rows, known=known, grace=0.0 if everything else GRACE, tars=everything, patience=_PATIENCE
    )
    return Pruned(
        tuple(row.id for row in gone), tuple(used), swept.bytes, swept.blobs, swept.layers, swept.trees, swept.later,
        {row.id: row.references for row in gone},
    )  # fmt: skip


def _chosen(
    store: ImageStore, rows: list[ImageRow], older_than: float | None, keep_bytes: int | None
) -> list[ImageRow]:
    """``rows``: the one last used comes first."""
    found = []
    if older_than is not None:
        before = time.time() - older_than
        found = [row for row in rows if row.used_at < before]
    if keep_bytes is not None:
        room, seen = keep_bytes, set[str]()
        full = False
        for row in rows:
            if row in found:
                continue
            mine = {name: size for name, size in disk_use(store, row).items() if name not in seen}
            full = full or sum(mine.values()) > room
            if full:
                found.append(row)
            else:
                room -= sum(mine.values())
                seen |= mine.keys()
    return found


def disk_use(store: ImageStore, row: ImageRow) -> dict[str, int]:
    """What an image has on disk: blobs and unpacked layers, each with its bytes; several images may share them."""
    manifest = media.parse_manifest(row.document)
    found = {layer.digest: layer.size for layer in manifest.layers}
    found |= {row.manifest: len(row.document), row.id: len(row.config)}
    layers = Layers(store.home, store.blobs)
    for diff in parse_config(row.config).diff_ids:
        found[f"unpacked {diff}"] = layer_size(layers.path_of(diff))
    return found


def _drop(store: ImageStore, row: ImageRow) -> tuple[bool, list[str] | None]:
    """Take an image off the records, unless it is another by now: whether it went. Or who uses it, in words."""
    tree = key_of(row.chain)
    held = None
    if not store.rows.shares_chain(row.id, row.chain):
        try:
            held = lease.take(store.home.images / tree, shared=False)
            if held is None:
                return False, _users(store, row, tree)
        except FileNotFoundError:
            pass  # nobody has used it yet
    try:
        dropped = store.rows.drop(row, tree)
        return bool(dropped), _users(store, row, tree) if dropped is None else None
    finally:
        if held is not None:
            held.release(remove=False)


def _users(store: ImageStore, row: ImageRow, tree: str) -> list[str]:
    names = [row.id, row.id.removeprefix("sha256:"), *row.references]
    names += [parse(each).familiar for each in row.references]
    names += [each.removesuffix(":latest") for each in names]
    return store.rows.users(names, tree) or ["a sandbox that runs, or a program that reads it"]


def _in_use(row: ImageRow, users: list[str]) -> ImageInUse:
    shown = ", ".join(users[:_SHOWN]) + (f" and {len(users) - _SHOWN} more" if len(users) > _SHOWN else "")
    name = parse(row.references[0]).familiar if row.references else row.id[:19]
    return ImageInUse(
        f"the image {name} is in use by {shown}",
        hint="end those first; with force (--force) its names go now, and the rest when nobody uses it",
    )


def _name_in(text: str, row: ImageRow) -> str | None:
    """The name of the image that ``text`` is, if it is one."""
    try:
        name = str(parse(text))
    except SpecError:
        return None
    return name if name in row.references else None


def _blobs(row: ImageRow) -> frozenset[str]:
    layers = media.parse_manifest(row.document).layers
    return frozenset({row.id, row.manifest, *(layer.digest for layer in layers)})


__all__ = ["Pruned", "Removed", "Swept", "disk_use", "prune", "remove"]
