"""``sloplet ls``: all sandboxes of this SLOPLET_HOME."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from .options import Verb, json_option
from .output import age, print_json, print_table, size, span

if TYPE_CHECKING:
    from ..controller import SandboxInfo

_COLUMNS = ("NAME", "ID", "STATE", "ENGINE", "IMAGE", "AGE", "EXPIRES", "MEMORY", "")


@click.command(
    "ls", cls=Verb, examples="sloplet ls\nsloplet ls -q | xargs sloplet rm\nsloplet ls --label team=search --json"
)
@click.option("-q", "--quiet", is_flag=True, help="Only names (ids of those without), one a line.")
@click.option("--label", "labels", multiple=True, metavar="K[=V]", help="Only those with this label; repeatable.")
@json_option
def ls(quiet: bool, labels: tuple[str, ...], as_json: bool) -> None:
    """List sandboxes: those that the keeper holds, and those of running programs."""
    from ..labels import matches, parse_wanted
    from .holding import known_sandboxes, saved_sizes

    wanted = parse_wanted(labels)
    found = [info for info in known_sandboxes() if matches(info.spec.labels, wanted)]
    if as_json:
        print_json([info.to_dict() for info in found])
    elif quiet:
        for info in found:
            click.echo(info.name or info.id)
    elif found:
        sizes = saved_sizes(found)
        print_table(_COLUMNS, [_row(info, sizes.get(info.id)) for info in found])
    elif wanted:
        click.echo("no sandboxes with these labels", err=True)
    else:
        click.echo("no sandboxes (make one with `sloplet create NAME`)", err=True)


def _row(info: SandboxInfo, saved_bytes: int | None) -> tuple[str, ...]:
    expires = "-" if info.expires_at is None else span(info.expires_at - time.time())
    return (
        info.name or "-",
        info.id,
        info.state,
        info.engine,
        info.spec.image,
        age(info.created_at),
        "-" if info.state == "dead" else expires,
        size(info.spec.limits.memory),
        _remark(info, saved_bytes),
    )


def _remark(info: SandboxInfo, saved_bytes: int | None) -> str:
    """What its state does not say by itself."""
    if info.state in ("paused", "dead") or info.recovered_from is not None:
        from .saved import remark

        return remark(info, saved_bytes)
    return "of a running program" if info.holder == "embedded" else ""
