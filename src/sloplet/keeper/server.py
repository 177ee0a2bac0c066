"""The keeper's side: the Runtime behind a Unix socket. One loop, one AgentMux per client.

It leaves when it holds no sandbox and nobody is connected. Leaving loses nothing: the socket's name goes first,
under the keeper's lock, and a client sends no request before it has the keeper's HELLO, so whoever comes
too late finds nobody and starts the next keeper.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from .. import __version__
from ..errors import KeeperError, SlopletError
from ..runtime import Runtime
from ..state.home import Home, unwritable
from ..wire.fields import Fields
from ..wire.mux import AgentMux, AgentStream, HostStream
from ..wire.schema import Op, Tag
from . import ACTS_FOR_OTHERS, LEAVING, error_close
from .connection import peer_of
from .control import Control
from .relay import Relay

_HELLO_TIMEOUT = 10.0
_FIRST_CLIENT = 2.0
_MAX_CLIENTS = 1024
_MAX_PENDING = 4 << 20
_MAX_GROWN = 8  # streams of a client that may bring much at a time

Log = Callable[[str], None]


class Server:
    """Serves until it is idle or told to stop. The caller holds the keeper's lock for as long."""

    def __init__(self, home: Home, runtime: Runtime, *, idle: float, log: Log) -> None:
        self.home = home
        self.runtime = runtime
        self.log = log
        self.clients: set[Client] = set()
        self.met = False  # whether a client has come at all
        self.control = Control(self)
        self._idle = idle
        self._path = Path()
        self._listener: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()
        self._reason = ""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, ready: Callable[[], None]) -> None:
        """Listen, tell ``ready``, serve, end everything."""
        loop = asyncio.get_running_loop()
        self._path = self.home.socket_path()
        await loop.run_in_executor(None, self.runtime.reap)
        self._listener = _listen(self._path)
        self.runtime.on_gone = self.consider_leaving
        loop.add_reader(self._listener, self._accept)
        ready()
        self.consider_leaving()
        try:
            await self._over.wait()
        finally:
            await self._end()

    def stop(self, reason: str) -> None:
        """End all sandboxes and leave. ``reason`` goes on their records."""
        if not self._over.is_set():
            self.log(f"stopping: {reason}")
            self._reason = reason
            self.retire()

    def retire(self) -> None:
        """Take no more clients, and leave; synchronous, so that nothing can begin in between."""
        self._over.set()
        if self._listener is not None:
            with suppress(OSError):
                os.unlink(self._path)
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    @property
    def leaving(self) -> bool:
        return self._over.is_set()

    @property
    def busy(self) -> int:
        """How many sandboxes are held or being made."""
        return self.runtime.held + self.control.creating

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a request failed", "exception": task.exception(), "task": task}
            )

    # -- leaving -----------------------------------------------------------------------

    def consider_leaving(self) -> None:
        """Something ended: leave after a while, unless somebody comes."""
        if not self.clients and not self.busy and not self.leaving:
            # Whoever had us started is on its way; a connection without HELLO was only a look whether we are here.
            self._arm(self._idle if self.met else max(self._idle, _FIRST_CLIENT))

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._leave_if_idle)

    def _leave_if_idle(self) -> None:
        if not self.clients and not self.busy and not self.leaving:
            self.log("leaving: idle")
            self.retire()

    async def _end(self) -> None:
        self.retire()
        if self._timer is not None:
            self._timer.cancel()
        await self.runtime.end_all(self._reason or "its keeper ended")
        for client in list(self.clients):
            client.drop(KeeperError(LEAVING))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A create that was under way may have finished in between.
        await self.runtime.end_all(self._reason or "its keeper ended")
        await self.runtime.aclose()

    # -- clients -----------------------------------------------------------------------

    def _accept(self) -> None:
        listener = self._listener
        if listener is None:
            return
        for _ in range(64):
            if len(self.clients) >= _MAX_CLIENTS:
                self._accept_later()
                return
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # EMFILE and its kin
                self.log(f"cannot take a client: {error}")
                self._accept_later()
                return
            if (uid := peer_of(connection)[1]) not in (os.geteuid(), 0):
                self.log(f"refused user {uid}")
                connection.close()
                continue
            if self._timer is not None:
                self._timer.cancel()
            self.clients.add(Client(self, connection))

    def _accept_later(self) -> None:
        loop, listener = asyncio.get_running_loop(), self._listener
        if listener is not None:
            loop.remove_reader(listener)
            loop.call_later(0.1, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        if self._listener is listener:
            asyncio.get_running_loop().add_reader(listener, self._accept)


class Client:
    """One connection."""

    def __init__(self, server: Server, connection: socket.socket) -> None:
        self.server = server
        self.gone = False
        self.using: set[str] = set()  # sandboxes that this program has made, woken or asked, and not released
        self._socket = connection
        self._relays: set[Relay] = set()
        self._pending = 0
        fd = connection.fileno()
        self._mux = AgentMux(fd, fd, self._stream, on_lost=self.drop)
        self._mux.hello(
            Fields((Tag.MESSAGE, __version__), (Tag.PID, os.getpid()), (Tag.COUNT, server.busy)),
        )
        self._timer = asyncio.get_running_loop().call_later(_HELLO_TIMEOUT, self._check_hello)

    def _check_hello(self) -> None:
        if self._mux.peer is None:
            self.drop(KeeperError("no HELLO"))

    @property
    def same_version(self) -> bool:
        return self._mux.peer is not None and self._mux.peer.text(Tag.MESSAGE, "") == __version__

    def use(self, *sandboxes: str) -> None:
        """This program uses them from now on, until it releases them. One that acts for others (a server) does not: it
        knows itself whom it acts for."""
        hello = self._mux.peer
        if hello is None or not hello.integer(Tag.FLAGS, 0) & ACTS_FOR_OTHERS:
            self.using.update(sandboxes)

    def drop(self, error: SlopletError) -> None:
        """The connection is lost, or not wanted any more. Idempotent."""
        if self.gone:
            return
        self.gone = True
        self._timer.cancel()
        for relay in list(self._relays):
            relay.abandon()
        self._mux.fail(error)
        self._socket.close()
        self.server.clients.discard(self)
        self.server.consider_leaving()

    def _stream(self, stream: AgentStream) -> None:
        self.server.met = True
        op = stream.request.integer(Tag.OP)
        if Tag.SANDBOX in stream.request:
            self.server.background(self._open(stream))
        elif op == Op.CONTROL:
            self.server.background(self.server.control.serve(self, stream))
        else:
            stream.close(error_close(KeeperError(f"operation {op} names no sandbox")))

    async def _open(self, stream: AgentStream) -> None:
        """Open the stream in its sandbox and tie the two together."""
        sandbox_id = stream.request.text(Tag.SANDBOX)
        request = Fields(*((tag, value) for tag, value in stream.request if tag not in (Tag.SANDBOX, Tag.STATE)))
        wake = Tag.STATE not in stream.request
        stream.request = Fields((Tag.OP, request.integer(Tag.OP)))  # the rest may be long: not kept while it runs
        size = sum(len(value) for _, value in request if isinstance(value, bytes))
        self._hold(size)
        try:
            if not self.same_version:
                raise other_version()
            back = cast(HostStream, await self.server.runtime.open(sandbox_id, request, wake=wake))
            self.use(sandbox_id)
        except SlopletError as error:
            if not self.gone:
                stream.close(error_close(await self.server.control.why_closed(sandbox_id, error)))
            return
        finally:
            self._hold(-size)
        back.request = stream.request
        if self.gone:
            back.reset()
            return
        relay = Relay(stream, back, self._relays.discard, self._may_grow)
        self._relays.add(relay)
        relay.start()

    def _may_grow(self) -> bool:
        return sum(relay.grown for relay in self._relays) < _MAX_GROWN

    def _hold(self, size: int) -> None:
        """Requests that wait for a sandbox which does not read them: bounded, by not reading more of them."""
        was, self._pending = self._pending > _MAX_PENDING, self._pending + size
        now = self._pending > _MAX_PENDING
        if now and not was:
            self._mux.pause()
        elif was and not now:
            self._mux.resume()


def other_version() -> KeeperError:
    return KeeperError(
        f"the keeper (pid {os.getpid()}) is of sloplet {__version__}, this program of another version",
        hint="use that version, or end its sandboxes with `sloplet rm`",
    )


def _listen(path: Path) -> socket.socket:
    """Bind the socket. The keeper's lock is held, so what is there is stale; but only a socket of ours is removed."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise KeeperError(f"{path} is in the way of the keeper's socket", hint=f"remove it: rm -r '{path}'")
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise unwritable(path, error) from error
    finally:
        os.umask(before)
    return listener
