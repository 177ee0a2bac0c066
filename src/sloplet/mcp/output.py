"""What a process of a sandbox has printed, as far as the sandbox keeps it (the last 256 KiB of each stream)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ..errors import ProcessNotFound
from ..process import new_decoder
from ..results import ProcessInfo
from ..sandbox import AsyncSandbox


@dataclass(frozen=True)
class Printed:
    info: ProcessInfo
    stdout: str
    stderr: str
    missing: int  #: bytes that are not kept any more


async def find_process(box: AsyncSandbox, pid: int) -> ProcessInfo:
    info = next((item for item in await box.processes() if item.pid == pid), None)
    if info is None:
        raise ProcessNotFound(f"the sandbox has no process {pid}", hint="process_output without a pid lists them")
    return info


async def printed(box: AsyncSandbox, pid: int) -> Printed:
    """All that is kept now. A process that prints on is never held up, and never waited for."""
    info = await find_process(box, pid)
    newest = await box.attach(pid, replay=False, lossy=True, text=False)
    await newest.detach()
    process = await box.attach(pid, lossy=True, text=False, max_output=1)
    left = {1: newest.offsets[0] - process.offsets[0], 2: newest.offsets[1] - process.offsets[1]}
    texts = {1: "", 2: ""}
    decoders = {1: new_decoder(), 2: new_decoder()}
    try:
        if any(count > 0 for count in left.values()):
            async for channel, data in process:
                texts[channel] += decoders[channel].decode(data)
                left[channel] -= len(data)
                if all(count <= 0 for count in left.values()):
                    break
    finally:
        await process.detach()
    return Printed(info, texts[1], texts[2], sum(process.offsets))


async def ended(box: AsyncSandbox, pid: int, seconds: float) -> bool:
    """Wait for its end, at most so long; whether it has ended."""
    if seconds <= 0:
        return not (await find_process(box, pid)).running
    process = await box.attach(pid, replay=False, lossy=True, max_output=1)
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
        return True
    except TimeoutError:
        return False
    finally:
        await process.detach()
