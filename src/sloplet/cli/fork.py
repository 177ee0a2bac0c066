"""``sloplet fork``: running copies of a sandbox."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from .options import CountVerb, json_option, name_argument, snapshot_names
from .output import print_json
from .working import finish, working

if TYPE_CHECKING:
    from ..controller import SandboxInfo


@click.command(
    "fork",
    cls=CountVerb,
    examples="""
    sloplet fork dev
    sloplet fork dev 10
    sloplet fork dev 3 --snapshot base --name try
    sloplet fork dev 5 | xargs -I{} sloplet exec {} -- make test
    """,
)
@name_argument()
@click.argument("count", type=int, default=1, required=False, metavar="[COUNT]")
@click.option(
    "--snapshot",
    metavar="SNAPSHOT",
    shell_complete=snapshot_names,
    help="Copies of that snapshot. [default: of how it is now]",
)
@click.option("--name", "prefix", metavar="PREFIX", help="Call them PREFIX-1, PREFIX-2, ... [default: NAME]")
@click.option("--ttl", metavar="TIME", help="What each has to live. [default: as NAME was made]")
@json_option
def fork(name: str, count: int, snapshot: str | None, prefix: str | None, ttl: str | None, as_json: bool) -> None:
    """Make running copies of a sandbox, each with its own identity, and print their names.

    They stay until `sloplet rm`. All of them are made, or none. Names that are taken are skipped.
    """
    from ..spec import check_fork, check_name, parse_duration

    check_fork(count)
    seconds = None if ttl is None else parse_duration(ttl, "ttl")
    if prefix is not None:
        check_name(prefix)
    made = finish(_fork(name, count, snapshot, prefix, seconds), _look)
    if as_json:
        print_json([info.to_dict() for info in made])
        return
    for info in made:
        click.echo(info.name or info.id)


async def _fork(
    name: str, count: int, snapshot: str | None, prefix: str | None, ttl: float | None
) -> list[SandboxInfo]:
    from ..sandbox import AsyncSandbox

    box = await AsyncSandbox.connect(name)
    taken = [info.name for info in await AsyncSandbox.list() if info.name is not None]
    names = child_names(prefix or box.name or name, count, taken)
    copies = "a copy" if count == 1 else f"{count} copies"
    making = box.fork(count, names=names, snapshot=snapshot, ttl=ttl)
    children = await working(f"making {copies} of {name}", making)
    return [await child.info() for child in children]


def child_names(prefix: str, count: int, taken: Iterable[str]) -> list[str]:
    """PREFIX-1 and so on, without those that are taken (case does not count)."""
    from ..spec import check_name

    used = {name.casefold() for name in taken}
    names: list[str] = []
    number = 1
    while len(names) < count:
        name = check_name(f"{prefix}-{number}")
        if name.casefold() not in used:
            names.append(name)
        number += 1
    return names


async def _look() -> str:
    return "Either all copies will be there or none (`sloplet ls`)"
