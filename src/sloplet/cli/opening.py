"""A sandbox that is there, to be used now: one that sleeps is woken, one that died goes on from its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .output import age, note, plain
from .working import working

if TYPE_CHECKING:
    from ..sandbox import AsyncSandbox


async def open_box(name: str) -> AsyncSandbox:
    """By name or id. SandboxNotFound; a dead one without a checkpoint is found, and every use of it says so."""
    from ..sandbox import AsyncSandbox

    box = await AsyncSandbox.connect(name)
    info = await box.info()
    if info.state == "paused":
        await working(f"waking {name}", box.resume())
    elif info.state == "dead" and info.saved is not None:
        went_on = await working(f"recovering {name}", box.resume())
        when = "" if went_on.recovered_from is None else f" of {age(went_on.recovered_from)} ago"
        note(f"{name} had died ({plain(info.reason) or 'nobody knows why'}); it goes on from its checkpoint{when}")
    return box
