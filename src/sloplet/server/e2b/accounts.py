"""Users inside sandboxes, as /etc/passwd there has them: it is code's to change, so it is read anew after a moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from ...errors import FileError, SlopletError
from ...wire.mux import request
from ...wire.schema import Op, Tag
from .answers import refused

if TYPE_CHECKING:
    from .calls import Call

_FRESH = 2.0  # seconds
_MOST = 1 << 20  # bytes
_REMEMBERED = 4096


class Account(NamedTuple):
    name: str
    uid: int
    gid: int
    home: str


class Accounts:
    def __init__(self) -> None:
        self._known: dict[str, tuple[float, dict[str, Account]]] = {}

    async def home(self, call: Call, user: str | None) -> str:
        name = user or call.record.user
        if user is None and call.record.home:
            return call.record.home
        return (await self.find(call, name)).home

    async def find(self, call: Call, name: str) -> Account:
        """refused (401) if there is none."""
        found = (await self._read(call)).get(name)
        if found is None:
            raise refused(401, f"invalid username: '{name[:80]}'", code="unauthenticated")
        return found

    async def _read(self, call: Call) -> dict[str, Account]:
        now = asyncio.get_running_loop().time()
        known = self._known.get(call.record.sandbox)
        if known is not None and now - known[0] < _FRESH:
            return known[1]
        try:
            text = await _read(call, "/etc/passwd")
        except FileError:
            text = ""
        found = parse_passwd(text)
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        self._known[call.record.sandbox] = (now, found)
        return found


async def _read(call: Call, path: str) -> str:
    fields = request(Op.READ, (Tag.PATH, path)).add(Tag.LENGTH, _MOST).add(Tag.USER, "root")
    parts = []
    try:
        stream = await call.open(fields)
        try:
            while (piece := await stream.recv()) is not None:
                parts.append(piece.data)
            await stream.result()
        finally:
            stream.reset()
    except SlopletError as error:
        raise call.gone(error) from None
    return b"".join(parts).decode("utf-8", "replace")


def parse_passwd(text: str) -> dict[str, Account]:
    """By name; the first of several counts, as for everybody else."""
    found: dict[str, Account] = {}
    for line in text.splitlines():
        parts = line.split(":")
        if len(parts) >= 7 and parts[2].isdecimal() and parts[3].isdecimal() and len(parts[2] + parts[3]) < 20:
            found.setdefault(parts[0], Account(parts[0], int(parts[2]), int(parts[3]), parts[5] or "/"))
    return found
