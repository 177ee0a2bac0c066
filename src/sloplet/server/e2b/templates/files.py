"""What clients send for COPY: archives, by template and hash, in the tenant's ``cache/``. Each is unpacked for a build,
by our own reader, and is gone when nobody has asked for it in a week.

A client sends one to an address that it was given, without a key: the token in it says for whom, until when.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

from starlette.requests import Request
from starlette.types import Scope

from ....fs import write_all
from ....images.threads import whole
from ....state.home import Home, names_in, unwritable
from ...bodies import check_room
from ...caller import Caller
from ...writing import pieces
from ..answers import Answer, refused
from ..api import Asked, Route
from .places import waited
from .steps import HASH_RE

if TYPE_CHECKING:
    from ..door import Facade

_PREFIX = "e2b-files-"
_UNUSED = 7 * 86400
_TORN = 86400
_VALID = 3600
_MOST_TOGETHER = 32 << 30  # bytes of one tenant's
_BATCH = 1 << 20


class Files:
    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self.routes = (Route("PUT", "/templates/{template}/upload/{hash}", self.receive),)

    # -- where they lie ----------------------------------------------------------------

    def path(self, home: Home, template: str, digest: str) -> Path:
        assert HASH_RE.match(digest)
        assert template.isalnum()
        return home.cache / f"{_PREFIX}{template}-{digest}"

    def present(self, home: Home, template: str, digest: str) -> bool:
        """It is kept for another week then. Blocking."""
        try:
            os.utime(self.path(home, template, digest), follow_symlinks=False)
            return True
        except OSError:
            return False

    def forget(self, home: Home, template: str) -> None:
        """Blocking."""
        for name in names_in(home.cache):
            if name.startswith(f"{_PREFIX}{template}-"):
                with suppress(OSError):
                    os.unlink(home.cache / name)

    def tidy(self, home: Home, coming: int = 0) -> None:
        """What nobody has used for long goes, and more of it, the oldest first, where it is too much. Blocking."""
        now, found = time.time(), []
        for name in names_in(home.cache):
            if name.startswith(_PREFIX):
                with suppress(OSError):
                    info = os.lstat(home.cache / name)
                    found.append((info.st_mtime, info.st_size, name))
        together = coming + sum(size for _, size, _ in found)
        for used, size, name in sorted(found):
            old = now - used > (_TORN if name.endswith(".part") else _UNUSED)
            if old or (together > _MOST_TOGETHER and not name.endswith(".part")):
                with suppress(OSError):
                    os.unlink(home.cache / name)
                together -= size

    # -- how they come -----------------------------------------------------------------

    def address(self, asked: Asked, template: str, digest: str) -> str:
        """Where one may be sent to, for an hour."""
        caller = asked.caller
        expires = str(int(time.time()) + _VALID)
        token = self._token(caller.tenant.name, caller.key.id, template, digest, expires)
        query = {"tenant": caller.tenant.name, "key": caller.key.id, "expires": expires, "token": token}
        scheme = asked.scope.get("scheme", "http")
        return f"{scheme}://{asked.host}/templates/{template}/upload/{digest}?{urlencode(query)}"

    def _token(self, *subject: str) -> str:
        return self._facade.tokens.of("upload", "\0".join(subject))

    def is_for(self, scope: Scope) -> bool:
        words = scope["path"].split("/")
        return scope["method"] == "PUT" and len(words) == 5 and (words[1], words[3]) == ("templates", "upload")

    def admit(self, scope: Scope, headers: Mapping[str, str], request_id: str, address: str) -> Caller:
        """Who sends one, by the token in its address. refused (401)."""
        words = scope["path"].split("/")
        given = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        tenant, key_id, expires = (given.get(name, "") for name in ("tenant", "key", "expires"))
        subject = "\0".join((tenant, key_id, words[2], words[4], expires))
        if not self._facade.tokens.opens("upload", subject, given.get("token", "")):
            raise refused(401, "this address is not one that was given out")
        if int(expires) < time.time():
            raise refused(401, "this address was valid for an hour, which is over")
        server = self._facade.server
        key = server.keys.current(key_id)
        if key is None:
            raise refused(401, "the key that this address was given to is not valid any more")
        return Caller(key, server.tenants.get(tenant), request_id, "", address)

    async def receive(self, asked: Asked) -> Answer:
        template, digest = asked.path["template"], asked.path["hash"]
        tenant, server = asked.caller.tenant, self._facade.server
        if not HASH_RE.match(digest):
            raise refused(400, "this is no hash")
        if self._facade.templates.store.find(tenant.name, template) is None:
            raise refused(404, f"template '{template[:80]}' not found")
        async with waited(server.images.uploads, tenant.name):
            body = pieces(Request(asked.scope, asked.receive), server.settings.max_upload)
            await self._keep(tenant.home, self.path(tenant.home, template, digest), body)
        return Answer(200, {})

    async def _keep(self, home: Home, path: Path, body: AsyncIterator[bytes]) -> None:
        """All of it, or none."""
        await whole(self._begin, home)
        torn = path.with_name(f"{path.name}.{secrets.token_hex(6)}.part")
        fd = await whole(os.open, torn, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            waiting: list[bytes] = []
            size = 0
            async for piece in body:
                waiting.append(piece)
                size += len(piece)
                if size >= _BATCH:
                    await whole(_write, fd, b"".join(waiting), home)
                    waiting, size = [], 0
            await whole(_write, fd, b"".join(waiting), home)
            os.rename(torn, path)
        except OSError as error:
            raise unwritable(home.cache, error) from error
        finally:
            os.close(fd)
            with suppress(OSError):
                os.unlink(torn)

    def _begin(self, home: Home) -> None:
        home.open()
        home.cache.mkdir(0o700, exist_ok=True)
        self.tidy(home)


def _write(fd: int, data: bytes, home: Home) -> None:
    check_room(home)
    write_all(fd, data)
