"""How long to wait for a registry, and how often to try again."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from ..errors import RegistryError, RegistryUnavailable


@dataclass(frozen=True)
class Patience:
    """How long to wait for a registry. Seconds."""

    connect: float = 15.0
    silence: float = 30.0  #: nothing at all comes, or goes
    small: float = 90.0  #: for a manifest, a token, a question: all of it
    slowest: float = 256.0  #: bytes a second, over a window of ``window``; below that it counts as stalled
    window: float = 60.0
    tries: int = 5
    unheard: int = 2  #: of these, where nobody has answered at all so far: it may not be there
    pause: float = 0.5  #: before the second try; doubles
    longest: float = 60.0  #: what a server may ask us to wait


class Transient(Exception):
    """It may work the next time; ``after``: the server said when; ``unheard``: there may be none. ``final`` is what it
    becomes if it does not."""

    def __init__(self, final: RegistryError, after: float | None = None, *, unheard: bool = False) -> None:
        super().__init__(final.message)
        self.final, self.after, self.unheard = final, after, unheard


class Tries:
    """Counts tries, and waits between them."""

    def __init__(self, patience: Patience) -> None:
        self._patience, self._failed = patience, 0

    def progressed(self) -> None:
        self._failed = 0

    async def wait(self, problem: Transient) -> None:
        """Raises what it finally is, once there were enough tries."""
        self._failed += 1
        patience = self._patience
        if problem.after is not None and problem.after > patience.longest:
            raise RegistryUnavailable(
                f"{problem.final.message}, and asks to come back in {problem.after:.0f} s", hint="try again then"
            ) from problem
        if self._failed >= (min(patience.unheard, patience.tries) if problem.unheard else patience.tries):
            raise problem.final from problem
        pause = patience.pause * 2 ** (self._failed - 1) * random.uniform(0.75, 1.25)  # noqa: S311
        await asyncio.sleep(max(pause, problem.after or 0.0))
