"""One command of a sandbox, joined to our stdin, stdout, stderr, terminal and signals: run, exec, shell, attach.

Signals: the first INT, QUIT, USR1 or USR2 goes to the command; a second INT, or a command that does not end
within a few seconds after TERM or HUP, ends it the hard way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from ..errors import SlopletError
from ..process import AsyncProcess
from ..results import Result
from . import terminal
from .output import EXIT_OURS, EXIT_PIPE, EXIT_TIMEOUT, note
from .streams import Output, read_chunks

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_GRACE = 3.0
_STUCK = 1.0


class Left(Exception):
    """The person left with ``~.``."""


class Signals:
    """Takes the signals of this process for a block. Until ``process`` is set they cancel the block, then they
    are the command's."""

    def __init__(self) -> None:
        self.process: AsyncProcess | None = None
        self.received: list[int] = []
        self.pty = False
        self.outputs: tuple[Output, ...] = ()
        self.on_resize: Callable[[], None] | None = None
        self.raw: terminal.RawTerminal | None = None
        self._closing = 0
        self._installed: list[int] = []

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and `&` in a script, mean it
                self._add(number, self._on_signal, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._installed:
            self._loop.remove_signal_handler(number)

    def _add(self, number: int, handler: Callable[..., None], *args: Any) -> None:
        self._loop.add_signal_handler(number, handler, *args)
        self._installed.append(number)

    def take_terminal(self, raw: terminal.RawTerminal | None, on_resize: Callable[[], None]) -> None:
        """Also follow the window's size, and be stopped and continued without leaving the terminal raw."""
        self.raw, self.on_resize = raw, on_resize
        self._add(signal.SIGWINCH, on_resize)
        if raw is not None:
            self._add(signal.SIGTSTP, self._on_stop)
            self._add(signal.SIGCONT, self._on_continue)

    def closing(self) -> None:
        """The command is over and the sandbox is being closed: that takes milliseconds and should not be cut short."""
        self.process = None
        self._closing = len(self.received) + 1

    @property
    def exit_code(self) -> int | None:
        """128 + the first deadly signal, if there was one."""
        deadly = [n for n in self.received if n not in (signal.SIGUSR1, signal.SIGUSR2)]
        return 128 + deadly[0] if deadly else None

    def _on_signal(self, number: int) -> None:
        self.received.append(number)
        assert self._task is not None
        if self._closing and len(self.received) <= self._closing:
            return
        again = self.received.count(number) > 1 and number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if self.process is None or again:
            self._task.cancel()
            return
        # A shell ignores TERM at its prompt; HUP is what a terminal that closes would send.
        sent = signal.SIGHUP if self.pty and number == signal.SIGTERM else number
        _send(self.process.signal(sent))
        if number in (signal.SIGTERM, signal.SIGHUP):
            self._loop.call_later(_GRACE, self._task.cancel)
        else:
            self._leave_if_stuck(())

    def _leave_if_stuck(self, before: tuple[object, ...]) -> None:
        """The command may be long dead while we hold output that nobody reads (a pager that waits, say)."""
        waiting = tuple(out.waiting for out in self.outputs if out.waiting is not None)
        if self._task is not None and any(write in before for write in waiting):
            self._task.cancel()
        elif not self._closing:
            self._loop.call_later(_STUCK, self._leave_if_stuck, waiting)

    def _on_stop(self) -> None:
        if self.raw is not None:
            self.raw.restore()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _on_continue(self) -> None:
        if self.raw is not None and self.on_resize is not None:
            self.raw.apply()
            self.on_resize()


_pending: set[asyncio.Future[Any]] = set()


def _send(work: Awaitable[None]) -> None:
    """Fire and forget; an operation that has ended takes no signal any more."""
    task = asyncio.ensure_future(work)
    _pending.add(task)
    task.add_done_callback(_sent)


def _sent(task: asyncio.Future[Any]) -> None:
    _pending.discard(task)
    if not task.cancelled():
        task.exception()


class Wiring:
    """How a command is joined to us, decided from the options and what our fds are."""

    def __init__(self, *, interactive: bool, tty: bool | None, capture: bool = False) -> None:
        at_terminal = os.isatty(0) and os.isatty(1)
        self.pty = at_terminal and os.isatty(2) and not capture if tty is None else tty
        self.raw = self.pty and os.isatty(0)
        # A terminal that the command does not get stays the shell's: `sloplet run -- make &` must not stop on input.
        self.stdin = self.pty or interactive or not os.isatty(0)
        self.out = 1  # where its stdout goes
        self.rows_cols: tuple[int, int] = terminal.size(1 if os.isatty(1) else 0)

    @property
    def pty_argument(self) -> bool | tuple[int, int]:
        return self.rows_cols if self.pty else False

    def environment(self) -> dict[str, str]:
        """What a program on a terminal needs to know."""
        if not self.pty:
            return {}
        known = {"TERM": os.environ.get("TERM") or "xterm"}
        if os.environ.get("COLORTERM"):
            known["COLORTERM"] = os.environ["COLORTERM"]
        return known


async def follow(process: AsyncProcess, wiring: Wiring, signals: Signals) -> Result:
    """Pass everything through until the command ends. BrokenPipeError when our own reader has gone."""
    with ExitStack() as stack:
        tracker = terminal.ModeTracker() if wiring.pty and os.isatty(1) else None
        out, err = Output(wiring.out), Output(2)
        signals.process, signals.pty, signals.outputs = process, wiring.pty, (out, err)
        if tracker is not None:
            stack.callback(_write_quietly, tracker)
        if wiring.raw:
            raw = stack.enter_context(terminal.RawTerminal())
            signals.take_terminal(raw, lambda: _send(process.resize(*terminal.size(1))))
        feeder = asyncio.ensure_future(_feed(process, wiring)) if wiring.stdin else None
        copier = asyncio.ensure_future(_copy(process, out, err, tracker))
        try:
            watched = [copier] if feeder is None else [copier, feeder]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if feeder is not None and feeder.done() and not feeder.cancelled():
                failure = feeder.exception()
                if isinstance(failure, Left):
                    raise failure
            await copier
            return await process.wait()
        finally:
            for task in (copier, feeder):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*(t for t in (copier, feeder) if t is not None), return_exceptions=True)


def _write_quietly(tracker: terminal.ModeTracker) -> None:
    codes = tracker.undo()
    if codes:
        try:
            os.write(1, codes)
        except OSError:
            pass


async def _copy(process: AsyncProcess, out: Output, err: Output, tracker: terminal.ModeTracker | None) -> None:
    async for channel, data in process:
        if tracker is not None:
            tracker.feed(data)
        await (err if channel == 2 else out).write(data)


async def _feed(process: AsyncProcess, wiring: Wiring) -> None:
    escapes = terminal.Escapes() if wiring.raw else None
    try:
        async for data in read_chunks(0):
            leave = False
            if escapes is not None:
                data, leave = escapes.feed(data)
            if data:
                await process.send(data)
            if leave:
                raise Left
        await process.close_stdin()
    except SlopletError:
        return  # the command or its sandbox ended: whoever reads the output learns how


async def capture(process: AsyncProcess, wiring: Wiring, signals: Signals) -> Result:
    """Like ``follow``, but the output is kept for a JSON document."""
    signals.process = process
    feeder = asyncio.ensure_future(_feed(process, wiring)) if wiring.stdin else None
    try:
        return await process.wait()
    finally:
        if feeder is not None:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)


def exit_code(result: Result, signals: Signals, *, quiet: bool = False) -> int:
    """The CLI's exit code for a command that ended, with a word on stderr where the code alone would be a mystery."""
    if result.timed_out:
        if not quiet:
            note(f"{result.describe()} (give it more with --timeout)")
        return EXIT_TIMEOUT
    if result.oom:
        if not quiet:
            note(f"{result.describe()} (give it more with --memory)")
    elif result.signal and signals.exit_code is not None:
        return signals.exit_code  # TERM reached a shell as HUP, but TERM is what we were sent
    return result.exit_code


async def guarded(work: Awaitable[int], signals: Signals) -> int:
    """The ways out that are not errors: interrupted, left, or our reader gone."""
    try:
        return await work
    except asyncio.CancelledError:
        if signals.exit_code is None:
            raise
        return signals.exit_code
    except Left:
        note("left")
        return 0
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_PIPE
    except OSError as error:
        if isinstance(error, SlopletError):
            raise
        note(f"cannot write the command's output: {error.strerror}")
        return EXIT_OURS


def _silence_stdout() -> None:
    """Python flushes stdout at exit and would complain about the closed pipe."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno() if sys.stdout is not None else 1)
    os.close(devnull)
