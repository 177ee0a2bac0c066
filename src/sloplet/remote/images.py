"""The images of a key on a server: what ``ImageStore``, pulls, pushes and builds are on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import FileExists, ImageNotFound, ServerUnreachable, file_error
from ..images.progress import ImageProgress, OnImageProgress, silent
from ..images.removing import Pruned, Removed
from ..images.store import StoredImage
from ..images.threads import whole
from .http import json_of
from .link import used_link
from .place import Place
from .problems import error_of
from .told import lines_of, server_sent

if TYPE_CHECKING:
    from .http import Http

_PIECE = 1 << 20
_PATH = "/v1/images"
_Images = list[StoredImage]
Pieces = Generator[bytes, None, None]


class RemoteImages:
    """Each method raises what the same does on this machine, and from the ServerError branch."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    def _http(self) -> Http:
        return used_link(self.place).http

    async def list(self, *, all: bool = False) -> _Images:
        found = await self._http.get(_PATH, {"all": "true"} if all else None)
        return [StoredImage.from_dict(item) for item in found["items"]]

    async def find(self, ref: str) -> tuple[StoredImage, dict[str, Any]]:
        """An image, and all that the server says of it."""
        found = await self._http.get(f"{_PATH}/item", {"ref": ref})
        return StoredImage.from_dict(found), found

    async def remove(self, ref: str, *, force: bool = False) -> Removed:
        params = {"ref": ref, **({"force": "true"} if force else {})}
        found = await self._http.ask("DELETE", f"{_PATH}/item", params=params)
        return Removed(tuple(found["references"]), found["image"], found["bytes"], found["later"])

    async def tag(self, image: str, reference: str) -> dict[str, Any]:
        return dict(await self._http.post(f"{_PATH}/tag", {"image": image, "reference": reference}))

    async def prune(self, *, older_than: float | None, keep_bytes: int | None, everything: bool) -> Pruned:
        body = {"older_than": older_than, "keep": keep_bytes, "all": everything}
        found = await self._http.post(f"{_PATH}/prune", body)
        return Pruned(
            tuple(found["images"]), tuple(found["used"]), found["bytes"], found["blobs"], found["layers"],
            found["trees"], found["later"], dict.fromkeys(found["images"], ()),
        )  # fmt: skip

    async def pull(
        self, reference: str, *, platform: str | None = None, insecure: bool = False,
        login: tuple[str, str] | None = None, if_missing: bool = False, progress: OnImageProgress = silent,
    ) -> StoredImage:  # fmt: skip
        """``login``: a name and a password for the registry, for this once. ``if_missing``: no registry is asked for
        what the server has."""
        body = {
            "reference": reference, "platform": platform, "insecure": insecure, "if_missing": if_missing,
            **_login(login),
        }  # fmt: skip
        return StoredImage.from_dict(await self._followed(f"{_PATH}/pull", body, progress))

    async def push(
        self, image: str, reference: str | None = None, *, insecure: bool = False,
        login: tuple[str, str] | None = None, progress: OnImageProgress = silent,
    ) -> dict[str, Any]:  # fmt: skip
        """What it is called there, and the digest of its manifest."""
        body = {"image": image, "reference": reference, "insecure": insecure, **_login(login)}
        return await self._followed(f"{_PATH}/push", body, progress)

    async def _followed(self, path: str, body: Mapping[str, Any], progress: OnImageProgress) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", path, headers=headers, content=json.dumps(body).encode()) as answer:
            return await result_of(
                server_sent(lines_of(answer)),
                lambda name, data: progress(ImageProgress(**data)) if name == "progress" else None,
            )

    async def import_file(
        self, pieces: Pieces, *, name: str | None = None, pick: str | None = None, platform: str | None = None
    ) -> StoredImage:
        """Take in an archive, as its bytes come."""
        given = {"name": name, "pick": pick, "platform": platform}
        params = {key: value for key, value in given.items() if value is not None}
        headers = {"Content-Type": "application/x-tar"}
        async with self._http.stream(
            "POST", f"{_PATH}/import", params=params, headers=headers, content=sent(pieces)
        ) as answer:
            return StoredImage.from_dict(await json_of(answer))

    async def export_to(self, ref: str, sink: BinaryIO) -> None:
        """Write an image's archive. ServerUnreachable if it breaks off."""
        async with self._http.stream("GET", f"{_PATH}/export", params={"ref": ref}) as answer:
            async for piece in answer.aiter_bytes(_PIECE):
                await asyncio.to_thread(sink.write, piece)

    async def export(self, ref: str, path: str | os.PathLike[str]) -> None:
        """The archive as a file, which must be new; it is there whole or not at all. FileError."""
        place = os.path.abspath(path)
        if os.path.lexists(place):
            raise FileExists(f"there already is {place!r}", hint="name a new one, or remove that")
        partial = f"{place}.{secrets.token_hex(6)}.partial"
        try:
            with open(partial, "xb") as file:  # noqa: ASYNC230 - opened at once, written in a thread
                await self.export_to(ref, file)
            os.link(partial, place)
        except OSError as error:
            raise file_error(error.errno or 0, f"{place!r} cannot be written: {error.strerror}") from error
        finally:
            with suppress(FileNotFoundError):
                os.unlink(partial)

    async def has(self, image_id: str) -> bool:
        try:
            await self.find(image_id)
        except ImageNotFound:
            return False
        return True


async def result_of(events: AsyncIterator[tuple[str, Any]], told: Callable[[str, Any], object]) -> dict[str, Any]:
    """The data of ``done``, after everything else was told. Raises what ``error`` stands for."""
    async for name, data in events:
        if name == "error":
            raise error_of(data)
        if name == "done":
            if not isinstance(data, dict):
                break
            return data
        told(name, data)
    raise ServerUnreachable("the server stopped to tell of it before it was done", hint="look whether it was done")


async def sent(pieces: Pieces) -> AsyncIterator[bytes]:
    """What is read in a thread, in pieces that are worth a message."""
    with closing(pieces):
        while batch := await whole(_batch, pieces):
            yield batch


def _batch(pieces: Pieces) -> bytes:
    found: list[bytes] = []
    size = 0
    while size < _PIECE and (piece := next(pieces, None)) is not None:
        found.append(piece)
        size += len(piece)
    return b"".join(found)


def _login(login: tuple[str, str] | None) -> dict[str, str]:
    return {} if login is None else {"username": login[0], "password": login[1]}
