"""One connection to the keeper: made, checked (whose it is, which version), and its streams' errors rebuilt."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import weakref
from pathlib import Path

from .. import __version__
from ..errors import KeeperError, ProtocolError, SandboxDead, SlopletError
from ..wire.fields import Fields
from ..wire.mux import HostMux, HostStream
from ..wire.schema import Tag
from . import ACTS_FOR_OTHERS, error_of, unreachable

HELLO_TIMEOUT = 10.0
_UCRED = struct.Struct("3i")


class KeeperStream(HostStream):
    """A stream through the keeper: an error that the keeper made keeps its class."""

    def _checked(self, result: Fields) -> Fields:
        error = error_of(result)
        if error is not None:
            raise error
        return super()._checked(result)


class KeeperMux(HostMux):
    stream_type = KeeperStream


class Connection:
    """A socket to a keeper that has said HELLO. Closed explicitly, when lost, or with the object."""

    def __init__(self, path: Path, connected: socket.socket) -> None:
        self.path = path
        self.pid, self.uid = peer_of(connected)
        self.version = ""
        fd = connected.detach()
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False
        self.mux = KeeperMux(fd, fd, on_lost=self._on_lost, refuse=False)

    async def greet(self, *, acting: bool = False) -> None:
        """Exchange HELLO. Nothing is asked before: a keeper that is just leaving has then done nothing for us."""
        self.mux.hello(greeting(acting=acting))
        try:
            async with asyncio.timeout(HELLO_TIMEOUT):
                hello = await self.mux.peer_hello()
        except TimeoutError:
            raise KeeperError(
                f"the keeper (pid {self.pid}) does not answer",
                hint=f"if it hangs, `kill -9 {self.pid}` ends it and its sandboxes",
            ) from None
        self.version = hello.text(Tag.MESSAGE, "")

    @property
    def lost(self) -> bool:
        return self.mux.error is not None

    @property
    def same_version(self) -> bool:
        return self.version == __version__

    def check_version(self) -> None:
        if not self.same_version:
            raise KeeperError(
                f"the keeper (pid {self.pid}) is of sloplet {self.version or '?'}, and this is {__version__}",
                hint=f"use sloplet {self.version or 'of its version'} for its sandboxes, or end them with `sloplet rm`",
            )

    def close(self) -> None:
        self.mux.fail(SandboxDead("the connection to the keeper was closed"))
        self._close()

    def forget(self) -> None:
        """In a forked child: the connection is the parent's."""
        self._close()

    def _on_lost(self, error: SlopletError) -> None:
        if isinstance(error, ProtocolError):
            error = KeeperError(
                f"the keeper (pid {self.pid}) cannot be understood: {error.message}",
                hint=f"if it is of another version, use that; `kill {self.pid}` ends it and its sandboxes",
            )
        else:
            error = SandboxDead(
                "the connection to the keeper was lost: it ended, and its sandboxes with it", hint="see `sloplet ls`"
            )
        self.mux.fail(error)
        self._close()


def greeting(*, acting: bool = False) -> Fields:
    """What a client says of itself. ``acting``: it acts for others."""
    fields = Fields((Tag.MESSAGE, __version__), (Tag.PID, os.getpid()))
    return fields.add(Tag.FLAGS, ACTS_FOR_OTHERS) if acting else fields


async def connect(path: Path, *, acting: bool = False) -> Connection | None:
    """A connection that has been greeted; None if nobody listens there."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + HELLO_TIMEOUT
    while True:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            opened.connect(os.fspath(path))
        except OSError as error:
            opened.close()
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
                return None
            if error.errno != errno.EAGAIN or loop.time() > deadline:  # EAGAIN: its backlog is full
                raise unreachable(path, error) from error
            await asyncio.sleep(0.01)
            continue
        connection = Connection(path, opened)
        if connection.uid not in (os.geteuid(), 0):
            connection.close()
            raise KeeperError(
                f"the socket {path} is served by user {connection.uid}, and this is user {os.geteuid()}",
                hint="set SLOPLET_HOME to a folder of your own",
            )
        try:
            await connection.greet(acting=acting)
        except SandboxDead:
            continue  # it was leaving: nothing was asked yet
        except BaseException:
            connection.close()
            raise
        return connection


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """The pid and the uid of the other side of a Unix socket, by the kernel's word."""
    pid, uid, _ = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid
