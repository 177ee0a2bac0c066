"""``sloplet snapshots``: the tree of saved states, and what can be done with one of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from .groups import VerbGroup
from .options import Verb, json_option, name_argument, snapshot_names
from .output import console, print_json

if TYPE_CHECKING:
    from ..controller import SandboxInfo, Snapshot


@click.group(
    "snapshots",
    cls=VerbGroup,
    default="ls",
    takes_words=True,
    examples="""
    sloplet snapshots
    sloplet snapshots dev
    sloplet snapshots dev --all --json
    sloplet snapshots inspect dev before-upgrade
    sloplet snapshots rm dev before-upgrade
    """,
)
def snapshots() -> None:
    """The snapshots of a sandbox, or of all, as a tree. Without a verb of its own: `snapshots ls`."""


@snapshots.command(
    "ls", cls=Verb, examples="sloplet snapshots\nsloplet snapshots dev --all\nsloplet snapshots ls dev --json"
)
@name_argument(required=False)
@click.option("-a", "--all", "everything", is_flag=True, help="Undo points, checkpoints and paused states too.")
@json_option
def ls(name: str | None, everything: bool, as_json: bool) -> None:
    """Draw the tree of snapshots, and where each sandbox is now."""
    from .saved import document
    from .tree import draw

    infos, found = asyncio.run(_collect(name))
    shown = [item for item in found if everything or item.role == "snapshot"]
    if as_json:
        print_json(document(shown, infos))
        return
    trees = [tree for info in infos if (tree := draw(info, found, shown, always=name is not None)) is not None]
    for tree in trees:
        console().print(tree)
    if not shown:
        what = f"{name} has no snapshots" if name else "no snapshots"
        click.echo(f"{what} (make one with `sloplet snapshot {name or 'NAME'}`)", err=True)


async def _collect(name: str | None) -> tuple[list[SandboxInfo], list[Snapshot]]:
    from .holding import holder

    controller = await holder()
    if name is not None:
        info = await controller.find(name)
        return [info], await controller.snapshots(info.id, role=None)
    found = await controller.snapshots(role=None)
    return await controller.list(), [item for item in found if item.role != "template"]


@snapshots.command("rm", cls=Verb, examples="sloplet snapshots rm dev base\nsloplet snapshots rm dev base --force")
@name_argument()
@click.argument("snapshot", metavar="SNAPSHOT", shell_complete=snapshot_names)
@click.option("-f", "--force", is_flag=True, help="Also if others descend from it: they then descend from its parent.")
@json_option
def rm(name: str, snapshot: str, force: bool, as_json: bool) -> None:
    """Delete a snapshot, by its name or id."""
    found = asyncio.run(_remove(name, snapshot, force))
    if as_json:
        print_json({"removed": found.to_dict()})
    else:
        click.echo(found.name or found.id)


async def _remove(name: str, ref: str, force: bool) -> Snapshot:
    from .holding import holder

    controller = await holder()
    found = await controller.find_snapshot(ref, (await controller.find(name)).id)
    await controller.delete_snapshot(found.id, force=force)
    return found


@snapshots.command(
    "inspect", cls=Verb, examples="sloplet snapshots inspect dev base\nsloplet snapshots inspect dev base --json"
)
@name_argument()
@click.argument("snapshot", metavar="SNAPSHOT", shell_complete=snapshot_names)
@json_option
def inspect(name: str, snapshot: str, as_json: bool) -> None:
    """Everything known about a snapshot."""
    from .saved import show

    found, parent = asyncio.run(_inspect(name, snapshot))
    show(found, parent, as_json=as_json)


async def _inspect(name: str, ref: str) -> tuple[Snapshot, Snapshot | None]:
    from .holding import holder
    from .saved import parent_of

    controller = await holder()
    found = await controller.find_snapshot(ref, (await controller.find(name)).id)
    return found, await parent_of(controller, found)
