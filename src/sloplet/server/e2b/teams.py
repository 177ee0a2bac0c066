"""What E2B's command line and dashboards ask besides: whose key it is, how much runs, and the logs of sandboxes."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from .answers import Answer, refused
from .api import Asked, Route
from .documents import time_of

if TYPE_CHECKING:
    from .door import Facade

_TEAMS = uuid.UUID("5d3e4f0c-6a0b-4c0e-9a2e-3f6f1b1c7d52")


def team_of(tenant: str) -> str:
    """The id of a tenant's team: always the same."""
    return str(uuid.uuid5(_TEAMS, tenant))


class Teams:
    """A tenant is a team of its own. The keys that it has are told to nobody."""

    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self.routes = (
            Route("GET", "/teams", self.list),
            Route("GET", "/teams/{team}/metrics", self.metrics),
            Route("GET", "/teams/{team}/metrics/max", self.most),
            Route("GET", "/sandboxes/{sandbox}/logs", self.logs_old),
            Route("GET", "/v2/sandboxes/{sandbox}/logs", self.logs),
        )

    async def list(self, asked: Asked) -> Answer:
        tenant = asked.caller.tenant.name
        return Answer(200, [{"teamID": team_of(tenant), "name": tenant, "apiKey": "", "isDefault": True}])

    async def metrics(self, asked: Asked) -> Answer:
        """As of now: nothing is remembered of them."""
        moment = self._moment(asked)
        return Answer(200, [{**moment, "concurrentSandboxes": self._running(asked), "sandboxStartRate": 0.0}])

    async def most(self, asked: Asked) -> Answer:
        moment = self._moment(asked)
        value = self._running(asked) if asked.query.get("metric") != "sandbox_start_rate" else 0
        return Answer(200, {**moment, "value": float(value)})

    def _moment(self, asked: Asked) -> dict[str, Any]:
        if asked.path["team"] != team_of(asked.caller.tenant.name):
            raise refused(403, "this key is another team's")
        now = time.time()
        return {"timestamp": time_of(now), "timestampUnix": int(now)}

    def _running(self, asked: Asked) -> int:
        return len(self._facade.server.quotas.account(asked.caller.tenant).running)

    # Nothing keeps what a sandbox's commands say once they have said it: who wants that follows them.

    async def logs_old(self, asked: Asked) -> Answer:
        await self._facade.sandboxes.find(asked)
        return Answer(200, {"logs": [], "logEntries": []})

    async def logs(self, asked: Asked) -> Answer:
        await self._facade.sandboxes.find(asked)
        return Answer(200, {"logs": []})
