"""Many clients at once, as a program of its own: each with a connection and a sandbox of its own, all running commands.

``python -m sloplet.testing.bench.server.crowd URL KEY ENGINE CLIENTS EACH`` prints what came of it as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from ....errors import SlopletError
from ....remote.controller import RemoteController
from ....remote.link import Link
from ....remote.place import Place, parse
from ....sandbox import AsyncSandbox

_STARTING = 16  # sandboxes being made at a time: what is measured are commands


class _Client(RemoteController):
    """With connections of its own: as another program would have."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._own = Link(place)

    @property
    def link(self) -> Link:
        self._own.use()
        return self._own

    async def aclose(self) -> None:
        await self._own.aclose()


async def crowd(url: str, key: str, engine: str, clients: int, each: int) -> dict[str, Any]:
    samples: list[float] = []
    failures: list[str] = []
    ready, places = asyncio.Barrier(clients), asyncio.Semaphore(_STARTING)
    began = 0.0

    async def one(number: int) -> None:
        nonlocal began
        controller = _Client(parse(url, key))
        box = AsyncSandbox(engine=engine, memory="64m", controller=controller)
        try:
            async with places:
                try:
                    await box.start()
                except SlopletError as error:
                    failures.append(f"start: {error}")
            await ready.wait()
            began = began or time.perf_counter()
            for turn in range(each):
                start = time.perf_counter()
                try:
                    result = await box.run(["echo", f"{number}.{turn}"])
                    if result.stdout != f"{number}.{turn}\n":
                        failures.append(f"output {result.stdout!r}")
                except SlopletError as error:
                    failures.append(f"run: {error}")
                samples.append(time.perf_counter() - start)
        finally:
            await box.kill()
            await controller.aclose()

    await asyncio.gather(*(one(number) for number in range(clients)))
    took = time.perf_counter() - began
    return {"samples": samples, "failed": len(failures), "failures": failures[:10], "seconds": took}


def main() -> None:
    url, key, engine, clients, each = sys.argv[1:6]
    print(json.dumps(asyncio.run(crowd(url, key, engine, int(clients), int(each)))))


if __name__ == "__main__":
    main()
