"""The records of images: which there are, what they are called, what each needs. Files are ``images.store``'s."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .connection import Connected

if TYPE_CHECKING:
    import sqlite3

_SELECT = "SELECT id, manifest, document, config, chain, size, created_at, used_at FROM images "
_USED_STEP = 60.0  # seconds: a use is not written down more often than that


@dataclass(frozen=True)
class ImageRow:
    """An image as it is on record. ``document`` is its manifest, ``config`` its config, as they came."""

    id: str
    manifest: str
    document: bytes
    config: bytes
    chain: str
    size: int
    created_at: float
    used_at: float
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Needed:
    """What must stay: by blobs' digests, by layers' diff ids, and by chains."""

    blobs: frozenset[str]
    diffs: frozenset[str]
    chains: frozenset[str]
    trees: frozenset[str]  #: folders in images/ that saved states need


class ImageRows(Connected):
    """The part of ``state.db`` about images. Each method is one transaction."""

    def put(self, row: ImageRow, layers: list[tuple[str, str]], reference: str | None) -> ImageRow:
        """Record an image with its layers (blob, diff id), or what has become of it, and call it ``reference``."""
        now = time.time()
        with self._write(durable=True) as db:
            db.execute(
                "INSERT INTO images (id, manifest, document, config, chain, size, created_at, used_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET manifest = excluded.manifest, "
                "document = excluded.document, size = excluded.size, used_at = excluded.used_at",
                (row.id, row.manifest, row.document, row.config, row.chain, row.size, now, now),
            )
            db.execute("DELETE FROM image_layers WHERE image = ?", (row.id,))
            db.executemany(
                "INSERT INTO image_layers VALUES (?, ?, ?, ?)",
                [(row.id, position, blob, diff) for position, (blob, diff) in enumerate(layers)],
            )
            if reference is not None:
                _tag(db, reference, row.id, now)
            return _rows(db, "WHERE id = ?", (row.id,))[0]

    def by_id(self, image_id: str) -> ImageRow | None:
        return self._one("WHERE id = ?", image_id)

    def by_manifest(self, digest: str) -> ImageRow | None:
        return self._one("WHERE manifest = ?", digest)

    def by_reference(self, reference: str) -> ImageRow | None:
        return self._one("WHERE id = (SELECT image FROM image_tags WHERE reference = ?)", reference)

    def by_prefix(self, prefix: str) -> list[ImageRow]:
        """Those whose id begins so; ``prefix`` is made of hexadecimal digits."""
        with self._connected() as db:
            return _rows(db, "WHERE id >= ? AND id < ? LIMIT 2", (f"sha256:{prefix}", f"sha256:{prefix}g"))

    def all(self) -> list[ImageRow]:
        """The one last used comes first."""
        with self._connected() as db:
            return _rows(db, "ORDER BY used_at DESC, id", ())

    def tag(self, reference: str, image_id: str) -> bool:
        """False if there is no such image (any more)."""
        with self._write() as db:
            if not db.execute("SELECT 1 FROM images WHERE id = ?", (image_id,)).fetchone():
                return False
            _tag(db, reference, image_id, time.time())
            return True

    def untag(self, reference: str) -> bool:
        with self._write() as db:
            return db.execute("DELETE FROM image_tags WHERE reference = ?", (reference,)).rowcount > 0

    def untag_image(self, image_id: str) -> None:
        with self._write() as db:
            db.execute("DELETE FROM image_tags WHERE image = ?", (image_id,))

    def used(self, row: ImageRow) -> None:
        """It is used now."""
        now = time.time()
        if now - row.used_at > _USED_STEP or now < row.used_at:
            with self._write() as db:
                db.execute("UPDATE images SET used_at = ? WHERE id = ?", (now, row.id))

    def drop(self, row: ImageRow, tree: str) -> bool | None:
        """Remove the rows of an image. False: it is not what ``row`` says any more; it was removed, or somebody has
        pulled, used or named it meanwhile. None: a saved state needs ``tree``, the folder of its files."""
        with self._write(durable=True) as db:
            now = _rows(db, "WHERE id = ?", (row.id,))
            if not now or (now[0].references, now[0].used_at) != (row.references, row.used_at):
                return False
            shared = db.execute("SELECT 1 FROM images WHERE chain = ? AND id != ?", (row.chain, row.id)).fetchone()
            if not shared and db.execute("SELECT 1 FROM snapshots WHERE image = ?", (tree,)).fetchone():
                return None
            db.execute("DELETE FROM image_tags WHERE image = ?", (row.id,))
            db.execute("DELETE FROM image_layers WHERE image = ?", (row.id,))
            db.execute("DELETE FROM images WHERE id = ?", (row.id,))
            return True

    def shares_chain(self, image_id: str, chain: str) -> bool:
        """Whether another image has the same files."""
        return bool(self._read("SELECT 1 FROM images WHERE chain = ? AND id != ? LIMIT 1", (chain, image_id)))

    def has_layer(self, blob: str, diff: str) -> bool:
        """Whether an image has a layer of that blob, with that content."""
        return bool(self._read("SELECT 1 FROM image_layers WHERE blob = ? AND diff = ? LIMIT 1", (blob, diff)))

    def users(self, names: list[str], tree: str) -> list[str]:
        """Who uses an image that goes by ``names`` and has the files in ``tree``, in words for a message."""
        sandboxes = self._read(
            "SELECT coalesce(name, id), state FROM sandboxes WHERE state != 'dead' "
            "AND json_extract(spec, '$.image') IN (SELECT value FROM json_each(?)) ORDER BY created_at, id",
            (json.dumps(names),),
        )
        saved = self._read(
            "SELECT role, coalesce(name, id), coalesce(sandbox_name, sandbox) FROM snapshots WHERE image = ? "
            "ORDER BY created_at, id",
            (tree,),
        )
        words = [f"the {state} sandbox {name}" for name, state in sandboxes]
        for role, name, sandbox in saved:
            if role in ("snapshot", "template"):
                words.append(f"the {role} {name}")
            else:
                words.append(f"a saved state of the sandbox {sandbox}")
        return list(dict.fromkeys(words))

    def _one(self, where: str, value: str) -> ImageRow | None:
        with self._connected() as db:
            found = _rows(db, where, (value,))
        return found[0] if found else None


def needed(store: Connected) -> Needed:
    """What the images and saved states on record need; one consistent look."""
    with store._connected() as db:
        db.execute("BEGIN")
        try:
            images = db.execute("SELECT id, manifest, chain FROM images").fetchall()
            layers = db.execute("SELECT DISTINCT blob, diff FROM image_layers").fetchall()
            trees = db.execute("SELECT DISTINCT image FROM snapshots WHERE image IS NOT NULL").fetchall()
        finally:
            db.execute("COMMIT")
    return Needed(
        frozenset({digest for row in images for digest in row[:2]} | {row[0] for row in layers}),
        frozenset(row[1] for row in layers),
        frozenset(row[2] for row in images),
        frozenset(row[0] for row in trees),
    )


def _tag(db: sqlite3.Connection, reference: str, image_id: str, now: float) -> None:
    db.execute(
        "INSERT INTO image_tags VALUES (?, ?, ?) ON CONFLICT (reference) DO UPDATE SET image = excluded.image, "
        "tagged_at = excluded.tagged_at",
        (reference, image_id, now),
    )


def _rows(db: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> list[ImageRow]:
    found = db.execute(_SELECT + where, values).fetchall()
    if not found:
        return []
    tags: dict[str, list[str]] = {}
    only = found[0][0] if len(found) == 1 else None
    query = "SELECT image, reference FROM image_tags WHERE ?1 IS NULL OR image = ?1 ORDER BY reference"
    for image, reference in db.execute(query, (only,)):
        tags.setdefault(image, []).append(reference)
    return [replace(ImageRow(*row), references=tuple(tags.get(row[0], ()))) for row in found]
