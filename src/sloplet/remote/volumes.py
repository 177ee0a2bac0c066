"""The named volumes of a key on a server: what ``Volumes`` is on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..volumes.records import Use, VolumeInfo
from ..volumespec import check_volume_name
from .link import used_link
from .place import Place

if TYPE_CHECKING:
    from .http import Http

_PATH = "/v1/volumes"
_Infos = list[VolumeInfo]


class RemoteVolumes:
    """Each method raises what the same does on this machine, and from the ServerError branch."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    def _http(self) -> Http:
        return used_link(self.place).http

    async def create(self, name: str, *, size: int | str | None = None) -> VolumeInfo:
        check_volume_name(name)
        return _info(await self._http.post(_PATH, {"name": name, "size": size}))

    async def list(self) -> _Infos:
        return [_info(item) for item in (await self._http.get(_PATH))["items"]]

    async def inspect(self, name: str) -> VolumeInfo:
        return _info(await self._http.get(_path(name)))

    async def remove(self, name: str) -> None:
        await self._http.ask("DELETE", _path(name))

    async def snapshot(self, name: str, snapshot: str) -> VolumeInfo:
        check_volume_name(snapshot)
        return _info(await self._http.post(_path(name, "snapshots"), {"name": snapshot}))

    async def remove_snapshot(self, name: str, snapshot: str) -> None:
        await self._http.ask("DELETE", _path(name, "snapshots", check_volume_name(snapshot)))

    async def clone(self, name: str, new: str, *, snapshot: str | None = None) -> VolumeInfo:
        check_volume_name(new)
        return _info(await self._http.post(_path(name, "clone"), {"name": new, "snapshot": snapshot}))


def _path(name: str, *more: str) -> str:
    return "/".join([_PATH, quote(check_volume_name(name), safe=""), *more])


def _info(data: Any) -> VolumeInfo:
    """What the server said of a volume, or of a snapshot of one."""
    given = data.get("users", ())
    users = [Use(use["sandbox"], use["name"], use["mode"], use["shared"], use["since"]) for use in given]
    return VolumeInfo(
        data["name"], data["created_at"], data["size"], data["source"], "", data["used"], tuple(users),
        tuple(_info(each) for each in data.get("snapshots", ())),
    )  # fmt: skip
