"""The intent of a request, for whoever makes what it asks for: it goes on record with the id that was chosen."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3


@dataclass(frozen=True)
class Intent:
    """Of a request with an ``Idempotency-Key``: see idempotency.py."""

    owner: str
    key: str
    request: str
    made_at: float

    def enter(self, db: sqlite3.Connection, sandbox: str | None) -> None:
        """In the caller's transaction."""
        values = (self.owner, self.key, self.request, self.made_at, sandbox)
        db.execute("INSERT OR REPLACE INTO server_done VALUES (?, ?, ?, NULL, ?, ?)", values)


#: Of this task's request, if it is not on record yet: who makes an unnamed sandbox enters it.
INTENT: ContextVar[Intent | None] = ContextVar("sloplet_intent", default=None)
