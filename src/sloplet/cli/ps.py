"""``sloplet ps``: the commands that were started in a sandbox."""

from __future__ import annotations

import asyncio
import shlex
from typing import Any

import click

from .options import Verb, json_option, name_argument
from .output import age, print_json, print_table

_COLUMNS = ("PID", "STATE", "EXIT", "AGE", "TTY", "OS PID", "COMMAND")


@click.command("ps", cls=Verb, examples="sloplet ps dev\nsloplet ps dev --running\nsloplet ps dev --json")
@name_argument()
@click.option("--running", is_flag=True, help="Only those that run.")
@json_option
def ps(name: str, running: bool, as_json: bool) -> None:
    """List the commands of a sandbox, running or ended lately. PID is the number for logs and attach."""
    found = [item for item in asyncio.run(_processes(name)) if item.running or not running]
    if as_json:
        print_json([item.to_dict() for item in found])
        return
    rows = [
        (
            str(item.pid),
            "running" if item.running else "ended",
            "-" if item.exit_code is None else str(item.exit_code),
            age(item.started_at),
            "yes" if item.tty else "no",
            str(item.os_pid),
            shlex.join(item.command),
        )
        for item in found
    ]
    print_table(_COLUMNS, rows)


async def _processes(name: str) -> list[Any]:
    from .opening import open_box

    box = await open_box(name)
    return await box.processes()
