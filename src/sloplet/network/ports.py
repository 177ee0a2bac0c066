"""Ports of sandboxes, listened on here: each connection is a DIAL stream, bytes both ways, whatever they mean.

A listener belongs to a sandbox's id. It stays while the sandbox is paused, woken or rolled back (a connection wakes
one that sleeps) and goes with it. Nothing is listened on that was not asked for, and only on 127.0.0.1 unless another
address was asked for by name.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol, cast

from ..controller import Port, Stream
from ..errors import PortUnavailable, SandboxDead, SandboxNotFound, SlopletError, SpecError
from ..wire.fields import Fields
from ..wire.mux import request
from ..wire.schema import Op, Tag
from ..wire.streams import HostStream
from .tie import Tie, close_socket

MOST_CONNECTIONS = 256  # of one listener; more wait in the kernel's queue
MOST_TOGETHER = 512  # of all listeners of a sandbox: half of its wire's streams stay for commands and files
MOST_LISTENERS = 256  # of one sandbox
_BACKLOG = 1024  # beyond it the kernel resets who comes
_OPENING = 60.0  # until a connection is through, a wake included
_JUST_WOKEN = 2.0  # a server may need a moment to listen again
_AGAIN = 0.05
_FULL = 0.1
_list = list  # the class has a method of that name


class Opener(Protocol):
    """A Controller, as far as it is needed here."""

    async def open(self, sandbox_id: str, request: Fields) -> Stream: ...


async def dial(opener: Opener, sandbox_id: str, port: int, patience: float = 0.0) -> HostStream:
    """A stream to a port inside, connected. ``patience``: how long a refusal is taken for "not yet"."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while True:
        stream = cast(HostStream, await opener.open(sandbox_id, request(Op.DIAL, (Tag.PORT, port))))
        try:
            await stream.started()
            return stream
        except BaseException as error:
            stream.reset()
            if not isinstance(error, SlopletError) or not was_refused(stream) or loop.time() >= deadline:
                raise
        await asyncio.sleep(_AGAIN)


def was_refused(stream: HostStream) -> bool:
    """Nothing listens there."""
    return stream.outcome is not None and stream.outcome.integer(Tag.ERRNO, 0) == errno.ECONNREFUSED


def check_port(value: object, *, any_free: bool = False) -> int:
    """A port number; 0, where that means any."""
    if isinstance(value, bool) or not isinstance(value, int) or not (0 if any_free else 1) <= value <= 65535:
        raise SpecError(f"{str(value)[:80]!r} is not a port", hint="a whole number from 1 to 65535")
    return value


def check_address(value: object) -> str:
    """An address of this machine to listen on."""
    if value == "127.0.0.1":  # nearly always, and ipaddress takes milliseconds to import
        return "127.0.0.1"
    import ipaddress

    try:
        return str(ipaddress.ip_address(value if isinstance(value, str) else ""))
    except ValueError:
        raise SpecError(
            f"{str(value)[:80]!r} is not an address to listen on", hint="for example 127.0.0.1, or ::1"
        ) from None


class Listener:
    """One listening socket, for one port of one sandbox."""

    def __init__(self, ports: Ports, sandbox_id: str, port: Port, listening: socket.socket) -> None:
        self.port = port
        self._ports = ports
        self._sandbox = sandbox_id
        self._socket = listening
        self._loop = asyncio.get_running_loop()
        self._accepting = self._closed = False
        self.serving = False  #: whether its sandbox runs, or sleeps
        self._opening: set[asyncio.Task[None]] = set()
        self._ties: set[Tie] = set()

    def begin(self) -> None:
        """Serve who waits, and who comes."""
        self.serving = True
        self.accept()

    @property
    def count(self) -> int:
        """How many are connected, or about to be."""
        return len(self._opening) + len(self._ties)

    def accept(self) -> None:
        """Take connections, as far as there is room."""
        wanted = not self._closed and self.count < MOST_CONNECTIONS and self._ports.has_room(self._sandbox)
        if wanted and not self._accepting:
            self._loop.add_reader(self._socket, self._on_readable)
        elif self._accepting and not wanted:
            self._loop.remove_reader(self._socket)
        self._accepting = wanted

    def _on_readable(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # EMFILE and its kin: those who wait go on waiting
            self._loop.remove_reader(self._socket)
            self._accepting = False
            self._loop.call_later(_FULL, self.accept)
            return
        task = asyncio.ensure_future(self._serve(connection))
        self._opening.add(task)
        task.add_done_callback(self._opened)
        self._ports.balance(self._sandbox)

    async def _serve(self, connection: socket.socket) -> None:
        patience = 0.0 if self._ports.is_awake(self._sandbox) else _JUST_WOKEN
        try:
            async with asyncio.timeout(_OPENING):
                stream = await dial(self._ports.opener, self._sandbox, self.port.inside, patience)
        except BaseException as error:
            close_socket(connection, reset=True)
            if isinstance(error, (SandboxNotFound, SandboxDead)):
                self._loop.call_soon(self._ports.close, self._sandbox)
            if isinstance(error, (SlopletError, TimeoutError)):
                return
            raise
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tie = Tie(stream, connection, self._untied)
        self._ties.add(tie)
        tie.start()

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._loop.call_exception_handler(
                {"message": "sloplet: a connection to a port failed", "exception": task.exception(), "task": task}
            )
        self._ports.balance(self._sandbox)

    def _untied(self, tie: Tie) -> None:
        self._ties.discard(tie)
        self._ports.balance(self._sandbox)

    def close(self) -> None:
        """Listen no more, and cut what is connected. Idempotent."""
        self._closed = True
        self.accept()  # no more
        self._socket.close()
        for task in self._opening:
            task.cancel()
        for tie in _list(self._ties):
            tie.cut()

    def forget(self) -> None:
        """In a forked child, or without the loop: only the descriptors go."""
        self._closed = True
        self._socket.close()
        for tie in self._ties:
            tie.forget()


class Ports:
    """All listeners of one holder. ``is_awake`` tells of a sandbox whether it runs just now. Without ``listens`` there
    are none: of a server's tenants nothing listens on its machine, where others could connect who have no key."""

    def __init__(
        self, opener: Opener, is_awake: Callable[[str], bool] = lambda sandbox_id: True, *, listens: bool = True
    ) -> None:
        self._listens = listens
        self.opener = opener
        self.is_awake = is_awake
        self._listeners: dict[str, _list[Listener]] = {}
        #: Of those to be listened on at every start, which are not: "" if nobody wants it any more, else why not.
        self._missing: dict[str, dict[int, str]] = {}
        self._dialled: set[Tie] = set()

    def expose(
        self, sandbox_id: str, port: int, host_port: int = 0, address: str = "127.0.0.1", *, accept: bool = True
    ) -> Port:
        """See ``Controller.expose``. ``accept`` False: those who connect wait, until ``begin``."""
        check_port(port)
        check_port(host_port, any_free=True)
        address = check_address(address)
        if not self._listens:
            raise PortUnavailable(
                "ports of a server's tenants are not listened on at its machine",
                hint="they have names: box.public_url()",
            )
        there = self._listeners.setdefault(sandbox_id, [])
        try:
            for listener in there:
                known = listener.port
                if (known.inside, known.address) == (port, address) and host_port in (0, known.outside):
                    return known
            if len(there) >= MOST_LISTENERS:
                raise PortUnavailable(f"a sandbox can have {MOST_LISTENERS} ports", hint="give some up: unexpose(port)")
            listening = _listen(address, host_port)
            listener = Listener(self, sandbox_id, Port(port, address, listening.getsockname()[1]), listening)
            there.append(listener)
        finally:
            if not there:
                del self._listeners[sandbox_id]
        self._found(sandbox_id, port)
        if accept:
            listener.begin()
        return listener.port

    def _found(self, sandbox_id: str, port: int) -> None:
        missing = self._missing.get(sandbox_id, {})
        missing.pop(port, None)
        if not missing:
            self._missing.pop(sandbox_id, None)

    def has_room(self, sandbox_id: str) -> bool:
        return sum(listener.count for listener in self._listeners.get(sandbox_id, ())) < MOST_TOGETHER

    def balance(self, sandbox_id: str) -> None:
        """A connection came or went: who may take the next?"""
        for listener in self._listeners.get(sandbox_id, ()):
            if listener.serving:
                listener.accept()

    def reserve(self, sandbox_id: str, ports: Iterable[tuple[int, int]]) -> None:
        """Listen for all of these, (inside, outside), or for none. Nobody is served before ``begin``."""
        try:
            for inside, outside in ports if self._listens else ():
                self.expose(sandbox_id, inside, outside, accept=False)
        except BaseException:
            self.close(sandbox_id)
            raise

    def begin(self, sandbox_id: str, ports: Iterable[tuple[int, int]] = ()) -> str:
        """The sandbox runs: serve those who wait. Those of ``ports`` that are not listened on yet are now, as far as
        they can be (why not, if not) and nobody has said otherwise."""
        problem = ""
        for inside, outside in ports if self._listens else ():
            there = [each for each in self.list(sandbox_id) if each.inside == inside and not each.problem]
            given_up = self._missing.get(sandbox_id, {}).get(inside) == ""
            if not given_up and (outside or not there):
                try:
                    self.expose(sandbox_id, inside, outside, accept=False)
                except SlopletError as error:
                    problem = str(error)
                    self._missing.setdefault(sandbox_id, {})[inside] = problem
        for listener in self._listeners.get(sandbox_id, ()):
            listener.begin()
        return problem

    def list(self, sandbox_id: str) -> _list[Port]:
        """What is listened on, and what should be and could not."""
        found = [listener.port for listener in self._listeners.get(sandbox_id, ())]
        found += (Port(inside, "", 0, why) for inside, why in self._missing.get(sandbox_id, {}).items() if why)
        return sorted(found, key=lambda port: (port.inside, port.outside))

    def holders(self) -> set[str]:
        """The sandboxes of which something has to be known here: what is listened on, and what is not any more."""
        return self._listeners.keys() | {each for each, ports in self._missing.items() if "" in ports.values()}

    def unexpose(self, sandbox_id: str, port: int, *, given: bool = False) -> None:
        """``given``: it is one to be listened on at every start; from now on not, until ``expose``."""
        if given:
            self._missing.setdefault(sandbox_id, {})[port] = ""
        for listener in self._listeners.pop(sandbox_id, []):
            if listener.port.inside == port:
                listener.close()
            else:
                self._listeners.setdefault(sandbox_id, []).append(listener)

    def close(self, sandbox_id: str) -> None:
        """The sandbox is gone. Idempotent."""
        self._missing.pop(sandbox_id, None)
        for listener in self._listeners.pop(sandbox_id, ()):
            listener.close()

    def close_all(self) -> None:
        for sandbox_id in _list(self._listeners.keys() | self._missing.keys()):
            self.close(sandbox_id)

    def forget(self) -> None:
        """After a fork they are the parent's; at interpreter exit there is no loop: only our descriptors go."""
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.forget()
        self._listeners.clear()
        for tie in self._dialled:
            tie.forget()

    async def dial(self, sandbox_id: str, port: int, opener: Opener | None = None) -> socket.socket:
        """A socket whose other end is a port inside: for links between sandboxes. ``opener``: who holds that one, if
        it is not who holds ours."""
        stream = await dial(opener or self.opener, sandbox_id, port)
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            stream.reset()
            raise PortUnavailable(f"no connection can be made: {error.strerror}") from error
        theirs.setblocking(False)
        tie = Tie(stream, ours, self._dialled.discard)
        self._dialled.add(tie)
        tie.start()
        return theirs


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise _unavailable(address, port, error) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((address, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise _unavailable(address, port, error) from error
    return listening


def _unavailable(address: str, port: int, error: OSError) -> PortUnavailable:
    hint = "choose another, or 0 for any that is free"
    if error.errno == errno.EACCES:
        hint = "ports below 1024 are root's; choose another"
    elif error.errno == errno.EADDRNOTAVAIL:
        hint = "that is no address of this machine"
    why = os.strerror(error.errno) if error.errno else str(error)
    return PortUnavailable(f"port {port} of {address} cannot be listened on: {why}", hint=hint)
