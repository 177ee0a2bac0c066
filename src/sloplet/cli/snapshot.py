"""``sloplet snapshot``: save the state of a sandbox, which runs on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from .options import Verb, disk_option, json_option, name_argument
from .output import print_json, size
from .working import finish, working

if TYPE_CHECKING:
    from ..controller import Snapshot


@click.command(
    "snapshot",
    cls=Verb,
    examples="""
    sloplet snapshot dev
    sloplet snapshot dev before-upgrade
    id=$(sloplet snapshot dev --quiet)
    """,
)
@name_argument()
@click.argument("snapshot_name", metavar="[SNAPSHOT]", required=False)
@disk_option
@click.option("-q", "--quiet", is_flag=True, help="Only its id.")
@json_option
def snapshot(name: str, snapshot_name: str | None, files_only: bool, quiet: bool, as_json: bool) -> None:
    """Save the state of a sandbox: memory, processes and files. It runs on.

    An engine that cannot save processes saves the files only, and the output says so ("disk").
    """
    from .saved import look_at

    made, seconds = finish(_snapshot(name, snapshot_name, not files_only), lambda: look_at(name))
    if as_json:
        print_json({**made.to_dict(), "seconds": round(seconds, 3)})
    elif quiet:
        click.echo(made.id)
    else:
        click.echo(said(made, seconds))


async def _snapshot(name: str, snapshot_name: str | None, memory: bool) -> tuple[Snapshot, float]:
    from ..sandbox import AsyncSandbox
    from ..spec import check_snapshot_name

    if snapshot_name is not None:
        check_snapshot_name(snapshot_name)  # before a keeper is asked
    box = await AsyncSandbox.connect(name)
    began = time.monotonic()
    made = await working(f"saving {name}", box.snapshot(snapshot_name, memory=memory))
    return made, time.monotonic() - began


def said(made: Snapshot, seconds: float) -> str:
    from .saved import kind_text

    named = f"{made.name} ({made.id})" if made.name else made.id
    return f"{named}: {kind_text(made)}, {size(made.bytes)} in {seconds:.2f} s"
