"""What the image of a sandbox says of how it wants to be run, and doing so. Part of ``AsyncSandbox``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .controller import Controller, Port
from .errors import CommandFailed, ProcessNotFound, SpecError
from .process import Command
from .spec import parse_duration

if TYPE_CHECKING:
    from .images.config import Healthcheck, ImageConfig
    from .results import Result

_SHELL = ("/bin/sh", "-c")
_ALL_OUTPUT = 64 * 1024


@dataclass(frozen=True)
class Health:
    """How a sandbox does by its image's own check."""

    status: str  #: healthy, unhealthy, or none: the image has no check
    exit_code: int | None = None
    output: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "healthy"

    def to_dict(self) -> dict[str, Any]:
        return {"status": self.status, "exit_code": self.exit_code, "output": self.output}


class AsyncImaged:
    """What ``AsyncSandbox`` does by its image's config. See docs/images.md."""

    async def _holder(self) -> tuple[Controller, str]:
        """Who holds it, and its id; it has started then."""
        raise NotImplementedError

    async def _check(self, command: Command, timeout: float) -> Result:
        """Run a command to its end, whatever it says."""
        raise NotImplementedError

    async def _ended(self, pid: int) -> None:
        """Return once that process has ended; at once if there is none."""
        raise NotImplementedError

    async def _send_signal(self, pid: int, signal: str) -> None:
        raise NotImplementedError

    async def image_config(self) -> ImageConfig | None:
        """The image's config: variables, user, command, ports, health check. None: it has none (``host``, a folder)."""
        controller, sandbox_id = await self._holder()
        return await controller.image_config(sandbox_id)

    async def image_command(self, arguments: Sequence[str] | None = None) -> list[str]:
        """What the image runs by itself: its entrypoint and its own arguments, or these instead. SpecError if it says
        nothing."""
        config = await self.image_config()
        command = () if config is None else config.command if arguments is None else (*config.entrypoint, *arguments)
        if not command:
            raise SpecError("there is no command, and the image names none", hint='for example box.run("python3 -V")')
        return list(command)

    async def health(self) -> Health:
        """Ask by the image's own health check, once, now."""
        config = await self.image_config()
        check = config.healthcheck if config is not None else None
        if config is None or check is None or check.test[0] == "NONE":
            return Health("none")
        result = await self._check(_test(check, config), check.timeout)
        output = (result.stdout + result.stderr)[-_ALL_OUTPUT:]
        return Health(
            "healthy" if result.exit_code == 0 and not result.timed_out else "unhealthy", result.exit_code, output
        )

    async def wait_healthy(self, timeout: float | str = 60.0) -> Health:
        """Return once the image's health check says yes. CommandFailed when it has failed as often in a row as the
        image allows, or the time is up."""
        config = await self.image_config()
        check = config.healthcheck if config is not None else None
        loop = asyncio.get_running_loop()
        began, failures = loop.time(), 0
        until = began + parse_duration(timeout, "timeout")
        while True:
            found = await self.health()
            if found.ok or check is None or found.status == "none":
                return found
            now = loop.time()
            failures += now - began >= check.start_period
            pause = min(check.interval, 1.0 if now - began < check.start_period else check.interval)
            if failures >= check.retries or now + pause > until:
                raise CommandFailed(f"the sandbox is not healthy: exit code {found.exit_code}: {found.output[-500:]}")
            await asyncio.sleep(pause)

    async def stop(self, pid: int, *, grace: float | str = 10.0) -> None:
        """End a process as its image wants it (``StopSignal``, else TERM), and for good when ``grace`` is over.
        Idempotent."""
        config = await self.image_config()
        name = (config.stop_signal if config is not None else "") or "TERM"
        try:
            await self._send_signal(pid, name.removeprefix("SIG"))
            try:
                async with asyncio.timeout(parse_duration(grace, "grace")):
                    await self._ended(pid)
            except TimeoutError:
                await self._send_signal(pid, "KILL")
                await self._ended(pid)
        except ProcessNotFound:
            pass

    async def expose_image_ports(self) -> list[Port]:
        """Listen on this machine for each TCP port that the image exposes (``EXPOSE``)."""
        controller, sandbox_id = await self._holder()
        config = await self.image_config()
        wanted = exposed(config.ports) if config is not None else []
        return [await controller.expose(sandbox_id, port) for port in wanted]


def exposed(ports: Sequence[str]) -> list[int]:
    """``80``, ``80/tcp``, ``8000-8002/tcp``: the numbers. UDP does not reach a sandbox."""
    found: set[int] = set()
    for text in ports:
        numbers, _, protocol = text.partition("/")
        first, _, last = numbers.partition("-")
        if protocol in ("", "tcp") and first.isdigit() and (last or first).isdigit():
            low, high = int(first), int(last or first)
            if 0 < low <= high < 65536 and high - low < 1000:
                found.update(range(low, high + 1))
    return sorted(found)


def _test(check: Healthcheck, config: ImageConfig) -> list[str]:
    if check.test[0] == "CMD":
        return list(check.test[1:])
    words = check.test[1:] if check.test[0] == "CMD-SHELL" else check.test
    return [*(config.shell or _SHELL), " ".join(words)]
