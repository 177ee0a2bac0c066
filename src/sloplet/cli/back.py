"""``sloplet rollback`` and ``sloplet undo``: a sandbox as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import CountVerb, Verb, json_option, name_argument, snapshot_names
from .output import age, plain, print_json
from .working import finish, working

if TYPE_CHECKING:
    from ..controller import SandboxInfo, Snapshot


@click.command(
    "rollback", cls=Verb, examples="sloplet rollback dev before-upgrade\nsloplet rollback dev before-upgrade --json"
)
@name_argument()
@click.argument("snapshot", metavar="SNAPSHOT", shell_complete=snapshot_names)
@json_option
def rollback(name: str, snapshot: str, as_json: bool) -> None:
    """Let a sandbox be as it was at one of its snapshots: same id, same name. What came after is gone."""
    from .saved import called, look_at

    info, found = finish(_rollback(name, snapshot), lambda: look_at(name))
    if as_json:
        print_json(info.to_dict())
        return
    files = "" if found.kind != "disk" else ": its files are back, and nothing runs (a disk snapshot)"
    click.echo(f"{name}: as it was at {called(found)}, {age(found.created_at)} ago{files}")


async def _rollback(name: str, ref: str) -> tuple[SandboxInfo, Snapshot]:
    from ..sandbox import AsyncSandbox
    from .holding import holder

    controller = await holder()
    box = await AsyncSandbox.connect(name)
    found = await controller.find_snapshot(ref, box.id)
    return await working(f"taking {name} back to {ref}", box.rollback(found)), found


@click.command("undo", cls=CountVerb, examples="sloplet create dev --undo 5\nsloplet undo dev\nsloplet undo dev 3")
@name_argument()
@click.argument("steps", type=int, default=1, required=False, metavar="[STEPS]")
@json_option
def undo(name: str, steps: int, as_json: bool) -> None:
    """Let a sandbox be as it was before its last command, or the STEPS-th last. Needs `create --undo N`."""
    from .saved import look_at

    found = finish(_undo(name, steps), lambda: look_at(name))
    if as_json:
        print_json(found.to_dict())
    else:
        click.echo(f"{name}: {undone(found, steps)}")


async def _undo(name: str, steps: int) -> Snapshot:
    from ..errors import SpecError
    from ..sandbox import AsyncSandbox

    if steps < 1:
        raise SpecError(f"undo of {steps} commands makes no sense", hint="a whole number from 1 on")
    box = await AsyncSandbox.connect(name)
    return await working(f"taking {name} back", box.undo(steps))


def undone(point: Snapshot, steps: int) -> str:
    """Which command was undone, as far as the checkpoint says."""
    command = f"`{plain(point.note, 200)}`" if point.note else "a command"
    when = f"as it was {age(point.created_at)} ago"
    if steps == 1:
        return f"undid {command}, {when}"
    return f"undid {steps} commands, the first of them {command}, {when}"
