"""The content of volumes, for who has a volume's token: looked at, written, read, removed, from outside."""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect
from starlette.types import Scope

from ...errors import SlopletError, VolumeNotFound
from ...state.home import Home
from ...volumes.content import Contents, Draft, known
from ...volumes.records import VolumeInfo
from ..bodies import check_room
from ..caller import Caller
from . import documents
from .answers import Answer, dump, refused
from .api import Asked, Route, optional
from .envd import abort
from .tokens import Tokens

if TYPE_CHECKING:
    from .door import Facade

_FIRST = "/volumecontent/"
_OPENED = "sloplet.volume"  # in the scope: which volume the token opens
_PIECE = 256 << 10
_ENTRIES = 256  # of a listing, sent at a time
_MOST_ID = 65535
_STATUS = {
    errno.ENOENT: 404, errno.ENOTDIR: 404, errno.EEXIST: 409, errno.ENOTEMPTY: 409, errno.ENOSPC: 507,
    errno.EDQUOT: 507, errno.EACCES: 403, errno.EPERM: 403, errno.EROFS: 403, errno.EIO: 500, errno.EMFILE: 503,
    errno.ENFILE: 503, errno.ENOMEM: 503,
}  # fmt: skip

_T = TypeVar("_T")


@dataclass(frozen=True)
class Opened:
    """What a token says."""

    key: str  #: the id of the key that it was given to
    tenant: str
    name: str
    volume: str  #: the volume's id


def volume_token(tokens: Tokens, key: str, tenant: str, name: str, volume: str) -> str:
    """It says what it opens, and for whom: nothing has to be kept of it."""
    said = "\n".join((key, tenant, name, volume))
    return f"{base64.urlsafe_b64encode(said.encode()).decode().rstrip('=')}.{tokens.of('volume', said)}"


def read_token(tokens: Tokens, token: str) -> Opened | None:
    """None: it is not one of ours."""
    text, _, digest = token.partition(".")
    try:
        said = base64.urlsafe_b64decode(text[:1024] + "=" * (-len(text) % 4)).decode()
    except (binascii.Error, ValueError):
        return None
    parts = said.split("\n")
    if len(parts) != 4 or not tokens.opens("volume", said, digest):
        return None
    return Opened(*parts)


class VolumeContent:
    def __init__(self, facade: Facade, id_of: Callable[[str, VolumeInfo], str]) -> None:
        self._facade = facade
        self._id_of = id_of
        self._contents = Contents()
        self.routes = (
            Route("GET", "/volumecontent/{volume}/path", self.look),
            Route("PATCH", "/volumecontent/{volume}/path", self.change),
            Route("DELETE", "/volumecontent/{volume}/path", self.remove),
            Route("GET", "/volumecontent/{volume}/dir", self.listing),
            Route("POST", "/volumecontent/{volume}/dir", self.make_folder),
            Route("GET", "/volumecontent/{volume}/file", self.read),
            Route("PUT", "/volumecontent/{volume}/file", self.write),
        )

    async def aclose(self) -> None:
        await asyncio.to_thread(self._contents.close)

    # -- who comes in --------------------------------------------------------------------

    @staticmethod
    def is_for(scope: Scope) -> bool:
        return str(scope["path"]).startswith(_FIRST)

    def admit(self, scope: Scope, headers: dict[str, str], request_id: str, address: str) -> Caller:
        """Who has a volume's token acts for the key that it was given to. refused (401)."""
        server = self._facade.server
        kind, _, token = headers.get("authorization", "").partition(" ")
        opened = read_token(self._facade.tokens, token.strip()) if kind.casefold() == "bearer" else None
        if opened is None:
            raise refused(401, "unauthorized access, please provide a valid volume token")
        key = server.keys.current(opened.key)
        if key is None or (key.tenant != opened.tenant and not key.admin):
            raise refused(401, "the key that this token was given to is not valid any more")
        scope[_OPENED] = opened
        return Caller(key, server.tenants.get(opened.tenant), request_id, "", address)

    async def _work(
        self, asked: Asked, work: Callable[..., _T], *given: Any, slow: bool = False, adds: bool = False, **more: Any
    ) -> _T:
        """A piece of work on the volume that the path names, in a thread; its errors in E2B's words. ``adds``: it needs
        room on the disk."""
        opened: Opened = asked.scope[_OPENED]
        if asked.path["volume"] != opened.volume:
            raise refused(401, "this token is another volume's")

        def checked() -> _T:
            home = asked.caller.tenant.home
            if not self._is_there(home, opened):
                raise refused(404, f"Volume {opened.volume} not found")
            if adds:
                check_room(home)
            return work(home, opened.name, *given, **more)

        return await self._off_loop(asked, checked, slow=slow)

    async def _off_loop(self, asked: Asked, work: Callable[[], _T], *, slow: bool = False) -> _T:
        try:
            return await self._contents.off_loop(work, asked.caller.tenant.name, slow=slow)
        except OSError as error:
            if isinstance(error, SlopletError):
                raise
            raise _refusal(error) from None

    def _is_there(self, home: Home, opened: Opened) -> bool:
        try:
            return self._id_of(opened.tenant, known(home, opened.name)) == opened.volume
        except VolumeNotFound:
            return False

    # -- routes --------------------------------------------------------------------------

    async def look(self, asked: Asked) -> Answer:
        return Answer(200, entry(await self._work(asked, self._contents.look, _path(asked))))

    async def listing(self, asked: Asked) -> None:
        """It may be long: all of it is made in the thread."""
        depth = _number(asked.query, "depth", 1 << 20)
        pieces = await self._work(asked, self._listing, _path(asked), depth or 1, slow=True)
        length = str(sum(len(piece) for piece in pieces)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await asked.send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in pieces:
            await asked.send({"type": "http.response.body", "body": piece, "more_body": True})
        await asked.send({"type": "http.response.body", "body": b""})

    def _listing(self, home: Home, name: str, path: str, depth: int) -> list[bytes]:
        """As JSON, in pieces: one call for all of it would let nobody else go on meanwhile."""
        told = [dump(entry(each)) for each in self._contents.listing(home, name, path, depth)]
        many = (b",".join(told[at : at + _ENTRIES]) for at in range(0, len(told), _ENTRIES))
        return [b"[", *(b"," + piece if at else piece for at, piece in enumerate(many)), b"]"]

    async def change(self, asked: Asked) -> Answer:
        values = {name: optional(asked.body, name, int) for name in ("uid", "gid", "mode")}
        for name, value in values.items():
            _check(name, value)
        return Answer(200, entry(await self._work(asked, self._contents.change, _path(asked), **values)))

    async def remove(self, asked: Asked) -> Answer:
        await self._work(asked, self._contents.remove, _path(asked), slow=True)
        return Answer(204)

    async def make_folder(self, asked: Asked) -> Answer:
        made = await self._work(asked, self._contents.make_folder, _path(asked), adds=True, **_wishes(asked))
        return Answer(201, entry(made))

    async def read(self, asked: Asked) -> None:
        """A stream. One that cannot be kept to its length any more is cut."""
        found, fd = await self._work(asked, self._contents.read, _path(asked))
        try:
            left = int(found["size"])
            headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(left).encode())]
            await asked.send({"type": "http.response.start", "status": 200, "headers": headers})
            while left:
                reading = partial(os.read, fd, min(left, _PIECE))
                piece = await self._contents.off_loop(reading, asked.caller.tenant.name)
                if not piece:
                    abort(asked.scope)
                    return
                left -= len(piece)
                await asked.send({"type": "http.response.body", "body": piece, "more_body": True})
            await asked.send({"type": "http.response.body", "body": b""})
        finally:
            os.close(fd)

    async def write(self, asked: Asked) -> Answer:
        """From a stream. What breaks off leaves nothing."""
        draft = await self._work(asked, self._contents.write, _path(asked), adds=True, **_wishes(asked))
        try:
            await self._fill(asked, draft)
            return Answer(201, entry(await self._off_loop(asked, draft.finish)))
        finally:
            await asyncio.shield(self._contents.off_loop(draft.discard, asked.caller.tenant.name))

    async def _fill(self, asked: Asked, draft: Draft) -> None:
        held: list[bytes] = []
        size, more, home = 0, True, asked.caller.tenant.home
        while more:
            message = await asked.receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            more = message.get("more_body", False)
            if piece := message.get("body", b""):
                held.append(piece)
                size += len(piece)
            if size >= _PIECE or (size and not more):
                await self._off_loop(asked, partial(_write, draft, b"".join(held), home))
                held.clear()
                size = 0


def _write(draft: Draft, data: bytes, home: Home) -> None:
    check_room(home)
    draft.write(data)


# -- what is asked, and told -------------------------------------------------------------------------------------------


def entry(found: dict[str, Any]) -> dict[str, Any]:
    """Facts of a file, as E2B's document has them. Names need not be UTF-8; JSON is."""
    told = {**found, **{name: documents.time_of(found[name]) for name in ("atime", "mtime", "ctime")}}
    for name in ("name", "path", "target"):
        if name in told:
            told[name] = os.fsencode(told[name]).decode("utf-8", "replace")
    return told


def _path(asked: Asked) -> str:
    """Names need not be UTF-8 here, either."""
    raw = asked.scope["query_string"].decode("latin-1")
    found: str | None = dict(parse_qsl(raw, keep_blank_values=True, errors="surrogateescape")).get("path")
    if found is None:
        raise refused(400, "path is missing")
    return found


def _wishes(asked: Asked) -> dict[str, Any]:
    """Of something that is to be made."""
    query = asked.query
    values: dict[str, Any] = {name: _number(query, name) for name in ("uid", "gid", "mode")}
    force = query.get("force", "false").casefold()
    if force not in ("true", "false", "1", "0", ""):
        raise refused(400, "force is true or false")
    return {**values, "force": force in ("true", "1")}


def _number(query: dict[str, str], name: str, most: int | None = None) -> int | None:
    given = query.get(name, "")
    if not given:
        return None
    if not given.isascii() or not given.isdecimal() or len(given) > 9:
        raise refused(400, f"{name} is no number")
    number = int(given)
    if most is None:
        _check(name, number)
    elif number > most:
        raise refused(400, f"{name} is at most {most}")
    return number


def _check(name: str, value: int | None) -> None:
    most = 0o7777 if name == "mode" else _MOST_ID
    if value is not None and not 0 <= value <= most:
        raise refused(400, f"{name} is a number from 0 to {most}")


def _refusal(error: OSError) -> SlopletError:
    status = _STATUS.get(error.errno or 0, 400)
    text = {404: "path not found", 409: "path already exists"}.get(status) or (error.strerror or str(error))
    return refused(status, text)
