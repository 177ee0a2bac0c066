"""Images of a server's operator, for its tenants: what lies in the main home is linked into the tenant's own store.

A tenant's home lies below the server's (``Home.main``). An image that a tenant asks for and does not have, and that the
operator has by a name, is recorded in the tenant's store; its blobs and unpacked layers become further names of the
same files, so the disk holds them once. It is the tenant's from then on: what is removed on one side stays on the
other. Nothing ever goes the other way, and no tenant sees another's store.

While something is linked the shared lock of *both* stores is held, the tenant's first: nothing goes meanwhile on either
side. Who removes things holds one exclusive lock and waits for no other, so nobody waits in a circle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import ImageError, ImageNotFound, SpecError, StateError
from ..fs import FOLDER
from ..state.home import Home, unwritable
from ..state.image_rows import ImageRow, ImageRows
from . import media
from .blobs import BlobStore
from .layers import Layers, make_layer
from .media import Descriptor
from .progress import OnImageProgress
from .reference import Reference, parse
from .staging import sync_later
from .storelock import StoreLock
from .userns import Session

if TYPE_CHECKING:
    from .store import ImageStore, StoredImage


def find(store: ImageStore, text: str) -> StoredImage:
    """What ``text`` names here, or becomes here because the operator has it. ImageNotFound. Blocking."""
    try:
        return store.find(text)
    except ImageNotFound:
        found = adopt(store, text)
        if found is None:
            raise
        return found


def adopt(store: ImageStore, text: str) -> StoredImage | None:
    """The operator's image of that name or id, in this store from now on; None if there is none, or this is no tenant's
    store. Only what has a name there counts: the rest is work in progress. Blocking."""
    from .store import ImageStore

    main = store.home.main
    if main is None or not main.database.exists():
        return None
    theirs = ImageStore(main)
    try:
        with store.adding(), theirs.adding():
            try:
                row = theirs.row(text)
            except ImageNotFound:
                return None
            if not row.references:
                return None
            layers = media.parse_manifest(row.document).layers
            for digest in (row.id, *dict.fromkeys(layer.digest for layer in layers), row.manifest):
                store.blobs.link_from(theirs.blobs, digest)
            return store.record(row.manifest, reference=_name(text, row))
    finally:
        theirs.close()


def link_layer(
    home: Home, name: str, layer: Descriptor, diff_id: str, progress: OnImageProgress, session: Session
) -> bool:
    """Make the unpacked layer ``name`` of this store out of the operator's; False: there is none, and it is to be
    unpacked here. Where the operator's is not unpacked yet, that is done there, once for all tenants. The caller holds
    the lock of the layer and this store's shared one, and has the blob: what is in it is no news to him."""
    main = home.main
    if main is None or not main.database.exists():
        return False
    try:
        with _staying(main, layer, diff_id) as known:
            if not known:
                return False
            theirs = Layers(main, BlobStore(main))
            theirs.need(layer, diff_id, progress, session)
            folder = _open(theirs)
            try:
                make_layer(home, name, lambda fd: session.run("relink", {"layer": name}, [fd, folder]))
            finally:
                os.close(folder)
            sync_later(theirs.path_of(diff_id))
            return True
    except (StateError, ImageError):
        return False  # whatever ails the operator's, the tenant has all that it takes


@contextmanager
def _staying(main: Home, layer: Descriptor, diff_id: str) -> Iterator[bool]:
    """Whether an image there has that layer, which stays for as long as the block lasts."""
    lock = StoreLock.shared(main)
    rows = ImageRows(main)
    try:
        yield rows.has_layer(layer.digest, diff_id)
    finally:
        rows.close()
        lock.release(remove=False)


def _open(layers: Layers) -> int:
    try:
        return os.open(layers.path, FOLDER)
    except OSError as error:
        raise unwritable(layers.path, error) from error


def _name(text: str, row: ImageRow) -> Reference | None:
    """What the image is called here; None if it was asked for by its id."""
    try:
        found = parse(text)
    except SpecError:
        return None
    if found.digest is not None:
        return found
    return found if str(found) in row.references else None
