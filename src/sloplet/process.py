"""Commands: from a call to an EXEC stream, and the AsyncProcess that users hold.

``stdout`` and ``stderr`` of a process are read as they come, by iteration. Nothing is kept beyond a bound: while
nobody reads, back-pressure holds the process as a pipe would; ``wait()`` and ``run()`` read on, keep the
first ``max_output`` bytes, and let the agent count and drop the rest.
"""

from __future__ import annotations

import asyncio
import signal as _signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from .controller import Stream
from .errors import CommandFailed, CommandTimeout, SpecError
from .results import ProcessInfo, Result
from .spec import check_env, parse_duration, parse_size
from .wire.fields import Fields
from .wire.mux import request
from .wire.schema import Channel, CtrlKind, ExecFlag, Op, SignalFlag, Tag

Command = str | Sequence[str]
Output = Callable[[Any], Awaitable[None] | None]

DEFAULT_MAX_OUTPUT = 4 * 2**20
_MAX_REQUEST = 1_000_000


def argv_of(command: Command) -> list[str]:
    """A string is run by the shell, a sequence is the argument vector itself."""
    if isinstance(command, str):
        if not command.strip():
            raise SpecError("the command is empty")
        argv = ["/bin/sh", "-c", command]
    else:
        argv = list(command) if isinstance(command, (list, tuple)) else []
        if not argv or not all(isinstance(arg, str) for arg in argv) or not argv[0]:
            raise SpecError("a command is a string or a non-empty list of strings")
    if any("\0" in arg for arg in argv):
        raise SpecError("a command cannot hold a NUL character")
    return argv


def exec_request(
    command: Command,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    timeout: float | str | None = None,
    pty: bool | tuple[int, int] = False,
    stdin: bool = False,
    detached: bool = False,
    tag: str | None = None,
) -> Fields:
    """The EXEC request. SpecError for anything that could not be sent."""
    fields = request(Op.EXEC)
    for arg in argv_of(command):
        fields.add(Tag.ARGV, arg)
    for key, value in check_env(env or {}):
        fields.add(Tag.ENV, f"{key}={value}")
    if cwd is not None:
        fields.add(Tag.CWD, _text("cwd", cwd))
    if user is not None:
        fields.add(Tag.USER, _text("user", user))
    if timeout is not None:
        fields.add(Tag.TIMEOUT_MS, max(1, round(parse_duration(timeout, "timeout") * 1000)))
    if tag is not None:
        fields.add(Tag.TAG, _text("tag", tag))
    flags = ExecFlag(0)
    if pty:
        flags |= ExecFlag.PTY
        rows, cols = (24, 80) if pty is True else pty if isinstance(pty, tuple) and len(pty) == 2 else (0, 0)
        fields.add(Tag.ROWS, _size(rows)).add(Tag.COLS, _size(cols))
    if stdin or pty:
        flags |= ExecFlag.STDIN
    if not detached:
        flags |= ExecFlag.KILL_ON_RESET
    fields.add(Tag.FLAGS, int(flags))
    if len(fields.encode()) > _MAX_REQUEST:
        raise SpecError(
            "the command line and environment are too long", hint="write long input to a file, or pass it as input="
        )
    return fields


def _text(what: str, value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise SpecError(f"{what}={str(value)[:80]!r} is not valid", hint="a non-empty string without NUL")
    return value


def _size(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10000:
        raise SpecError(f"{value!r} is not a terminal size", hint="pty=(rows, cols), each from 1 to 10000")
    return value


def signal_number(value: int | str) -> int:
    """A signal by number or name: 15, "TERM", "SIGTERM"."""
    if isinstance(value, str):
        name = value.upper()
        try:
            return int(_signal.Signals[name if name.startswith("SIG") else "SIG" + name])
        except KeyError:
            raise SpecError(f"{value!r} is not a signal", hint="for example 15 or 'TERM'") from None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64:
        raise SpecError(f"{value!r} is not a signal", hint="for example 15 or 'TERM'")
    return value


class _Capture:
    """Collects the first ``most`` bytes of both channels together with an optional callback for each piece."""

    def __init__(self, most: int, text: bool, on_stdout: Output | None, on_stderr: Output | None) -> None:
        self.most = most
        self.kept = 0
        self.parts: dict[int, list[bytes]] = {Channel.OUT: [], Channel.ERR: []}
        self.callbacks = {Channel.OUT: on_stdout, Channel.ERR: on_stderr}
        self._decoders = {c: new_decoder() for c in (Channel.OUT, Channel.ERR)} if text else None

    @property
    def full(self) -> bool:
        return self.kept >= self.most and not any(self.callbacks.values())

    async def take(self, channel: int, data: bytes) -> None:
        room = self.most - self.kept
        if room > 0:
            self.parts[channel].append(data[:room])
            self.kept += min(room, len(data))
        callback = self.callbacks[Channel(channel)]
        if callback is not None:
            piece: Any = self._decoders[Channel(channel)].decode(data) if self._decoders else data
            if piece:
                outcome = callback(piece)
                if outcome is not None:
                    await outcome


def new_decoder() -> Any:
    import codecs

    return codecs.getincrementaldecoder("utf-8")("replace")


class AsyncProcess:
    """A command in a sandbox. Made by ``spawn`` and ``attach``.

    ``async for piece in process`` gives ``(1, data)`` for stdout and ``(2, data)`` for stderr as they come; use that,
    or ``wait()``, which collects. When the object is dropped or its sandbox closed, a process that was not
    ``detached`` ends.
    """

    def __init__(self, stream: Stream, started: Fields, *, text: bool, max_output: int) -> None:
        self._stream = stream
        self._text = text
        self._capture = _Capture(max_output, text, None, None)
        self._decoders = {Channel.OUT: new_decoder(), Channel.ERR: new_decoder()}
        self._result: Result | None = None
        self._collecting: asyncio.Task[Result] | None = None
        self.pid = started.integer(Tag.PID)
        #: The kernel's number inside the sandbox; 0 where a snapshot's agent is older than that it tells.
        self.os_pid = started.integer(Tag.OSPID, 0)
        #: Where in its stdout and stderr this object begins to read: above 0 for an ``attach`` to what is no more kept.
        self.offsets = (started.integer(Tag.OFFSET_OUT, 0), started.integer(Tag.OFFSET_ERR, 0))

    async def send(self, data: str | bytes) -> None:
        """Write to its stdin (``stdin=True`` or a terminal). Waits while the process does not read."""
        await self._stream.send(data.encode() if isinstance(data, str) else bytes(data))

    async def close_stdin(self) -> None:
        """Its stdin sees the end of the file."""
        await self._stream.send_end()

    async def resize(self, rows: int, cols: int) -> None:
        """Tell its terminal the new size."""
        self._stream.ctrl(Fields((Tag.KIND, int(CtrlKind.RESIZE)), (Tag.ROWS, _size(rows)), (Tag.COLS, _size(cols))))

    async def signal(self, signal: int | str = "TERM", *, tree: bool = True) -> None:
        """Send a signal to the process and everything it started (``tree=False``: to itself only)."""
        flags = 0 if tree else int(SignalFlag.MAIN_ONLY)
        self._stream.ctrl(
            Fields((Tag.KIND, int(CtrlKind.SIGNAL)), (Tag.SIGNUM, signal_number(signal)), (Tag.FLAGS, flags))
        )

    async def kill(self) -> None:
        """End the process and everything it started, now. ``wait()`` tells when it is gone."""
        await self.signal("KILL")

    async def detach(self) -> None:
        """Stop following it. It runs on if it was spawned with ``detached=True``, else it ends."""
        self._stream.reset()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Any]]:
        while (piece := await self._stream.recv()) is not None:
            await self._capture.take(piece.channel, piece.data)
            if self._text:
                text = self._decoders[Channel(piece.channel)].decode(piece.data)
                if text:
                    yield piece.channel, text
            else:
                yield piece.channel, piece.data

    async def wait(self, *, check: bool = False) -> Result:
        """Wait until it has ended; the result holds the output that was read so far or by this call."""
        if self._result is None:
            if self._collecting is None:
                self._collecting = asyncio.ensure_future(collect(self._stream, self._capture))
                # A waiter may be cancelled, the process still be waited for by another.
                self._collecting.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._result = await asyncio.shield(self._collecting)
        return checked(self._result, check)


async def collect(stream: Stream, capture: _Capture) -> Result:
    """Read a command's output to its end and make the Result. Cancelling it resets the stream."""
    discarded = False
    try:
        while (piece := await stream.recv()) is not None:
            await capture.take(piece.channel, piece.data)
            if capture.full and not discarded:
                discarded = True
                stream.ctrl(Fields((Tag.KIND, int(CtrlKind.DISCARD))))
        end = await stream.result()
    except BaseException:
        stream.reset()
        raise
    return result_of(end, b"".join(capture.parts[Channel.OUT]), b"".join(capture.parts[Channel.ERR]))


def result_of(end: Fields, out: bytes, err: bytes) -> Result:
    """The Result of a CLOSE's exit fields. The counts are the agent's word, clamped to be sane."""
    signal = end.integer(Tag.SIGNUM, 0)
    code = 128 + signal if signal else end.integer(Tag.EXIT_CODE)
    out_total, err_total = end.integer(Tag.OUT_TOTAL, 0), end.integer(Tag.ERR_TOTAL, 0)
    out_total, err_total = max(out_total, len(out)), max(err_total, len(err))
    return Result(
        exit_code=code & 0xFF,
        stdout_raw=out,
        stderr_raw=err,
        duration=max(0, end.integer(Tag.WALL_US, 0)) / 1e6,
        signal=signal or None,
        timed_out=bool(end.integer(Tag.TIMED_OUT, 0)),
        oom=bool(end.integer(Tag.OOM, 0)),
        truncated=out_total > len(out) or err_total > len(err),
        stdout_size=out_total,
        stderr_size=err_total,
        cpu_seconds=max(0, end.integer(Tag.CPU_US, 0)) / 1e6,
        max_rss=max(0, end.integer(Tag.MAXRSS, 0)),
        denied=tuple(text.decode("utf-8", "replace") for text in end.all(Tag.DENIED)),
    )


def checked(result: Result, check: bool) -> Result:
    """Raise CommandFailed if asked for and the command did not end well."""
    if check and not result.ok:
        shown = (result.stderr or result.stdout).strip()[-500:]
        kind = CommandTimeout if result.timed_out else CommandFailed
        error = kind(f"the command failed: {result.describe()}" + (f": {shown}" if shown else ""))
        error.result = result
        raise error
    return result


def make_capture(max_output: int | str, text: bool, on_stdout: Output | None, on_stderr: Output | None) -> _Capture:
    return _Capture(parse_size(max_output, "max_output"), text, on_stdout, on_stderr)


def process_info(record: Fields) -> ProcessInfo:
    running = record.integer(Tag.STATE) == 0
    signal = record.integer(Tag.SIGNUM, 0)
    return ProcessInfo(
        pid=record.integer(Tag.PID),
        os_pid=record.integer(Tag.OSPID, 0),
        command=tuple(a.decode("utf-8", "replace") for a in record.all(Tag.ARGV)),
        running=running,
        started_at=record.integer(Tag.STARTED_NS, 0) / 1e9,
        tty=bool(record.integer(Tag.FLAGS, 0) & ExecFlag.PTY),
        tag=record.raw(Tag.TAG, b"").decode("utf-8", "replace"),
        exit_code=None if running else (128 + signal if signal else record.integer(Tag.EXIT_CODE, 0)),
        stdout_size=record.integer(Tag.OUT_TOTAL, 0),
        stderr_size=record.integer(Tag.ERR_TOTAL, 0),
    )
