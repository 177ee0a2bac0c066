"""``sloplet image warm``: a live template of a standard image."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from .options import Verb, json_option
from .output import print_json
from .working import finish, working

if TYPE_CHECKING:
    from ..controller import Snapshot


@click.command(
    "warm",
    cls=Verb,
    examples="""
    sloplet image warm
    sloplet image warm sloplet/code --template notebook --memory 4g
    sloplet code --template sloplet-code -c 'import pandas; pandas.__version__'
    """,
)
@click.argument("image", metavar="[IMAGE]", default="sloplet/code")
@click.option("--template", metavar="NAME", help="What the template is called. [default: the image's name, with a -]")
@click.option("--memory", metavar="SIZE", help="Memory of the sandboxes that start from it. [default: 512m]")
@json_option
def command(image: str, template: str | None, memory: str | None, as_json: bool) -> None:
    """Make a template of a standard image whose Python has already imported numpy, pandas and matplotlib.

    Sandboxes that start from it (--template) are at work at once. It needs gVisor, and the image, built.
    """
    from .snapshot import said

    async def nothing() -> str:
        return "no template was made"

    limits = {} if memory is None else {"memory": memory}
    made, seconds = finish(_warm(image, template, limits), nothing)
    if as_json:
        print_json({**made.to_dict(), "seconds": round(seconds, 3)})
    else:
        click.echo(said(made, seconds))


async def _warm(image: str, template: str | None, limits: dict[str, Any]) -> tuple[Snapshot, float]:
    from ..finding import holder_at, place_of
    from ..recipes import warm
    from ..spec import check_snapshot_name

    if template is not None:
        check_snapshot_name(template, "template")
    began = time.monotonic()
    controller = await holder_at(place_of(), named=False)
    made = await working(f"warming up {image}", warm(image, controller, template=template, **limits))
    return made, time.monotonic() - began
