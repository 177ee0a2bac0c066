"""``sloplet volume``: data that outlives sandboxes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from .groups import VerbGroup
from .options import Verb, json_option
from .output import age, plain, print_json, print_table, size
from .stores import place, volumes

if TYPE_CHECKING:
    from ..volumes.records import VolumeInfo


def volume_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion. A prompt is no place for errors."""
    try:
        known = volumes().list() if place() is None else []
        return [each.name for each in known if each.name.startswith(incomplete)]
    except Exception:
        return []


@click.group(
    "volume",
    cls=VerbGroup,
    default="ls",
    examples="""
    sloplet volume create data --size 2g
    sloplet run -v data:/data -- sh -c 'date >> /data/log'
    sloplet volume snapshot data before
    sloplet volume clone data:before again
    sloplet volume inspect data
    sloplet volume rm data again
    """,
)
def volume() -> None:
    """Named volumes: data that outlives sandboxes. Without a verb of its own: `volume ls`."""


@volume.command("create", cls=Verb, examples="sloplet volume create cache\nsloplet volume create data --size 2g")
@click.argument("name", metavar="VOLUME")
@click.option("--size", "most", metavar="SIZE", help="The most that it holds, for example 2g (root only).")
@json_option
def create(name: str, most: str | None, as_json: bool) -> None:
    """Make an empty volume."""
    _show(volumes().create(name, size=most), as_json)


@volume.command("ls", cls=Verb, examples="sloplet volume\nsloplet volume ls -q\nsloplet volume ls --json")
@click.option("-q", "--quiet", is_flag=True, help="Only names, one a line.")
@json_option
def ls(quiet: bool, as_json: bool) -> None:
    """List volumes, and who has them."""
    found = volumes().list()
    if as_json:
        print_json([info.to_dict() for info in found])
    elif quiet:
        for info in found:
            click.echo(info.name)
    elif found:
        print_table(("NAME", "LIMIT", "AGE", "IN USE BY"), [_row(info) for info in found])
    else:
        click.echo("no volumes (`sloplet volume create VOLUME` makes one)", err=True)


@volume.command("inspect", cls=Verb, examples="sloplet volume inspect data --json")
@click.argument("name", metavar="VOLUME", shell_complete=volume_names)
@json_option
def inspect(name: str, as_json: bool) -> None:
    """Everything known about a volume: its snapshots, what it takes on the disk, who has it."""
    info = volumes().inspect(name)
    if as_json:
        print_json(info.to_dict())
        return
    facts = [
        ("name", info.name),
        ("limit", _limit(info)),
        ("used", size(info.used)),
        ("made", f"{age(info.created_at)} ago" + (f", of {info.source}" if info.source else "")),
        *([("files", info.path)] if info.path else []),
        *(("in use by", str(use)) for use in info.users),
        *(("snapshot", f"{each.name}, {size(each.used)}, {age(each.created_at)} ago") for each in info.snapshots),
    ]
    for what, value in facts:
        click.echo(f"{what + ':':<11}{plain(value)}")


@volume.command("rm", cls=Verb, examples="sloplet volume rm data\nsloplet volume rm data:before")
@click.argument("names", metavar="VOLUME[:SNAPSHOT]...", nargs=-1, required=True, shell_complete=volume_names)
@json_option
def rm(names: tuple[str, ...], as_json: bool) -> None:
    """Remove volumes with all their snapshots, or single snapshots. One that a sandbox has is refused."""
    known = volumes()
    for each in names:
        name, snapshot = _split(each)
        if snapshot is None:
            known.remove(name)
        else:
            known.remove_snapshot(name, snapshot)
        if not as_json:
            click.echo(each)
    if as_json:
        print_json({"removed": list(names)})


@volume.command("snapshot", cls=Verb, examples="sloplet volume snapshot data before")
@click.argument("name", metavar="VOLUME", shell_complete=volume_names)
@click.argument("snapshot", metavar="SNAPSHOT")
@json_option
def snapshot(name: str, snapshot: str, as_json: bool) -> None:
    """Keep a volume's content as it is now. Nobody may have it read-write meanwhile."""
    _show(volumes().snapshot(name, snapshot), as_json)


@volume.command("clone", cls=Verb, examples="sloplet volume clone data again\nsloplet volume clone data:before again")
@click.argument("source", metavar="VOLUME[:SNAPSHOT]", shell_complete=volume_names)
@click.argument("name", metavar="NEW")
@json_option
def clone(source: str, name: str, as_json: bool) -> None:
    """A new volume with the content that another has, or had at a snapshot."""
    of, at = _split(source)
    _show(volumes().clone(of, name, snapshot=at), as_json)


def _split(text: str) -> tuple[str, str | None]:
    name, separator, snapshot = text.partition(":")
    return name, snapshot if separator else None


def _show(info: VolumeInfo, as_json: bool) -> None:
    if as_json:
        print_json(info.to_dict())
    else:
        click.echo(info.name)


def _limit(info: VolumeInfo) -> str:
    return "-" if info.size is None else size(info.size)


def _row(info: VolumeInfo) -> tuple[str, ...]:
    return info.name, _limit(info), age(info.created_at, time.time()), ", ".join(map(str, info.users)) or "-"
