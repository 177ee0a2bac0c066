"""The images that are here: blobs by digest, records in state.db, and for those in use a tree of files.

``record`` makes an image of blobs that are here already; ``resolve`` makes its tree (``layers``, ``trees``), once.
Many processes may record, resolve and remove at a time. Who brings blobs for an image that is not on record yet holds
the store's shared lock (``adding``), and who removes blobs and layers the exclusive one: nothing goes that somebody has
just found here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engines.base import ResolvedImage
from ..errors import ImageInvalid, ImageNotFound, ServerError, SpecError
from ..state.home import Home
from ..state.image_rows import ImageRow, ImageRows
from . import media, trees
from .blobs import BlobStore
from .config import MAX_CONFIG, ImageConfig, parse_config
from .progress import OnImageProgress, silent
from .reference import DIGEST_RE, Reference, parse
from .storelock import StoreLock

if TYPE_CHECKING:
    from .removing import Pruned, Removed

_PREFIX_RE = re.compile(r"(?:sha256:)?([0-9a-f]{6,64})\Z")


@dataclass(frozen=True)
class StoredImage:
    """An image that is here. ``id`` is the digest of its config, ``manifest`` that of its manifest."""

    id: str
    manifest: str
    references: tuple[str, ...]  #: in full; see ``Reference.familiar``
    config: ImageConfig
    layers: tuple[media.Descriptor, ...]  #: as they were brought here, the lowest first
    size: int  #: of its blobs, in bytes
    created_at: float  #: when it came here
    used_at: float
    platform: str

    @property
    def chain(self) -> str:
        """The name of its files: what is in all its layers together."""
        return trees.chain_id(self.config.diff_ids)

    @property
    def short(self) -> str:
        return self.id.removeprefix("sha256:")[:12]

    def to_dict(self) -> dict[str, Any]:
        config = self.config
        return {
            "id": self.id, "manifest": self.manifest, "references": list(self.references), "size": self.size,
            "created_at": self.created_at, "used_at": self.used_at, "platform": self.platform,
            "layers": [
                {**layer.to_dict(), "diff_id": diff}
                for layer, diff in zip(self.layers, config.diff_ids, strict=True)
            ],
            "config": {
                "env": dict(config.env), "user": config.user, "workdir": config.workdir,
                "entrypoint": list(config.entrypoint), "cmd": list(config.cmd), "volumes": list(config.volumes),
                "ports": list(config.ports), "stop_signal": config.stop_signal, "labels": dict(config.labels),
                "created": config.created, "author": config.author,
            },
        }  # fmt: skip

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> StoredImage:
        """What ``to_dict`` tells of one, as far as it does: for images on a server. ServerError."""
        try:
            told, layers = data["config"], data["layers"]
            system, _, rest = str(data["platform"]).partition("/")
            architecture, _, variant = rest.partition("/")
            config = ImageConfig(
                env=tuple(told["env"].items()), user=told["user"], workdir=told["workdir"],
                entrypoint=tuple(told["entrypoint"]), cmd=tuple(told["cmd"]), volumes=tuple(told["volumes"]),
                ports=tuple(told["ports"]), stop_signal=told["stop_signal"], labels=tuple(told["labels"].items()),
                created=told["created"], author=told["author"], os=system, architecture=architecture, variant=variant,
                diff_ids=tuple(layer["diff_id"] for layer in layers),
            )  # fmt: skip
            return StoredImage(
                data["id"], data["manifest"], tuple(data["references"]), config,
                tuple(media.Descriptor(each["mediaType"], each["digest"], each["size"]) for each in layers),
                data["size"], data["created_at"], data["used_at"], data["platform"],
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ServerError(f"the server tells of an image in words that make no sense: {error!r:.80}") from error


_Images = list[StoredImage]  # spelled here: inside ImageStore, `list` is its method


class ImageStore:
    """Constructing does no I/O. Any thread. Besides the named errors those of the StateError branch."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.blobs = BlobStore(home)
        self.rows = ImageRows(home)

    def close(self) -> None:
        """Idempotent; the next call opens again."""
        self.rows.close()

    @contextmanager
    def adding(self) -> Iterator[None]:
        """While an image's blobs are being found or brought, until ``record`` has returned: none of them goes."""
        lock = StoreLock.shared(self.home)
        try:
            yield
        finally:
            lock.release(remove=False)

    def record(self, manifest_digest: str, *, reference: Reference | None = None) -> StoredImage:
        """Make an image of blobs that are here: its manifest, config and layers. It is called ``reference`` from then
        on, as another image may have been before.

        ImageInvalid: they do not fit each other. ImageNotFound: one is missing.
        """
        with self.adding():
            manifest = media.parse_manifest(self.blobs.read(manifest_digest, media.MAX_MANIFEST))
            raw = self.blobs.read(manifest.config.digest, MAX_CONFIG)
            config = parse_config(raw)
            self._check(manifest, config, len(raw))
            unique = {layer.digest: layer.size for layer in manifest.layers}
            row = ImageRow(
                manifest.config.digest, manifest_digest, manifest.raw, raw, trees.chain_id(config.diff_ids),
                len(manifest.raw) + len(raw) + sum(unique.values()), 0.0, 0.0,
            )  # fmt: skip
            layers = [(layer.digest, diff) for layer, diff in zip(manifest.layers, config.diff_ids, strict=True)]
            return _stored(self.rows.put(row, layers, None if reference is None else _key(reference)))

    def _check(self, manifest: media.Manifest, config: ImageConfig, config_size: int) -> None:
        if not manifest.layers:
            raise ImageInvalid("the image has no layers: there is nothing in it")
        if len(manifest.layers) != len(config.diff_ids):
            raise ImageInvalid(
                f"the image's manifest has {len(manifest.layers)} layers, and its config {len(config.diff_ids)}"
            )
        for diff in config.diff_ids:
            if not DIGEST_RE.match(diff) or not diff.startswith("sha256:"):
                raise ImageInvalid(f"the image's config names a layer by {diff[:100]!r}; only sha256 is used here")
        for what in (manifest.config, *manifest.layers):
            size = config_size if what is manifest.config else self.blobs.size(what.digest)
            if size != what.size:
                raise ImageInvalid(
                    f"the blob {what.digest} has {size} bytes, and the image's manifest says {what.size}"
                )

    def find(self, text: str) -> StoredImage:
        """By reference, by id or digest, or by at least six digits of the id. ImageNotFound."""
        return _stored(self.row(text))

    def row(self, text: str) -> ImageRow:
        """The record of what ``find`` finds."""
        row = None
        if DIGEST_RE.match(text):
            row = self.rows.by_id(text) or self.rows.by_manifest(text)
        elif not text.startswith("sha256:"):
            try:
                reference = parse(text)
            except SpecError as error:
                raise ImageNotFound(f"there is no image {text[:200]!r} here: {error.message}") from error
            row = self.rows.by_reference(_key(reference))
            if row is None and reference.digest is not None:
                row = self.rows.by_manifest(reference.digest)
        if row is None and (match := _PREFIX_RE.match(text)):
            found = self.rows.by_prefix(match[1])
            if len(found) > 1:
                raise ImageNotFound(f"several images have an id that begins with {match[1]}", hint="write more of it")
            row = found[0] if found else None
        if row is None:
            raise ImageNotFound(
                f"there is no image {text[:200]!r} here", hint="`sloplet image ls` lists them; `image pull` brings one"
            )
        return row

    def list(self) -> list[StoredImage]:
        """The one last used comes first."""
        return [_stored(row) for row in self.rows.all()]

    def tag(self, image: StoredImage, reference: Reference) -> None:
        """ImageNotFound if it went meanwhile; SpecError for a reference by digest."""
        if reference.digest is not None:
            raise SpecError(f"{reference.familiar!r} names content: an image cannot be called so", hint="use a tag")
        if not self.rows.tag(_key(reference), image.id):
            raise ImageNotFound(f"the image {image.short} was removed")

    def untag(self, reference: Reference) -> None:
        """The image stays. ImageNotFound."""
        if not self.rows.untag(_key(reference)):
            raise ImageNotFound(f"there is no image {reference.familiar!r} here", hint="see `sloplet image ls`")

    def remove(self, text: str, *, force: bool = False) -> Removed:
        """One of several names: the name goes. Else the image: its name, files and all blobs that no other needs.
        ImageNotFound; ImageInUse, unless ``force``: then its names go, and the rest once nobody uses it (``prune``)."""
        from . import removing

        return removing.remove(self, text, force=force)

    def prune(
        self, *, older_than: float | None = None, keep_bytes: int | None = None, everything: bool = False
    ) -> Pruned:
        """Remove images that nobody uses just now: those without a name; those not used for ``older_than`` seconds; the
        least recently used until the rest has at most ``keep_bytes``; all. And what no image needs."""
        from . import removing

        return removing.prune(self, older_than=older_than, keep_bytes=keep_bytes, everything=everything)

    def resolve(self, image: StoredImage, progress: OnImageProgress = silent) -> ResolvedImage:
        """Its tree, made if it is not here yet (seconds: call it in a thread), with a lease that the caller closes.

        ImagePlatform: it is made for another machine. ImageInvalid: a layer is hostile, damaged or not what the image
        says. ImageNotFound: it was removed meanwhile.
        """
        media.check_platform(_platform(image.config), media.host_platform())
        found = trees.Trees(self.home, self.blobs).get(image, self._still_there, progress)
        row = self.rows.by_id(image.id)
        if row is not None:
            self.rows.used(row)
        return found

    def _still_there(self, image: StoredImage) -> None:
        if self.rows.by_id(image.id) is None:
            raise ImageNotFound(f"the image {image.short} was removed", hint="pull or build it again")


def _key(reference: Reference) -> str:
    """How a reference is on record: with a digest, the tag says nothing."""
    if reference.digest is not None:
        return str(Reference(reference.registry, reference.repository, None, reference.digest))
    return str(reference)


def _platform(config: ImageConfig) -> media.Platform:
    return media.Platform(config.os, config.architecture, config.variant)


def _stored(row: ImageRow) -> StoredImage:
    config = parse_config(row.config)
    layers = media.parse_manifest(row.document).layers
    return StoredImage(
        row.id, row.manifest, row.references, config, layers, row.size, row.created_at, row.used_at,
        str(_platform(config)),
    )  # fmt: skip
