"""An image's unpacked tree, to look at and to copy from, with owners as they are inside."""

from __future__ import annotations

from ..engines.base import ResolvedImage
from ..errors import BuildFailed
from .context import Folder


def tree_folder(resolved: ResolvedImage) -> Folder:
    """The caller closes it."""
    if resolved.path is None:
        raise BuildFailed("this image has no files of its own")
    return Folder(resolved.path, owners=resolved.owners_kept)
