"""What runs in a sandbox of a template from its beginning: started in the background, then waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ....errors import CommandError, SlopletError
from ....process import AsyncProcess
from ....sandbox import AsyncSandbox

TAG = "e2b-start"
_LONGEST = 600.0  # seconds until it must be ready
_UNSAID = 20.0  # what a template is given to start where nothing says when it is ready
_FIRST, _LATER = 0.1, 2.0  # seconds between two questions
_OUTPUT = "64k"


class StartFailed(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True)
class Start:
    """``start`` or ``ready`` may be "": there is none."""

    start: str
    ready: str
    user: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] | None = None


Tell = Callable[[str], None]


async def begin(box: AsyncSandbox, asked: Start, *, longest: float = _LONGEST, unsaid: float = _UNSAID,
                settle: float = 0.0, tell: Tell = lambda line: None) -> None:  # fmt: skip
    """Start it, and return when it is ready: it goes on in the background. StartFailed.

    ``unsaid``: how long is waited where nothing says when it is ready; a program that has ended well by then is fine.
    ``settle``: how long one that is said to be ready is looked at: it may be about to fail.
    """
    process: AsyncProcess | None = None
    following: asyncio.Task[None] | None = None
    try:
        if asked.start:
            process = await _spawn(box, asked)
            following = asyncio.ensure_future(_follow(process, tell))
        if asked.ready:
            await _until_ready(box, asked, following, longest, tell)
            if following is not None and settle:
                await asyncio.wait({following}, timeout=settle)
        elif following is not None:
            await asyncio.wait({following}, timeout=unsaid)
        if following is not None and following.done():
            following.result()
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if process is not None:
            with suppress(SlopletError):
                await process.detach()


async def _spawn(box: AsyncSandbox, asked: Start) -> AsyncProcess:
    try:
        return await box.spawn(
            ["/bin/bash", "-l", "-c", asked.start], cwd=asked.cwd, env=asked.env, user=asked.user, detached=True,
            tag=TAG, max_output=_OUTPUT,
        )  # fmt: skip
    except CommandError as error:
        raise StartFailed(f"start command failed: {error.message}") from None


async def _follow(process: AsyncProcess, tell: Tell) -> None:
    """Until it ends. StartFailed if it does not end well."""
    async for _, text in process:
        for line in text.splitlines():
            tell(line)
    result = await process.wait()
    if not result.ok:
        raise StartFailed(f"start command failed: exit status {result.exit_code}")


async def _until_ready(
    box: AsyncSandbox, asked: Start, following: asyncio.Task[None] | None, longest: float, tell: Tell
) -> None:
    loop = asyncio.get_running_loop()
    end, pause = loop.time() + longest, _FIRST
    while True:
        left = max(end - loop.time(), 1.0)
        try:
            result = await box.run(
                ["/bin/bash", "-l", "-c", asked.ready], cwd=asked.cwd, env=asked.env, user=asked.user, timeout=left,
                max_output=_OUTPUT,
            )  # fmt: skip
        except CommandError as error:
            raise StartFailed(f"ready command failed: {error.message}") from None
        if result.ok:
            return
        if following is not None and following.done():
            following.result()
        if loop.time() >= end:
            raise StartFailed(f"ready command failed: it was not ready within {longest:g} seconds")
        await asyncio.sleep(pause)
        pause = min(pause * 2, _LATER)
