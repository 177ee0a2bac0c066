"""Chosen changes, from a sandbox to a folder of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..controller import Diff
from ..files import AsyncFiles


@dataclass(frozen=True)
class Applied:
    """What ``apply`` did: paths below ``to``."""

    written: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()  #: path and why


async def apply(
    files: AsyncFiles, diff: Diff, paths: list[str], to: str | os.PathLike[str], *, delete: bool = False
) -> Applied:
    raise NotImplementedError
