"""cloud-init for sandboxes: what makes sense of a ``#cloud-config``, applied once, when a sandbox is made.

``document`` reads YAML with line numbers, ``config`` and its helpers turn it into a ``Plan`` (pure; everything unknown
is an error), ``apply`` carries a plan out through the agent, as root inside. The order of things is cloud-init's own.
"""

from __future__ import annotations
