"""``sloplet image rm``: take images away."""

from __future__ import annotations

import click

from ..errors import SlopletError
from .options import Verb, image_names, json_option
from .output import exit_code_of, note, print_json, report_error, size
from .stores import images as opened


@click.command("rm", cls=Verb, examples="sloplet image rm debian:12\nsloplet image rm 3f2a9c app --force")
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, shell_complete=image_names)
@click.option("-f", "--force", is_flag=True, help="Take the names of one in use away; it goes when nobody uses it.")
@json_option
def command(images: tuple[str, ...], force: bool, as_json: bool) -> int:
    """Remove images, by name or id. One of several names of an image: only that name goes.

    What other images need stays. One that a sandbox or a saved state uses is refused.
    """
    done, code = [], 0
    with opened() as known:
        for image in images:
            try:
                removed = known.remove(image, force=force)
            except SlopletError as error:
                report_error(error, as_json)
                code = exit_code_of(error)
                continue
            done.append(removed)
            if as_json:
                continue
            if removed.image is None:
                click.echo(f"{image}: its name is gone, the image stays")
            else:
                click.echo(f"{image}: removed, {size(removed.bytes)} freed")
            if removed.later:
                note("another program adds an image just now: `sloplet gc` frees the disk later")
    if as_json:
        print_json({"removed": [each.to_dict() for each in done]})
    return code
