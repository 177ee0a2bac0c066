"""The tools, each group in a file of its own. A set that a coding agent needs, and no more: every tool costs every
conversation the words of its description."""

from __future__ import annotations

from ..call import Toolbox
from . import files, history, network, processes, running, sandboxes


def toolbox() -> Toolbox:
    """All of them, in the order that a model is told."""
    found = Toolbox()
    for group in (running, files, processes, history, network, sandboxes):
        group.add_to(found)
    return found
