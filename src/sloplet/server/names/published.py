"""Which ports of which sandboxes have a name outside, and who may use it: the table ``server_ports``.

Ids of sandboxes are never used twice, so a row that outlives its sandbox opens nothing; it is removed when that is
noticed.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from ...errors import PortUnavailable
from ...state.connection import Connected

MOST = 64  #: names of one sandbox
_REFRESH = 1.0  # seconds that a change by another process may take to be seen
_SELECT = "SELECT tenant, sandbox, port, public, token FROM server_ports "


@dataclass(frozen=True)
class PublishedPort:
    tenant: str
    sandbox: str
    port: int
    public: bool
    token: str  #: opens it, unless it is public


class Published(Connected):
    """Blocking, and quick; what visitors need is kept in memory for a second."""

    _known: dict[tuple[str, int], PublishedPort]
    _read_at = -1e9

    def find(self, sandbox: str, port: int) -> PublishedPort | None:
        if time.monotonic() - self._read_at > _REFRESH:
            self._known = {(each.sandbox, each.port): each for each in self.all()}
            self._read_at = time.monotonic()
        return self._known.get((sandbox, port))

    def all(self) -> list[PublishedPort]:
        return [_port(row) for row in self._read(_SELECT, ())]

    def of(self, tenant: str, sandbox: str) -> list[PublishedPort]:
        """By port."""
        return [_port(row) for row in self._read(_SELECT + "WHERE tenant = ? AND sandbox = ?", (tenant, sandbox))]

    def publish(self, tenant: str, sandbox: str, port: int, *, public: bool) -> PublishedPort:
        """Idempotent: one that is there keeps its token. PortUnavailable if there are too many."""
        with self._write() as db:
            there = {row[0]: row[1] for row in db.execute(
                "SELECT port, token FROM server_ports WHERE tenant = ? AND sandbox = ?", (tenant, sandbox)
            )}  # fmt: skip
            if port not in there and len(there) >= MOST:
                raise PortUnavailable(
                    f"a sandbox can have {MOST} public names", hint="take some back: DELETE .../ports"
                )
            made = PublishedPort(tenant, sandbox, port, public, there.get(port) or secrets.token_urlsafe(24))
            db.execute(
                "INSERT OR REPLACE INTO server_ports VALUES (?, ?, ?, ?, ?, ?)",
                (tenant, sandbox, port, int(public), made.token, time.time()),
            )
        self._read_at = -1e9
        return made

    def unpublish(self, tenant: str, sandbox: str, port: int | None = None) -> None:
        """``port`` None: all of the sandbox. Idempotent."""
        which = "" if port is None else " AND port = ?"
        with self._write() as db:
            db.execute(
                f"DELETE FROM server_ports WHERE tenant = ? AND sandbox = ?{which}",  # noqa: S608 - a constant
                (tenant, sandbox) if port is None else (tenant, sandbox, port),
            )
        self._read_at = -1e9


def _port(row: tuple[Any, ...]) -> PublishedPort:
    tenant, sandbox, port, public, token = row
    return PublishedPort(str(tenant), str(sandbox), int(port), bool(public), str(token))
