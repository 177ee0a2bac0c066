"""Templates: what sandboxes are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...controller import SandboxInfo
from ..caller import Caller
from .answers import refused
from .making import Plan
from .records import Record

if TYPE_CHECKING:
    from .door import Facade

#: name -> the standard image that it is
STANDARD = {"base": "sloplet/e2b-base", "code-interpreter-v1": "sloplet/e2b-code"}


class Templates:
    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self.routes = ()

    async def plan(self, caller: Caller, reference: str) -> Plan:
        """What a sandbox of that template is made of; refused (404) where there is none."""
        if reference in STANDARD:
            return Plan(reference, alias=reference, image=STANDARD[reference], home="/home/user", workdir="/home/user")
        raise refused(404, f"template '{reference[:80]}' not found")

    async def begun(self, caller: Caller, plan: Plan, info: SandboxInfo, record: Record) -> None:
        """A sandbox of it has just started: what runs in it from the beginning is started, too."""

    async def restarted(self, caller: Caller, record: Record) -> None:
        """The same of one that was started anew with its files."""
