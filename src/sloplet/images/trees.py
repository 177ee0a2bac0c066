"""The tree of an image: ``images/KEY/rootfs``, composed once of its layers, used by every sandbox of it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..engines.base import ResolvedImage
from ..errors import ImageInvalid, StateBusy
from ..fs import FOLDER, NEW_FILE, write_atomic
from ..state.home import Home, unwritable
from ..state.locks import FileLock, image_lock_path
from . import lease, userns
from .blobs import BlobStore
from .config import ImageConfig
from .layers import Layers, key_of
from .progress import OnImageProgress
from .staging import Staging, is_whole, sync_later
from .storelock import StoreLock

if TYPE_CHECKING:
    from .store import StoredImage


def chain_id(diff_ids: Sequence[str]) -> str:
    """OCI's name of layers applied one after the other: 64 hexadecimal digits."""
    chain = ""
    for diff in diff_ids:
        chain = diff if not chain else "sha256:" + hashlib.sha256(f"{chain} {diff}".encode("ascii")).hexdigest()
    return chain.removeprefix("sha256:")


_PATIENCE = 10.0
COMPOSED = "composed"  #: a mark: made of layers, and not of a tar


def lock_key(tree: str) -> str:
    """Of the lock (``image_lock_path``) that whoever makes or removes a tree holds."""
    return f"t{tree[:31]}"


def leased(home: Home, tree: str, config: ImageConfig | None = None) -> ResolvedImage | None:
    """What lies in ``images/TREE``, with a lease. None: somebody is about to remove it, or has just decided not to.
    FileNotFoundError: it is not there, or not whole (a loss of power, somebody's rm). ImageInvalid: it is damaged."""
    folder = home.images / tree
    lock = lease.take(folder)
    if lock is None:
        return None
    try:
        if not is_whole(folder) or not os.path.isdir(folder / "rootfs"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        facts = json.loads((folder / lease.FACTS).read_bytes())
        held = lease.Lease(lock)
        found = ResolvedImage("rootfs", folder / "rootfs", bool(facts["owners_kept"]), config, held)
        lock = None
        return found
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImageInvalid(
            f"the unpacked image {tree[:12]} is damaged ({error})", hint=f"remove {folder} and try again"
        ) from error
    finally:
        if lock is not None:
            lock.release(remove=False)


def disk_owners(image: ResolvedImage) -> userns.OwnerMap | None:
    """From owners of its files on disk to those inside; None: the disk does not say."""
    if image.owners_kept:
        return lambda uid, gid: (uid, gid)
    if image.path is not None and userns.acts_for_others() and os.path.lexists(image.path.parent / COMPOSED):
        return userns.inside()
    return None


class Trees:
    """Makes trees of images that are on record."""

    def __init__(self, home: Home, blobs: BlobStore) -> None:
        self._home = home
        self._layers = Layers(home, blobs)

    def get(
        self, image: StoredImage, still_there: Callable[[StoredImage], None], progress: OnImageProgress
    ) -> ResolvedImage:
        """See ``ImageStore.resolve``. ``still_there`` raises if the image has gone meanwhile."""
        tree = key_of(image.chain)
        found = self._found(tree, image)
        if found is not None:
            return found
        adding = StoreLock.shared(self._home)
        try:
            still_there(image)
            lock = FileLock.take(image_lock_path(self._home, lock_key(tree)), wait=True)
            assert lock is not None
            try:
                found = self._found(tree, image)
                if found is None:
                    with userns.Session() as session:
                        self._compose(tree, image, progress, session)
                    found = self._found(tree, image)
            finally:
                lock.release()
        finally:
            adding.release(remove=False)
        if found is None:
            raise ImageInvalid(f"the tree of the image {image.short} was made, and is not there", hint="try again")
        return found

    def _found(self, tree: str, image: StoredImage) -> ResolvedImage | None:
        """None: it is to be made. Who looks whether it can go does so for a moment, and is waited for."""
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                found = leased(self._home, tree, image.config)
            except (FileNotFoundError, ImageInvalid):
                return None
            if found is not None:
                return found
            if time.monotonic() > until:
                raise StateBusy(f"the image {image.short} is being removed by somebody else", hint="try again")
            time.sleep(0.005)

    def _compose(self, tree: str, image: StoredImage, progress: OnImageProgress, session: userns.Session) -> None:
        """The lock of the tree is held, and the store's shared one."""
        started = time.time()
        names = [
            self._layers.need(layer, diff, progress, session)
            for layer, diff in zip(image.layers, image.config.diff_ids, strict=True)
        ]
        layers = -1
        try:
            layers = os.open(self._layers.path, FOLDER)
            with Staging(self._home, lock_key(tree)) as staging:
                made = session.run("compose", {"layers": names}, [staging.fd, layers])
                facts = {
                    "owners_kept": userns.owners_tag() == "root", "chain": image.chain, "composed_at": time.time(),
                    "seconds": round(time.time() - started, 3), **made,
                }  # fmt: skip
                os.close(os.open(COMPOSED, NEW_FILE, 0o600, dir_fd=staging.fd))
                write_atomic(staging.fd, lease.FACTS, json.dumps(facts, indent=1).encode("ascii"))
                old = self._home.images / tree
                if old.exists():  # not whole: of before a loss of power
                    userns.remove(self._home.images, tree)
                staging.publish(tree, sync=False)
        except OSError as error:
            raise unwritable(self._home.images, error) from error
        finally:
            if layers >= 0:
                os.close(layers)
        paths: list[Path] = [self._layers.path_of(diff) for diff in image.config.diff_ids]
        sync_later(self._home.images / tree, *paths)
