"""What was decided about a sandbox's connections, and what became of them: bounded, in memory, and in a file.

One row per connection. A row that changes (it ended, it was cut) gets a new ``seq`` and moves to the end, so that who
asks for what came after the last ``seq`` he saw misses nothing, and whoever asks for all sees each connection once.

Names and reasons hold what programs inside chose: they are made harmless for terminals here, once.
"""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

KEPT = 10_000
ROTATE = 8 * 2**20
_TEXT = 1024  # of any text in a row
_DENIALS = 200  # distinct refusals that commands can be told of


@dataclass(frozen=True)
class Decision:
    """A connection, as it is now: what was decided, and what became of it."""

    seq: int  #: grows with every change; ask for what came after the last you saw
    connection: int  #: the same for all rows of one connection
    time: float  #: when it was asked for, seconds since the epoch
    sandbox: str
    name: str  #: the name that the program connected to; "" if it used an address
    address: str  #: the address that was dialled, or was asked for
    port: int
    verdict: str  #: allow, deny (by policy), cut (it was allowed, and is not any more), fail (it could not be reached)
    rule: str = ""  #: the rule that decided, as it was written; "default" if none did
    reason: str = ""  #: one sentence
    bytes_out: int = 0  #: from the sandbox
    bytes_in: int = 0  #: to the sandbox
    duration: float = 0.0
    protocol: str = ""  #: tls, http, https (inspected), tcp, dns, link; "" while it is not known
    request: str = ""  #: of one that is inspected: the last method and path
    state: str = "done"  #: open or done

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Decision:
        return Decision(**data)


_FIELDS = {field.name for field in fields(Decision)}


class NetworkLog:
    """One per sandbox. ``path``: the file of one that has a name. ``tell`` is called with each refusal and each
    connection that was allowed, as it happens."""

    def __init__(self, sandbox: str, path: Path | None = None, tell: Callable[[Decision], None] | None = None) -> None:
        self.sandbox = sandbox
        self.tell = tell
        self._path = path
        self._rows: OrderedDict[int, Decision] = OrderedDict()
        self._seq = 0
        self._connections = 0
        self._denied: deque[tuple[int, str]] = deque(maxlen=_DENIALS)
        self._denials = 0
        self.lost = False  #: the file could not be written, and lacks some rows
        if path is not None:
            self._load(path)

    def keep(self, path: Path) -> None:
        """From now on it is written to a file, too."""
        self._path = path

    def _load(self, path: Path) -> None:
        """Go on where an earlier holder of the sandbox ended."""
        for line in _tail(path):
            with suppress(ValueError, TypeError):
                data = json.loads(line)
                row = Decision(**{key: value for key, value in data.items() if key in _FIELDS})
                self._rows[int(row.connection)] = row
                self._seq, self._connections = max(self._seq, row.seq), max(self._connections, row.connection)
        while len(self._rows) > KEPT:
            self._rows.popitem(last=False)

    def add(self, name: str, address: str, port: int, verdict: str, **more: Any) -> Decision:
        """A new row, and who listens is told."""
        self._connections += 1
        self._seq += 1
        row = Decision(
            self._seq, self._connections, time.time(), self.sandbox, shown(name), shown(address), port, verdict,
            **_harmless(more),
        )  # fmt: skip
        self._put(row, decided=True)
        return row

    def change(self, row: Decision, **more: Any) -> Decision:
        """What has become of it; the new row."""
        decided = more.get("verdict", row.verdict) != row.verdict
        self._seq += 1
        row = replace(row, seq=self._seq, **_harmless(more))
        self._put(row, decided=decided)
        return row

    def note(self, row: Decision, **more: Any) -> Decision:
        """Its counters as they are, without a word to anybody; the new row."""
        row = replace(row, **_harmless(more))
        if row.connection in self._rows:
            self._rows[row.connection] = row
        return row

    def _put(self, row: Decision, *, decided: bool) -> None:
        self._rows[row.connection] = row
        self._rows.move_to_end(row.connection)
        if len(self._rows) > KEPT:
            self._rows.popitem(last=False)
        if decided and row.verdict in ("deny", "cut"):
            self._denials += 1
            self._denied.append((self._denials, row.reason))
        if row.state == "done" and self._path is not None:
            self._write(row)
        if decided and self.tell is not None:
            self.tell(row)

    def read(self, *, after: int = 0, limit: int = 1000) -> list[Decision]:
        """The first ``limit`` rows that changed after ``after``, in order."""
        found: list[Decision] = []
        for row in reversed(self._rows.values()):
            if row.seq <= after:
                break
            found.append(row)
        found.reverse()
        return found[: max(limit, 0)]

    # -- what commands are told --------------------------------------------------------

    @property
    def denials(self) -> int:
        """How many refusals there were: what a command remembers when it starts."""
        return self._denials

    def denied_since(self, mark: int, most: int = 20) -> list[str]:
        """The reasons of the refusals since, each once."""
        if self._denials == mark:
            return []
        return list(dict.fromkeys(reason for count, reason in self._denied if count > mark))[:most]

    # -- the file ----------------------------------------------------------------------

    def _write(self, row: Decision) -> None:
        """Append a line. What fails (a full disk, no descriptor) must not fail the connection: it is said in
        ``lost``."""
        assert self._path is not None
        line = json.dumps(row.to_dict(), separators=(",", ":")).encode() + b"\n"
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, line)
                full = os.fstat(fd).st_size > ROTATE
            finally:
                os.close(fd)
            if full:
                os.rename(self._path, _older(self._path))
        except OSError:
            self.lost = True


def path_of(home: Path, sandbox: str) -> Path:
    return home / "network" / f"{sandbox}.jsonl"


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _tail(path: Path) -> list[bytes]:
    lines: list[bytes] = []
    for each in (_older(path), path):
        try:
            fd = os.open(each, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        with open(fd, "rb") as file:
            size = os.fstat(fd).st_size
            file.seek(max(0, size - ROTATE - 2**20))
            lines += file.read(ROTATE + 2**20).splitlines()
    return lines[-KEPT:]


def _harmless(more: dict[str, Any]) -> dict[str, Any]:
    return {key: shown(value) if isinstance(value, str) else value for key, value in more.items()}


def shown(text: str) -> str:
    """Text that came from inside, for people's terminals: printable, and bounded."""
    text = text[:_TEXT]
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "�" for char in text)
