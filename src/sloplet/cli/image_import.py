"""``sloplet image import``: an image from files."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from .image_pull import platform_option, summary
from .imagebars import Bars
from .options import Verb, json_option
from .output import print_json
from .stores import place
from .working import finish, working

if TYPE_CHECKING:
    from ..images.store import StoredImage
    from ..remote.place import Place


@click.command(
    "import",
    cls=Verb,
    examples="sloplet image import ./layout app:1.2\nsloplet image import saved.tar --pick app:latest\n"
    "sloplet image import rootfs.tar.zst debian:mine",
)
@click.argument("path", metavar="PATH", type=click.Path())
@click.argument("reference", metavar="[NAME]", required=False)
@click.option("--pick", metavar="NAME", help="Which one, where PATH holds several.")
@platform_option
@click.option("-q", "--quiet", is_flag=True, help="No progress; print the id alone.")
@json_option
def command(
    path: str, reference: str | None, pick: str | None, platform: str | None, quiet: bool, as_json: bool
) -> None:
    """Take in an OCI layout (a folder or a tar), what docker save wrote, or a root filesystem (a folder or a tar).

    Without NAME it is called as it is called there, if it is.
    """
    from ..images.layout import import_image
    from ..images.reference import parse
    from ..images.store import ImageStore
    from ..state.home import Home

    name = None if reference is None else parse(reference)
    began = time.monotonic()
    if (there := place()) is not None:
        image = finish(_send(there, path, reference, pick, platform), _look)
    else:
        store = ImageStore(Home())
        try:
            with Bars(quiet=quiet or as_json) as bars:
                image = import_image(path, store, name, pick=pick, platform=platform, progress=bars)
        finally:
            store.close()
    seconds = time.monotonic() - began
    if as_json:
        print_json({**image.to_dict(), "seconds": round(seconds, 3)})
    elif quiet:
        click.echo(image.id)
    else:
        called = name.familiar if name else ", ".join(parse(text).familiar for text in image.references) or "no name"
        click.echo(f"{called}: {summary(image)} in {seconds:.1f} s")


async def _send(there: Place, path: str, name: str | None, pick: str | None, platform: str | None) -> StoredImage:
    from ..images.layout import sendable
    from ..remote.images import RemoteImages

    work = RemoteImages(there).import_file(sendable(path), name=name, pick=pick, platform=platform)
    return await working(f"sending {path}", work)


async def _look() -> str:
    return "the image is not there"
