"""The image of an archive, on the machine it comes to: one that is here already, or one that the archive brings.

What it brings lies in ``images/DIGEST`` by the digest of what it *is* (its tar in the archive), never by a digest that
the archive merely claims: else it could lay down a folder that a tar of somebody else's would later be taken for.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import BinaryIO

from ..engines.base import ResolvedImage
from ..errors import ImageError, ImageInvalid, ImageNotFound, SnapshotIncompatible
from ..images.config import parse_config
from ..images.resolve import publish_staged, resolve, unpack_staged, unpacked
from ..images.staging import Staging
from ..images.trees import disk_owners
from ..images.unpack import UnpackLimits
from ..state.home import Home
from ..state.locks import FileLock, image_lock_path
from . import hostprint, rootfs
from .layout import ImageFacts, Manifest, damaged


class Incoming:
    """Takes the image out of an archive, if it is not here. A context manager: what is not published then goes."""

    def __init__(self, home: Home, manifest: Manifest) -> None:
        self._home = home
        self._manifest = manifest
        self._staging: Staging | None = None
        self._lock: FileLock | None = None
        self._image = here(home, manifest)
        self._entries: dict[str, object] = {}

    def __enter__(self) -> Incoming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._image is not None:
            self._image.close()
        if self._staging is not None:
            self._staging.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def missing(self) -> bool:
        """Whether it must be unpacked."""
        return self._image is None

    def take(self, source: BinaryIO, size: int) -> str:
        """Read all of the image's tar, unpack it if it is not here, and return its sha256."""
        if self._image is not None:
            return _digest(source)
        key = self._manifest.image.content[:32]
        self._lock = FileLock.take(image_lock_path(self._home, key), wait=True)
        self._image = here(self._home, self._manifest)  # somebody else brought it meanwhile
        if self._image is not None:
            return _digest(source)
        self._staging = Staging(self._home, key)
        try:
            result = unpack_staged(self._staging, source, UnpackLimits(bytes=size))
        except ImageInvalid as error:
            raise damaged(f"its image cannot be used: {error.message}") from error
        if result.packing != "tar":
            raise damaged("its image is packed twice")
        self._entries = result.to_dict()
        return result.digest

    def publish(self) -> ResolvedImage:
        """The archive was whole: the image is there from now on, and the caller closes it."""
        if self._image is None:
            assert self._staging is not None
            content = self._manifest.image.content
            publish_staged(self._staging, content, {**self._entries, "source": self._manifest.image.reference})
            self._image = unpacked(self._home, content)
        image, self._image = self._image, None
        config = self._manifest.image.config
        return replace(image, config=parse_config(config.encode())) if config else image


def here(home: Home, manifest: Manifest) -> ResolvedImage | None:
    """The image, if this machine has the same. None: the archive brings it. ImageNotFound, SnapshotIncompatible."""
    facts = manifest.image
    if facts.kind == "host":
        if manifest.kind == "live" and facts.host != hostprint.fingerprint():
            raise SnapshotIncompatible(
                "the archive was made on another machine's own programs (image='host'), and those here are others",
                hint="export a sandbox that has an image",
            )
        return ResolvedImage("host")
    for digest in (facts.key, facts.content):
        with suppress(ImageInvalid):
            if digest:
                return unpacked(home, digest)
    return None if manifest.packed is not None else _by_reference(home, facts)


def _by_reference(home: Home, facts: ImageFacts) -> ResolvedImage:
    """The image that the same words mean here, if it has the same content."""
    hint = "export it with its image, or make a sandbox of that image here first"
    try:
        image = resolve(facts.reference, home, pull=False)  # an archive does not say whom this machine talks to
    except ImageError as error:
        raise ImageNotFound(
            f"the archive comes without its image {facts.reference[:200]!r}, which is not here: {error.message}",
            hint=hint,
        ) from error
    if image.path is not None:
        if facts.key and image.path.parent == home.images / facts.key:
            return image
        owners = disk_owners(image) or False
        if facts.content and rootfs.measure(image.path, owners=owners)[1] == facts.content:
            return image
    image.close()
    raise ImageNotFound(
        f"the archive comes without its image, and {facts.reference[:200]!r} is another one here", hint=hint
    )


def _digest(source: BinaryIO) -> str:
    hashed = hashlib.sha256()
    while piece := source.read(1 << 20):
        hashed.update(piece)
    return hashed.hexdigest()
