"""The image of a sandbox that is about to be made: brought here and unpacked first, with its progress shown.

A keeper would do the same without a word, and without this terminal's credentials in its environment.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from ..errors import ImageNotFound, SpecError


async def bring_image(options: dict[str, Any]) -> None:
    """For what names an image of the store or of a registry; all else is its holder's matter, errors too."""
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
    from ..images.resolve import is_tar
    from ..images.standard import refuse_standard
    from ..images.store import ImageStore
    from ..state.home import Home
    from .imagebars import Bars

    if is_tar(text):
        return
    store = ImageStore(Home())
    try:
        with Bars(quiet=bool(options.get("as_json"))) as bars, suppress(ImageNotFound):
            try:
                image = await asyncio.to_thread(store.find, text)
            except ImageNotFound:
                refuse_standard(reference)
                from ..images.pull import pull

                image = await pull(reference, store, progress=bars)
            (await asyncio.to_thread(store.resolve, image, bars)).close()
    finally:
        store.close()
