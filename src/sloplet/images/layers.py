"""Unpacked layers: ``images/layers/KEY/`` with ``tree`` and ``layer.json``, each made once and shared by all images."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ..state.home import Home, unwritable
from ..state.locks import FileLock, image_lock_path
from . import userns
from .blobs import BlobStore
from .compose import LAYER_FACTS
from .extract import UnpackLimits
from .media import Descriptor
from .progress import ImageProgress, OnImageProgress
from .staging import Staging, is_whole


def key_of(name: str) -> str:
    """The folder of what has that name, with owners as they are on this disk for this user. Never the digest of a tar,
    which other folders in images/ have for a name."""
    return hashlib.sha256(f"layers {name} {userns.owners_tag()}".encode()).hexdigest()


class Layers:
    def __init__(self, home: Home, blobs: BlobStore) -> None:
        self._home = home
        self._blobs = blobs
        self.path = home.images / "layers"

    def path_of(self, diff_id: str) -> Path:
        return self.path / key_of(diff_id.removeprefix("sha256:"))

    def need(
        self,
        layer: Descriptor,
        diff_id: str,
        progress: OnImageProgress,
        session: userns.Session,
        limits: UnpackLimits | None = None,
    ) -> str:
        """The name of the layer's folder, which is unpacked if it is not here. The caller holds the store's shared
        lock: it stays for as long. ImageInvalid, ImageNotFound, StateUnwritable."""
        folder = self.path_of(diff_id)
        if _is_there(folder):
            return folder.name
        lock = FileLock.take(image_lock_path(self._home, f"l{folder.name[:31]}"), wait=True)
        assert lock is not None
        try:
            if not _is_there(folder):
                from .adopting import link_layer

                if not link_layer(self._home, folder.name, layer, diff_id, progress, session):
                    self._unpack(folder, layer, diff_id, progress, session, limits or UnpackLimits())
            return folder.name
        finally:
            lock.release()

    def _unpack(
        self,
        folder: Path,
        layer: Descriptor,
        diff_id: str,
        progress: OnImageProgress,
        session: userns.Session,
        limits: UnpackLimits,
    ) -> None:
        def tell(done: int) -> None:
            progress(ImageProgress("unpack", layer.digest, min(done, layer.size - 1), layer.size))

        tell(0)
        arguments = {"diff_id": diff_id, "limits": asdict(limits)}
        with self._blobs.open(layer.digest) as blob:
            make_layer(self._home, folder.name, lambda fd: session.run("unpack", arguments, [blob.fileno(), fd], tell))
        progress(ImageProgress("unpack", layer.digest, layer.size, layer.size))


def make_layer(home: Home, name: str, make: Callable[[int], object]) -> None:
    """Have ``make`` fill an empty folder, and give it its name. The lock of the layer is held. StateUnwritable."""
    layers = home.images / "layers"
    with Staging(home, f"l{name[:31]}") as staging:
        try:
            layers.mkdir(0o700, exist_ok=True)
            make(staging.fd)
        except OSError as error:
            raise unwritable(layers / name, error) from error
        if (layers / name).exists():  # not whole: of before a loss of power
            userns.remove(layers, name)
        staging.publish(f"layers/{name}", sync=False)


def _is_there(folder: Path) -> bool:
    """And whole, also after a loss of power."""
    return os.path.lexists(folder / LAYER_FACTS) and is_whole(folder)
