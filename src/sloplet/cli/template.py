"""``sloplet template``: saved states that new sandboxes start from, warm."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import click

from .groups import VerbGroup
from .options import Verb, disk_option, json_option, sandbox_names, template_names
from .output import age, print_json, print_table, size
from .working import finish, working

if TYPE_CHECKING:
    from ..controller import Snapshot

_COLUMNS = ("NAME", "ID", "KIND", "SIZE", "AGE", "ENGINE", "IMAGE", "MADE OF")


@click.group(
    "template",
    cls=VerbGroup,
    default="ls",
    examples="""
    sloplet template create warm dev
    sloplet create web --template warm
    sloplet template
    sloplet template rm warm
    """,
)
def template() -> None:
    """States that new sandboxes start from: `create --template`. Without a verb of its own: `template ls`."""


@template.command("create", cls=Verb, examples="sloplet template create warm dev\nsloplet run --template warm -- make")
@click.argument("name", metavar="TEMPLATE")
@click.argument("sandbox", metavar="SANDBOX", shell_complete=sandbox_names)
@disk_option
@json_option
def create(name: str, sandbox: str, files_only: bool, as_json: bool) -> None:
    """Make a template of a sandbox as it is now. The sandbox runs on; the template stays when it is gone."""
    from .saved import look_at
    from .snapshot import said

    made, seconds = finish(_create(name, sandbox, not files_only), lambda: look_at(sandbox))
    if as_json:
        print_json({**made.to_dict(), "seconds": round(seconds, 3)})
    else:
        click.echo(said(made, seconds))


async def _create(name: str, sandbox: str, memory: bool) -> tuple[Snapshot, float]:
    from ..sandbox import AsyncSandbox
    from ..spec import check_snapshot_name

    check_snapshot_name(name, "template")
    box = await AsyncSandbox.connect(sandbox)
    began = time.monotonic()
    made = await working(f"saving {sandbox}", box.template(name, memory=memory))
    return made, time.monotonic() - began


@template.command("ls", cls=Verb, examples="sloplet template\nsloplet template ls -q\nsloplet template ls --json")
@click.option("-q", "--quiet", is_flag=True, help="Only names, one a line.")
@json_option
def ls(quiet: bool, as_json: bool) -> None:
    """List templates."""
    found = asyncio.run(_list())
    if as_json:
        print_json([item.to_dict() for item in found])
    elif quiet:
        for item in found:
            click.echo(item.name or item.id)
    elif found:
        print_table(_COLUMNS, [_row(item) for item in found])
    else:
        click.echo("no templates (make one with `sloplet template create TEMPLATE SANDBOX`)", err=True)


async def _list() -> list[Snapshot]:
    from .holding import holder

    return await (await holder()).snapshots(role="template")


def _row(item: Snapshot) -> tuple[str, ...]:
    made_of = item.sandbox_name or item.sandbox
    return (item.name or "-", item.id, item.kind, size(item.bytes), age(item.created_at), item.engine, item.spec.image,
            made_of)  # fmt: skip


@template.command("rm", cls=Verb, examples="sloplet template rm warm\nsloplet template rm warm --force")
@click.argument("name", metavar="TEMPLATE", shell_complete=template_names)
@click.option("-f", "--force", is_flag=True, help="Also if sandboxes that started from it are there.")
@json_option
def rm(name: str, force: bool, as_json: bool) -> None:
    """Delete a template."""
    found = asyncio.run(_remove(name, force))
    if as_json:
        print_json({"removed": found.to_dict()})
    else:
        click.echo(found.name or found.id)


async def _remove(name: str, force: bool) -> Snapshot:
    from .holding import holder

    controller = await holder()
    found = await controller.find_snapshot(name)
    await controller.delete_snapshot(found.id, force=force)
    return found


@template.command("inspect", cls=Verb, examples="sloplet template inspect warm\nsloplet template inspect warm --json")
@click.argument("name", metavar="TEMPLATE", shell_complete=template_names)
@json_option
def inspect(name: str, as_json: bool) -> None:
    """Everything known about a template."""
    from .saved import show

    found, parent = asyncio.run(_find(name))
    show(found, parent, as_json=as_json)


async def _find(name: str) -> tuple[Snapshot, Snapshot | None]:
    from .holding import holder
    from .saved import parent_of

    controller = await holder()
    found = await controller.find_snapshot(name)
    return found, await parent_of(controller, found)
