"""Templates: what sandboxes are made of. Built step by step, or saved of a sandbox; known by names and tags."""

from .catalog import Templates
from .standard import STANDARD

__all__ = ["STANDARD", "Templates"]
