"""What E2B's model has of a sandbox that Sloplet's has not: the table ``e2b_sandboxes``, all of it in memory.

The server is the only one who writes it. A row without its sandbox opens nothing, and goes when that is noticed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ...errors import StateError
from ...state.connection import Connected
from ...state.home import Home


@dataclass(frozen=True)
class Record:
    sandbox: str
    tenant: str
    key: str  #: the id of the key that made it, for whom its data plane acts
    template: str  #: the id
    alias: str = ""  #: what the template was asked for by
    build: str = ""
    envd: str = ""
    secure: bool = True
    metadata: dict[str, str] = field(default_factory=dict)
    auto_resume: bool = False
    pauses: bool = False  #: when its time is over
    timeout: float = 300.0  #: what it was made with
    internet: bool | None = None
    network: dict[str, Any] = field(default_factory=dict)  #: as it was asked for; no values of headers, no passwords
    volumes: list[dict[str, str]] = field(default_factory=list)
    mask_host: str = ""  #: what servers inside see as Host
    https_ports: list[int] = field(default_factory=list)  #: of those that speak TLS inside
    public: bool = True  #: its ports are anybody's; else who has the token's
    user: str = "user"  #: who commands run as
    home: str = ""  #: his; "": as /etc/passwd inside says
    workdir: str = ""
    started_at: float = 0.0


_LAST = 5.0  # seconds for what is being forgotten when the server ends
_MOST_GONE = 10_000  # that are remembered


_FIELDS = frozenset(each.name for each in fields(Record))


def _record(row: tuple[Any, ...]) -> Record:
    """A newer or an older version may have written others."""
    known = {name: value for name, value in json.loads(row[3]).items() if name in _FIELDS}
    return Record(row[0], row[1], row[2], **known)


class Records(Connected):
    """Blocking, and quick."""

    _known: dict[str, Record] | None = None

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self._dropping: asyncio.Future[None] | None = None
        self._gone: dict[str, None] = {}  # the last that were dropped, oldest first

    def _all(self) -> dict[str, Record]:
        if self._known is None:
            rows = self._read("SELECT sandbox, tenant, key, document FROM e2b_sandboxes", ())
            self._known = {row[0]: _record(row) for row in rows}
        return self._known

    def find(self, sandbox: str) -> Record | None:
        return self._all().get(sandbox)

    def was(self, sandbox: str) -> bool:
        """Whether it was here lately, and is not any more."""
        return sandbox in self._gone

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._all().values()))

    async def put(self, *records: Record) -> None:
        """Known at once, and on record when this returns. Others may be writing just now: it is waited for off the
        loop."""
        self._all().update((record.sandbox, record) for record in records)
        await asyncio.get_running_loop().run_in_executor(None, self._save, records)

    def _save(self, records: tuple[Record, ...]) -> None:
        with self._write() as db:
            for record in records:
                document = asdict(record)
                for name in ("sandbox", "tenant", "key"):
                    del document[name]
                db.execute(
                    "INSERT OR REPLACE INTO e2b_sandboxes VALUES (?, ?, ?, ?, ?)",
                    (record.sandbox, record.tenant, record.key, json.dumps(document), time.time()),
                )

    async def change(self, sandbox: str, **values: Any) -> Record | None:
        """None if it is gone."""
        record = self.find(sandbox)
        if record is None:
            return None
        changed = replace(record, **values)
        if changed != record:
            await self.put(changed)
        return changed

    def drop(self, sandboxes: Iterable[str]) -> None:
        """Forgotten at once; a row that stays when the server ends before it is gone is swept away later."""
        gone = [sandbox for sandbox in sandboxes if self._all().pop(sandbox, None) is not None]
        if gone:
            self._gone.update(dict.fromkeys(gone))
            while len(self._gone) > _MOST_GONE:
                del self._gone[next(iter(self._gone))]
            self._dropping = asyncio.get_running_loop().run_in_executor(None, self._delete, gone)

    def _delete(self, sandboxes: list[str]) -> None:
        with suppress(StateError), self._write() as db:
            db.executemany("DELETE FROM e2b_sandboxes WHERE sandbox = ?", [(each,) for each in sandboxes])

    async def aclose(self) -> None:
        if self._dropping is not None:
            await asyncio.wait({self._dropping}, timeout=_LAST)
        self.close()
