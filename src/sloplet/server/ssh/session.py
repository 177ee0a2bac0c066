"""One session of a connection: a shell, a command, or SFTP. Its process is the sandbox's; it lives on here only as long
as somebody is connected.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from asyncssh import EXTENDED_DATA_STDERR, Error, SSHReader, SSHWriter
from asyncssh.stream import SSHServerStreamSession

from ...errors import SandboxNotFound, SlopletError
from ...process import AsyncProcess
from ...wire.schema import Channel
from ..audit import first_word
from ..logs import log
from ..problems import without_paths
from . import files

if TYPE_CHECKING:
    from asyncssh import SSHServerChannel

    from ...sandbox import AsyncSandbox
    from .visitor import Visitor

_PROMPT = r"\[\e[1;32m\]\u@{name}\[\e[0m\]:\[\e[1;34m\]\w\[\e[0m\]\$ "
#: The best shell of the image, as the terminal's own process (exec), so that job control works.
_SHELL = "command -v bash >/dev/null 2>&1 && exec bash; unset PS1; exec sh -i"
_SCRIPT = "command -v bash >/dev/null 2>&1 && exec bash; exec sh"  # reads commands, without a terminal
_TERM = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]{0,63}")
_ENV = re.compile(r"(?:LANG|LC_[A-Z]{1,20})")
_VALUE = re.compile(r"[A-Za-z0-9_.@=,-]{0,64}")
_MOST_ENV = 20
_FAILED = 255  # as ssh itself has it
_PIECE = 65536
_NAMED = {each.value: each.name.removeprefix("SIG") for each in signal.Signals}  # most of real-time have none
_SIGNALS = frozenset(
    ("ABRT", "ALRM", "CONT", "HUP", "INT", "KILL", "PIPE", "QUIT", "STOP", "TERM", "TSTP", "USR1", "USR2", "WINCH")
)


class Environment(dict[bytes, bytes]):
    """What a client asks to be set, as far as it counts; the rest is not even remembered."""

    def __setitem__(self, key: bytes, value: bytes) -> None:
        name, text = key.decode("ascii", "replace"), value.decode("ascii", "replace")
        if _ENV.fullmatch(name) and _VALUE.fullmatch(text) and (len(self) < _MOST_ENV or key in self):
            super().__setitem__(key, value)


def terminal_size(width: int, height: int) -> tuple[int, int]:
    """Rows and columns that a terminal can have."""
    return (min(height, 10000) or 24, min(width, 10000) or 80)


def wanted_environment(asked: Mapping[str, str], term: str | None, name: str) -> dict[str, str]:
    """``term`` None: without a terminal."""
    found = {key: value for key, value in asked.items() if _ENV.fullmatch(key) and _VALUE.fullmatch(value)}
    if term is not None:
        found = {"LANG": "C.UTF-8", "PS1": _PROMPT.format(name=name), **found}
        found["TERM"] = term if _TERM.fullmatch(term) else "dumb"
    return found


class Session(SSHServerStreamSession[bytes]):
    """Signals and sizes of the terminal go past the input that waits: a program that does not read it hears of them."""

    def __init__(self, visitor: Visitor) -> None:
        super().__init__(None)
        self._visitor = visitor
        self._process: AsyncProcess | None = None
        self.task: asyncio.Task[None] | None = None

    # -- what the client asks ----------------------------------------------------------

    def shell_requested(self) -> bool:
        return True

    def exec_requested(self, command: str) -> bool:
        return True

    def subsystem_requested(self, subsystem: str) -> bool:
        return subsystem == "sftp"

    def session_started(self) -> None:
        self.task = asyncio.ensure_future(self._serve())

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        if self._process is not None:
            self._do(self._process.resize(*terminal_size(width, height)))

    def signal_received(self, signal: str) -> None:
        if self._process is not None and signal in _SIGNALS:
            self._do(self._process.signal(signal))

    def break_received(self, msec: int) -> bool:
        return False

    def soft_eof_received(self) -> None:
        pass

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._visitor.left(self)
        if self.task is not None:
            self.task.cancel()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """What only sends a frame, and waits for nothing."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    # -- what is done for it -----------------------------------------------------------

    async def _serve(self) -> None:
        chan = cast("SSHServerChannel[bytes]", self._chan)
        stdin, stdout = SSHReader[bytes](self, chan), SSHWriter[bytes](self, chan)
        stderr = SSHWriter[bytes](self, chan, EXTENDED_DATA_STDERR)
        command, sftp = chan.get_command(), chan.get_subsystem() is not None
        action = "ssh.sftp" if sftp else "ssh.shell" if command is None else "ssh.exec"
        audit = self._visitor.audit(action, first_word(command or ""))
        try:
            box = await self._visitor.box()
            audit(sandbox=box.id)
            if sftp:
                await files.serve(box, self._visitor.open, self._visitor.ahead, chan, stdin, stdout)
            else:
                await self._run(box, chan, stdin, stdout, stderr)
        except SlopletError as error:
            if isinstance(error, SandboxNotFound):
                audit(verdict="failed", error=type(error).__name__)
            with suppress(OSError):
                stderr.write(f"sloplet: {without_paths(str(error))}\r\n".encode("utf-8", "replace"))
                chan.exit(_FAILED)
        except OSError:
            chan.abort()  # the client has gone in the middle of it
        except Exception:
            log.exception("an SSH session failed")
            chan.exit(_FAILED)

    async def _run(
        self,
        box: AsyncSandbox,
        chan: SSHServerChannel[bytes],
        stdin: SSHReader[bytes],
        stdout: SSHWriter[bytes],
        stderr: SSHWriter[bytes],
    ) -> None:
        command, term = chan.get_command(), chan.get_terminal_type()
        size = terminal_size(*chan.get_terminal_size()[:2])
        shell = _SHELL if term is not None else _SCRIPT
        env = wanted_environment(chan.get_environment(), term, box.name or box.id)
        spawning = asyncio.ensure_future(
            # Not tied to us: what somebody has started with nohup outlives the connection. We hang up ourselves.
            box.spawn(
                command or ["/bin/sh", "-c", shell], env=env, pty=size if term is not None else False, stdin=True,
                detached=True, text=False, max_output=1,
            )
        )  # fmt: skip
        try:
            process = self._process = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            spawning.add_done_callback(_hang_up_late)
            raise
        if (now := terminal_size(*chan.get_terminal_size()[:2])) != size and term is not None:
            await process.resize(*now)
        feeding = asyncio.ensure_future(_feed(stdin, process))
        ended = False
        try:
            async for channel, data in process:
                writer = stderr if channel == Channel.ERR else stdout
                writer.write(data)
                await writer.drain()
            result = await process.wait()
            ended = True
        finally:
            self._process = None
            feeding.cancel()
            if not ended:
                await hang_up(process)
            await asyncio.gather(feeding, return_exceptions=True)
        if result.signal in _NAMED:
            chan.exit_with_signal(_NAMED[result.signal])
        else:
            chan.exit(128 + result.signal if result.signal else result.exit_code)


async def _feed(stdin: SSHReader[bytes], process: AsyncProcess) -> None:
    with suppress(SlopletError, OSError, Error):  # its end is told by the process, or by the connection
        while data := await stdin.read(_PIECE):
            await process.send(data)
        await process.close_stdin()


async def hang_up(process: AsyncProcess) -> None:
    """As a terminal that goes away: those who do not care run on."""
    with suppress(SlopletError):
        await process.signal("HUP")
        await process.signal("CONT")  # who is stopped could not hear it
        await process.detach()


def _hang_up_late(spawning: asyncio.Future[AsyncProcess]) -> None:
    if not spawning.cancelled() and spawning.exception() is None:
        task = asyncio.ensure_future(hang_up(spawning.result()))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
