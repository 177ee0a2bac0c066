"""A connection to a keeper whose bytes are passed on: greeted, then raw, both ways. For the tunnel (``wire.py``)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

from .. import __version__
from ..errors import KeeperError, ProtocolError
from ..keeper.connection import HELLO_TIMEOUT, greeting, peer_of
from ..wire.fields import Fields, decode_fields
from ..wire.frames import FROM_AGENT, Frame, FrameDecoder, encode_frame
from ..wire.outgoing import Outgoing
from ..wire.schema import HEADER_SIZE, MAX_PAYLOAD, VERSION, FrameType, Tag
from ..wire.walk import Walker

_READ = 4 * (MAX_PAYLOAD + HEADER_SIZE)  # full frames, mostly whole
_SENDS = FROM_AGENT - {FrameType.OPEN, FrameType.RESET}  # a keeper opens nothing of its own
_STOPS = frozenset({FrameType.CLOSE, FrameType.PING, FrameType.PONG})


class KeeperLink:
    """``on_data`` gets runs of whole frames, and each CLOSE, PING and PONG; ``on_lost`` is called once, unless closed
    before; ``on_empty`` when what had to wait was written."""

    def __init__(
        self,
        connected: socket.socket,
        on_data: Callable[[bytes | Frame], None],
        on_lost: Callable[[], None],
        on_empty: Callable[[], None],
    ) -> None:
        self._socket = connected
        self._on_data = on_data
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._walker = Walker(_SENDS, _STOPS)
        self._outgoing = Outgoing(connected.fileno(), on_empty, lambda error: self._lost(), lambda: None)
        self._closed = self._paused = False
        self._loop.add_reader(connected, self._on_readable)

    @property
    def waiting(self) -> int:
        """Bytes that the keeper has not taken yet."""
        return self._outgoing.size

    def write(self, data: bytes) -> None:
        self._outgoing.put(data)

    def pause(self) -> None:
        """Read nothing until ``resume``."""
        if not self._paused and not self._closed:
            self._paused = True
            self._loop.remove_reader(self._socket)

    def resume(self) -> None:
        if self._paused and not self._closed:
            self._paused = False
            self._loop.add_reader(self._socket, self._on_readable)

    def close(self) -> None:
        """The keeper gives up all that was opened here. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket)
            self._outgoing.stop()
            self._socket.close()

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        try:
            for item in self._walker.walk(data):
                self._on_data(item)
        except ProtocolError:
            self._lost()

    def _lost(self) -> None:
        if not self._closed:
            self.close()
            self._on_lost()


async def connect(
    path: Path,
    on_data: Callable[[bytes | Frame], None],
    on_lost: Callable[[], None],
    on_empty: Callable[[], None],
) -> KeeperLink | None:
    """To the keeper that listens there; None if nobody does, or it left before it said HELLO. KeeperError."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(HELLO_TIMEOUT):
            if await _greeted(opened, path):
                return KeeperLink(opened, on_data, on_lost, on_empty)
    except TimeoutError:
        opened.close()
        raise KeeperError("the keeper does not answer", hint="see its log in SLOPLET_HOME/run") from None
    except BaseException:
        opened.close()
        raise
    opened.close()
    return None


async def _greeted(opened: socket.socket, path: Path) -> bool:
    """Exchange HELLO. False if the keeper is gone."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            try:
                opened.connect(os.fspath(path))
                break
            except BlockingIOError:  # its backlog is full
                await asyncio.sleep(0.01)
        uid = peer_of(opened)[1]
        if uid not in (os.geteuid(), 0):
            raise KeeperError(f"the keeper's socket is served by user {uid}")
        hello = Fields((Tag.VERSION, VERSION), *greeting(acting=True)).encode()
        await loop.sock_sendall(opened, encode_frame(FrameType.HELLO, 0, hello))
        decoder, frames = FrameDecoder(frozenset({FrameType.HELLO})), list[Frame]()
        while not frames:  # it says nothing else before it is asked
            piece = await loop.sock_recv(opened, 65536)
            if not piece:
                return False
            frames = decoder.feed(piece)
    except OSError:
        return False
    theirs = decode_fields(frames[0].payload)
    if theirs.text(Tag.MESSAGE, "") != __version__:
        raise KeeperError(
            f"the keeper is of sloplet {theirs.text(Tag.MESSAGE, '?')[:40]}, the server of {__version__}",
            hint="end its sandboxes, or run a server of that version",
        )
    return True
