"""Bringing an image here: mirrors and the registry in turn, manifest, config and layers, each checked by its digest.

Blobs go to the store as they come; the image is there once all of them are. What was cut is gone on with by the next
pull, of whatever process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ImageError, ImageInvalid, ImageNotFound, RegistryError, StateBusy
from . import registries as configured
from .access import Access, access_of
from .blobs import BlobStore, BlobWriter
from .config import MAX_CONFIG, parse_config
from .media import (
    MAX_DEPTH,
    MAX_MANIFEST,
    Descriptor,
    Manifest,
    Platform,
    check_fit,
    choose,
    digest_of,
    host_platform,
    parse,
    parse_platform,
)
from .patience import Patience
from .progress import ImageProgress, OnImageProgress, silent
from .reference import Reference
from .registries import Endpoint, Registries
from .registry import BlobMissing, RegistryClient
from .standard import refuse_standard
from .threads import kept, whole

if TYPE_CHECKING:
    from .store import ImageStore, StoredImage

_PARALLEL = 4
_MOVES = 3  # how often a tag may move while we look
_MIRROR_TRIES = 2
HERE = "here already"  #: the text of a blob's progress that need not be sent
_BUSY_PAUSE = 0.2


async def pull(
    reference: Reference, store: ImageStore, *, platform: str | None = None, progress: OnImageProgress = silent,
    insecure: bool = False, registries: Registries | None = None, patience: Patience | None = None,
    access: Access | None = None,
) -> StoredImage:  # fmt: skip
    """Bring an image here, or what is missing of it, and give it its name.

    ``insecure``: plain HTTP, to a registry on this machine. ``access``: by default what holds for the owner of the
    store. Raises NotAllowed, SpecError, ImageNotFound, ImageInvalid,
    ImagePlatform, RegistryDenied, RegistryUnavailable, RegistryError, StateUnwritable; nothing is half there then.
    """
    refuse_standard(reference, "is built, not pulled: no registry is asked for it")
    wanted = parse_platform(platform) if platform else host_platform()
    if registries is None:
        registries = await asyncio.to_thread(configured.load, store.home)
    if access is None:
        access = await asyncio.to_thread(access_of, store.home)
    endpoints = registries.pull(reference, insecure=insecure)
    progress(ImageProgress("resolve", text=reference.familiar))
    async with adding(store):
        for number, endpoint in enumerate(endpoints):
            try:
                found = await _from(endpoint, reference, store, wanted, progress, patience, access)
                break
            except ImageError as error:
                if number == len(endpoints) - 1:
                    raise
                why = f"the mirror {endpoint.host} did not help: {error.message}"
                progress(ImageProgress("resolve", text=why))
        image = await asyncio.to_thread(store.record, found.digest, reference=reference)
    progress(ImageProgress("done", key=image.id, text=reference.familiar))
    return image


async def _from(
    endpoint: Endpoint, reference: Reference, store: ImageStore, wanted: Platform, progress: OnImageProgress,
    patience: Patience | None, access: Access,
) -> Manifest:  # fmt: skip
    """Everything of the image, from one server."""
    found = await asyncio.to_thread(access.credentials, endpoint, reference)
    patience = patience or Patience()
    if endpoint.mirror:  # there is another one to ask
        patience = replace(patience, tries=min(patience.tries, _MIRROR_TRIES))
    async with RegistryClient(endpoint, found, patience=patience, reach=access.reach_of(endpoint)) as client:
        pulling = _Pull(client, store.blobs, wanted, progress)
        seen = ""
        for _ in range(_MOVES):
            data, kind = await client.manifest(reference.asked)
            if digest_of(data) == seen:
                break
            try:
                return await pulling.all(data, kind)
            except BlobMissing as error:
                problem = error
                if reference.digest:
                    break
                seen = digest_of(data)  # if the tag has moved meanwhile, what it names now may be whole
        raise RegistryError(problem.message, hint="push the image there again") from problem


class _Pull:
    def __init__(self, client: RegistryClient, blobs: BlobStore, wanted: Platform, progress: OnImageProgress) -> None:
        self._client, self._blobs, self._wanted, self._progress = client, blobs, wanted, progress

    async def all(self, data: bytes, kind: str) -> Manifest:
        manifest = await self._manifest(data, kind)
        if manifest.config.size > MAX_CONFIG:
            raise ImageInvalid(
                f"the image's config is said to have {manifest.config.size} bytes; at most {MAX_CONFIG} are allowed"
            )
        await self._blob(manifest.config)
        config = parse_config(await asyncio.to_thread(self._blobs.read, manifest.config.digest, MAX_CONFIG))
        check_fit(manifest, config, self._wanted)
        await self._layers(manifest)
        await asyncio.to_thread(self._blobs.add_bytes, manifest.raw)
        return manifest

    async def _manifest(self, data: bytes, kind: str) -> Manifest:
        """Through indexes to the one image for our platform."""
        for _ in range(MAX_DEPTH + 1):
            document = parse(data, kind)
            if isinstance(document, Manifest):
                return document
            entry = choose(document, self._wanted)
            if entry.size > MAX_MANIFEST:
                raise ImageInvalid(f"a manifest of the image is said to have {entry.size} bytes, above {MAX_MANIFEST}")
            try:
                data, _served = await self._client.manifest(entry.digest)
            except ImageNotFound as error:
                raise BlobMissing(error.message) from error
            if len(data) != entry.size:
                raise ImageInvalid(f"a manifest of the image has {len(data)} bytes; its index says {entry.size}")
            kind = entry.media_type
        raise ImageInvalid(f"the image has indexes inside of indexes, more than {MAX_DEPTH} deep")

    async def _layers(self, manifest: Manifest) -> None:
        free = asyncio.Semaphore(_PARALLEL)

        async def one(layer: Descriptor) -> None:
            async with free:
                await self._blob(layer)

        distinct = {layer.digest: layer for layer in manifest.layers}
        await asyncio.to_thread(self._blobs.room_for, {name: layer.size for name, layer in distinct.items()})
        await gather(*(one(layer) for layer in distinct.values()))

    async def _blob(self, blob: Descriptor) -> None:
        def told(done: int, text: str = "") -> None:
            self._progress(ImageProgress("download", blob.digest, done, blob.size, text))

        told(0)
        for last in (False, True):
            writer = await open_writer(self._blobs, blob)
            begun = writer.offset
            try:
                if writer.done:
                    return told(blob.size, HERE)
                if begun:
                    told(begun)
                await self._client.blob(blob, writer, told)
                await whole(writer.commit)
                return None
            except ImageInvalid:
                if last or not begun:
                    raise
                writer.restart()  # the wrong part may be what another server sent: all of it from this one
            finally:
                writer.close()


@asynccontextmanager
async def adding(store: ImageStore) -> AsyncIterator[None]:
    """``ImageStore.adding``, which may have to wait, for who must not block."""
    held = store.adding()
    await kept(lambda _: held.__exit__(None, None, None), held.__enter__)
    try:
        yield
    finally:
        held.__exit__(None, None, None)


async def open_writer(blobs: BlobStore, blob: Descriptor) -> BlobWriter:
    """Waits while another process downloads the same blob: it is ours as well, then. What an earlier one left is
    hashed first, so it is done in a thread."""
    while True:
        try:
            return await kept(BlobWriter.close, blobs.writer, blob.digest, blob.size, wait=False)
        except StateBusy:
            await asyncio.sleep(_BUSY_PAUSE)


async def gather(*work: Coroutine[Any, Any, None]) -> None:
    """All of them; the first error ends the others and is raised as it is."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        for task in asyncio.as_completed(tasks):
            await task
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
