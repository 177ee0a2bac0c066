"""Images of a tenant: pulled, listed, named, sent, taken in and given out."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ...errors import ImageNotFound, SlopletError, SpecError
from ...images import adopting
from ...images.export import archive_pieces, name_of
from ...images.layout import import_file
from ...images.pull import pull
from ...images.push import push
from ...images.reference import parse
from ...images.removing import disk_use
from ...images.standard import refuse_standard, standard_name
from ...images.store import ImageStore
from ...images.threads import kept, whole
from ...quantities import parse_duration, parse_size
from ..bodies import spooled
from ..caller import CallerOf, ServerOf
from ..documents import PROBLEMS, Items
from ..imagedocs import (
    ImageDetails,
    ImageDocument,
    PruneAsked,
    PrunedDocument,
    PullAsked,
    PushAsked,
    RemovedDocument,
    TagAsked,
    TagDocument,
)
from ..imaging import Told, access_for, followed, opened, stoppable
from ..sse import EVENTS, event_stream
from ..streams import ClientGone, while_connected
from ..writing import pieces

router = APIRouter(prefix="/v1/images", tags=["images"], responses=PROBLEMS)

Ref = Annotated[str, Query(min_length=1, max_length=1000, description="A name, an id, or at least six digits of it")]
ARCHIVE = "application/x-tar"
_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {ARCHIVE: {"schema": {"type": "string", "format": "binary"}}}}
}
_TAR: dict[int | str, dict[str, Any]] = {
    200: {"content": {ARCHIVE: {"schema": {"type": "string", "format": "binary"}}}, "description": "An OCI archive"}
}


@router.get("")
async def listed(caller: CallerOf, all: bool = False) -> Items[ImageDocument]:
    """The images of the key's tenant, the one last used first; with `all` also those without a name (steps of builds).

    Images of the operator's can be used by their names without being listed here; from then on they are.
    """
    async with opened(caller.tenant.home) as store:
        found = await asyncio.to_thread(store.list)
    return Items(items=[ImageDocument.of(image) for image in found if all or image.references])


@router.get("/item")
async def inspect(ref: Ref, caller: CallerOf) -> ImageDetails:
    """Everything known about an image."""

    def look(store: ImageStore) -> ImageDetails:
        image = store.find(ref)
        used = disk_use(store, store.row(image.id))
        unpacked = sum(count for name, count in used.items() if name.startswith("unpacked "))
        return ImageDetails.model_validate({**image.to_dict(), "disk": {"blobs": image.size, "unpacked": unpacked}})

    async with opened(caller.tenant.home) as store:
        return await asyncio.to_thread(look, store)


@router.delete("/item")
async def remove(ref: Ref, caller: CallerOf, force: bool = False) -> RemovedDocument:
    """Take one away. Of several names of an image the one that was named goes; by its id all of them.

    One that a sandbox or a saved state uses is refused, unless `force`: then its names go, and the rest later.
    """
    async with opened(caller.tenant.home) as store:
        removed = await asyncio.to_thread(lambda: store.remove(ref, force=force))
    return RemovedDocument.model_validate(removed.to_dict())


@router.post("/tag")
async def tag(asked: TagAsked, caller: CallerOf) -> TagDocument:
    """Give an image another name; one that had it before loses it."""
    name = parse(asked.reference)

    def give(store: ImageStore) -> TagDocument:
        image = adopting.find(store, asked.image)
        store.tag(image, name)
        return TagDocument(id=image.id, reference=str(name))

    async with opened(caller.tenant.home) as store:
        return await asyncio.to_thread(give, store)


@router.post("/prune")
async def prune(asked: PruneAsked, caller: CallerOf) -> PrunedDocument:
    """Remove images that no sandbox and no saved state uses: by default those without a name."""
    older = None if asked.older_than is None else parse_duration(asked.older_than, "older_than")
    most = None if asked.keep is None else parse_size(asked.keep, "keep")
    async with opened(caller.tenant.home) as store:
        found = await asyncio.to_thread(lambda: store.prune(older_than=older, keep_bytes=most, everything=asked.all))
    return PrunedDocument.model_validate(found.to_dict())


@router.post("/pull", response_class=Response, responses=EVENTS)
async def bring(asked: PullAsked, caller: CallerOf, server: ServerOf) -> Response:
    """Bring an image here from a registry, or what is missing of it.

    Events: `progress` {"stage", "key", "done", "total", "text"}, then `done` (the image) or `error` (a problem
    document). A client that goes away ends it; what has come is kept for the next pull.
    """
    reference = parse(asked.reference)
    access = await access_for(caller, asked.username, asked.password)
    server.images.pulls.check(caller.tenant.name)

    async def work(told: Told) -> dict[str, Any]:
        with server.images.pulls.take(caller.tenant.name):
            async with opened(caller.tenant.home) as store:
                if asked.if_missing:
                    with suppress(ImageNotFound):
                        return (await asyncio.to_thread(adopting.find, store, asked.reference)).to_dict()
                if standard_name(reference) is not None:  # of the operator's making: there is none elsewhere
                    image = await asyncio.to_thread(adopting.adopt, store, asked.reference)
                    if image is None:
                        refuse_standard(reference)
                    assert image is not None
                else:
                    image = await pull(
                        reference, store, platform=asked.platform, insecure=asked.insecure, access=access,
                        progress=told.progress,
                    )  # fmt: skip
                return image.to_dict()

    return await event_stream(followed(work), caller.request_id)


@router.post("/push", response_class=Response, responses=EVENTS)
async def send(asked: PushAsked, caller: CallerOf, server: ServerOf) -> Response:
    """Send an image to a registry, byte for byte as it is here.

    Events: `progress`, then `done` {"reference", "digest"} or `error`.
    """
    target = parse(asked.reference or asked.image.removeprefix("sha256:"))
    access = await access_for(caller, asked.username, asked.password)
    server.images.pulls.check(caller.tenant.name)

    async def work(told: Told) -> dict[str, Any]:
        with server.images.pulls.take(caller.tenant.name):
            async with opened(caller.tenant.home) as store:
                image = await asyncio.to_thread(adopting.find, store, asked.image)
                if asked.reference is None and str(target) not in image.references:
                    raise SpecError(f"{asked.image[:200]!r} is no name of that image", hint="say what to push it as")
                digest = await push(
                    image, target, store, insecure=asked.insecure, access=access, progress=told.progress
                )
                return {"reference": str(target), "digest": digest}

    return await event_stream(followed(work), caller.request_id)


@router.post("/import", status_code=201, openapi_extra=_BODY)
async def take_in(
    request: Request,
    caller: CallerOf,
    server: ServerOf,
    name: Annotated[str | None, Query(min_length=1, max_length=1000)] = None,
    pick: Annotated[str | None, Query(min_length=1, max_length=1000, description="Which, of several")] = None,
    platform: Annotated[str | None, Query(min_length=1, max_length=80)] = None,
) -> ImageDocument:
    """Take an image in: the body is an OCI archive, what `docker save` wrote, or a tar of a root filesystem.

    Archives may be packed. Without `name` it is called as it is called there, if that is a whole name.
    """
    reference = None if name is None else parse(name)
    home = caller.tenant.home
    with server.images.uploads.take(caller.tenant.name):
        async with spooled(pieces(request, server.settings.max_upload), home) as file, opened(home) as store:
            work = stoppable(
                lambda check: import_file(file, store, reference, pick=pick, platform=platform, progress=check)
            )
            image = await while_connected(request.receive, work)
    return ImageDocument.of(image)


@router.get("/export", response_class=Response, responses=_TAR)
async def give_out(ref: Ref, caller: CallerOf) -> Response:
    """The image as an OCI archive, which `docker load` reads as well. Equal images give equal bytes."""
    store = ImageStore(caller.tenant.home)

    def begin() -> tuple[Generator[bytes, None, None], bytes]:
        try:
            image = adopting.find(store, ref)
            found = archive_pieces(image, store, reference=name_of(image, ref))
            return found, next(found)
        except BaseException:
            store.close()
            raise

    def undo(made: tuple[Generator[bytes, None, None], bytes]) -> None:
        made[0].close()
        store.close()

    return _Archive(store, *await kept(undo, begin))


class _Archive(Response):
    """Pieces of an archive as they are read. One that breaks off is not completed: the client sees that bytes lack."""

    def __init__(self, store: ImageStore, archive: Generator[bytes, None, None], first: bytes) -> None:
        super().__init__(media_type=ARCHIVE)
        self._store, self._archive, self._first = store, archive, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", ARCHIVE.encode())]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await while_connected(receive, self._pour(send))
        except ClientGone:
            pass
        finally:
            await asyncio.shield(asyncio.to_thread(self._close))

    async def _pour(self, send: Send) -> None:
        piece: bytes | None = self._first
        try:
            while piece is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await whole(next, self._archive, None)
        except SlopletError:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _close(self) -> None:
        self._archive.close()
        self._store.close()
