"""``sloplet image export``: an image as files."""

from __future__ import annotations

import os
import sys
import time

import click

from ..errors import SpecError
from .imagebars import Bars
from .options import Verb, json_option
from .output import print_json


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
    from ..images.export import export_image, write_archive
    from ..images.reference import parse
    from ..images.store import ImageStore
    from ..state.home import Home

    if path == "-" and (as_json or form == "folder" or sys.stdout.isatty()):
        raise SpecError("an archive cannot go to a terminal, beside JSON, or be a folder", hint="name a PATH")
    store = ImageStore(Home())
    began = time.monotonic()
    try:
        found = store.find(image)
        try:
            name = parse(image)
            reference = name if str(name) in found.references else None
        except SpecError:
            reference = None
        if reference is None and found.references:
            reference = parse(found.references[0])
        with Bars(quiet=quiet or as_json) as bars:
            if path == "-":
                write_archive(found, store, sys.stdout.buffer, reference=reference, progress=bars)
                return
            folder = None if form is None else form == "folder"
            export_image(found, store, path, reference=reference, folder=folder, progress=bars)
    finally:
        store.close()
    seconds = time.monotonic() - began
    if as_json:
        facts = {"path": os.path.abspath(path), "id": found.id, "manifest": found.manifest}
        print_json({**facts, "reference": str(reference) if reference else None, "seconds": round(seconds, 3)})
    elif not quiet:
        click.echo(path)
