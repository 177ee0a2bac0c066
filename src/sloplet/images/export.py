"""An image as an OCI layout: a folder, or one archive that ``docker load`` reads too. Equal images give equal bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..archive import tarwrite
from ..errors import FileExists, SpecError, file_error
from ..fs import write_all
from .blobs import damaged
from .layout import FULL_NAME, REF_NAME, path_of
from .media import MAX_MANIFEST, OCI_INDEX, Descriptor, Platform, parse_manifest
from .progress import ImageProgress, OnImageProgress, silent
from .reference import Reference, parse

if TYPE_CHECKING:
    from .store import ImageStore, StoredImage

_PIECE = 1 << 20
_PACKED_RE = re.compile(r"\.(?:tgz|tar\.[a-z0-9]+)\Z", re.IGNORECASE)


def export_image(
    image: StoredImage, store: ImageStore, path: str | os.PathLike[str], *, reference: Reference | None = None,
    folder: bool | None = None, progress: OnImageProgress = silent,
) -> None:  # fmt: skip
    """Write an image to ``path``, which must be new (or an empty folder). ``folder`` None: a path that ends with
    ``.tar`` becomes an archive. Takes its time: call it in a thread.

    Raises FileExists and other FileErrors, ImageNotFound, ImageInvalid (a blob is damaged), SpecError; nothing is
    left then.
    """
    place = Path(os.path.abspath(path_of(path)))
    if folder is None:
        if _PACKED_RE.search(place.name):
            raise SpecError(
                f"{place.name!r} sounds packed, which an archive of images is not: its layers are already",
                hint="call it NAME.tar, or say which it is: --format archive, --format folder",
            )
        folder = not place.name.endswith(".tar")
    with store.adding():  # none of its blobs goes meanwhile
        export = _Export(image, store, reference, progress)
        try:
            if folder:
                export.folder(place)
            else:
                export.archive(place)
        except FileExists:
            raise
        except OSError as error:
            failed = file_error(error.errno or 0, f"{str(place)!r} cannot be written: {error.strerror}")
            failed.hint = "write it to a folder of your own that exists, on a disk with room"
            raise failed from error


def write_archive(
    image: StoredImage, store: ImageStore, sink: BinaryIO, *, reference: Reference | None = None,
    progress: OnImageProgress = silent,
) -> None:  # fmt: skip
    """The same archive, into a stream."""
    for piece in archive_pieces(image, store, reference=reference, progress=progress):
        sink.write(piece)


def archive_pieces(
    image: StoredImage, store: ImageStore, *, reference: Reference | None = None, progress: OnImageProgress = silent
) -> Generator[bytes, None, None]:
    """The same archive, piece by piece. Blocking; none of the image's blobs goes until it is closed."""
    with store.adding():
        yield from _Export(image, store, reference, progress).pieces()


def name_of(image: StoredImage, asked: str) -> Reference | None:
    """What an image is called in an archive: as it was asked for, if that is a name of it, else by its first name."""
    try:
        name = parse(asked)
        if str(name) in image.references:
            return name
    except SpecError:
        pass
    return parse(image.references[0]) if image.references else None


class _Export:
    def __init__(
        self, image: StoredImage, store: ImageStore, reference: Reference | None, progress: OnImageProgress
    ) -> None:
        self._blobs, self._progress = store.blobs, progress
        raw = store.blobs.read(image.manifest, MAX_MANIFEST)
        manifest = parse_manifest(raw)
        config = image.config
        described = Descriptor(
            manifest.media_type, image.manifest, len(raw), _annotations(reference),
            Platform(config.os, config.architecture, config.variant),
        )  # fmt: skip
        layers = {layer.digest: layer for layer in manifest.layers}
        self._parts = [described, manifest.config, *layers.values()]
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [described.to_dict()]}
        tagged = reference is not None and reference.tag and not reference.digest
        docker = {
            "Config": _path(manifest.config), "RepoTags": [reference.familiar] if reference and tagged else [],
            "Layers": [_path(layer) for layer in manifest.layers],
        }  # fmt: skip
        self._documents = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": _json(index)}
        self._docker = {"manifest.json": _json([docker])}

    def folder(self, place: Path) -> None:
        """Under another name until all of it is there."""
        if os.path.lexists(place) and (place.is_symlink() or not place.is_dir() or any(place.iterdir())):
            raise _exists(place)
        partial = place.with_name(f".{place.name[:200]}.{secrets.token_hex(6)}.partial")
        partial.mkdir(0o755)
        try:
            (partial / "blobs" / "sha256").mkdir(parents=True)
            for part in self._parts:
                with (partial / _path(part)).open("xb", buffering=0) as file:
                    for piece in self._blob(part):
                        write_all(file.fileno(), piece)
            for name, data in self._documents.items():
                (partial / name).write_bytes(data)
            os.rename(partial, place)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def archive(self, place: Path) -> None:
        if os.path.lexists(place):
            raise _exists(place)
        partial = place.with_name(f".{place.name[:200]}.{secrets.token_hex(6)}.partial")
        try:
            with partial.open("xb", buffering=0) as file:
                for piece in self.pieces():
                    write_all(file.fileno(), piece)
                os.fsync(file.fileno())
            try:
                os.link(partial, place)  # unlike a rename this cannot replace what came meanwhile
            except FileExistsError:
                raise _exists(place) from None
            except OSError:  # a filesystem without hard links
                os.rename(partial, place)
        finally:
            partial.unlink(missing_ok=True)

    def pieces(self) -> Iterator[bytes]:
        """A tar of the layout, with Docker's manifest.json beside the index."""
        for name in ("blobs/", "blobs/sha256/"):
            yield tarwrite.header(name.encode(), kind="folder", mode=0o755)
        for part in self._parts:
            yield tarwrite.header(_path(part).encode(), size=part.size, mode=0o644)
            yield from self._blob(part)
            yield tarwrite.padding(part.size)
        for name, data in {**self._documents, **self._docker}.items():
            yield tarwrite.header(name.encode(), size=len(data), mode=0o644) + data + tarwrite.padding(len(data))
        yield tarwrite.END

    def _blob(self, part: Descriptor) -> Iterator[bytes]:
        """Compared with its digest on the way: what is damaged here does not go out."""
        hashed, done = hashlib.sha256(), 0
        with self._blobs.open(part.digest) as file:
            while piece := file.read(_PIECE):
                hashed.update(piece)
                done += len(piece)
                yield piece
                self._progress(ImageProgress("upload", part.digest, done, part.size))
        if done != part.size or f"sha256:{hashed.hexdigest()}" != part.digest:
            raise damaged(part.digest, self._blobs.path_of(part.digest))


def _annotations(reference: Reference | None) -> dict[str, str]:
    if reference is None:
        return {}
    found = {FULL_NAME: str(reference)}
    return {**found, REF_NAME: reference.tag} if reference.tag else found


def _exists(place: Path) -> FileExists:
    return FileExists(f"there already is {str(place)!r}", hint="name a new one, or remove that")


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _path(part: Descriptor) -> str:
    return f"blobs/{part.digest.replace(':', '/')}"
