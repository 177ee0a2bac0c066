"""E2B's volumes: Sloplet's, by id and name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..caller import Caller

if TYPE_CHECKING:
    from .door import Facade


class Volumes:
    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self.routes = ()

    async def mounts(self, caller: Caller, body: dict[str, Any]) -> tuple[list[dict[str, str]], dict[str, str]]:
        """What ``volumeMounts`` asks for: as it is told again, and for ``volumes=``."""
        return [], {}
