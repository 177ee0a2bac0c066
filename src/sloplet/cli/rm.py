"""``sloplet rm``: the end of named sandboxes."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import click

from ..errors import SandboxError, SandboxNotFound, SlopletError, SpecError
from .options import Verb, json_option, name_argument
from .output import EXIT_OURS, note, print_json, report_error

if TYPE_CHECKING:
    from ..controller import Controller, SandboxInfo


@click.command(
    "rm", cls=Verb, examples="sloplet rm dev\nsloplet rm dev ci build-7\nsloplet rm --force maybe\nsloplet rm --all"
)
@name_argument(required=False, multiple=True)
@click.option("-a", "--all", "everything", is_flag=True, help="All that the keeper holds; asks first.")
@click.option("-f", "--force", is_flag=True, help="Do not ask, and do not mind if there is none.")
@json_option
def rm(names: tuple[str, ...], everything: bool, force: bool, as_json: bool) -> int:
    """End sandboxes, running, paused or dead, and remove all they had, their snapshots too."""
    if everything == bool(names):
        raise SpecError("name the sandboxes to remove, or say --all", hint="`sloplet ls` lists them")
    if everything:
        from .holding import known_sandboxes

        names = tuple(info.name or info.id for info in known_sandboxes() if info.holder == "keeper")
        if names and not force and not _agreed(names):
            return EXIT_OURS
    removed, failed = asyncio.run(_remove(names, force)) if names else ([], [])
    if as_json:
        print_json({"removed": removed, "failed": [error.to_dict() for error in failed]})
    else:
        for name in removed:
            click.echo(name)
        for error in failed:
            report_error(error, False)
    return EXIT_OURS if failed else 0


def _agreed(names: tuple[str, ...]) -> bool:
    if not os.isatty(0):
        raise SpecError(f"this would end {len(names)} sandboxes, and there is nobody to ask", hint="add --force")
    return click.confirm(f"End {', '.join(names)} and remove all they had?", err=True)


async def _remove(names: tuple[str, ...], force: bool) -> tuple[list[str], list[SandboxError]]:
    from .holding import holder

    controller = await holder()
    removed: list[str] = []
    failed: list[SandboxError] = []
    for name in dict.fromkeys(names):
        try:
            info = await controller.find(name)
            if info.holder != "keeper" and info.state != "dead":
                raise SandboxError(
                    f"the sandbox {name} belongs to a running program",
                    hint="it ends when that program closes it or ends",
                )
            await _tell_of_snapshots(controller, info)
            await controller.kill(info.id)
            removed.append(name)
        except SandboxNotFound as error:
            if not force:
                failed.append(error)
        except SandboxError as error:
            failed.append(error)
    return removed, failed


async def _tell_of_snapshots(controller: Controller, info: SandboxInfo) -> None:
    """To someone at a terminal: what goes with it."""
    if not sys.stderr.isatty():
        return
    try:
        count = len(await controller.snapshots(info.id))
    except SlopletError:
        return  # it can be removed all the same
    if count:
        note(f"{info.name or info.id}: {count} snapshot{'s go' if count > 1 else ' goes'} with it")
