"""envd's ``/files``: whole files up and down, streamed. As envd does, it acts as root and gives files to the user."""

from __future__ import annotations

import email.utils
import mimetypes
import posixpath
import re
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ...controller import Stream
from ...errors import (
    DiskFull,
    FileDenied,
    FileError,
    FileExists,
    FileIsDirectory,
    FileMissing,
    FileNotDirectory,
    SlopletError,
    UserNotFound,
)
from ...wire.fields import Fields
from ...wire.mux import request
from ...wire.schema import Op, Tag
from .answers import dump, refused
from .calls import Call, is_gone
from .connect import body_of
from .entries import PREFIX, metadata_asked
from .filesystem import ROOT, files_of
from .multipart import Part, parts_of

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})\Z")
_PIECE = 1 << 20  # bytes that are unpacked at a time
_MOST_FILES = 10_000  # in one request


# -- down --------------------------------------------------------------------------------------------------------------


async def download(call: Call) -> None:
    path = await call.path(call.query.get("path", ""), _user(call))
    stream = await call.open(request(Op.READ, (Tag.PATH, path)).add(Tag.USER, ROOT))
    try:
        found = await stream.started()
        span = _span(call, found)
        if span is not None:
            stream.reset()
            fields = request(Op.READ, (Tag.PATH, path)).add(Tag.USER, ROOT)
            stream = await call.open(fields.add(Tag.OFFSET, span[0]).add(Tag.LENGTH, span[1] - span[0] + 1))
            await stream.started()
        await _send(call, path, found, stream, span)
    except FileIsDirectory:
        raise refused(400, f"path '{path}' is a directory") from None
    except (FileMissing, FileNotDirectory):
        raise refused(404, f"path '{path}' does not exist") from None
    except FileError as error:
        raise _failed(error, path) from None
    finally:
        stream.reset()


def _span(call: Call, found: Fields) -> tuple[int, int] | None:
    """The first and the last byte that are asked for; None: all."""
    asked = _RANGE.match(call.headers.get("range", ""))
    size = found.integer(Tag.SIZE)
    if asked is None or not (asked[1] or asked[2]) or not size or "if-range" in call.headers:
        return None
    if not asked[1]:
        first, last = max(0, size - int(asked[2])), size - 1
    else:
        first, last = int(asked[1]), min(int(asked[2]) if asked[2] else size - 1, size - 1)
    if first >= size or last < first:
        raise refused(416, "the range is not of this file")
    return first, last


async def _send(call: Call, path: str, found: Fields, stream: Stream, span: tuple[int, int] | None) -> None:
    size = found.integer(Tag.SIZE)
    modified = email.utils.formatdate(found.integer(Tag.MTIME_NS) / 1e9, usegmt=True)
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    headers = [
        (b"content-type", kind.encode()), (b"last-modified", modified.encode()), (b"accept-ranges", b"bytes"),
        (b"vary", b"Accept-Encoding"),
        (b"content-disposition", f"inline; filename*=UTF-8''{_quoted(posixpath.basename(path))}".encode()),
    ]  # fmt: skip
    # Only where it is asked for by name: everybody's library says that it could take it, and few lines are that slow.
    packed = span is None and call.headers.get("accept-encoding", "").strip().lower() == "gzip"
    length = span[1] - span[0] + 1 if span is not None else size
    if packed:
        headers.append((b"content-encoding", b"gzip"))
    elif size:  # files of /proc say that they are empty, and are not
        headers.append((b"content-length", str(length).encode()))
    if span is not None:
        headers.append((b"content-range", f"bytes {span[0]}-{span[1]}/{size}".encode()))
    first = await stream.recv()  # what cannot be read is told before anything is
    if first is None:
        await stream.result()
    await call.send({"type": "http.response.start", "status": 200 if span is None else 206, "headers": headers})
    packing = zlib.compressobj(1, zlib.DEFLATED, 31) if packed else None
    left = length if size and packing is None else None
    piece = first
    while piece is not None:
        data = piece.data
        if left is not None:  # it may have grown meanwhile
            data = data[:left]
            left -= len(data)
        if packing is not None:
            data = packing.compress(data)
        if data:
            await call.send({"type": "http.response.body", "body": data, "more_body": True})
        if left == 0:
            break
        piece = await stream.recv()
    rest = packing.flush() if packing is not None else b""
    if left:
        from .envd import abort

        abort(call.scope)  # it has become shorter than was said
        return
    await call.send({"type": "http.response.body", "body": rest, "more_body": False})


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


# -- up ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Upload:
    user: str | None
    owner: str
    metadata: dict[str, str]


async def upload(call: Call) -> None:
    user = _user(call)
    metadata = metadata_asked(call.scope["headers"])
    if isinstance(metadata, str):
        raise refused(400, metadata)
    if user is not None:
        await call.facade.accounts.find(call, user)
    asked = _Upload(user, user or call.record.user, metadata)
    kind = call.headers.get("content-type", "").split(";")[0].strip().lower()
    body = _unpacked(call)
    if kind == "multipart/form-data":
        made = await _upload_parts(call, asked, body)
    elif kind == "application/octet-stream":
        if not call.query.get("path"):
            raise refused(400, "path query parameter is required for raw body upload")
        made = [await _write(call, asked, await call.path(call.query["path"], user), body)]
    else:
        raise refused(400, f"unsupported content type: {kind[:80]}")
    from .envd import answer

    await answer(call, dump(made))


async def _upload_parts(call: Call, asked: _Upload, body: AsyncIterator[bytes]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    seen: set[str] = set()
    async for part in parts_of(body, call.headers.get("content-type", "")):
        if part.name != "file":
            continue
        path = await _path_of(call, asked, part)
        if path in seen or len(seen) >= _MOST_FILES:
            raise refused(
                400, f"you cannot upload multiple files to the same path '{path}' in one upload request, only the "
                "first specified file was uploaded",
            )  # fmt: skip
        seen.add(path)
        made.append(await _write(call, asked, path, part.data))
    return made


async def _path_of(call: Call, asked: _Upload, part: Part) -> str:
    given = call.query.get("path") or part.filename
    if not given:
        raise refused(400, "a file without a name, and no path query parameter")
    return await call.path(given, asked.user)


async def _write(call: Call, asked: _Upload, path: str, data: AsyncIterator[bytes]) -> dict[str, Any]:
    files = files_of(call)
    try:
        await files.write(path, data, in_place=True, parents=True, user=ROOT, owner=asked.owner)
        await _set_metadata(call, path, asked)
    except FileIsDirectory:
        raise refused(400, f"path is a directory: {path}") from None
    except (FileNotDirectory, FileExists):
        raise refused(500, f"error ensuring directories: path is a file: {posixpath.dirname(path)}") from None
    except SlopletError as error:
        raise _failed(error, path) from None
    found: dict[str, Any] = {"path": path, "name": posixpath.basename(path), "type": "file"}
    return {**found, "metadata": asked.metadata} if asked.metadata else found


async def _set_metadata(call: Call, path: str, asked: _Upload) -> None:
    """All of it is replaced, by nothing if there is none."""
    given = {PREFIX + key: value for key, value in asked.metadata.items() if value}  # gVisor keeps no empty ones
    files = files_of(call)
    try:
        try:
            await files.set_attributes(path, given, prefix=PREFIX, replace=True, user=asked.owner)
        except FileDenied:
            await files.set_attributes(path, given, prefix=PREFIX, replace=True, user=ROOT)
    except FileError:
        if given:
            raise


def _user(call: Call) -> str | None:
    return call.query.get("username") or None


async def _unpacked(call: Call) -> AsyncIterator[bytes]:
    coding = call.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("gzip", "identity", ""):
        raise refused(400, f"unsupported content encoding: {coding[:40]}")
    if coding != "gzip":
        async for piece in body_of(call.receive):
            yield piece
        return
    packing = zlib.decompressobj(31)
    most = call.facade.server.settings.max_upload
    try:
        async for piece in body_of(call.receive):
            while piece:
                if packing.eof:  # a file may be several that were packed one after the other
                    packing = zlib.decompressobj(31)
                data = packing.decompress(piece, _PIECE)
                most -= len(data)
                if most < 0:
                    raise refused(413, "the body is longer than this server takes")
                if data:
                    yield data
                piece = packing.unused_data if packing.eof else packing.unconsumed_tail
    except zlib.error as error:
        raise refused(400, f"error decompressing request body: {error}") from None
    if not packing.eof:
        raise refused(400, "error decompressing request body: unexpected EOF")


def _failed(error: SlopletError, path: str) -> SlopletError:
    if is_gone(error):
        return error
    if isinstance(error, DiskFull):
        return refused(507, "not enough disk space available")
    if isinstance(error, UserNotFound):
        return refused(401, f"error looking up user: {error.message}")
    if isinstance(error, FileMissing):
        return refused(404, f"path '{path}' does not exist")
    if isinstance(error, FileError):
        return refused(500, f"error opening file '{path}': {error.message}")
    return error


# -- put together ------------------------------------------------------------------------------------------------------


async def compose(call: Call) -> None:
    """Several files become one, in their order, and are gone."""
    from .connect import unary
    from .envd import answer

    asked = await unary(call.receive)
    sources, target = asked.get("source_paths"), asked.get("destination")
    user = asked.get("username") or _user(call)
    if not isinstance(sources, list) or not sources or not isinstance(target, str) or not target:
        raise refused(400, "source_paths and destination are needed")
    if user is not None and not isinstance(user, str):
        raise refused(400, "username is a text")
    path = await call.path(target, user)
    paths = [await call.path(each, user) for each in sources]
    if path in paths:
        raise refused(400, "the destination is one of the sources")
    files = files_of(call)

    async def pieces() -> AsyncIterator[bytes]:
        for each in paths:
            async for piece in files.stream(each, user=ROOT):
                yield piece

    for each in paths:
        try:
            found = await files.stat(each, user=ROOT)
        except (FileMissing, FileNotDirectory):
            raise refused(404, f"path '{each}' does not exist") from None
        if found.type != "file":
            raise refused(400, f"path '{each}' is not a regular file")
    made = await _write(call, _Upload(user, user or call.record.user, {}), path, pieces())
    for each in paths:
        await files.remove(each, missing_ok=True, user=ROOT)
    await answer(call, dump(made))
