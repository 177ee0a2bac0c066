"""Manifests, indexes and what they point at, in OCI's words and in Docker's. Pure; every length is bounded.

What a document *is* follows from what it says of itself, what it was served as and what it holds; where those
disagree it is refused: a document that is a manifest to one reader and an index to another is an attack.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ImageInvalid, ImagePlatform, SpecError
from .config import ImageConfig, load_json
from .reference import DIGEST_RE

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"

#: What a client says it can read, the best first.
ACCEPTED = (OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST)
#: media type of a layer -> what its tar is packed with
LAYERS = {
    OCI_LAYER: "tar", f"{OCI_LAYER}+gzip": "gzip", f"{OCI_LAYER}+zstd": "zstd",
    DOCKER_LAYER: "tar", f"{DOCKER_LAYER}.gzip": "gzip", f"{DOCKER_LAYER}.zstd": "zstd",
}  # fmt: skip

MAX_MANIFEST = 4 * 2**20  #: as Docker's registry has it
MAX_LAYERS = 1024
MAX_INDEX = 1024  #: images in an index
MAX_DEPTH = 4  #: indexes inside of indexes
MAX_BLOB = 34 * 2**30  #: more than what any layer may unpack to (extract.UnpackLimits)

_INDEXES = (OCI_INDEX, DOCKER_LIST)
_MANIFESTS = (OCI_MANIFEST, DOCKER_MANIFEST)
_OLD = re.compile(r"application/vnd\.docker\.distribution\.manifest\.v1\+")
_FOREIGN = ("nondistributable", "rootfs.foreign")
_MOST_ANNOTATIONS = 1024
_PLATFORM_RE = re.compile(r"[a-z0-9_.-]{1,64}\Z")
_ARCHITECTURES = {
    "x86_64": "amd64", "aarch64": "arm64", "armv8l": "arm", "armv7l": "arm", "armv6l": "arm", "armv5tel": "arm",
    "i386": "386", "i686": "386", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64",
    "loongarch64": "loong64",
}  # fmt: skip
_SPELLINGS = {"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64", "armhf": "arm", "armel": "arm", "i386": "386"}
#: Which variants of an architecture run here, the best first. Only those that every such machine has.
_VARIANTS = {"amd64": ("", "v1"), "arm64": ("v8", ""), "arm": ("v7", "", "v6", "v5")}


@dataclass(frozen=True)
class Platform:
    """What an image is made for: ``linux/arm64/v8``."""

    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


@dataclass(frozen=True)
class Descriptor:
    """What a document says of a blob: its type, its name by content, its size."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
    platform: Platform | None = None
    urls: tuple[str, ...] = ()

    @property
    def packing(self) -> str:
        """Of a layer: tar, gzip or zstd."""
        return LAYERS[self.media_type]

    def to_dict(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        found: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.annotations:
            found["annotations"] = dict(self.annotations)
        if self.platform:
            found["platform"] = {"os": self.platform.os, "architecture": self.platform.architecture}
            if self.platform.variant:
                found["platform"]["variant"] = self.platform.variant
        if self.urls:
            found["urls"] = list(self.urls)
        return found


@dataclass(frozen=True)
class Manifest:
    """One image: its config and its layers, the lowest first. ``raw`` is what the digest is of."""

    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    raw: bytes = field(repr=False)
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def digest(self) -> str:
        return digest_of(self.raw)


@dataclass(frozen=True)
class Index:
    """Several images, as a rule the same for several platforms."""

    media_type: str
    manifests: tuple[Descriptor, ...]
    raw: bytes = field(repr=False)

    @property
    def digest(self) -> str:
        return digest_of(self.raw)


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def verify(data: bytes, digest: str, what: str) -> None:
    """ImageInvalid unless ``digest`` (sha256 or sha512) is that of ``data``."""
    algorithm = digest.partition(":")[0]
    found = f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"
    if found != digest:
        raise ImageInvalid(
            f"{what} is not what its digest says: it should be {digest}, and is {found}",
            hint="somebody changed it, on the way or at the registry; nothing of it was kept",
        )


def make_manifest(
    config: Descriptor, layers: tuple[Descriptor, ...], annotations: Mapping[str, str] | None = None
) -> Manifest:
    """An OCI manifest; equal parts give equal bytes."""
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": config.to_dict(),
        "layers": [layer.to_dict() for layer in layers],
    }
    if annotations:
        document["annotations"] = dict(annotations)
    raw = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return Manifest(OCI_MANIFEST, config, layers, raw, dict(annotations or {}))


def parse_manifest(data: bytes, media_type: str = "") -> Manifest:
    """Raises ImageInvalid, also for an index."""
    found = parse(data, media_type)
    if not isinstance(found, Manifest):
        raise ImageInvalid("this is an index of several images, where one image was expected")
    return found


def parse(data: bytes, media_type: str = "") -> Manifest | Index:
    """What a registry or a layout gave, which said that it is of ``media_type`` ("": it did not say).

    Raises ImageInvalid, and tells what is wrong.
    """
    document = parse_json(data, MAX_MANIFEST, "the image's manifest")
    served = media_type.partition(";")[0].strip().lower()
    own = document.get("mediaType")
    if own is not None and not isinstance(own, str):
        raise ImageInvalid("the image's manifest has a mediaType that is no text")
    if document.get("schemaVersion") == 1 or any(_OLD.match(kind or "") for kind in (own, served)):
        raise ImageInvalid(
            "the image is in Docker's old format (schema 1), which names no content that could be checked",
            hint="copy it with a current tool, which converts it: skopeo copy docker://OLD docker://NEW",
        )
    if document.get("schemaVersion") != 2:
        raise ImageInvalid(f"the image's manifest has schemaVersion {document.get('schemaVersion')!r:.40}, not 2")
    known = (*_INDEXES, *_MANIFESTS)
    if own and served in known and own != served:
        raise ImageInvalid(f"the image's manifest says that it is {own[:80]!r}, and was given as {served!r}")
    if "manifests" in document and ("layers" in document or "config" in document):
        raise ImageInvalid("the image's manifest is both an index and a manifest; which one is for nobody to guess")
    kind = own or (served if served in known else "") or (OCI_INDEX if "manifests" in document else OCI_MANIFEST)
    if kind in _INDEXES:
        listed = _items(document, "manifests", MAX_INDEX, "an index")
        return Index(kind, tuple(_descriptor(item, "an index") for item in listed), data)
    if kind in _MANIFESTS:
        return _manifest(document, kind, data)
    raise ImageInvalid(f"the image's manifest is of a type that is not known: {kind[:80]!r}")


def _manifest(document: Mapping[str, Any], kind: str, data: bytes) -> Manifest:
    config = _descriptor(document.get("config"), "the manifest's config")
    if config.media_type not in (OCI_CONFIG, DOCKER_CONFIG):
        what = document.get("artifactType") or config.media_type
        raise ImageInvalid(f"this is no image to run but an artifact of another kind ({str(what)[:80]!r})")
    layers = tuple(_layer(item) for item in _items(document, "layers", MAX_LAYERS, "a manifest"))
    if not layers:
        raise ImageInvalid("the image has no layers: there is nothing in it")
    return Manifest(kind, config, layers, data, _annotations(document))


def _layer(item: object) -> Descriptor:
    layer = _descriptor(item, "a layer")
    if layer.urls or any(word in layer.media_type for word in _FOREIGN):
        raise ImageInvalid(
            "the image has a layer that lies elsewhere than in its registry (a foreign layer)",
            hint="such images are Windows' as a rule; for others, push it again with its layers",
        )
    if layer.media_type not in LAYERS:
        raise ImageInvalid(
            f"the image has a layer of a type that is not known: {layer.media_type[:100]!r}",
            hint=f"known are {', '.join(LAYERS)}",
        )
    return layer


def parse_json(data: bytes, most: int, what: str) -> dict[str, Any]:
    """A JSON object of at most ``most`` bytes. Raises ImageInvalid."""
    if len(data) > most:
        raise ImageInvalid(f"{what} has {len(data)} bytes; at most {most} are allowed")
    try:
        document = load_json(data)
    except (ValueError, RecursionError) as error:
        raise ImageInvalid(f"{what} is no JSON: {str(error)[:200]}") from error
    if not isinstance(document, dict):
        raise ImageInvalid(f"{what} is no JSON object")
    return document


def _items(document: Mapping[str, Any], key: str, most: int, what: str) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise ImageInvalid(f"{what} of the image has no list {key!r}")
    if len(value) > most:
        raise ImageInvalid(f"{what} of the image has {len(value)} {key}; at most {most} are allowed")
    return value


def _descriptor(item: object, what: str) -> Descriptor:
    if not isinstance(item, dict):
        raise ImageInvalid(f"{what} of the image is not described by a JSON object")
    kind, digest, size = item.get("mediaType"), item.get("digest"), item.get("size")
    if not isinstance(kind, str) or not isinstance(digest, str) or type(size) is not int:
        raise ImageInvalid(f"{what} of the image lacks its mediaType, digest or size")
    if not DIGEST_RE.match(digest) or not digest.startswith("sha256:"):
        raise ImageInvalid(f"{what} of the image is named by {digest[:100]!r}; only sha256 is used here")
    if not 0 <= size <= MAX_BLOB:
        raise ImageInvalid(f"{what} of the image claims to have {size} bytes; at most {MAX_BLOB} are allowed")
    urls = item.get("urls") or []
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise ImageInvalid(f"{what} of the image has urls that are no list of text")
    return Descriptor(kind, digest, size, _annotations(item), _platform(item.get("platform")), tuple(urls))


def _annotations(above: Mapping[str, Any]) -> dict[str, str]:
    found = above.get("annotations")
    if found is None:
        return {}
    if not isinstance(found, dict) or len(found) > _MOST_ANNOTATIONS:
        raise ImageInvalid(f"the image has annotations that are no object, or more than {_MOST_ANNOTATIONS} of them")
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _platform(found: object) -> Platform | None:
    if not isinstance(found, dict):
        return None
    texts = [found.get(key) or "" for key in ("os", "architecture", "variant")]
    if not all(isinstance(text, str) and (not text or _PLATFORM_RE.match(text)) for text in texts):
        raise ImageInvalid("an index of the image has a platform that is none")
    return Platform(*texts)


def host_platform() -> Platform:
    """What images have to be made for to run on this machine."""
    machine = os.uname().machine
    return Platform("linux", _ARCHITECTURES.get(machine, machine))


def parse_platform(text: str) -> Platform:
    """``linux/amd64``, ``arm64``, ``linux/arm/v7``. Raises SpecError."""
    parts = text.lower().split("/")
    if len(parts) == 1:
        parts.insert(0, "linux")
    if len(parts) > 3 or not all(map(_PLATFORM_RE.match, parts)):
        raise SpecError(f"{text[:80]!r} is no platform", hint="for example linux/amd64, linux/arm64, linux/arm/v7")
    return Platform(parts[0], _SPELLINGS.get(parts[1], parts[1]), *parts[2:])


def fits(found: Platform, wanted: Platform) -> bool:
    """Whether what is made for ``found`` does for who wants ``wanted``."""
    return _rank(found, wanted) is not None


def _rank(found: Platform, wanted: Platform) -> int | None:
    if (found.os, found.architecture) != (wanted.os, wanted.architecture):
        return None
    known = _VARIANTS.get(wanted.architecture, ("",))
    if wanted.variant:  # asked for by name: that one, or one that does not say
        known = (wanted.variant, "") if wanted.variant in known else (wanted.variant,)
    return known.index(found.variant) if found.variant in known else None


def choose(index: Index, wanted: Platform) -> Descriptor:
    """The entry of an index that is for this platform. Raises ImagePlatform, which names those that there are."""
    usable = [entry for entry in index.manifests if entry.media_type in (*_INDEXES, *_MANIFESTS)]
    ranked = [
        (rank, entry) for entry in usable if entry.platform and (rank := _rank(entry.platform, wanted)) is not None
    ]
    if ranked:
        return min(ranked, key=lambda pair: pair[0])[1]
    silent = [entry for entry in usable if entry.platform is None]
    if len(silent) == 1:  # its config will tell; it is checked again there
        return silent[0]
    if not usable:
        raise ImageInvalid("the image's index names no image")
    offered = sorted({str(entry.platform) for entry in usable if entry.platform and entry.platform.os != "unknown"})
    raise ImagePlatform(
        f"the image is not made for {wanted}, but for {', '.join(offered[:20]) or 'nothing that it says'}",
        hint="--platform names another of those; it runs only on such a machine",
    )


def check_platform(found: Platform, wanted: Platform) -> None:
    """ImagePlatform unless an image whose config says ``found`` does. A config that says nothing is believed."""
    if found.architecture and not fits(found, wanted):
        if not all(not text or _PLATFORM_RE.match(text) for text in (found.os, found.architecture, found.variant)):
            raise ImageInvalid(f"the image's config says that it is for {str(found)[:80]!r}, which is no platform")
        raise ImagePlatform(
            f"the image is made for {found}, not for {wanted}",
            hint=f"--platform {found} brings it here; it runs only on such a machine",
        )


def check_fit(manifest: Manifest, config: ImageConfig, wanted: Platform) -> None:
    """ImageInvalid unless config and manifest speak of the same layers; ImagePlatform unless it is for ``wanted``."""
    check_platform(Platform(config.os, config.architecture, config.variant), wanted)
    if len(config.diff_ids) != len(manifest.layers):
        raise ImageInvalid(
            f"the image's manifest has {len(manifest.layers)} layers, its config {len(config.diff_ids)}: "
            "they do not belong together"
        )
