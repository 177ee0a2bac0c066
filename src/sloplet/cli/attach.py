"""``sloplet attach``: join a running command of a sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from .options import Verb, name_argument
from .output import note


@click.command("attach", cls=Verb, examples="sloplet attach dev 3\nsloplet attach dev 3 --no-replay")
@name_argument()
@click.argument("pid", type=int)
@click.option("--replay/--no-replay", default=True, help="First what is kept of its output.")
def attach(name: str, pid: int, replay: bool) -> int:
    """Join a running command: its output, its input, its terminal. The exit code is the command's.

    `~.` at the beginning of a line leaves and lets it run on; so does a second Ctrl-C (the first goes to the command).
    """
    return asyncio.run(_attach(name, pid, replay))


async def _attach(name: str, pid: int, replay: bool) -> int:
    from .session import Signals, guarded

    with Signals() as signals:
        return await guarded(_join(name, pid, replay, signals), signals)


async def _join(name: str, pid: int, replay: bool, signals: Any) -> int:
    from ..errors import ProcessNotFound
    from .opening import open_box
    from .session import Wiring, exit_code, follow
    from .terminal import size

    box = await open_box(name)
    info = next((item for item in await box.processes() if item.pid == pid), None)
    if info is None:
        raise ProcessNotFound(f"the sandbox {name!r} has no command {pid}", hint=f"see `sloplet ps {name}`")
    process = await box.attach(pid, replay=replay, text=False, max_output=1)
    wiring = Wiring(interactive=False, tty=info.tty)
    if wiring.raw:
        note("joined; ~. at the beginning of a line leaves")
        await process.resize(*size(1))
    try:
        result = await follow(process, wiring, signals)
    finally:
        await process.detach()
    return exit_code(result, signals)
