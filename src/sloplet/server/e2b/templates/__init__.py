"""Templates: what sandboxes are made of. Built step by step, or saved of a sandbox; known by names and tags."""

from .catalog import Templates
from .files import Files
from .standard import STANDARD

__all__ = ["STANDARD", "Files", "Templates"]
