"""``sloplet image push``: an image to a registry."""

from __future__ import annotations

import time

import click

from ..errors import SpecError
from .image_pull import own_login, registry_options
from .imagebars import Bars
from .options import Verb
from .output import print_json
from .stores import place
from .working import finish


@click.command(
    "push",
    cls=Verb,
    examples="sloplet image push ghcr.io/owner/app:1.2\nsloplet image push app localhost:5000/app:1.2 --insecure",
)
@click.argument("image", metavar="IMAGE")
@click.argument("reference", metavar="[REFERENCE]", required=False)
@registry_options
def command(image: str, reference: str | None, login: bool, insecure: bool, quiet: bool, as_json: bool) -> None:
    """Send an image to a registry, under its own name or as REFERENCE, and print the digest that it has there.

    Byte for byte as it is here; what the registry has already is not sent again.
    """
    from ..images.reference import parse

    target = parse(reference or image.removeprefix("sha256:"))
    began = time.monotonic()
    quiet = quiet or as_json
    digest = finish(_push(image, str(target), reference is not None, insecure, login, quiet), _look)
    seconds = time.monotonic() - began
    if as_json:
        print_json({"reference": str(target), "digest": digest, "seconds": round(seconds, 3)})
    elif quiet:
        click.echo(digest)
    else:
        click.echo(f"{target.familiar}: {digest} in {seconds:.1f} s")


async def _push(image: str, reference: str, named: bool, insecure: bool, login: bool, quiet: bool) -> str:
    if (there := place()) is not None:
        from ..remote.images import RemoteImages

        given = await own_login(reference) if login else None
        with Bars(quiet=quiet) as bars:
            done = await RemoteImages(there).push(
                image, reference if named else None, insecure=insecure, login=given, progress=bars
            )
        return str(done["digest"])
    from ..images.push import push
    from ..images.reference import parse
    from ..images.store import ImageStore
    from ..state.home import Home

    store = ImageStore(Home())
    try:
        with Bars(quiet=quiet) as bars:
            found = store.find(image)
            if not named and reference not in found.references:
                raise SpecError(f"{image!r} is no name of that image: say what to push it as", hint="IMAGE REFERENCE")
            return await push(found, parse(reference), store, insecure=insecure, progress=bars)
    finally:
        store.close()


async def _look() -> str:
    return "The image is not there yet; what was sent need not be sent again"
