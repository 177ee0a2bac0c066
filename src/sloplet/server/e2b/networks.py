"""What a sandbox may reach, and who may reach it, in E2B's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...netspec import Network
from ..caller import Caller
from .api import optional

if TYPE_CHECKING:
    from .door import Facade


@dataclass(frozen=True)
class Wanted:
    """What a request says of the network."""

    policy: Any  #: for ``network=``
    internet: bool | None  #: as it was said
    document: dict[str, Any] = field(default_factory=dict)  #: to be told again: without what is confidential
    secrets: dict[str, Any] = field(default_factory=dict)  #: for ``secrets=``
    values: dict[str, str] = field(default_factory=dict)  #: of these
    mask_host: str = ""
    https_ports: list[int] = field(default_factory=list)
    public: bool = True


class Networks:
    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self.routes = ()

    async def asked(self, caller: Caller, body: dict[str, Any]) -> Wanted:
        internet = optional(body, "allow_internet_access", bool)
        policy = Network(allow=["*"]) if internet is not False else Network()
        return Wanted(policy, internet)
