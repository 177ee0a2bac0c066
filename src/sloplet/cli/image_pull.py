"""``sloplet image pull``: an image from a registry."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from .imagebars import Bars
from .options import Verb, json_option, stacked
from .output import print_json, size
from .stores import place
from .working import finish

if TYPE_CHECKING:
    from ..images.store import StoredImage

platform_option = click.option("--platform", metavar="OS/ARCH", help="For another kind of machine: linux/arm64.")
registry_options = stacked(
    click.option("--login", is_flag=True, help="With --server: send your own login for the registry along, this once."),
    click.option("--insecure", is_flag=True, help="Plain HTTP, to a registry on this machine."),
    click.option("-q", "--quiet", is_flag=True, help="No progress; print the id alone."),
    json_option,
)


@click.command(
    "pull",
    cls=Verb,
    examples="sloplet image pull python:3.12-slim\nsloplet image pull ghcr.io/owner/app@sha256:...\n"
    "sloplet image pull localhost:5000/app --insecure --json",
)
@click.argument("reference", metavar="IMAGE")
@platform_option
@registry_options
def command(reference: str, platform: str | None, login: bool, insecure: bool, quiet: bool, as_json: bool) -> None:
    """Bring an image here from a registry, or what is missing of it.

    With your own credentials, as docker login or podman login left them. What is interrupted goes on where it was.
    """
    from ..images.reference import parse

    wanted = parse(reference)
    began = time.monotonic()
    image = finish(_pull(reference, platform, insecure, login, quiet or as_json), _look)
    seconds = time.monotonic() - began
    if as_json:
        print_json({**image.to_dict(), "reference": str(wanted), "seconds": round(seconds, 3)})
    elif quiet:
        click.echo(image.id)
    else:
        click.echo(f"{wanted.familiar}: {summary(image)} in {seconds:.1f} s")


def summary(image: StoredImage) -> str:
    count = len(image.layers)
    return f"{image.short}, {count} layer{'s' * (count != 1)}, {size(image.size)}"


async def _pull(reference: str, platform: str | None, insecure: bool, login: bool, quiet: bool) -> StoredImage:
    if (there := place()) is not None:
        from ..remote.images import RemoteImages

        given = await own_login(reference) if login else None
        with Bars(quiet=quiet) as bars:
            return await RemoteImages(there).pull(
                reference, platform=platform, insecure=insecure, login=given, progress=bars
            )
    from ..images.pull import pull
    from ..images.reference import parse
    from ..images.store import ImageStore
    from ..state.home import Home

    store = ImageStore(Home())
    try:
        with Bars(quiet=quiet) as bars:
            return await pull(parse(reference), store, platform=platform, insecure=insecure, progress=bars)
    finally:
        store.close()


async def own_login(reference: str) -> tuple[str, str]:
    """This user's own name and password for the registry of a reference. SpecError if there are none to send."""
    import asyncio

    from ..errors import SpecError
    from ..images import credentials
    from ..images.reference import parse

    wanted = parse(reference)
    found = await asyncio.to_thread(credentials.find, wanted.registry, wanted.repository)
    if not found.username or not found.password:
        raise SpecError(
            f"--login: there is no name and password for {wanted.registry} here", hint=f"docker login {wanted.registry}"
        )
    return found.username, found.password


async def _look() -> str:
    return "What has come is kept: the same command goes on from there"
