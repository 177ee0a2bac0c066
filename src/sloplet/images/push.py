"""Sending an image to a registry: what it lacks, and the manifest last, so that it is there whole or not at all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from ..errors import RegistryError, RegistryUnavailable
from . import reference as references
from . import registries as configured
from .access import Access, access_of
from .blobs import BlobStore
from .media import MAX_MANIFEST, Descriptor, Manifest, parse_manifest
from .patience import Patience, Transient, Tries
from .progress import ImageProgress, OnImageProgress, silent
from .pull import adding, gather
from .reference import Reference
from .registries import Registries
from .registry import RegistryClient
from .threads import whole

if TYPE_CHECKING:
    from .store import ImageStore, StoredImage

_PARALLEL = 4
_CHUNK = 16 * 2**20  #: what is larger goes in pieces, and on from where it was cut
_PIECE = 1 << 18
THERE = "there already"  #: the text of a blob's progress that need not be sent


async def push(
    image: StoredImage, reference: Reference, store: ImageStore, *, progress: OnImageProgress = silent,
    insecure: bool = False, registries: Registries | None = None, patience: Patience | None = None,
    access: Access | None = None,
) -> str:  # fmt: skip
    """Send an image, byte for byte as it was pulled or built, and return the digest of its manifest.

    ``insecure``: plain HTTP, to a registry on this machine. ``access``: by default what holds for the owner of the
    store. Raises NotAllowed, SpecError, ImageNotFound (a blob went meanwhile),
    RegistryDenied, RegistryUnavailable, RegistryError.
    """
    if registries is None:
        registries = await asyncio.to_thread(configured.load, store.home)
    endpoint = registries.push(reference, insecure=insecure)
    if access is None:
        access = await asyncio.to_thread(access_of, store.home)
    found = await asyncio.to_thread(access.credentials, endpoint, reference)
    lender = _lender(image, reference)
    async with adding(store):  # none of its blobs goes while they are sent
        manifest = parse_manifest(await asyncio.to_thread(store.blobs.read, image.manifest, MAX_MANIFEST))
        async with RegistryClient(
            endpoint, found, push=True, mount_from=lender, patience=patience, reach=access.reach_of(endpoint)
        ) as client:
            pushing = _Push(client, store.blobs, lender, progress)
            await pushing.blobs(manifest)
            await pushing.manifest(manifest, reference)
    progress(ImageProgress("done", key=manifest.digest, text=reference.familiar))
    return manifest.digest


def _lender(image: StoredImage, reference: Reference) -> str | None:
    """A repository of the same registry that has this image, and so its blobs."""
    known = [references.parse(text) for text in image.references]
    names = [other.repository for other in known if other.registry == reference.registry]
    return next((name for name in names if name != reference.repository), None)


class _Push:
    def __init__(self, client: RegistryClient, blobs: BlobStore, lender: str | None, progress: OnImageProgress) -> None:
        self._client, self._blobs, self._lender, self._progress = client, blobs, lender, progress
        self._url = client.endpoint.url

    async def blobs(self, manifest: Manifest) -> None:
        free = asyncio.Semaphore(_PARALLEL)

        async def one(blob: Descriptor) -> None:
            async with free:
                await self._blob(blob)

        distinct = {blob.digest: blob for blob in (*manifest.layers, manifest.config)}
        await gather(*(one(blob) for blob in distinct.values()))

    async def manifest(self, manifest: Manifest, reference: Reference) -> None:
        what = f"the manifest of {self._client.endpoint}"
        asked = manifest.digest if reference.digest else reference.asked
        if reference.digest and reference.digest != manifest.digest:
            raise RegistryError(
                f"the image has the digest {manifest.digest}, and cannot be pushed as {reference.digest}",
                hint="use a tag",
            )

        async def once() -> None:
            headers = {"Content-Type": manifest.media_type, "Content-Length": str(len(manifest.raw))}
            url = f"{self._url}/manifests/{asked}"
            async with self._client.open("PUT", url, headers=headers, body=_all(manifest.raw)) as answer:
                await self._client.expect(answer, what, 200, 201, 202)
                told = answer.headers.get("Docker-Content-Digest", manifest.digest)
                if told != manifest.digest:
                    raise RegistryError(f"the registry took {what} for another: {told[:80]!r}")

        await self._client.again(once)

    async def _blob(self, blob: Descriptor) -> None:
        def told(done: int, text: str = "") -> None:
            self._progress(ImageProgress("upload", blob.digest, done, blob.size, text))

        told(0)
        if await self._there(blob):
            return told(blob.size, THERE)
        tries = Tries(self._client.patience)
        while True:
            try:
                upload = await self._begin(blob)
                if not upload:
                    return told(blob.size, THERE)
                await self._upload(blob, upload, told)
                return told(blob.size)
            except Transient as problem:
                await tries.wait(problem)
                if await self._there(blob):  # only the answer was lost, or took longer than we wait
                    return told(blob.size)

    async def _there(self, blob: Descriptor) -> bool:
        async def once() -> bool:
            async with self._client.open("HEAD", f"{self._url}/blobs/{blob.digest}") as answer:
                if answer.status_code == 404:
                    return False
                await self._client.expect(answer, _name(blob), 200)
                return True

        return bool(await self._client.again(once))

    async def _begin(self, blob: Descriptor) -> str:
        """Where to upload it; "" if another repository lent it."""
        words = f"?{urlencode({'mount': blob.digest, 'from': self._lender})}" if self._lender else ""

        async def once() -> str:
            headers = {"Content-Length": "0"}
            async with self._client.open("POST", f"{self._url}/blobs/uploads/{words}", headers=headers) as answer:
                await self._client.expect(answer, f"an upload of {_name(blob)}", 201, 202)
                if answer.status_code == 201:
                    return ""
                location = answer.headers.get("Location", "")
                if not location:
                    raise RegistryError(f"{self._client.endpoint.host} does not say where to upload")
                return self._client.target(str(answer.url), location)

        return str(await self._client.again(once))

    async def _upload(self, blob: Descriptor, url: str, told: Callable[[int], None]) -> None:
        """In one request, or what is large in pieces."""
        start = 0
        if blob.size > _CHUNK:
            url, start = await self._pieces(blob, url, told)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size - start)}
        closing = _with(url, digest=blob.digest)
        body = self._body(blob, start, blob.size, told)
        async with self._client.open("PUT", closing, headers=headers, body=body) as answer:
            await self._client.expect(answer, _name(blob), 201, 204)
            got = answer.headers.get("Docker-Content-Digest", blob.digest)
            if got != blob.digest:
                raise RegistryError(f"the registry took {_name(blob)} for another: {got[:80]!r}")

    async def _pieces(self, blob: Descriptor, url: str, told: Callable[[int], None]) -> tuple[str, int]:
        """All pieces but the last. Where the next request goes, and from which byte on."""
        start = most = 0
        tries = Tries(self._client.patience)
        while blob.size - start > _CHUNK:
            end = start + _CHUNK
            headers = {
                "Content-Type": "application/octet-stream", "Content-Length": str(_CHUNK),
                "Content-Range": f"{start}-{end - 1}",
            }  # fmt: skip
            try:
                async with self._client.open(
                    "PATCH", url, headers=headers, body=self._body(blob, start, end, told)
                ) as answer:
                    await self._client.expect(answer, _name(blob), 202, 204, 201)
                    url = self._next(answer.headers.get("Location", ""), url)
                    start = end
                    if end > most:  # a registry that forgets what it took does not get it for ever
                        most = end
                        tries.progressed()
            except Transient as problem:
                await tries.wait(problem)
                url, start = await self._status(blob, url)
        return url, start

    async def _status(self, blob: Descriptor, url: str) -> tuple[str, int]:
        """How much of an upload the registry has."""

        async def once() -> tuple[str, int]:
            async with self._client.open("GET", url) as answer:
                if answer.status_code in (404, 416):
                    raise RegistryUnavailable(f"the registry forgot the upload of {_name(blob)}", hint="push again")
                await self._client.expect(answer, _name(blob), 204, 202, 200)
                match = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,15})", answer.headers.get("Range", ""))
                have = int(match[1]) + 1 if match and int(match[1]) else 0
                if have > blob.size:
                    raise RegistryError(f"the registry says that it has {have} bytes of {_name(blob)}")
                return self._next(answer.headers.get("Location", ""), url), have

        found: tuple[str, int] = await self._client.again(once)
        return found

    def _next(self, location: str, url: str) -> str:
        return self._client.target(url, location) if location else url

    def _body(
        self, blob: Descriptor, start: int, end: int, told: Callable[[int], None]
    ) -> Callable[[], AsyncGenerator[bytes, None]]:
        async def pieces() -> AsyncGenerator[bytes, None]:
            with self._blobs.open(blob.digest) as file:
                file.seek(start)
                at = start
                while at < end:
                    piece = await whole(file.read, min(_PIECE, end - at))
                    if not piece:
                        raise RegistryError(f"{_name(blob)} is shorter on this disk than it was")
                    yield piece
                    at += len(piece)
                    told(at)

        return pieces


def _all(data: bytes) -> Callable[[], AsyncGenerator[bytes, None]]:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield data

    return pieces


def _with(url: str, **parameters: str) -> str:
    """An address with more in its query: uploads' have one of their own."""
    parts = urlsplit(url)
    query = "&".join(filter(None, (parts.query, urlencode(parameters))))
    return parts._replace(query=query).geturl()


def _name(blob: Descriptor) -> str:
    return f"the blob {blob.digest[:19]}"
