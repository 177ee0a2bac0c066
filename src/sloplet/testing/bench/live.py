"""Many sandboxes at once, weighed. A program of its own: ``python -m sloplet.testing.bench.live ENGINE COUNT AT_ONCE``
prints [count, MiB each by PSS, MiB each that the machine lost, processes that only told their RSS]."""

from __future__ import annotations

import asyncio
import gc
import json
import sys

from ...portal import portal
from ...sandbox import AsyncSandbox
from .measures import many, must
from .memory import MIB, descendants, machine_available, pss, weigh


class Live:
    """Many sandboxes at once, held by this process."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.boxes: list[AsyncSandbox] = []

    def measure(self, count: int, at_once: int) -> tuple[int, float, float, int]:
        """Start ``count``, use each, and weigh them: what this program prints."""
        portal().call(self._start(1, 1))  # what only the first one costs is not theirs
        portal().call(self._close())
        gc.collect()
        others, own, free = descendants(), pss(), machine_available()
        portal().call(self._start(count, at_once))
        mine = descendants() - others
        weight, guessed = weigh(mine)
        weight += max(0, pss() - own)
        lost = free - machine_available()
        portal().call(self._use(at_once))
        return len(self.boxes), weight / count / MIB, lost / count / MIB, guessed

    def close(self) -> None:
        portal().call(self._close())

    async def _start(self, count: int, at_once: int) -> None:
        async def one() -> None:
            box = AsyncSandbox(engine=self.engine)
            self.boxes.append(box)
            await box.start()
            must((await box.run(["true"])).exit_code == 0, "a live sandbox did not run its command")

        await many(one, count, at_once)

    async def _use(self, at_once: int) -> None:
        """They are all still alive, also now that there are so many."""
        left = iter(list(self.boxes))

        async def one() -> None:
            must((await next(left).run(["true"])).exit_code == 0, "a live sandbox stopped answering")

        await many(one, len(self.boxes), at_once)

    async def _close(self) -> None:
        boxes, self.boxes = self.boxes, []
        await asyncio.gather(*(box.close() for box in boxes))


def main(engine: str, count: int, at_once: int) -> None:
    held = Live(engine)
    try:
        print(json.dumps(held.measure(count, at_once)))
    finally:
        held.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
