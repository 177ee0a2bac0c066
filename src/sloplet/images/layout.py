"""Images as files: OCI layouts (a folder, or an archive of one), what ``docker save`` writes, and plain root
filesystems (a tar, or a folder) as an image of one layer.

Nothing of an archive is unpacked here: its blobs are read by position, checked, and put into the store.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from ..errors import FileMissing, ImageError, ImageInvalid, SpecError, file_error
from . import reference as references
from .config import MAX_CONFIG, ImageConfig, load_json, parse_config
from .container import (
    Container,
    FolderContainer,
    Scan,
    TarContainer,
    packing_and_digest,
    scan,
    seekable,
    unpacked_pieces,
)
from .media import (
    MAX_DEPTH,
    MAX_LAYERS,
    MAX_MANIFEST,
    OCI_CONFIG,
    OCI_LAYER,
    Descriptor,
    Index,
    Manifest,
    Platform,
    check_fit,
    check_platform,
    choose,
    host_platform,
    make_manifest,
    parse,
    parse_platform,
    verify,
)
from .progress import ImageProgress, OnImageProgress, silent
from .reference import Reference

if TYPE_CHECKING:
    from .store import ImageStore, StoredImage

REF_NAME = "org.opencontainers.image.ref.name"
FULL_NAME = "io.containerd.image.name"
_PIECE = 1 << 20
_MOST_IMAGES = 1024
_TYPES = {"tar": OCI_LAYER, "gzip": f"{OCI_LAYER}+gzip", "zstd": f"{OCI_LAYER}+zstd"}
_FORMS = "an OCI layout (a folder or a tar), what docker save wrote, or a root filesystem (a folder or a tar)"
_LEVEL = 1  # of gzip: what is packed here is unpacked here, as a rule


_Taken = tuple[Manifest, Reference | None]


def import_image(
    path: str | os.PathLike[str], store: ImageStore, reference: Reference | None = None, *, pick: str | None = None,
    platform: str | None = None, progress: OnImageProgress = silent,
) -> StoredImage:  # fmt: skip
    """Take an image in, called ``reference`` or as it is called there. ``pick``: which, where there are several.

    Takes its time: call it in a thread. Raises FileMissing (and other FileErrors), ImageInvalid, ImagePlatform,
    SpecError, StateUnwritable; nothing is half there then.
    """
    place = path_of(path)

    def read(work: _Import) -> _Taken:
        if place.is_dir():
            return work.folder(place)
        with _open(place) as file:
            return work.file(file)

    return _take(read, repr(os.fspath(path)[:200]), store, reference, pick, platform, progress)


def import_file(
    file: BinaryIO, store: ImageStore, reference: Reference | None = None, *, pick: str | None = None,
    platform: str | None = None, progress: OnImageProgress = silent,
) -> StoredImage:  # fmt: skip
    """The same of an archive that is open already, to be read by position."""
    return _take(lambda work: work.file(file), "the archive", store, reference, pick, platform, progress)


def sendable(path: str | os.PathLike[str]) -> Generator[bytes, None, None]:
    """What is at ``path`` as an archive, for a server to take in: a file as it is, a folder as a tar. Blocking."""
    from ..archive import rootfs

    place = path_of(path)
    if place.is_dir():
        yield from rootfs.tar(place, owners=os.geteuid() == 0 and place.stat().st_uid == 0)
        return
    with _open(place) as file:
        while piece := file.read(_PIECE):
            yield piece


def _take(
    read: Callable[[_Import], _Taken], shown: str, store: ImageStore, reference: Reference | None, pick: str | None,
    platform: str | None, progress: OnImageProgress,
) -> StoredImage:  # fmt: skip
    wanted = parse_platform(platform) if platform else host_platform()
    try:
        with store.adding():
            manifest, name = read(_Import(store, wanted, pick, progress))
            image = store.record(manifest.digest, reference=reference or name)
    except OSError as error:
        if isinstance(error, FileMissing):
            raise
        raise file_error(error.errno or 0, f"{shown} cannot be read: {error.strerror}") from error
    except ImageInvalid as error:
        raise type(error)(f"{shown} cannot be used: {error.message}", hint=error.hint) from error
    called = reference or name
    progress(ImageProgress("done", key=image.id, text=called.familiar if called else image.short))
    return image


def path_of(path: str | os.PathLike[str]) -> Path:
    """SpecError for what can be none; the empty one would be the folder that we happen to be in."""
    text = os.fspath(path)
    if not text or "\0" in text:
        raise SpecError(f"{text[:200]!r} is no path")
    return Path(text)


def _open(path: Path) -> BinaryIO:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise FileMissing(f"there is no {os.fspath(path)[:200]!r} on this machine", hint=f"name {_FORMS}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ImageInvalid("it is neither a folder nor a file", hint=f"name {_FORMS}")
    return cast(BinaryIO, os.fdopen(fd, "rb", buffering=0))


class _Import:
    def __init__(self, store: ImageStore, wanted: Platform, pick: str | None, progress: OnImageProgress) -> None:
        self._store, self._blobs = store, store.blobs
        self._wanted, self._pick, self._progress = wanted, pick, progress

    def folder(self, path: Path) -> tuple[Manifest, Reference | None]:
        with FolderContainer(path) as container:
            if container.small("oci-layout", 4096) is not None:
                return self._layout(container)
            if (text := container.small("manifest.json", MAX_MANIFEST)) is not None:
                return self._docker(container, text)
        return self._root(path), None

    def file(self, file: BinaryIO) -> tuple[Manifest, Reference | None]:
        before = os.fstat(file.fileno())
        seen = scan(file)
        if "oci-layout" in seen.members or "manifest.json" in seen.members:
            with seekable(file, seen, self._store.home.cache) as plain:
                container = TarContainer(plain, seen)
                if "oci-layout" in seen.members:
                    return self._layout(container)
                text = container.small("manifest.json", MAX_MANIFEST)
                assert text is not None
                return self._docker(container, text)
        manifest = self._tar(file, seen)
        after = os.fstat(file.fileno())
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise ImageInvalid("it changed while it was being read", hint="try again")
        return manifest, None

    # OCI layouts

    def _layout(self, container: Container) -> tuple[Manifest, Reference | None]:
        text = container.small("index.json", MAX_MANIFEST)
        if text is None:
            raise ImageInvalid("it is an OCI layout without an index.json")
        index = parse(text)
        if not isinstance(index, Index):
            raise ImageInvalid("its index.json is no index")
        named = {entry: _names(entry) for entry in index.manifests}
        entries = [entry for entry, names in named.items() if not self._pick or self._pick in names]
        if len({entry.digest for entry in entries}) == 1:  # one image of several names: docker save APP:1 APP:latest
            entries = entries[:1]
        groups = {tuple(named[entry]) for entry in entries}
        self._check_choice(len(groups), sorted({names[0] for names in named.values() if names}))
        data, kind = self._bytes(container, choose_one(index, entries, self._wanted)), ""
        for _ in range(MAX_DEPTH + 1):
            document = parse(data, kind)
            if isinstance(document, Manifest):
                break
            entry = choose(document, self._wanted)
            data, kind = self._bytes(container, entry), entry.media_type
        else:
            raise ImageInvalid(f"it has indexes inside of indexes, more than {MAX_DEPTH} deep")
        self._config_and_layers(container, document)
        return document, _reference(next(iter(groups)))

    def _config_and_layers(self, container: Container, manifest: Manifest) -> None:
        if manifest.config.size > MAX_CONFIG:
            raise ImageInvalid(f"its config has {manifest.config.size} bytes; at most {MAX_CONFIG} are allowed")
        self._copy(container, manifest.config)
        config = parse_config(self._blobs.read(manifest.config.digest, MAX_CONFIG))
        check_fit(manifest, config, self._wanted)
        for layer in {layer.digest: layer for layer in manifest.layers}.values():
            self._copy(container, layer)
        self._blobs.add_bytes(manifest.raw)

    def _bytes(self, container: Container, entry: Descriptor) -> bytes:
        if entry.size > MAX_MANIFEST:
            raise ImageInvalid(f"a manifest in it has {entry.size} bytes; at most {MAX_MANIFEST} are allowed")
        data = container.small(_path(entry.digest), MAX_MANIFEST)
        if data is None:
            raise ImageInvalid(f"it is not whole: the manifest {entry.digest} is missing")
        verify(data, entry.digest, "a manifest in it")
        return data

    def _copy(self, container: Container, blob: Descriptor) -> None:
        with self._blobs.writer(blob.digest, blob.size) as writer:
            if not writer.done:
                writer.restart()
                file, size = container.part(_path(blob.digest))
                with file:
                    if size != blob.size:
                        raise ImageInvalid(
                            f"the blob {blob.digest} has {size} bytes in it; its manifest says {blob.size}"
                        )
                    while piece := file.read(_PIECE):
                        writer.write(piece)
                        self._progress(ImageProgress("download", blob.digest, writer.offset, blob.size))
            writer.commit()

    def _check_choice(self, found: int, names: list[str]) -> None:
        offered = ", ".join(names[:20]) or "none with a name"
        if not found:
            what = f"no image {self._pick!r}" if self._pick else "no image"
            raise ImageInvalid(f"there is {what} in it, but {offered}" if self._pick else "there is no image in it")
        if found > 1:
            raise SpecError(f"there are several images in it: {offered}", hint="pick one: --pick NAME")

    # docker save

    def _docker(self, container: Container, text: bytes) -> tuple[Manifest, Reference | None]:
        try:
            listed = load_json(text)
            images = [(str(item["Config"]), [str(tag) for tag in item.get("RepoTags") or []], item["Layers"])
                      for item in listed]  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ImageInvalid(f"its manifest.json is not what docker save writes: {error!r:.200}") from error
        if len(images) > _MOST_IMAGES:
            raise ImageInvalid(f"it has {len(images)} images; at most {_MOST_IMAGES} are allowed")
        chosen = [image for image in images if not self._pick or self._pick in image[1]]
        self._check_choice(len(chosen), sorted(tag for _, tags, _ in images for tag in tags))
        config_name, tags, names = chosen[0]
        raw = container.small(config_name, MAX_CONFIG)
        if raw is None:
            raise ImageInvalid(f"it is not whole: {config_name[:100]!r} is missing")
        config = parse_config(raw)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) > MAX_LAYERS:
            raise ImageInvalid(f"its layers are no list of names, or more than {MAX_LAYERS}")
        if len(names) != len(config.diff_ids) or not names:
            raise ImageInvalid(f"it has {len(names)} layers, and its config {len(config.diff_ids)}")
        check_platform(Platform(config.os, config.architecture, config.variant), self._wanted)
        pairs = list(zip(names, config.diff_ids, strict=True))
        read = {
            pair: self._docker_layer(container, *pair) for pair in dict.fromkeys(pairs)
        }  # of a thousand the same, one
        manifest = self._made(raw, tuple(read[pair] for pair in pairs))
        return manifest, _reference(tuple(tags[:1]))

    def _docker_layer(self, container: Container, name: str, diff_id: str) -> Descriptor:
        file, _ = container.part(name)
        with file:
            packing, digest = packing_and_digest(file)
        if digest != diff_id:
            raise ImageInvalid(f"the layer {name[:100]!r} is not what the config says: {digest}, not {diff_id[:100]}")
        if packing not in _TYPES:
            raise ImageInvalid(f"the layer {name[:100]!r} is packed with {packing}, which images are not")
        file, size = container.part(name)
        with file:
            return self._add(iter(lambda: file.read(_PIECE), b""), _TYPES[packing], size)

    # root filesystems

    def _tar(self, file: BinaryIO, seen: Scan) -> Manifest:
        if not seen.entries:
            raise ImageInvalid("the tar is empty")
        if not seen.runnable:
            raise ImageInvalid(
                "it holds no root filesystem: no bin, sbin or usr at its top, and no program; and no image",
                hint=f"name {_FORMS}",
            )
        file.seek(0)
        if seen.packing in _TYPES:
            size = os.fstat(file.fileno()).st_size
            layer = self._add(iter(lambda: file.read(_PIECE), b""), _TYPES[seen.packing], size)
        else:
            layer = self._add(_gzipped(unpacked_pieces(file)), _TYPES["gzip"], None)
        return self._one_layer(layer, seen.diff_id)

    def _root(self, path: Path) -> Manifest:
        from ..archive import rootfs

        if not any((path / name).exists() for name in ("bin", "sbin", "usr")) and not _has_program(path):
            raise ImageInvalid(
                "the folder holds no root filesystem (no bin, sbin or usr, and no program), and no OCI layout",
                hint=f"name {_FORMS}",
            )
        owners = os.geteuid() == 0 and path.stat().st_uid == 0
        hashed = _Hashed()
        try:
            with closing(rootfs.tar(path, owners=owners)) as pieces:
                layer = self._add(_gzipped(hashed.through(pieces)), _TYPES["gzip"], None)
        except ImageInvalid:
            raise
        except ImageError as error:  # its hint is for who exports a sandbox
            raise ImageInvalid(error.message, hint="as a user who may read all of it") from error
        return self._one_layer(layer, hashed.digest)

    def _one_layer(self, layer: Descriptor, diff_id: str) -> Manifest:
        made: dict[str, Any] = {"created_by": "sloplet image import"}
        config = ImageConfig(
            architecture=self._wanted.architecture, os=self._wanted.os, variant=self._wanted.variant,
            diff_ids=(diff_id,), history=(made,),
        )  # fmt: skip
        return self._made(config.to_json(), (layer,))

    def _made(self, config: bytes, layers: tuple[Descriptor, ...]) -> Manifest:
        described = Descriptor(OCI_CONFIG, self._blobs.add_bytes(config), len(config))
        manifest = make_manifest(described, layers)
        self._blobs.add_bytes(manifest.raw)
        return manifest

    def _add(self, pieces: Iterable[bytes], media_type: str, total: int | None) -> Descriptor:
        with self._blobs.writer() as writer:
            for piece in pieces:
                writer.write(piece)
                self._progress(ImageProgress("download", "layer", writer.offset, total))
            size = writer.offset
            return Descriptor(media_type, writer.commit(), size)


class _Hashed:
    """The digest of what passes through."""

    def __init__(self) -> None:
        import hashlib

        self._hash = hashlib.sha256()

    def through(self, pieces: Iterable[bytes]) -> Iterable[bytes]:
        for piece in pieces:
            self._hash.update(piece)
            yield piece

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _gzipped(pieces: Iterable[bytes]) -> Iterable[bytes]:
    """Without a name or a time in it: the same bytes for the same content."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31)
    for piece in pieces:
        if packed := packer.compress(piece):
            yield packed
    yield packer.flush()


def _has_program(path: Path) -> bool:
    with os.scandir(path) as entries:
        return any(
            entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mode & 0o111
            for entry in entries
        )


def choose_one(index: Index, entries: list[Descriptor], wanted: Platform) -> Descriptor:
    """Of entries with the same name: the only one, or the one for this platform."""
    if len(entries) == 1:
        return entries[0]
    return choose(Index(index.media_type, tuple(entries), index.raw), wanted)


def _names(entry: Descriptor) -> list[str]:
    """What an entry of a layout is called, the fullest first."""
    return [entry.annotations[key] for key in (FULL_NAME, REF_NAME) if entry.annotations.get(key)]


def _reference(names: tuple[str, ...]) -> Reference | None:
    """The name that an image had, if it is one in full: a bare tag (``latest``) says nothing of which image."""
    for name in names:
        try:
            found = references.parse(name)
        except SpecError:
            continue
        if ":" in name or "/" in name:
            return found
    return None


def _path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
