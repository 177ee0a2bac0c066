"""The volumes of the sandboxes that a runtime holds: had when one starts, let go when all of it is gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .spec import SandboxSpec

if TYPE_CHECKING:
    from .controller import SandboxInfo
    from .holder import Holder
    from .volumes.opening import Opened


async def open_for(holder: Holder, info: SandboxInfo, spec: SandboxSpec, *, alone: bool) -> Opened | None:
    """What ``spec`` asks to be mounted, opened for the sandbox; None for nothing. VolumeError and what is below it."""
    if not any(volume.mounted for volume in spec.volumes):
        return None
    from .volumes.opening import open_volumes

    job = holder.off_loop(lambda: open_volumes(holder.home, info.id, info.name, spec.volumes, alone=alone))
    opening = holder.background(job)
    try:
        opened: Opened = await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_let_go)
        raise
    return opened


def _let_go(opening: asyncio.Task[Opened]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
