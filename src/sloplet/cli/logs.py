"""``sloplet logs``: what a command printed, as far as its sandbox keeps it."""

from __future__ import annotations

import asyncio
from collections import deque

import click

from .options import Verb, json_option, name_argument
from .output import print_json
from .streams import Output


@click.command(
    "logs",
    cls=Verb,
    examples="""
    sloplet logs dev 3
    sloplet logs dev 3 --tail 20
    sloplet logs dev 3 -f
    """,
)
@name_argument()
@click.argument("pid", type=int)
@click.option("-f", "--follow", is_flag=True, help="Go on until the command ends.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of what is kept.")
@json_option
def logs(name: str, pid: int, follow: bool, tail: int | None, as_json: bool) -> int:
    """What a command of a sandbox printed. A sandbox keeps the last 256 KiB of each stream of each command."""
    return asyncio.run(_logs(name, pid, follow and not as_json, tail, as_json))


async def _logs(name: str, pid: int, follow: bool, tail: int | None, as_json: bool) -> int:
    from .session import Signals, guarded

    with Signals() as signals:
        return await guarded(_print(name, pid, follow, tail, as_json), signals)


async def _print(name: str, pid: int, follow: bool, tail: int | None, as_json: bool) -> int:
    from ..errors import ProcessNotFound
    from .opening import open_box

    box = await open_box(name)
    info = next((item for item in await box.processes() if item.pid == pid), None)
    if info is None:
        raise ProcessNotFound(f"the sandbox {name!r} has no command {pid}", hint=f"see `sloplet ps {name}`")
    # Lossy: someone who looks on must never hold the command up.
    newest = await box.attach(pid, replay=False, lossy=True, text=False)
    await newest.detach()
    process = await box.attach(pid, lossy=True, text=False, max_output=1)
    kept = {1: newest.offsets[0] - process.offsets[0], 2: newest.offsets[1] - process.offsets[1]}
    printer = _Printer(tail, as_json)
    pieces = process.__aiter__()
    try:
        # What was there when we looked; a running command may print on while we read.
        while any(count > 0 for count in kept.values()):
            piece = await anext(pieces, None)
            if piece is None:
                break
            channel, data = piece
            kept[channel] -= len(data)
            await printer.take(channel, data)
        await printer.flush()
        if follow:
            async for channel, data in pieces:
                await printer.write(channel, data)
    finally:
        await process.detach()
    if as_json:
        print_json({**info.to_dict(), "stdout": printer.text(1), "stderr": printer.text(2)})
    return 0


class _Printer:
    """Passes output on at once, or keeps the last lines of it, or all of it for a JSON document."""

    def __init__(self, tail: int | None, keep: bool) -> None:
        self._tail, self._keep = tail, keep
        self._lines: deque[tuple[int, bytes]] = deque(maxlen=tail)
        self._outputs = {1: Output(1), 2: Output(2)}
        self._whole = not keep and tail is None

    async def take(self, channel: int, data: bytes) -> None:
        if self._whole:
            await self.write(channel, data)
            return
        for line in data.splitlines(keepends=True):
            if self._lines and self._lines[-1][0] == channel and not self._lines[-1][1].endswith(b"\n"):
                self._lines[-1] = (channel, self._lines[-1][1] + line)
            else:
                self._lines.append((channel, line))

    async def flush(self) -> None:
        if not self._keep:
            while self._lines:
                await self.write(*self._lines.popleft())

    async def write(self, channel: int, data: bytes) -> None:
        await self._outputs[channel].write(data)

    def text(self, channel: int) -> str:
        return b"".join(data for number, data in self._lines if number == channel).decode("utf-8", "replace")
