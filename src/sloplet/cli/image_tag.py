"""``sloplet image tag``: another name for an image."""

from __future__ import annotations

import click

from .options import Verb, image_names, json_option
from .output import print_json
from .stores import images


@click.command("tag", cls=Verb, examples="sloplet image tag debian:12 base\nsloplet image tag 3f2a9c ghcr.io/me/app:1")
@click.argument("image", metavar="IMAGE", shell_complete=image_names)
@click.argument("reference", metavar="REFERENCE")
@json_option
def command(image: str, reference: str, as_json: bool) -> None:
    """Give an image another name; an image that had it before loses it."""
    from ..images.reference import parse

    wanted = parse(reference)
    with images() as known:
        found = known.tag(image, wanted)
    if as_json:
        print_json({"id": found, "reference": str(wanted)})
    else:
        click.echo(f"{wanted.familiar}: {found.removeprefix('sha256:')[:12]}")
