"""A sandbox's network through a server: part of ``RemoteController``. Its ports are listened on here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from ..controller import Port, PublicPort
from ..network.ports import check_port
from .arguments import network_arguments
from .paths import box_path

if TYPE_CHECKING:
    from ..netchange import NetworkChange
    from ..netspec import NetworkSpec, SecretSpec
    from ..network.asks import Ask
    from ..network.log import Decision
    from .link import Link


class RemoteNetwork:
    """See ``NetworkController`` for what each method promises."""

    @property
    def link(self) -> Link:
        raise NotImplementedError

    async def _get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        raise NotImplementedError

    async def _ask(self, method: str, path: str, body: Any = None, params: Mapping[str, Any] | None = None) -> Any:
        raise NotImplementedError

    # -- policy ------------------------------------------------------------------------

    async def set_network(
        self, sandbox_id: str, network: NetworkSpec, values: Mapping[str, str | None] | None = None
    ) -> None:
        await self._ask("PUT", box_path(sandbox_id, "network"), network_arguments(network, values or {}))

    async def change_network(self, sandbox_id: str, change: NetworkChange) -> NetworkSpec:
        from ..netspec import NetworkSpec

        return NetworkSpec.from_dict(await self._ask("PATCH", box_path(sandbox_id, "network"), change.to_dict()))

    async def network(self, sandbox_id: str) -> NetworkSpec:
        from ..netspec import NetworkSpec

        return NetworkSpec.from_dict(await self._get(box_path(sandbox_id, "network")))

    async def network_log(self, sandbox_id: str, *, after: int = 0, limit: int = 1000) -> list[Decision]:
        from ..network.log import Decision

        found = await self._get(box_path(sandbox_id, "network", "log"), {"after": after, "limit": min(limit, 10_000)})
        return [Decision.from_dict(item) for item in found["items"]]

    async def learned(self, sandbox_id: str) -> NetworkSpec:
        from ..netspec import NetworkSpec

        return NetworkSpec.from_dict(await self._get(box_path(sandbox_id, "network", "learned")))

    async def secrets(self, sandbox_id: str) -> tuple[SecretSpec, ...]:
        from ..netspec import SecretSpec

        found = await self._get(box_path(sandbox_id, "secrets"))
        return tuple(SecretSpec.from_dict(item) for item in found["items"])

    async def set_secrets(self, sandbox_id: str, values: Mapping[str, str | None]) -> None:
        await self._ask("PUT", box_path(sandbox_id, "secrets"), {"values": dict(values)})

    def asks(self, sandbox_id: str) -> AsyncIterator[Ask]:
        return _asks(self.link.subscribe(box_path(sandbox_id, "network", "asks")))

    async def answer(self, sandbox_id: str, ask_id: int, verdict: str) -> None:
        await self._ask("POST", box_path(sandbox_id, "network", "asks", str(ask_id)), {"verdict": verdict})

    # -- ports, of this machine --------------------------------------------------------

    async def expose(self, sandbox_id: str, port: int, *, host_port: int = 0, address: str = "127.0.0.1") -> Port:
        return self.link.ports.expose(sandbox_id, port, host_port, address)

    async def ports(self, sandbox_id: str) -> list[Port]:
        return self.link.ports.list(sandbox_id)

    async def unexpose(self, sandbox_id: str, port: int) -> None:
        self.link.ports.unexpose(sandbox_id, port)

    # -- names of their own, outside ---------------------------------------------------

    async def publish(self, sandbox_id: str, port: int, *, public: bool = False) -> PublicPort:
        path = box_path(sandbox_id, "ports", str(check_port(port)))
        return _public(await self._ask("PUT", path, {"public": public}))

    async def published(self, sandbox_id: str) -> list[PublicPort]:
        return [_public(item) for item in (await self._get(box_path(sandbox_id, "ports")))["items"]]

    async def unpublish(self, sandbox_id: str, port: int) -> None:
        await self._ask("DELETE", box_path(sandbox_id, "ports", str(check_port(port))))


def _public(data: Any) -> PublicPort:
    return PublicPort(data["port"], data["url"], data["public"], data.get("token"))


async def _asks(source: AsyncIterator[Any]) -> AsyncIterator[Ask]:
    from ..network.asks import Ask

    async for item in source:
        yield Ask.from_dict(item)
