"""Users inside sandboxes, as /etc/passwd there has them: it is code's to change, so it is read anew after a moment."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from ...errors import FileError, SlopletError
from ...wire.mux import request
from ...wire.schema import Op, Tag
from .answers import refused

if TYPE_CHECKING:
    from .calls import Call

_FRESH = 2.0  # seconds
_MOST = 128 << 10  # bytes
_REMEMBERED = 4096


class Account(NamedTuple):
    name: str
    uid: int
    gid: int
    home: str


class Accounts:
    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[float, Account]] = OrderedDict()

    async def home(self, call: Call, user: str | None) -> str:
        if user is None and call.record.home:
            return call.record.home
        return (await self.find(call, user or call.record.user)).home

    async def find(self, call: Call, name: str) -> Account:
        """refused (401) if there is none."""
        now, key = asyncio.get_running_loop().time(), (call.record.sandbox, name[:256])
        known = self._known.get(key)
        if known is not None and now - known[0] < _FRESH:
            return known[1]
        try:
            found = find_account(await _read(call, "/etc/passwd"), name)
        except FileError:
            found = None
        if found is None:
            raise refused(401, f"invalid username: '{name[:80]}'", code="unauthenticated")
        self._known[key] = (now, found)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
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


def find_account(text: str, name: str) -> Account | None:
    """The first of several counts, as for everybody else."""
    at = 0 if text.startswith(name + ":") else text.find(f"\n{name}:") + 1
    if not name or ":" in name or "\n" in name or (at == 0 and not text.startswith(name + ":")):
        return None
    parts = text[at : at + 4096].partition("\n")[0].split(":")
    if len(parts) < 7 or not (parts[2].isdecimal() and parts[3].isdecimal()) or len(parts[2] + parts[3]) > 20:
        return None
    return Account(parts[0], int(parts[2]), int(parts[3]), parts[5] or "/")
