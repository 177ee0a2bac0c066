"""``sloplet image export``: an image as files."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from ..errors import SpecError
from .imagebars import Bars
from .options import Verb, json_option
from .output import print_json
from .stores import place
from .working import finish, working

if TYPE_CHECKING:
    from ..remote.place import Place


@click.command(
    "export",
    cls=Verb,
    examples="sloplet image export app:1.2 app.tar\nsloplet image export app:1.2 ./layout\n"
    "sloplet image export app:1.2 - | docker load",
)
@click.argument("image", metavar="IMAGE")
@click.argument("path", metavar="PATH", type=click.Path())
@click.option(
    "--format",
    "form",
    type=click.Choice(["folder", "archive"]),
    help="An OCI layout in a folder, or an archive of it. [default: an archive if PATH ends with .tar]",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@json_option
def command(image: str, path: str, form: str | None, quiet: bool, as_json: bool) -> None:
    """Write an image as an OCI layout: a folder, or an archive, which docker load reads as well. PATH - is stdout."""
    from ..images.export import export_image, name_of, write_archive
    from ..images.store import ImageStore
    from ..state.home import Home

    if path == "-" and (as_json or form == "folder" or sys.stdout.isatty()):
        raise SpecError("an archive cannot go to a terminal, beside JSON, or be a folder", hint="name a PATH")
    began = time.monotonic()
    if (there := place()) is not None:
        facts = finish(_fetch(there, image, path, form), _look)
        _say(path, facts, time.monotonic() - began, quiet, as_json)
        return
    store = ImageStore(Home())
    try:
        found = store.find(image)
        reference = name_of(found, image)
        with Bars(quiet=quiet or as_json) as bars:
            if path == "-":
                write_archive(found, store, sys.stdout.buffer, reference=reference, progress=bars)
                return
            folder = None if form is None else form == "folder"
            export_image(found, store, path, reference=reference, folder=folder, progress=bars)
    finally:
        store.close()
    facts = {"id": found.id, "manifest": found.manifest, "reference": str(reference) if reference else None}
    _say(path, facts, time.monotonic() - began, quiet, as_json)


def _say(path: str, facts: dict[str, Any], seconds: float, quiet: bool, as_json: bool) -> None:
    if as_json:
        print_json({"path": os.path.abspath(path), **facts, "seconds": round(seconds, 3)})
    elif not quiet and path != "-":
        click.echo(path)


async def _fetch(there: Place, image: str, path: str, form: str | None) -> dict[str, Any]:
    from ..images.export import name_of
    from ..remote.images import RemoteImages

    remote = RemoteImages(there)
    if form == "folder" or (form is None and path != "-" and not path.endswith(".tar")):
        raise SpecError("a server gives out archives", hint="name a PATH that ends with .tar, or --format archive")
    if path == "-":
        await remote.export_to(image, sys.stdout.buffer)
        return {}
    await working(f"fetching {image}", remote.export(image, path))
    found, _ = await remote.find(image)
    name = name_of(found, image)
    return {"id": found.id, "manifest": found.manifest, "reference": str(name) if name else None}


async def _look() -> str:
    return "nothing was written"
