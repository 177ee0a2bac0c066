"""E2B's volumes: Sloplet's, by id and name. An id is made of what the volume's record says, so there is nothing to be
kept: a new volume of the same name has another one, and no token of the old one opens it."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from ...errors import VolumeError, VolumeExists, VolumeNotFound
from ...volumes import content
from ...volumes.records import VolumeInfo
from ...volumes.store import Volumes as Store
from ...volumespec import MOST, NAME_RE, Volume
from ..caller import Caller
from .answers import Answer, refused
from .api import Asked, Route, optional, text
from .volumecontent import VolumeContent, volume_token

if TYPE_CHECKING:
    from .door import Facade
_NAMES = "1 to 63 letters, digits, '_' and '-', beginning with a letter or a digit"


def id_of(tenant: str, info: VolumeInfo) -> str:
    told = f"{tenant}\0{info.name}\0{info.created_at!r}"
    return "vol" + hashlib.sha256(told.encode()).hexdigest()[:24]


class Volumes:
    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self.content = VolumeContent(facade, id_of)
        self.routes = (
            Route("GET", "/volumes", self.list),
            Route("POST", "/volumes", self.create),
            Route("GET", "/volumes/{volume}", self.info),
            Route("DELETE", "/volumes/{volume}", self.remove),
            *self.content.routes,
        )

    async def aclose(self) -> None:
        await self.content.aclose()

    # -- routes --------------------------------------------------------------------------

    async def list(self, asked: Asked) -> Answer:
        store, tenant = _store(asked.caller), asked.caller.tenant.name
        found = await asyncio.to_thread(store.list)
        return Answer(200, [{"volumeID": id_of(tenant, info), "name": info.name} for info in found])

    async def create(self, asked: Asked) -> Answer:
        name, store = text(asked.body, "name", most=128), _store(asked.caller)
        if not NAME_RE.match(name):
            raise refused(400, f"Invalid volume name '{name[:80]}': {_NAMES}")

        def make() -> VolumeInfo:
            info = store.create(name)
            content.open_to_all(store.home, name)
            return info

        try:
            info = await asyncio.to_thread(make)
        except VolumeExists:
            raise refused(400, f"Volume with name '{name}' already exists") from None
        return Answer(201, self._told(asked, info))

    async def info(self, asked: Asked) -> Answer:
        return Answer(200, self._told(asked, await self._find(asked)))

    async def remove(self, asked: Asked) -> Answer:
        """One that a sandbox has is refused (409)."""
        info = await self._find(asked)
        try:
            await asyncio.to_thread(_store(asked.caller).remove, info.name)
        except VolumeNotFound:
            raise _unknown(asked.path["volume"]) from None
        return Answer(204)

    async def _find(self, asked: Asked) -> VolumeInfo:
        wanted, tenant, store = asked.path["volume"], asked.caller.tenant.name, _store(asked.caller)
        for info in await asyncio.to_thread(store.list):
            if id_of(tenant, info) == wanted:
                return info
        raise _unknown(wanted)

    def _told(self, asked: Asked, info: VolumeInfo) -> dict[str, Any]:
        facade, caller = self._facade, asked.caller
        volume = id_of(caller.tenant.name, info)
        return {
            "volumeID": volume, "name": info.name, "domain": facade.domain(asked.host),
            "token": volume_token(facade.tokens, caller.key.id, caller.tenant.name, info.name, volume),
        }  # fmt: skip

    # -- for sandboxes -------------------------------------------------------------------

    async def mounts(self, caller: Caller, body: dict[str, Any]) -> tuple[_Mounts, dict[str, Volume]]:
        """What ``volumeMounts`` asks for: as it is told again, and for ``volumes=``. refused (400)."""
        asked = optional(body, "volumeMounts", list, [])
        if not asked:
            return [], {}
        if len(asked) > MOST:
            raise refused(400, f"invalid mounts:\n\t- at most {MOST} volumes can be mounted")
        return await asyncio.to_thread(_mounts, _store(caller), asked)


_Mounts = list[dict[str, str]]  # spelled here: inside Volumes, `list` is a method


def _mounts(store: Store, asked: list[Any]) -> tuple[_Mounts, dict[str, Volume]]:
    document: _Mounts = []
    volumes: dict[str, Volume] = {}
    wrong = []
    for number, mount in enumerate(asked):
        name, path = (mount.get("name"), mount.get("path")) if isinstance(mount, dict) else (None, None)
        problem = _problem(store, name, path, volumes)
        if problem:
            wrong.append(f"volume mount #{number}: {problem}")
            continue
        document.append({"name": str(name), "path": str(path)})
        volumes[str(path)] = Volume(str(name), shared=True)
    if wrong:
        raise refused(400, "invalid mounts:" + "".join(f"\n\t- {each}" for each in wrong))
    return document, volumes


def _problem(store: Store, name: Any, path: Any, volumes: dict[str, Volume]) -> str:
    if not isinstance(name, str) or not name:
        return "name cannot be empty"
    if not isinstance(path, str) or not path:
        return "path cannot be empty"
    if not path.startswith("/"):
        return "path must be absolute"
    if {".", ".."} & set(path.split("/")):
        return "path must not contain any '.' or '..' components"
    if path.rstrip("/") in {each.rstrip("/") for each in volumes}:
        return f"path '{path[:200]}' is already used"
    try:
        if NAME_RE.match(name):
            content.known(store.home, name)
            return ""
    except VolumeError:
        pass
    return f"volume '{name[:80]}' not found"


def _store(caller: Caller) -> Store:
    return Store(caller.tenant.home)


def _unknown(volume: str) -> Exception:
    return refused(404, f"Volume {volume[:80]} not found")
