"""A sandbox's network through the keeper: the methods it answers, and the client's side of them.

Values of secrets are in the request's body and in the runtime's memory, and nowhere in between: nothing here logs or
repeats what it was sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..controller import Port
from ..errors import SpecError

if TYPE_CHECKING:
    from ..netchange import NetworkChange
    from ..netspec import NetworkSpec, SecretSpec
    from ..network.asks import Ask
    from ..network.log import Decision
    from ..runtime import Runtime
    from .history import Method
    from .server import Client, Server

MOST_ROWS = 10_000  # of a log, in one answer


class NetworkMethods:
    """The keeper's side."""

    def __init__(self, server: Server) -> None:
        self._runtime: Runtime = server.runtime
        self.methods: dict[str, Method] = {
            "set_network": self._set_network,
            "change_network": self._change_network,
            "network": self._network,
            "network_log": self._network_log,
            "learned": self._learned,
            "secrets": self._secrets,
            "set_secrets": self._set_secrets,
            "answer": self._answer,
            "expose": self._expose,
            "ports": self._ports,
            "unexpose": self._unexpose,
        }

    def asks(self, sandbox: str) -> AsyncIterator[Ask]:
        """From this call on, so that what is run next is asked about."""
        return self._runtime.asks(sandbox)

    async def _set_network(self, client: Client, params: dict[str, Any]) -> Any:
        from ..netspec import NetworkSpec

        values = _values(params.get("values") or {})
        await self._runtime.set_network(params["sandbox"], NetworkSpec.from_dict(params["network"]), values)

    async def _change_network(self, client: Client, params: dict[str, Any]) -> Any:
        from ..netchange import NetworkChange

        change = NetworkChange.from_dict(params["change"])
        return (await self._runtime.change_network(params["sandbox"], change)).to_dict()

    async def _network(self, client: Client, params: dict[str, Any]) -> Any:
        return (await self._runtime.network(params["sandbox"])).to_dict()

    async def _network_log(self, client: Client, params: dict[str, Any]) -> Any:
        limit = min(int(params["limit"]), MOST_ROWS)
        return await _dicts(self._runtime.network_log(params["sandbox"], after=int(params["after"]), limit=limit))

    async def _learned(self, client: Client, params: dict[str, Any]) -> Any:
        return (await self._runtime.learned(params["sandbox"])).to_dict()

    async def _secrets(self, client: Client, params: dict[str, Any]) -> Any:
        return await _dicts(self._runtime.secrets(params["sandbox"]))

    async def _set_secrets(self, client: Client, params: dict[str, Any]) -> Any:
        await self._runtime.set_secrets(params["sandbox"], _values(params["values"]))

    async def _answer(self, client: Client, params: dict[str, Any]) -> Any:
        await self._runtime.answer(params["sandbox"], int(params["ask"]), str(params["verdict"]))

    async def _expose(self, client: Client, params: dict[str, Any]) -> Any:
        made = await self._runtime.expose(
            params["sandbox"], params["port"], host_port=params["host_port"], address=params["address"]
        )
        return made.to_dict()

    async def _ports(self, client: Client, params: dict[str, Any]) -> Any:
        return [port.to_dict() for port in await self._runtime.ports(params["sandbox"])]

    async def _unexpose(self, client: Client, params: dict[str, Any]) -> Any:
        await self._runtime.unexpose(params["sandbox"], params["port"])


class KeeperNetwork:
    """The client's side: part of ``KeeperClient``. See ``Controller`` for what each method promises."""

    async def _do(self, method: str, **params: Any) -> Any:
        """Ask a keeper of our version, started if there is none, for what may be asked once only."""
        raise NotImplementedError

    async def _look(self, method: str, offline: Callable[[Runtime], Awaitable[Any]], **params: Any) -> Any:
        """Ask the keeper that runs or, where none does, the records. JSON, or what ``offline`` gives."""
        raise NotImplementedError

    def _subscribe(self, method: str, sandbox_id: str | None) -> AsyncIterator[Any]:
        """What the keeper tells from now on, as JSON."""
        raise NotImplementedError

    async def set_network(
        self, sandbox_id: str, network: NetworkSpec, values: Mapping[str, str | None] | None = None
    ) -> None:
        await self._do("set_network", sandbox=sandbox_id, network=network.to_dict(), values=dict(values or {}))

    async def change_network(self, sandbox_id: str, change: NetworkChange) -> NetworkSpec:
        from ..netspec import NetworkSpec

        return NetworkSpec.from_dict(await self._do("change_network", sandbox=sandbox_id, change=change.to_dict()))

    async def network(self, sandbox_id: str) -> NetworkSpec:
        from ..netspec import NetworkSpec

        found = await self._look("network", lambda runtime: _dict(runtime.network(sandbox_id)), sandbox=sandbox_id)
        return NetworkSpec.from_dict(found)

    async def network_log(self, sandbox_id: str, *, after: int = 0, limit: int = 1000) -> list[Decision]:
        from ..network.log import Decision

        found = await self._look(
            "network_log",
            lambda runtime: _dicts(runtime.network_log(sandbox_id, after=after, limit=limit)),
            sandbox=sandbox_id,
            after=after,
            limit=limit,
        )
        return [Decision.from_dict(item) for item in found]

    async def learned(self, sandbox_id: str) -> NetworkSpec:
        from ..netspec import NetworkSpec

        found = await self._look("learned", lambda runtime: _dict(runtime.learned(sandbox_id)), sandbox=sandbox_id)
        return NetworkSpec.from_dict(found)

    async def secrets(self, sandbox_id: str) -> tuple[SecretSpec, ...]:
        from ..netspec import SecretSpec

        found = await self._look("secrets", lambda runtime: _dicts(runtime.secrets(sandbox_id)), sandbox=sandbox_id)
        return tuple(SecretSpec.from_dict(item) for item in found)

    async def set_secrets(self, sandbox_id: str, values: Mapping[str, str | None]) -> None:
        await self._do("set_secrets", sandbox=sandbox_id, values=dict(values))

    def asks(self, sandbox_id: str) -> AsyncIterator[Ask]:
        return _asks(self._subscribe("asks", sandbox_id))

    async def answer(self, sandbox_id: str, ask_id: int, verdict: str) -> None:
        await self._do("answer", sandbox=sandbox_id, ask=ask_id, verdict=verdict)

    async def expose(self, sandbox_id: str, port: int, *, host_port: int = 0, address: str = "127.0.0.1") -> Port:
        return Port.from_dict(
            await self._do("expose", sandbox=sandbox_id, port=port, host_port=host_port, address=address)
        )

    async def ports(self, sandbox_id: str) -> list[Port]:
        async def offline(runtime: Runtime) -> list[Any]:
            return []  # nobody listens

        return [Port.from_dict(item) for item in await self._look("ports", offline, sandbox=sandbox_id) or ()]

    async def unexpose(self, sandbox_id: str, port: int) -> None:
        await self._do("unexpose", sandbox=sandbox_id, port=port)


def _values(given: object) -> dict[str, str | None]:
    if not isinstance(given, dict) or not all(value is None or isinstance(value, str) for value in given.values()):
        raise SpecError("the values of secrets must be texts")
    return given


async def _asks(source: AsyncIterator[Any]) -> AsyncIterator[Ask]:
    from ..network.asks import Ask

    async for item in source:
        yield Ask.from_dict(item)


async def _dict(work: Awaitable[NetworkSpec]) -> dict[str, Any]:
    return (await work).to_dict()


async def _dicts(work: Awaitable[Iterable[Decision | SecretSpec]]) -> list[dict[str, Any]]:
    return [item.to_dict() for item in await work]
