"""Disk snapshots: the files that differ from the image, as the agent tells them, kept and brought back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .live import Live

if TYPE_CHECKING:
    from .state.draft import Draft
    from .state.opened import Opened

_FILE = "changes"
_PIECE = 1 << 16


async def pack(live: Live, draft: Draft) -> None:
    """Write the sandbox's changes into the draft."""
    raise NotImplementedError


async def unpack(live: Live, opened: Opened) -> None:
    """Bring the changes of a disk snapshot into a sandbox that has just started from the same image."""
    raise NotImplementedError
