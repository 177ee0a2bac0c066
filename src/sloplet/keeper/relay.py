"""One client's stream tied to one sandbox's stream, frame for frame, with end-to-end credit.

No task and no buffer of its own: ``_pump`` runs whenever something arrives on either side and moves what may be
moved. What cannot move stays in the streams' queues, which credit bounds:

- output: the sandbox gets credit only as the client grants it, and never more than one window (256 KiB) beyond
  what was passed on. A client that does not read, or grants 16 MiB, costs 256 KiB a stream.
- input: the client's window is refilled only after the sandbox's credit took the bytes. A few streams of a client at a
  time that bring much, to a sandbox that takes it, get a larger window (1 MiB): fewer, larger steps.

A client's RESET, or its loss (``abandon``), resets the sandbox's stream: commands that asked for it die,
detached ones live on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import KeeperError, SlopletError
from ..wire.fields import Fields
from ..wire.mux import AgentStream, HostStream
from ..wire.schema import INITIAL_CREDIT, MAX_PAYLOAD, Tag
from . import error_close

_LUMP = INITIAL_CREDIT // 2
_MUCH = 4 * INITIAL_CREDIT
_OURS = (Tag.BODY, Tag.SANDBOX)


class Relay:
    """``front`` is the client's, ``back`` the sandbox's. ``on_done`` is called once, after the CLOSE was passed on."""

    def __init__(
        self,
        front: AgentStream,
        back: HostStream,
        on_done: Callable[[Relay], None],
        may_grow: Callable[[], bool] = lambda: False,
    ) -> None:
        self._front = front
        self._may_grow = may_grow
        self.grown = False  #: whether its input has a larger window
        self._moved = 0  # input since it was last thought about
        self._lump = _LUMP
        self._back = back
        self._on_done = on_done
        self._allowed = INITIAL_CREDIT  # what the sandbox may still send, or has sent and lies in our queue
        self._taken = 0  # input that was passed on and not yet granted back to the client
        self._rest = b""  # input that the sandbox's credit does not cover yet
        self._replied = False
        self._gave_up = False
        self._done = False
        self._waits: dict[object, asyncio.Task[None]] = {}

    def start(self) -> None:
        self._front.on_change(self._pump)
        self._back.on_change(self._pump)
        self._pump()

    def abandon(self) -> None:
        """The client is gone."""
        if not self._done:
            self._stop()
            self._back.reset()

    def _pump(self) -> None:
        """Runs inside the muxes' dispatch: it must never raise, or the wrong connection would pay for it."""
        if self._done:
            return
        try:
            if self._front.was_reset and not self._gave_up:
                self._gave_up = True
                self._rest = b""
                self._back.reset()
            self._outwards()
            if not self._done and not self._gave_up:
                self._inwards()
        except SlopletError as error:
            self._fail(error)
        except Exception as error:
            self._fail(KeeperError(f"the keeper could not pass an answer on: {type(error).__name__}: {error}"))

    def _outwards(self) -> None:
        front, back = self._front, self._back
        if not self._replied and back.reply is not None:
            self._replied = True
            front.reply(_cleaned(back.reply))
        while True:
            if front.mux.congested:
                self._when_drained(front)
                return
            piece = back.take()
            if piece is None:
                break
            # Credit always suffices: the sandbox was granted only what the client had granted.
            front.send_now(piece.data, piece.channel)
            self._allowed -= len(piece.data)
        if back.outcome is not None:
            self._close(_cleaned(back.outcome))
        elif back.mux.error is not None:
            self._fail(back.mux.error)
        elif back.peer_ended:
            front.end_now()
        elif not self._gave_up:
            target = min(front.credit, INITIAL_CREDIT)
            more = target - self._allowed
            # In lumps; but all that a sparing client granted is passed on at once, or both would wait.
            if more > 0 and (more >= _LUMP or target == front.credit):
                self._allowed += more
                back.grant(more)

    def _inwards(self) -> None:
        front, back = self._front, self._back
        empty = False
        while not back.mux.congested:
            control = front.take_control()
            if control is not None:
                back.ctrl(control)
                continue
            if not self._rest:
                piece = front.take()
                if piece is None:
                    empty = True
                    break
                self._rest = piece.data
            sent = back.send_now(self._rest)
            if not sent:
                break  # its CREDIT calls us again
            self._rest = self._rest[sent:]
            self._taken += sent
        else:
            self._when_drained(back)
        if self._taken >= self._lump:
            front.grant(self._taken)
            self._moved += self._taken
            self._taken = 0
            if self._moved >= _MUCH and not self.grown:
                self._grow()
        if empty and front.peer_ended:
            back.end_now()

    def _grow(self) -> None:
        self._moved = 0
        if self._may_grow():
            self.grown = True
            self._lump = 2 * INITIAL_CREDIT
            self._front.grant(3 * INITIAL_CREDIT)

    def _when_drained(self, stream: AgentStream | HostStream) -> None:
        """Go on when the stream's connection has room again."""
        mux = stream.mux
        if mux in self._waits:
            return

        async def wait() -> None:
            try:
                await mux.drained()
            except SlopletError:
                pass  # the connection is lost, and _pump sees that
            self._waits.pop(mux, None)
            self._pump()

        self._waits[mux] = asyncio.ensure_future(wait())

    def _fail(self, error: SlopletError) -> None:
        self._back.reset()
        self._close(error_close(error))

    def _close(self, fields: Fields) -> None:
        self._stop()
        if Tag.OOM in fields and len(fields.encode()) > MAX_PAYLOAD:  # it was full, and the runtime added OOM
            fields = error_close(KeeperError("the sandbox's answer is too long"))
        self._front.close(fields)

    def _stop(self) -> None:
        self._done = True
        self._front.on_change(None)
        self._back.on_change(None)
        for task in self._waits.values():
            task.cancel()
        self._waits.clear()
        self._on_done(self)


def _cleaned(fields: Fields) -> Fields:
    """An agent must not speak with the keeper's voice."""
    if any(tag in _OURS for tag, _ in fields):
        return Fields(*((tag, value) for tag, value in fields if tag not in _OURS))
    return fields
