"""How far long work on images has come: one kind of value for pulls, unpacking, builds and pushes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ImageProgress:
    """A part of the work. Parts of one ``key`` follow each other; the last of them has ``done == total``."""

    stage: str  #: resolve, download, unpack, upload, step (of a build), log (its output), done
    key: str = ""  #: which blob (its digest), which step
    done: int = 0
    total: int | None = None  #: bytes; None: not known
    text: str = ""  #: for people: a name, a line of output

    def to_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "key": self.key, "done": self.done, "total": self.total, "text": self.text}


#: Called from any thread; must be quick and must not raise.
OnImageProgress = Callable[[ImageProgress], None]


def silent(progress: ImageProgress) -> None:
    """For callers that nobody watches."""
