"""``sloplet top``: what sandboxes use, live."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ..errors import SlopletError
from .options import Verb, json_option, name_argument
from .output import make_table, plain, print_json, print_table, size, span

if TYPE_CHECKING:
    from ..controller import SandboxInfo
    from ..results import Metrics

_COLUMNS = ("NAME", "ENGINE", "CPU", "MEMORY", "OF", "PIDS", "DISK", "UP", "")


@dataclass
class _Row:
    """One sandbox at one moment. ``cpu`` is the share of one CPU since the look before, in percent."""

    info: SandboxInfo
    metrics: Metrics | None
    cpu: float | None
    problem: str = ""

    def cells(self) -> tuple[str, ...]:
        name = self.info.name or self.info.id
        if self.metrics is None:
            return (name, self.info.engine, "-", "-", "-", "-", "-", "-", self.problem)
        m = self.metrics
        cpu = "-" if self.cpu is None else f"{self.cpu:.0f}%"
        return (name, self.info.engine, cpu, size(m.memory), size(m.memory_limit), str(m.pids), size(m.disk_used),
                span(m.uptime), "")  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.info.name, "id": self.info.id, "engine": self.info.engine, "cpu_percent": self.cpu,
            "metrics": self.metrics.to_dict() if self.metrics else None, "problem": self.problem,
        }  # fmt: skip


@click.command("top", cls=Verb, examples="sloplet top\nsloplet top dev --interval 5\nsloplet top --once --json")
@name_argument(required=False)
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, metavar="SECONDS", help="Between looks. [default: 1]"
)
@click.option("--once", is_flag=True, help="Print one look and end (so it is without a terminal, and with --json).")
@json_option
def top(name: str | None, interval: float, once: bool, as_json: bool) -> int:
    """Live use of CPU, memory, processes and disk. q or Ctrl-C ends it."""
    live = not (once or as_json) and os.isatty(0) and sys.stdout.isatty()
    return asyncio.run(_top(name, interval, live, as_json))


async def _top(name: str | None, interval: float, live: bool, as_json: bool) -> int:
    look = _Look(name)
    rows = await look()
    if live:
        await _show(look, rows, interval)
        return 0
    await asyncio.sleep(min(interval, 0.3))  # CPU use is a difference
    rows = await look()
    if as_json:
        print_json([row.to_dict() for row in rows])
    else:
        print_table(_COLUMNS, [row.cells() for row in rows])
    return 0


class _Look:
    """One look at all sandboxes of the keeper; remembers the last for the CPU's share."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._before: dict[str, tuple[float, float]] = {}

    async def __call__(self) -> list[_Row]:
        from .holding import holder

        controller = await holder()
        if self._name is not None:
            found = [await controller.find(self._name)]
        else:
            found = [info for info in await controller.list() if info.holder == "keeper"]
        return list(await asyncio.gather(*(self._row(info) for info in found)))

    async def _row(self, info: SandboxInfo) -> _Row:
        from ..sandbox import AsyncSandbox

        if info.state in ("dead", "paused"):  # asking a paused one would wake it
            from .saved import state_text

            return _Row(info, None, None, state_text(info))
        try:
            metrics = await (await AsyncSandbox.connect(info.id)).metrics()
        except SlopletError as error:
            return _Row(info, None, None, plain(error.message))
        now = time.monotonic()
        before = self._before.get(info.id)
        self._before[info.id] = (now, metrics.cpu_seconds)
        cpu = None
        if before is not None and now > before[0]:
            cpu = max(0.0, 100 * (metrics.cpu_seconds - before[1]) / (now - before[0]))
        return _Row(info, metrics, cpu)


async def _show(look: _Look, rows: list[_Row], interval: float) -> None:
    from rich.live import Live

    from .output import console

    quit_key = asyncio.ensure_future(_wait_for_q())
    try:
        with Live(console=console(), auto_refresh=False, screen=True) as live:
            while True:
                live.update(make_table(_COLUMNS, [row.cells() for row in rows]), refresh=True)
                done, _ = await asyncio.wait([quit_key], timeout=interval)
                if done:
                    return
                rows = await look()
    except asyncio.CancelledError:
        return  # Ctrl-C is how one leaves
    finally:
        quit_key.cancel()
        await asyncio.gather(quit_key, return_exceptions=True)


async def _wait_for_q() -> None:
    import termios
    import tty

    from .streams import read_chunks

    before = termios.tcgetattr(0)
    try:
        tty.setcbreak(0, termios.TCSADRAIN)
        async for keys in read_chunks(0):
            if b"q" in keys or b"Q" in keys:
                return
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
