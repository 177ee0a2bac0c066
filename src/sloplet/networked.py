"""The part of ``Runtime`` that is about networks: see ``controller.NetworkController`` for what is promised."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from .controller import Port
from .errors import SandboxNotFound, SpecError, UnsupportedOperation
from .holder import Holder

if TYPE_CHECKING:
    from .engines.base import Engine
    from .netchange import NetworkChange
    from .netspec import LinkSpec, NetworkSpec, SecretSpec
    from .network.asks import Ask
    from .network.log import Decision
    from .network.ports import Opener


class Networked(Holder):
    """What leaves a sandbox (networks.py), and what is let in (network/ports.py)."""

    elsewhere: Opener | None = None  #: who holds the sandboxes that this process does not, for links to them

    # -- what leaves -----------------------------------------------------------------

    async def set_network(
        self, sandbox_id: str, network: NetworkSpec, values: Mapping[str, str | None] | None = None
    ) -> None:
        await self.networks.set(sandbox_id, network, values)

    async def change_network(self, sandbox_id: str, change: NetworkChange) -> NetworkSpec:
        return await self.networks.set(sandbox_id, change)

    async def network(self, sandbox_id: str) -> NetworkSpec:
        return await self.networks.current(sandbox_id)

    async def network_log(self, sandbox_id: str, *, after: int = 0, limit: int = 1000) -> list[Decision]:
        return await self.networks.log(sandbox_id, after, limit)

    async def learned(self, sandbox_id: str) -> NetworkSpec:
        return await self.networks.learned(sandbox_id)

    async def secrets(self, sandbox_id: str) -> tuple[SecretSpec, ...]:
        return await self.networks.secrets(sandbox_id)

    async def set_secrets(self, sandbox_id: str, values: Mapping[str, str | None]) -> None:
        await self.networks.set_secrets(sandbox_id, values)

    def asks(self, sandbox_id: str) -> AsyncIterator[Ask]:
        return self.networks.asks(sandbox_id)

    async def answer(self, sandbox_id: str, ask_id: int, verdict: str) -> None:
        await self.networks.answer(sandbox_id, ask_id, verdict)

    async def check_links(self, links: Iterable[LinkSpec]) -> None:
        """SpecError where one leads nowhere: to nobody, or to whom only another process can reach."""
        for name, ref, _ in links:
            try:
                other = await self.on_state(partial(self.store.find, ref))
            except SandboxNotFound:
                raise SpecError(
                    f"the link {name!r} leads to {ref!r}, and there is no such sandbox",
                    hint="make that one first; `sloplet ls` lists them",
                ) from None
            if self.holder == "keeper" and other.holder != self.holder:
                raise SpecError(
                    f"the link {name!r} leads to {ref!r}, which lives in a program that the keeper cannot reach",
                    hint="give that one a name: then the keeper holds it too",
                )

    # -- what is let in --------------------------------------------------------------

    async def expose(self, sandbox_id: str, port: int, *, host_port: int = 0, address: str = "127.0.0.1") -> Port:
        live = self.held_live(sandbox_id)
        if live is not None:
            check_ports(live.engine)
        elif not await self.timeline.asleep(sandbox_id):
            raise self.not_held(sandbox_id)
        return self.exposed.expose(sandbox_id, port, host_port, address)

    async def ports(self, sandbox_id: str) -> list[Port]:
        return self.exposed.list(sandbox_id)

    async def unexpose(self, sandbox_id: str, port: int) -> None:
        live = self.find_live(sandbox_id)
        info = live.info if live is not None else await self.on_state(lambda: self.store.find(sandbox_id))
        self.exposed.unexpose(sandbox_id, port, given=any(each.inside == port for each in info.spec.ports))
        if self.on_gone is not None:
            self.on_gone()


def check_ports(engine: Engine) -> None:
    """UnsupportedOperation where nothing inside can be reached."""
    if not engine.probe().capabilities.ports:
        raise UnsupportedOperation(
            f"nothing inside a sandbox of engine {engine.name!r} can be reached",
            hint="engine='container' can, or 'gvisor'",
        )
