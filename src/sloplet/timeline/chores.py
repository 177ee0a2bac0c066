"""What a sandbox's settings ask to be done now and then: checkpoints, and sleep when it is idle."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ..errors import (
    SlopletError,
)
from ..live import Live
from ..wire.fields import Fields
from ..wire.schema import Op, Tag
from .sleeping import Sleeping, unused

_LOOK = 2.0  # how long a sandbox's processors are watched before it is called idle
_BUSY = 0.02  # of one processor
_LOOKING = 20_000  # microseconds that the look itself may cost


class Chores(Sleeping):
    """Started by ``tend``, for as long as the sandbox is held."""

    def tend(self, live: Live) -> None:
        """What a sandbox's settings ask to be done now and then."""
        if live.spec.idle is not None:
            live.chores.append(self._runtime.background(self._sleep_when_idle(live, live.spec.idle)))
        if live.spec.checkpoint_every is not None:
            live.chores.append(self._runtime.background(self._checkpoints(live, live.spec.checkpoint_every)))

    async def _checkpoints(self, live: Live, every: float) -> None:
        while not live.ending:
            await asyncio.sleep(every)
            try:
                await self._whole(self._checkpoint(live))
            except SlopletError as error:
                self._runtime.bus.emit(live.info.id, "checkpoint.failed", reason=str(error))

    async def _checkpoint(self, live: Live) -> None:
        """What it would be recovered from, written anew."""
        runtime = self._runtime
        async with self.turn(live.info.id):
            if live.ending:
                return
            snapshot = await self._save(live, "checkpoint")
            try:
                await runtime.off_loop(lambda: runtime.saved.replace_saved(live.info.id, snapshot))
            except BaseException:
                await asyncio.shield(self._drop(snapshot.id))
                raise
            live.info = replace(live.info, saved=snapshot.id, saved_at=snapshot.created_at)

    async def _sleep_when_idle(self, live: Live, idle: float) -> None:
        loop = asyncio.get_running_loop()
        moved = _moved(live)
        while not live.ending:
            if moved != _moved(live):  # a download is no idleness, though nobody follows it
                moved, live.used = _moved(live), loop.time()
            left = live.used + idle - loop.time()
            if live.mux.waiting or live.gate is not None:
                await asyncio.sleep(idle)
            elif left > 0:
                await asyncio.sleep(left)
            elif await self._busy(live, min(idle, _LOOK)):
                live.used = loop.time()
            elif unused(live, idle):
                try:
                    await self._whole(self._pause(live.info.id, idle=idle))
                except SlopletError as error:
                    self._runtime.bus.emit(live.info.id, "sleep.failed", reason=str(error))
                    live.used = loop.time()

    async def _busy(self, live: Live, seconds: float) -> bool:
        """Whether its processes compute, though nobody follows them."""
        try:
            before = await _cpu_us(live)
            await asyncio.sleep(seconds)
            return await _cpu_us(live) - before > _BUSY * seconds * 1e6 + _LOOKING
        except SlopletError:
            return True


def _moved(live: Live) -> int:
    """Bytes that its connections have moved so far."""
    return 0 if live.egress is None else live.egress.meter.moved


async def _cpu_us(live: Live) -> int:
    return (await live.mux.open(Fields((Tag.OP, int(Op.METRICS)))).result()).integer(Tag.CPU_US, 0)
