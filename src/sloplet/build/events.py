"""How far a build has come, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BuildEvent:
    """Something that happened. Steps are counted over all stages that are built, from 1."""

    kind: str  #: begin, log, end (of a step); done (of the build)
    step: int = 0
    total: int = 0
    stage: str = ""  #: its name or number
    text: str = ""  #: begin: the instruction; log: a line of output; done: the image's id
    cached: bool = False  #: end: it had been done before
    seconds: float = 0.0  #: end, done: how long it took

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "step": self.step, "total": self.total, "stage": self.stage, "text": self.text,
            "cached": self.cached, "seconds": round(self.seconds, 3),
        }  # fmt: skip


#: Called on the event loop; must be quick and must not raise.
OnBuildEvent = Callable[[BuildEvent], None]


def silent(event: BuildEvent) -> None:
    """For callers that nobody watches."""
