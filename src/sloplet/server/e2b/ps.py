"""Which command has which pid: E2B's number is the kernel's inside, the wire's its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import SlopletError
from ...files import records
from ...process import process_info
from ...wire.fields import Fields
from ...wire.mux import request
from ...wire.schema import ExecFlag, Op, Tag

if TYPE_CHECKING:
    from .calls import Call


@dataclass(frozen=True)
class Command:
    """A command that was started from out here."""

    pid: int  #: the wire's
    os_pid: int  #: the sandbox's own
    argv: tuple[str, ...]
    tag: str
    running: bool
    tty: bool
    stdin: bool


def _command(record: Fields) -> Command:
    info = process_info(record)
    stdin = bool(record.integer(Tag.FLAGS, 0) & ExecFlag.STDIN)
    return Command(info.pid, info.os_pid, info.command, info.tag, info.running, info.tty, stdin)


async def commands(call: Call) -> list[Command]:
    """All of them, also those that have ended lately."""
    try:
        return [_command(record) async for record in records(await call.open(request(Op.PS)))]
    except SlopletError as error:
        raise call.gone(error) from None


async def running(call: Call) -> list[Command]:
    return [each for each in await commands(call) if each.running]


async def os_pid(call: Call, started: Fields) -> int:
    """Of what has just begun."""
    if Tag.OSPID in started:
        return started.integer(Tag.OSPID)
    pid = started.integer(Tag.PID)
    return next((each.os_pid for each in await commands(call) if each.pid == pid), pid)
