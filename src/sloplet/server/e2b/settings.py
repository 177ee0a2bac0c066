"""How the facade is run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class E2BSettings:
    engine: str = ""  #: "": gvisor where it is, else container
    pool: int = 0  #: sandboxes of each template that are kept ready
