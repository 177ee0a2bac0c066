"""``sloplet image ls``: the images that are here."""

from __future__ import annotations

import click

from .options import Verb, json_option
from .output import age, print_json, print_table, size
from .stores import images as opened


@click.command("ls", cls=Verb, examples="sloplet image ls\nsloplet image ls --all\nsloplet image ls --json")
@click.option("-a", "--all", "everything", is_flag=True, help="Also those without a name: steps of builds.")
@click.option("-q", "--quiet", is_flag=True, help="Print ids only.")
@json_option
def command(everything: bool, quiet: bool, as_json: bool) -> None:
    """List the images that are here, the one last used first."""
    from ..images.reference import parse

    with opened() as known:
        images = known.list(all=everything)
    if as_json:
        print_json([image.to_dict() for image in images])
    elif quiet:
        for image in images:
            click.echo(image.id)
    elif images:
        rows = []
        for image in images:
            names = [parse(each).familiar for each in image.references] or ["-"]
            rows += [
                (name, image.short, image.platform, size(image.size), age(image.created_at), age(image.used_at))
                for name in names
            ]
        print_table(["NAME", "ID", "PLATFORM", "SIZE", "CAME", "USED"], rows)
    else:
        click.echo("no images (`sloplet image pull debian:12` brings one)", err=True)
