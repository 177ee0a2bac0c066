"""``sloplet image prune``: remove what nothing needs."""

from __future__ import annotations

import click

from .options import Verb, json_option
from .output import note, print_json, size
from .stores import images


@click.command(
    "prune",
    cls=Verb,
    examples="sloplet image prune\nsloplet image prune --older-than 7d\nsloplet image prune --keep 10g\n"
    "sloplet image prune --all",
)
@click.option("--older-than", "older_than", metavar="TIME", help="Those not used for that long, for example 7d.")
@click.option("--keep", "keep", metavar="SIZE", help="The least recently used, until the rest takes that much or less.")
@click.option("-a", "--all", "everything", is_flag=True, help="All that nobody uses just now.")
@json_option
def command(older_than: str | None, keep: str | None, everything: bool, as_json: bool) -> None:
    """Remove images that no sandbox and no saved state uses: without options those without a name.

    Blobs and unpacked layers that no image needs go in any case.
    """
    from ..images.reference import parse
    from ..quantities import parse_duration, parse_size

    seconds = None if older_than is None else parse_duration(older_than, "older_than")
    most = None if keep is None else parse_size(keep, "keep")
    with images() as known:
        pruned = known.prune(older_than=seconds, keep_bytes=most, everything=everything)
    if as_json:
        print_json(pruned.to_dict())
        return
    for image in pruned.images:
        names = ", ".join(parse(each).familiar for each in pruned.names[image]) or image.removeprefix("sha256:")[:12]
        click.echo(f"{names}: removed")
    count = len(pruned.images)
    click.echo(f"{count} {'image' if count == 1 else 'images'} removed, {size(pruned.bytes)} freed")
    if pruned.used:
        note(f"in use, and still here: {len(pruned.used)}")
    if pruned.later:
        note("another program adds an image just now: `sloplet gc` frees the disk later")
