"""Files of a sandbox: bytes both ways, streamed, and what can be done to them. All is done inside, as its user."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from ... import results
from ...controller import Controller
from ...errors import FileError
from ...files import file_info, list_request, records
from ...wire.fields import Fields
from .. import tarin, tarout
from ..caller import CallerOf, ServerOf
from ..documents import PROBLEMS, Document, Problem
from ..documents import Request as Body
from ..rawnames import FolderOf, PathOf, PathText, UserOf, named, path_of
from ..reading import answer, look
from ..sse import to_json
from ..writing import existed, pieces, write, write_request
from .attributes import Attribute
from .attributes import told as attributes_told

router = APIRouter(prefix="/v1/sandboxes/{box}/files", tags=["files"], responses=PROBLEMS)

BINARY = "application/octet-stream"
MAX_LISTED = 100_000
_MAX_LISTING = 32 << 20  # bytes
_LISTED = 10_000
_ENTRY = 200  # bytes of a usual one
Mode = (
    Annotated[int, Field(ge=0, le=0o7777, description="The number itself: 420 is 0644")]
    | Annotated[str, Field(pattern="^[0-7]{1,4}$", description="Octal digits", examples=["0644"])]
)
OctalOf = Annotated[str | None, Query(pattern="^[0-7]{1,4}$", description="Octal digits", examples=["0644"])]
OwnersOf = Annotated[bool, Query(description="With the names of user and group")]
TargetsOf = Annotated[bool, Query(description="With what links lead to")]
AttributesOf = Annotated[
    str | None,
    Query(pattern=r"^user\.", max_length=255, description="With the extended attributes that begin so, up to 16 KiB"),
]
_BYTES: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_GET: dict[int | str, dict[str, Any]] = {
    200: {"content": {BINARY: _BYTES}, "description": "The file"},
    206: {"content": {BINARY: _BYTES}, "description": "The part of it that `Range` asks for"},
    304: {"description": "It is the one that the client has"},
    416: {"model": Problem, "description": "It has no such part"},
}


class LinkTarget(Document):
    """What a link leads to, over all links on the way."""

    type: str = Field(description="file, dir or other")
    size: int
    mode: int
    path: str | None = Field(default=None, description="Absolute, without links")
    path_base64: str | None = None


class FileInfo(Document):
    """A file, a folder or a link."""

    name: str = Field(description="Its path below what was listed, or the last part of its path")
    name_base64: str | None = Field(default=None, description="The name's bytes, if they are no UTF-8")
    type: str = Field(description="file, dir, symlink or other")
    size: int
    mode: int = Field(description="Permission bits, as a number")
    uid: int
    gid: int
    modified: float = Field(description="Seconds since the epoch")
    target: str | None = Field(default=None, description="What a link says")
    target_base64: str | None = None
    owner: str | None = Field(default=None, description="With `owners`: the user's name, or the number as text")
    group: str | None = None
    leads_to: LinkTarget | None = Field(default=None, description="Of a link, with `targets`; none: it leads nowhere")
    attributes: list[Attribute] | None = Field(default=None, description="With `attributes`")


class Listing(Document):
    items: list[FileInfo]
    truncated: bool = Field(description="There is more than `limit`")


class Unpacked(Document):
    """What a tar became."""

    files: int
    folders: int
    links: int
    bytes: int
    skipped: list[str] = Field(description="Devices, sockets and pipes: the first hundred")


class MkdirAsked(Body):
    path: PathText
    parents: bool = Field(default=True, description="Also those above it; and it may be there already")
    mode: Mode | None = None
    user: str | None = Field(default=None, min_length=1, max_length=256)


class MoveAsked(Body):
    path: PathText
    target: PathText
    replace: bool = Field(default=False, description="What is there already is replaced")
    user: str | None = Field(default=None, min_length=1, max_length=256)


class ChmodAsked(Body):
    path: PathText
    mode: Mode
    user: str | None = Field(default=None, min_length=1, max_length=256)


class ChownAsked(Body):
    path: PathText
    owner: str = Field(min_length=1, max_length=256, examples=["1000:1000"])
    user: str | None = Field(default=None, min_length=1, max_length=256)


class SymlinkAsked(Body):
    path: PathText = Field(description="The link")
    target: PathText = Field(description="What it says")
    user: str | None = Field(default=None, min_length=1, max_length=256)


def told(info: results.FileInfo) -> dict[str, Any]:
    """A ``FileInfo``."""
    found = {**info.to_dict(), **named("name", info.name), **named("target", info.target)}
    if info.owner is not None:
        found |= {"owner": _shown(info.owner), "group": _shown(info.group or "")}
    if info.leads_to is not None:
        to = info.leads_to
        found["leads_to"] = {"type": to.type, "size": to.size, "mode": to.mode, **named("path", to.path)}
    if info.attributes:
        found["attributes"] = attributes_told(info.attributes)
    return found


def _shown(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def mode_of(given: int | str | None) -> int | None:
    return int(given, 8) if isinstance(given, str) else given


# -- bytes ---------------------------------------------------------------------------------------------------------


@router.get("", response_class=Response, responses=_GET)
async def read(box: str, path: PathOf, request: Request, caller: CallerOf, user: UserOf = None) -> Response:
    """A file's bytes. `Range`, `If-None-Match`, `If-Modified-Since` and `If-Range` are heard."""
    sandbox = await caller.tenant.box(box)
    return await answer(caller.tenant.controller, sandbox.id, path, user, request.headers)


@router.head("", response_class=Response, responses={200: {"description": "As GET, without the bytes"}})
async def head(box: str, path: PathOf, caller: CallerOf, user: UserOf = None) -> Response:
    """What GET would tell of the file."""
    sandbox = await caller.tenant.box(box)
    facts = await look(caller.tenant.controller, sandbox.id, path, user)
    return Response(headers={**facts.headers(), "content-length": str(facts.size)})


@router.put(
    "",
    response_model=FileInfo,
    responses={201: {"model": FileInfo, "description": "There was none"}},
    openapi_extra={"requestBody": {"content": {BINARY: _BYTES}, "required": True}},
)
async def put(
    box: str,
    path: PathOf,
    request: Request,
    caller: CallerOf,
    server: ServerOf,
    mode: OctalOf = None,
    user: UserOf = None,
    parents: Annotated[bool, Query(description="Make the folders above it")] = True,
    exclusive: Annotated[bool, Query(description="It must not be there")] = False,
    append: Annotated[
        bool, Query(description="At its end. What has come before a body breaks off stays then.")
    ] = False,
    in_place: Annotated[
        bool, Query(description="The file itself is emptied and written. What has come before a body breaks off stays.")
    ] = False,
) -> Response:
    """Write a file: the body, as it comes.

    The file is replaced at once when all has come: a reader sees the old one or the new one, and a body that breaks off
    leaves the old one whole.
    """
    sandbox = await caller.tenant.box(box)
    octal = None if mode is None else int(mode, 8)
    fields = write_request(path, user, octal, append=append, exclusive=exclusive, parents=parents, in_place=in_place)
    before = asyncio.ensure_future(
        existed(sandbox.files, path, user)
    )  # asked first: the two do not wait for each other
    try:
        await asyncio.sleep(0)
        async with aclosing(pieces(request, server.settings.max_upload)) as body:
            size = await write(caller.tenant.controller, sandbox.id, fields, body)
        was_there = await before
    finally:
        before.cancel()
    try:
        info = await sandbox.files.stat(path, user=user)
    except FileError:  # who waited for it has taken it away already: it was written all the same
        name = path.rstrip("/").rsplit("/", 1)[-1]
        info = results.FileInfo(name, "file", size, int(mode or "0", 8), 0, 0, time.time())
    return JSONResponse(told(info), 200 if was_there else 201)


@router.delete("", status_code=204, response_class=Response)
async def remove(
    box: str, path: PathOf, caller: CallerOf, user: UserOf = None, recursive: bool = False, missing_ok: bool = False
) -> None:
    """Remove a file or an empty folder; with `recursive` a folder and all below it."""
    sandbox = await caller.tenant.box(box)
    await sandbox.files.remove(path, recursive=recursive, missing_ok=missing_ok, user=user)


# -- what there is -------------------------------------------------------------------------------------------------


@router.get("/stat", response_model=FileInfo)
async def stat(
    box: str,
    path: PathOf,
    caller: CallerOf,
    user: UserOf = None,
    follow: Annotated[bool, Query(description="A link is what it leads to")] = True,
    owners: OwnersOf = False,
    targets: TargetsOf = False,
    attributes: AttributesOf = None,
) -> Response:
    """What a path is."""
    files = (await caller.tenant.box(box)).files
    info = await files.stat(path, follow=follow, owners=owners, targets=targets, attributes=attributes, user=user)
    return _json(told(info))


@router.get("/list", response_model=Listing)
async def listed(
    box: str,
    path: FolderOf,
    request: Request,
    caller: CallerOf,
    server: ServerOf,
    user: UserOf = None,
    recursive: Annotated[bool, Query(description="Everything below it")] = False,
    depth: Annotated[int | None, Query(ge=1, le=4096, description="Levels, with `recursive`")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = _LISTED,
    owners: OwnersOf = False,
    targets: TargetsOf = False,
    attributes: AttributesOf = None,
) -> Response:
    """What a folder holds, sorted by name. Of more than `limit` any are told."""
    sandbox = await caller.tenant.box(box)
    server.outputs.hold(request.scope, caller.tenant.name, min(limit * _ENTRY, _MAX_LISTING))
    found: list[tuple[str, bytes]] = []  # written down at once: many names are much smaller so
    size, more = 0, False
    fields = list_request(
        path, recursive=recursive, depth=depth, owners=owners, targets=targets, attributes=attributes, user=user
    )
    async with aclosing(_records(caller.tenant.controller, sandbox.id, fields)) as entries:
        async for info in entries:
            if len(found) == limit or size > _MAX_LISTING:
                more = True
                break
            found.append((info.name, to_json(told(info))))
            size += len(found[-1][1])
    found.sort()
    text = b'{"items":[%b],"truncated":%b}' % (b",".join(item for _, item in found), b"true" if more else b"false")
    return Response(text, media_type="application/json")


async def _records(controller: Controller, sandbox: str, fields: Fields) -> AsyncGenerator[results.FileInfo, None]:
    async for record in records(await controller.open(sandbox, fields)):
        yield file_info(record)


# -- what can be done to them --------------------------------------------------------------------------------------


@router.post("/mkdir", status_code=204, response_class=Response)
async def mkdir(box: str, asked: MkdirAsked, caller: CallerOf) -> None:
    """Make a folder."""
    files = (await caller.tenant.box(box)).files
    await files.mkdir(path_of(asked.path), parents=asked.parents, mode=mode_of(asked.mode), user=asked.user)


@router.post("/move", status_code=204, response_class=Response)
async def move(box: str, asked: MoveAsked, caller: CallerOf) -> None:
    """Rename. That the target is there is an error, unless `replace`."""
    files = (await caller.tenant.box(box)).files
    await files.move(path_of(asked.path), path_of(asked.target), replace=asked.replace, user=asked.user)


@router.post("/chmod", status_code=204, response_class=Response)
async def chmod(box: str, asked: ChmodAsked, caller: CallerOf) -> None:
    """Change permission bits."""
    files = (await caller.tenant.box(box)).files
    await files.chmod(path_of(asked.path), mode_of(asked.mode) or 0, user=asked.user)


@router.post("/chown", status_code=204, response_class=Response)
async def chown(box: str, asked: ChownAsked, caller: CallerOf) -> None:
    """Change the owner: a name, or `uid[:gid]`. `"user": "root"` may."""
    files = (await caller.tenant.box(box)).files
    await files.chown(path_of(asked.path), asked.owner, user=asked.user)


@router.post("/symlink", status_code=204, response_class=Response)
async def symlink(box: str, asked: SymlinkAsked, caller: CallerOf) -> None:
    """Make a symbolic link."""
    files = (await caller.tenant.box(box)).files
    await files.symlink(path_of(asked.path), path_of(asked.target), user=asked.user)


# -- whole folders -------------------------------------------------------------------------------------------------


@router.get(
    "/archive",
    response_class=Response,
    responses={200: {"content": {tarout.MEDIA_TYPE: _BYTES}, "description": "A tar"}},
)
async def get_archive(box: str, path: PathOf, caller: CallerOf, user: UserOf = None) -> Response:
    """A folder as a tar.

    Names are relative to the folder. Special files are left out, and so are setuid bits. An answer that breaks off
    means that a file could not be read by the user.
    """
    sandbox = await caller.tenant.box(box)
    return await tarout.folder_tar(caller.tenant.controller, sandbox.id, path, user)


@router.put(
    "/archive",
    openapi_extra={"requestBody": {"content": {tarout.MEDIA_TYPE: _BYTES}, "required": True}},
)
async def put_archive(
    box: str, path: PathOf, request: Request, caller: CallerOf, server: ServerOf, user: UserOf = None
) -> Unpacked:
    """Unpack a tar (not compressed) into a folder, which is made if it is missing.

    Everything is made as the user, with its permission bits but without owners and times. A hard link becomes a copy;
    links are made last. What was made before an error stays.
    """
    sandbox = await caller.tenant.box(box)
    most = server.settings.max_upload
    async with aclosing(pieces(request, most)) as body:
        made = await tarin.unpack(sandbox.files, path, user, body, most)
    return Unpacked.model_validate(made.to_dict())


def _json(data: Any) -> Response:
    return Response(to_json(data), media_type="application/json")
