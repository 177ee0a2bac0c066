"""What was built before: from the digest of all that a step depends on to the layer that it made.

One small file per step in ``cache/``, written whole or not at all, so any number of processes may read and write; what
they point to is checked on every use, because an image may have been removed since, with its layers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..fs import FILE, write_all, write_atomic
from ..images.blobs import BlobStore
from ..images.media import LAYERS, Descriptor
from ..images.reference import DIGEST_RE
from ..state.home import Home, unwritable
from .layertar import Layer

VERSION = 1  #: of what a key is made of: a change of how steps are done changes it
_PREFIX = "build-"
_MAX_BYTES = 4096
_MONTH = 30 * 86400


@dataclass(frozen=True)
class Hit:
    layer: Layer | None  #: None: the step changes nothing


def key_of(parent: str, what: dict[str, Any]) -> str:
    """``parent``: the chain of the layers below; ``what``: everything else that decides what comes out."""
    document = {"version": VERSION, "parent": parent, **what}
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=repr).encode()).hexdigest()


class BuildCache:
    """Blocking, quick."""

    def __init__(self, home: Home, blobs: BlobStore) -> None:
        self._home = home
        self._blobs = blobs

    def get(self, key: str) -> Hit | None:
        """None: not built yet, or not here any more. The store's lock (``ImageStore.adding``) is held."""
        path = self._home.cache / f"{_PREFIX}{key}"
        try:
            fd = os.open(path, FILE)
        except OSError:
            return None
        try:
            data = os.read(fd, _MAX_BYTES)
            os.utime(fd)
        except OSError:
            return None
        finally:
            os.close(fd)
        hit = _parse(data)
        if hit is None or (hit.layer is not None and not self._here(hit.layer)):
            with suppress(OSError):
                os.unlink(path)
            return None
        return hit

    def _here(self, layer: Layer) -> bool:
        return self._blobs.has(layer.descriptor.digest) and (
            self._blobs.size(layer.descriptor.digest) == layer.descriptor.size
        )

    def put(self, key: str, layer: Layer | None) -> None:
        """StateUnwritable."""
        found = None if layer is None else {**layer.descriptor.to_dict(), "diff_id": layer.diff_id}
        try:
            self._home.open()
            folder = os.open(self._home.cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _publish(folder, f"{_PREFIX}{key}", json.dumps({"layer": found}).encode())
            finally:
                os.close(folder)
        except OSError as error:
            raise unwritable(self._home.cache, error) from error

    def tidy(self) -> int:
        """Forget steps that nobody asked for in a month; how many. What a killed process left half written goes too."""
        before, count = time.time() - _MONTH, 0
        with suppress(OSError), os.scandir(self._home.cache) as entries:
            for entry in entries:
                if entry.name.lstrip(".").startswith(_PREFIX) and entry.stat(follow_symlinks=False).st_mtime < before:
                    with suppress(OSError):
                        os.unlink(entry.path)
                        count += 1
        return count


def _publish(folder: int, name: str, data: bytes) -> None:
    """A file that has no name before it is whole: whoever is killed leaves nothing. What a loss of power leaves of it
    is no entry (``_parse``), so the disk need not be waited for."""
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        write_atomic(folder, name, data)  # a filesystem without such files
        return
    try:
        write_all(fd, data)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        with suppress(FileExistsError):  # somebody else has done the same step, just now
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(fd)


def _parse(data: bytes) -> Hit | None:
    try:
        found = json.loads(data)["layer"]
        if found is None:
            return Hit(None)
        kind, digest, size, diff_id = found["mediaType"], found["digest"], found["size"], found["diff_id"]
        if kind not in LAYERS or type(size) is not int or not DIGEST_RE.match(digest) or not DIGEST_RE.match(diff_id):
            return None
        return Hit(Layer(Descriptor(kind, digest, size), diff_id))
    except (ValueError, KeyError, TypeError):
        return None
