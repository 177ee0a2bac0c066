"""The image of a sandbox that is about to be made: brought here and unpacked first, with its progress shown.

A keeper would do the same without a word, and without this terminal's credentials in its environment.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import ImageNotFound, SpecError

if TYPE_CHECKING:
    from ..images.progress import OnImageProgress


async def bring_image(options: dict[str, Any], told: OnImageProgress | None = None) -> None:
    """For what names an image of the store or of a registry; all else is its holder's matter, errors too. ``told``:
    who else hears how far it is; the terminal does not, then."""
    text = options.get("image") or "host"
    if text == "host" or options.get("template"):
        return
    from ..images.reference import parse

    if text.startswith(("dir:", "/", ".", "~")):
        return
    try:
        reference = parse(text)
    except SpecError:
        return
    from ..finding import place_of
    from ..images import adopting
    from ..images.resolve import is_tar
    from ..images.standard import refuse_standard
    from ..images.store import ImageStore
    from ..state.home import Home
    from .imagebars import Bars

    if is_tar(text):
        return
    if (there := place_of()) is not None:
        from ..remote.images import RemoteImages

        with Bars(quiet=bool(options.get("as_json") or told)) as bars, suppress(ImageNotFound):
            await RemoteImages(there).pull(text, if_missing=True, progress=told or bars)
        return
    store = ImageStore(Home())
    try:
        with Bars(quiet=bool(options.get("as_json") or told)) as bars, suppress(ImageNotFound):
            progress = told or bars
            try:
                image = await asyncio.to_thread(adopting.find, store, text)
            except ImageNotFound:
                refuse_standard(reference)
                from ..images.pull import pull

                image = await pull(reference, store, progress=progress)
            (await asyncio.to_thread(store.resolve, image, progress)).close()
    finally:
        store.close()
