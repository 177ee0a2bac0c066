"""The audit log: who asked for what, from where, when, and whether it was done. ``SLOPLET_HOME/server/audit.jsonl``.

One JSON line a request, a session or a change of keys: appended in one write, so a server that is killed loses none.
Never a body, never a secret; of a command its first word. Full files are moved aside (``audit.1.jsonl`` is the newest
of those) and the oldest goes. It is read from its end: what is asked for is mostly what has just happened.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestInvalid
from ..state.home import Home, unwritable

if TYPE_CHECKING:
    from .keys import Key

MAX_BYTES = 64 << 20  #: of one file
KEPT = 10  #: full files
_WORD = 120
_CHUNK = 1 << 16
_SCAN = 64 << 20  # bytes that one query looks at
#: Statuses with which something was refused that could have been done.
REFUSED = frozenset({401, 403, 413, 415, 429, 503})


class Audit:
    """Appends. Any number of processes may, at the same time; only the server moves full files aside."""

    def __init__(self, home: Home, *, most: int = MAX_BYTES, kept: int = KEPT) -> None:
        self.path = home.path / "server" / "audit.jsonl"
        self._most, self._kept = most, kept
        self._fd = -1
        self._size = 0
        self.failures = 0  #: lines that could not be written

    def record(
        self,
        action: str,
        *,
        key: Key | None = None,
        tenant: str = "",
        address: str = "",
        request: str = "",
        sandbox: str = "",
        verdict: str = "allowed",
        error: str = "",
        status: int = 0,
        ms: float = 0.0,
        detail: str = "",
    ) -> None:
        """``action``: "sandboxes.create", "wire.exec", "ssh.login". ``detail``: one word of it, never a secret. Never
        raises."""
        line = {
            "time": round(time.time(), 3), "action": action, "verdict": verdict,
            "key": key.id if key is not None else "", "name": key.name if key is not None else "",
            "tenant": tenant or (key.tenant if key is not None else ""), "address": address,
            "sandbox": sandbox[:_WORD], "error": error, "status": status, "ms": round(ms, 1),
            "request": request, "detail": detail[:_WORD],
        }  # fmt: skip
        self._append(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def check(self) -> bool:
        """Whether it can be written."""
        try:
            self._open()
        except OSError:
            return False
        return True

    def _open(self) -> int:
        if self._fd < 0:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self.path, flags, 0o600)
            self._size = os.fstat(self._fd).st_size
        return self._fd

    def _append(self, line: bytes) -> None:
        try:
            fd = self._open()
            self._size += os.write(fd, line)
            if self._size >= self._most:
                self._rotate()
        except OSError:
            self.failures += 1
            self.close()  # the next line tries anew

    def _rotate(self) -> None:
        self.close()
        with suppress(FileNotFoundError):
            os.unlink(_full(self.path, self._kept))
        for number in range(self._kept - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.rename(_full(self.path, number), _full(self.path, number + 1))
        os.rename(self.path, _full(self.path, 1))


def _full(path: Path, number: int) -> Path:
    return path.with_name(f"audit.{number}.jsonl")


def first_word(command: object) -> str:
    """What may be told of a command: the name of the program, or the first word of shell text."""
    if isinstance(command, (list, tuple)):
        command = command[0] if command else ""
    words = command.split(None, 1) if isinstance(command, str) else []
    word = words[0] if words else ""
    return "" if "=" in word else word[:_WORD]  # KEY=value in front of a command is none of it


# -- reading ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditQuery:
    """``key``: an id or a name. ``action``: the whole, or its first part ("sandboxes")."""

    since: float | None = None
    until: float | None = None
    key: str = ""
    action: str = ""
    sandbox: str = ""
    verdict: str = ""
    tenant: str = ""
    key_id: str = ""  #: only of this key: whose the question is

    def matches(self, line: Mapping[str, Any]) -> bool:
        return (
            (self.until is None or line["time"] <= self.until)
            and (self.since is None or line["time"] >= self.since)
            and (not self.key or self.key in (line["key"], line["name"]))
            and (not self.action or line["action"] == self.action or line["action"].startswith(self.action + "."))
            and (not self.sandbox or self.sandbox in line["sandbox"].split(","))
            and (not self.verdict or line["verdict"] == self.verdict)
            and (not self.tenant or line["tenant"] == self.tenant)
            and (not self.key_id or line["key"] == self.key_id)
        )


@dataclass
class AuditPage:
    """Newest first. ``next``: the cursor to go on with; None: that was all."""

    items: list[dict[str, Any]] = field(default_factory=list)
    next: str | None = None


def read(home: Home, query: AuditQuery, *, limit: int = 100, cursor: str | None = None, scan: int = _SCAN) -> AuditPage:
    """Blocking. A page may be short of ``limit`` and still not the last: one question looks at so many bytes only."""
    page, looked = AuditPage(), 0
    for place, start, line in _lines(home, _parse_cursor(cursor)):
        looked += len(line) + 1
        found = _parse(line)
        if found is not None:
            if query.since is not None and found["time"] < query.since - 60:  # lines may be a little out of order
                return page
            if query.matches(found):
                page.items.append(found)
        if len(page.items) >= limit or looked >= scan:
            page.next = f"{place:x}-{start:x}"
            return page
    return page


def _parse_cursor(cursor: str | None) -> tuple[int, int] | None:
    if cursor is None:
        return None
    try:
        place, start = (int(part, 16) for part in cursor.split("-"))
    except ValueError:
        raise RequestInvalid("this is no cursor", hint="take `next` of the page before") from None
    return place, start


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
        return found if isinstance(found["time"], (int, float)) and isinstance(found["action"], str) else None
    except (ValueError, KeyError, TypeError):
        return None  # cut off by a full disk


def _lines(home: Home, after: tuple[int, int] | None) -> Iterator[tuple[int, int, bytes]]:
    """Lines from the newest on: which file (by its inode: names move), where in it, and the line."""
    path = home.path / "server" / "audit.jsonl"
    seen: set[int] = set()
    for name in [path, *(_full(path, number) for number in range(1, KEPT + 2))]:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise unwritable(name, error) from error
        with open(fd, "rb") as file:
            info = os.fstat(fd)
            if info.st_ino in seen:  # it was moved aside while we read
                continue
            seen.add(info.st_ino)
            end = info.st_size
            if after is not None:
                if info.st_ino != after[0]:
                    continue
                end, after = min(end, after[1]), None
            for start, line in _backwards(file, end):
                yield info.st_ino, start, line


def _backwards(file: Any, end: int) -> Iterator[tuple[int, bytes]]:
    rest = b""
    while end > 0:
        begin = max(0, end - _CHUNK)
        file.seek(begin)
        piece = file.read(end - begin) + rest
        first, *lines = piece.split(b"\n")
        position = begin + len(piece)
        for line in reversed(lines):
            position -= len(line)
            if line:
                yield position, line
            position -= 1
        rest, end = first, begin
    if rest:
        yield 0, rest


def follow(home: Home, query: AuditQuery, *, wait: float = 0.3) -> Generator[dict[str, Any], None, None]:
    """What comes from now on, for ever."""
    path = home.path / "server" / "audit.jsonl"
    file = None
    first = True
    try:
        while True:
            with suppress(FileNotFoundError):
                inode = os.stat(path).st_ino
                if file is None or os.fstat(file.fileno()).st_ino != inode:
                    if file is not None:
                        yield from _rest(file, query)
                        file.close()
                    file = open(path, "rb")  # noqa: SIM115
                    file.seek(0, os.SEEK_END if first else os.SEEK_SET)
            first = False
            if file is not None:
                yield from _rest(file, query)
            time.sleep(wait)
    finally:
        if file is not None:
            file.close()


def _rest(file: Any, query: AuditQuery) -> Generator[dict[str, Any], None, None]:
    while line := file.readline():
        if not line.endswith(b"\n"):
            file.seek(-len(line), os.SEEK_CUR)
            return
        found = _parse(line)
        if found is not None and query.matches(found):
            yield found
