"""What lies in images/ and no record names: found by looking, and removed when nobody adds an image.

After a removal, and after a crash in the middle of one. What has come in only just now and is not on record yet is
somebody's work: it stays for ``GRACE`` seconds. What a record names, and what somebody has a lease on, always stays.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import SlopletError
from ..fs import FOLDER
from ..state.connection import Connected
from ..state.home import Home, names_in, unwritable
from ..state.image_rows import needed
from ..state.layout import MANIFEST
from ..state.locks import FileLock, image_lock_path
from ..state.opened import tree_of
from . import lease, userns
from .blobs import BlobStore
from .compose import LAYER_FACTS
from .layer import LayerFacts
from .layers import key_of
from .storelock import StoreLock
from .trees import COMPOSED, lock_key

GRACE = 3600.0
_MOST_ASIDE = 64
_PARTIAL = 24 * 3600.0  # what is there of a download that was broken off: it may be gone on with
_TREE_RE = re.compile(r"[0-9a-f]{64}\Z")


@dataclass
class Swept:
    """What went."""

    blobs: int = 0
    layers: int = 0
    trees: int = 0
    bytes: int = 0
    later: bool = False  #: somebody adds an image just now: what is left goes another time

    def __bool__(self) -> bool:
        return bool(self.blobs or self.layers or self.trees)


def sweep(
    home: Home,
    store: Connected,
    *,
    known: AbstractSet[str] = frozenset(),
    grace: float = GRACE,
    tars: bool = False,
    patience: float = 0.0,
) -> Swept:
    """``known``: blobs that may go at once; without ``grace`` all may, and what downloads left. ``tars``: also the
    roots that tars were unpacked to, which are made again when they are asked for. Raises StateError."""
    swept = Swept()
    _partials(home, time.time() - (_PARTIAL if grace else 0.0))
    if not _candidates(home, store, known, grace, tars):
        return swept
    lock = StoreLock.exclusive(home, patience)
    if lock is None:
        swept.later = True
        return swept
    aside = _Aside(home)
    try:
        for what, name in _candidates(home, store, known, grace, tars):  # again: now nobody adds
            if what == "blob":
                swept.bytes += BlobStore(home).remove(name)
                swept.blobs += 1
            elif what == "layer":
                size = layer_size(home.images / "layers" / name)
                if aside.put(home.images / "layers" / name, f"l{name[:31]}"):
                    swept.layers, swept.bytes = swept.layers + 1, swept.bytes + size
            else:
                swept.trees += _put_tree(aside, home, name)
    finally:
        lock.release(remove=False)
        aside.remove()
    return swept


def _candidates(
    home: Home, store: Connected, known: AbstractSet[str], grace: float, tars: bool
) -> list[tuple[str, str]]:
    trees = [name for name in names_in(home.images) if _TREE_RE.match(name)]
    layers = [name for name in names_in(home.images / "layers") if _TREE_RE.match(name)]
    blobs = BlobStore(home).digests()
    if not (trees or layers or blobs):
        return []
    stays = needed(store)
    kept_trees = {key_of(chain) for chain in stays.chains} | stays.trees | (_trees_of_states(home) if tars else set())
    kept_layers = {key_of(diff.removeprefix("sha256:")) for diff in stays.diffs}
    before = time.time() - grace
    found = [("blob", digest) for digest in blobs if digest not in stays.blobs and _old(home, digest, known, before)]
    found += [("layer", name) for name in layers if name not in kept_layers]
    for name in trees:
        composed = os.path.lexists(home.images / name / COMPOSED)
        if name not in kept_trees and (composed or tars):
            found.append(("tree", name))
    return found


def _trees_of_states(home: Home) -> set[str]:
    """What saved states need, as they say themselves: those of older versions are not on record with it."""
    found: set[str] = set()
    for name in names_in(home.snapshots):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            tree = tree_of(home, json.loads((home.snapshots / name / MANIFEST).read_bytes())["image"])
            if tree is not None:
                found.add(tree)
    return found


def _old(home: Home, digest: str, known: AbstractSet[str], before: float) -> bool:
    if digest in known:
        return True
    try:
        return os.lstat(BlobStore(home).path_of(digest)).st_mtime < before
    except OSError:
        return False


def _put_tree(aside: _Aside, home: Home, name: str) -> bool:
    """False: somebody uses it."""
    folder = home.images / name
    try:
        held = lease.take(folder, shared=False)
        if held is None:
            return False
    except FileNotFoundError:
        held = None  # without facts it was never whole, and nobody can have a lease on it
    try:
        return aside.put(folder, lock_key(name))
    finally:
        if held is not None:
            held.release(remove=False)


class _Aside:
    """What goes gets another name first, at once: half gone it must not be taken for whole. Removing it takes as long
    as it has files, and nobody who adds something else waits for that."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._put: list[tuple[str, FileLock]] = []

    def put(self, folder: Path, key: str) -> bool:
        """False: somebody is at it."""
        if len(self._put) >= _MOST_ASIDE:
            self.remove()
        lock = FileLock.take(image_lock_path(self._home, key))
        if lock is None:
            return False
        self._put.append((f".tmp-{key}", lock))
        try:
            images = os.open(self._home.images, FOLDER)
            try:
                userns.remove_in(images, f".tmp-{key}")
                with suppress(FileNotFoundError):
                    os.rename(folder, f".tmp-{key}", dst_dir_fd=images)
            finally:
                os.close(images)
        except OSError as error:
            if isinstance(error, SlopletError):
                raise
            raise unwritable(folder, error) from error
        return True

    def remove(self) -> None:
        """All of it is tried; raises the first StateError."""
        failure: SlopletError | None = None
        while self._put:
            name, lock = self._put.pop()
            try:
                userns.remove(self._home.images, name)
            except SlopletError as error:
                failure = failure or error
            except OSError as error:
                failure = failure or unwritable(self._home.images, error)
            finally:
                lock.release()
        if failure is not None:
            raise failure


def layer_size(folder: Path) -> int:
    """Bytes of the files of an unpacked layer; 0 if that cannot be told."""
    try:
        return LayerFacts.from_json((folder / LAYER_FACTS).read_bytes()).size
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _partials(home: Home, before: float) -> None:
    folder = BlobStore(home).partial
    for name in names_in(folder):
        with suppress(OSError):
            if os.lstat(folder / name).st_mtime < before and (lock := FileLock.take(folder / name)) is not None:
                lock.release()  # which removes it
