"""One cell over one stream: its output, its results, its time limit, and how it is interrupted.

The stream is an ATTACH to the kernel's process, open while the cell runs and no longer. Nothing from inside is
believed: every part is bounded, and a kernel that breaks the rules is a ``KernelError``.
"""

from __future__ import annotations

import asyncio
import binascii
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..controller import Stream
from ..errors import KernelError
from ..process import DEFAULT_MAX_OUTPUT, Output, make_capture, result_of
from ..wire.fields import Fields
from ..wire.mux import request as wire_request
from ..wire.schema import Channel, CtrlKind, Op, SignalFlag, Tag
from . import languages
from .frames import Frame, Reader, Text
from .results import CodeFailure, CodeResult, RichResult

OnResult = Callable[[RichResult], Awaitable[None] | None]

MAX_RICH = 32 * 2**20  # bytes of all results of a cell
MAX_RESULTS = 1000
_MAX_PARTS = 64  # representations of one result
_MAX_FAILURE = 256 * 1024
_MIME = re.compile(r"[a-z0-9]{1,20}/[A-Za-z0-9._+-]{1,80}")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_FRAME = re.compile(rb"\x1e[^\n]*\n")
#: After a time limit: SIGINT to the kernel at once, to all it started, again, and then no more patience.
PATIENCE = (1.0, 3.0, 5.0)
_STARTING = 60.0  # what an interpreter may take to start


@dataclass
class Kernel:
    """A running kernel as this client knows it."""

    name: str
    language: str
    key: str
    pid: int
    seen: float = 0.0  #: when it was last known to be there, by the loop's clock
    offsets: tuple[int, int] | None = None  #: where in its output our last cell ended, or it began
    early: bool = True  #: whether what it wrote since then is a cell's; not what it says when it starts
    user: str | None = None  #: if it is another than the sandbox's
    begun: bool = False  #: whether we have seen it begin with a cell
    protocol: int = languages.PROTOCOL  #: what it was started to speak

    def describe(self) -> str:
        return f"the {self.language} context {self.name!r}"


class Unfinished(Exception):
    """The cell goes on though it was interrupted. ``partial`` is what there is of its result."""

    def __init__(self, partial: CodeResult) -> None:
        super().__init__("the cell could not be interrupted")
        self.partial = partial


class EndedBefore(KernelError):
    """The kernel had ended before it began with the cell: nothing of it has run."""


@dataclass
class Wishes:
    """What a caller wants of a cell."""

    timeout: float | None = None
    max_output: int | str = DEFAULT_MAX_OUTPUT
    on_stdout: Output | None = None
    on_stderr: Output | None = None
    on_result: OnResult | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    silent: bool = False  #: it is not counted


class Collector:
    """Builds the CodeResult out of frames and text."""

    def __init__(self, wishes: Wishes) -> None:
        self._capture = make_capture(wishes.max_output, True, wishes.on_stdout, wishes.on_stderr)
        self._on_result = wishes.on_result
        self._parts: dict[str, bytearray] = {}
        self._dropped: set[str] = set()  # too large; what follows of them is dropped too
        self._rich = 0
        self._results: list[RichResult] = []
        self._failure: CodeFailure | None = None
        self._written = 0
        self._cut = False
        self.count = 0
        self.status = 0
        self.began: float | None = None

    async def take(self, piece: Frame | Text) -> None:
        if isinstance(piece, Text):
            self._written += len(piece.data)
            await self._capture.take(piece.channel, piece.data)
        elif piece.channel == Channel.OUT:
            await self._frame(piece.kind, piece.rest)

    async def _frame(self, kind: str, rest: bytes) -> None:
        if kind == "begin":
            self.began = time.monotonic()
            self.count = _number(rest)
        elif kind == "data":
            self._data(rest)
        elif kind in ("value", "shown"):
            await self._result(kind == "value")
        elif kind == "error":
            self._failure = self._failed()
        elif kind == "drop":
            self._rich -= sum(map(len, self._complete().values()))
        elif kind == "cut":
            self._cut = True
        elif kind == "end":
            self.status = _number(rest) & 0xFF
        else:
            raise KernelError(f"the kernel sent a frame of an unknown kind: {kind}", hint="restart the context")

    def _data(self, rest: bytes) -> None:
        name, _, text = rest.partition(b" ")
        try:
            raw = binascii.a2b_base64(text)
            key = name.decode("ascii")
        except (binascii.Error, UnicodeDecodeError):
            raise KernelError("the kernel sent data that is no base64", hint="restart the context") from None
        kept = self._parts.get(key, b"")
        if key in self._dropped or self._rich + len(raw) > MAX_RICH or (not kept and len(self._parts) >= _MAX_PARTS):
            self._cut = True
            self._rich -= len(kept)  # half an image is none
            self._parts.pop(key, None)
            if len(self._dropped) < _MAX_PARTS:
                self._dropped.add(key)
            return
        self._rich += len(raw)
        self._parts.setdefault(key, bytearray()).extend(raw)

    def _complete(self) -> dict[str, bytearray]:
        parts, self._parts = self._parts, {}
        self._dropped.clear()
        return parts

    async def _result(self, main: bool) -> None:
        parts = self._complete()
        made = RichResult({mime: bytes(raw) for mime, raw in parts.items() if _MIME.fullmatch(mime)}, main)
        if not made.data:
            return
        if len(self._results) >= MAX_RESULTS:
            self._cut = True
            return
        self._results.append(made)
        if self._on_result is not None:
            outcome = self._on_result(made)
            if outcome is not None:
                await outcome

    def _failed(self) -> CodeFailure:
        parts = self._complete()
        name, message, trace = (
            _ANSI.sub("", bytes(parts.get(part, b"")[:_MAX_FAILURE]).decode("utf-8", "replace"))
            for part in ("name", "message", "traceback")
        )
        return CodeFailure(name[:200] or "Error", message, trace)

    def result(self, kernel: Kernel, **more: Any) -> CodeResult:
        out, err = (b"".join(self._capture.parts[c]) for c in (Channel.OUT, Channel.ERR))
        failure = self._failure
        if failure is None and self.status:
            failure = CodeFailure("ExitStatus", f"the last command ended with exit code {self.status}")
        values: dict[str, Any] = {
            "stdout": out.decode("utf-8", "replace"),
            "stderr": err.decode("utf-8", "replace"),
            "results": tuple(self._results),
            "error": failure,
            "execution_count": self.count,
            "duration": 0.0 if self.began is None else time.monotonic() - self.began,
            "truncated": self._cut or self._written > len(out) + len(err),
            "context": kernel.name,
            "language": kernel.language,
            "exit_code": self.status or (1 if failure is not None else 0),
        }
        return CodeResult(**{**values, **more})


def _number(rest: bytes) -> int:
    digits = rest.partition(b" ")[0]
    return int(digits) if digits.isdigit() and len(digits) < 12 else 0


def attach_request(kernel: Kernel) -> Fields:
    out, err = kernel.offsets or (-1, -1)
    return wire_request(Op.ATTACH, (Tag.PID, kernel.pid), (Tag.FLAGS, 0), (Tag.FROM_OUT, out), (Tag.FROM_ERR, err))


def interrupt(stream: Stream, kernel: Kernel, *, tree: bool = False) -> None:
    """SIGINT to the kernel, or to it and all it started. A shell's command is what must be reached."""
    flags = 0 if tree or kernel.language == "shell" else int(SignalFlag.MAIN_ONLY)
    stream.ctrl(Fields((Tag.KIND, int(CtrlKind.SIGNAL)), (Tag.SIGNUM, 2), (Tag.FLAGS, flags)))


def new_cell() -> str:
    return secrets.token_hex(8)


class Running:
    """A cell that was sent, over the stream that it was sent on."""

    def __init__(self, kernel: Kernel, stream: Stream, cell: str, wishes: Wishes) -> None:
        self._kernel = kernel
        self._stream = stream
        self._cell = cell
        self._wishes = wishes
        self._collector = Collector(wishes)
        self._timers: list[asyncio.TimerHandle] = []
        self._late = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def finish(self) -> CodeResult:
        """Its result. Cancelling this interrupts the cell. KernelError if the kernel ends, Unfinished if the time is
        up and nothing helps."""
        try:
            async with asyncio.timeout(None) as limit:
                # A kernel that has only just been started may take its time; the cell's own begins with it.
                self._give(limit, 0.0 if self._kernel.early or self._kernel.begun else _STARTING)
                await self._follow(limit)
        except TimeoutError:
            if not self._late:
                raise  # a callback's own
            if self._collector.began is None:
                raise KernelError(
                    f"{self._kernel.describe()} did not begin with the cell in time: another one runs in it",
                    hint="wait longer, interrupt it, or use a context of your own",
                ) from None
            raise Unfinished(self._outcome()) from None
        except KernelError:
            raise
        except BaseException:
            if line := self._give_up():
                await self._stream.send(line)
            raise
        finally:
            self._disarm()
            self._stream.reset()
        return self._outcome()

    def _give(self, limit: asyncio.Timeout, least: float = 0.0) -> None:
        """From now on it has its time."""
        self._disarm()
        if self._wishes.timeout is not None:
            wait = max(self._wishes.timeout, least)
            self._timers = [asyncio.get_running_loop().call_later(wait, self._time_is_up, limit)]

    def _disarm(self) -> None:
        for timer in self._timers:
            timer.cancel()

    async def _follow(self, limit: asyncio.Timeout) -> None:
        started = await self._stream.started()
        begin = (started.integer(Tag.OFFSET_OUT, 0), started.integer(Tag.OFFSET_ERR, 0))
        reader = Reader(self._kernel.key, self._cell, early=self._kernel.early and begin == self._kernel.offsets)
        self._kernel.offsets = None
        last = b""
        while not reader.ended:
            piece = await self._stream.recv()
            if piece is None:
                error = ended(self._kernel, await self._stream.result(), last)
                worked = self._kernel.early or self._kernel.begun
                raise EndedBefore(error.message, hint=error.hint) if worked and self._collector.began is None else error
            if piece.channel == Channel.ERR:
                last = (last + piece.data)[-2000:]
            waiting = self._collector.began is None
            for part in reader.feed(piece.channel, piece.data):
                await self._collector.take(part)
            if waiting and self._collector.began is not None:
                self._kernel.begun = True
                if not self._late:
                    self._give(limit)
        taken = reader.taken
        self._kernel.offsets = (begin[0] + taken[0], begin[1] + taken[1])
        self._kernel.early = True
        self._kernel.seen = asyncio.get_running_loop().time()

    def _time_is_up(self, limit: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        self._late = True
        self._press(False)
        again = [loop.call_later(wait, self._press, True) for wait in PATIENCE[:-1]]
        self._timers += [*again, loop.call_later(PATIENCE[-1], limit.reschedule, loop.time() + PATIENCE[-1])]

    def _press(self, tree: bool) -> None:
        if line := self._give_up(tree):
            task = asyncio.ensure_future(self._stream.send(line))
            self._tasks.add(task)
            task.add_done_callback(self._sent)

    def _give_up(self, tree: bool = False) -> bytes | None:
        """Interrupt it, or take it back if it has not begun: what is to be sent for it."""
        kernel = self._kernel
        if self._collector.began is None:
            return languages.cancellation(kernel.language, kernel.key, self._cell)
        interrupt(self._stream, kernel, tree=tree)
        return languages.after_interrupt(kernel.language)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def _outcome(self) -> CodeResult:
        if not self._late:
            return self._collector.result(self._kernel)
        made = self._collector.result(self._kernel)
        trace = "" if made.error is None else made.error.traceback
        failure = CodeFailure(
            "Timeout", f"it was interrupted after {self._wishes.timeout:g} s: its time limit was reached", trace
        )
        return self._collector.result(self._kernel, error=failure, timed_out=True, exit_code=124)


def ended(kernel: Kernel, end: Fields, last: bytes) -> KernelError:
    """Why there is no kernel any more."""
    how = result_of(end, b"", b"").describe().removeprefix("it ")
    text = _ANSI.sub("", _FRAME.sub(b"", last).decode("utf-8", "replace")).strip()
    said = f"; its last words: {text[-800:]}" if text else ""
    if not kernel.early and not kernel.begun:
        hint = "use an image that has what the language needs, as sloplet/code-all has"
        if kernel.language == "python":
            hint = "look at its settings: contexts.create(python=...) names another interpreter"
        return KernelError(f"{kernel.describe()} could not be started: it {how}{said}", hint=hint)
    return KernelError(f"{kernel.describe()} {how}: its variables are gone{said}", hint=restart_hint(kernel.name))


def restart_hint(name: str) -> str:
    return f"contexts.restart({name!r}), or restart=True, starts it anew"
