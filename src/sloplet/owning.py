"""An image's owners, given inside: where all its files are the caller's on disk, and only the sandbox has other users.

That is gVisor's case without subordinate ids. Its root is everything's owner then; what the image gives to others is
given to them once, when the sandbox is new. (What is restored has it already.)
"""

from __future__ import annotations

import asyncio

from .errors import SlopletError, StartFailed
from .images.owners import RECORDED, recorded
from .live import Live
from .wire.mux import request
from .wire.schema import Op, Tag

_MOST = 20_000
_AT_ONCE = 64


async def give_owners(live: Live) -> None:
    """Raises StartFailed where there are too many."""
    image = live.image
    if image.path is None or image.owners_kept or not live.engine.probe().capabilities.users:
        return
    if not (image.path.parent / RECORDED).exists():
        return
    owners = await asyncio.to_thread(recorded, image.path)
    if len(owners) > _MOST:
        raise StartFailed(
            f"{len(owners)} files of the image belong to others than root, which takes too long without ids for them",
            hint="give this user subordinate ids: `sloplet doctor` says how",
        )
    places = sorted(owners.items())
    for first in range(0, len(places), _AT_ONCE):
        streams = []
        for name, (uid, gid) in places[first : first + _AT_ONCE]:
            asked = request(Op.CHOWN, (Tag.PATH, f"/{name}"), (Tag.OWNER, f"{uid}:{gid}"), (Tag.USER, "0"))
            streams.append(live.mux.open(asked))
        for stream in streams:
            try:
                await stream.result()
            except SlopletError:
                live.mux.check()  # one that cannot be given is root's, as on every disk that knows no others
