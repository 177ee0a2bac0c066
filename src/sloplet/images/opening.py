"""Files of an image's tree that belong to subordinate ids: opened by a child in a user namespace, handed over as
descriptors. For readers only: nothing is ever opened for writing."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import SlopletError
from ..fs import open_in

_ALLOWED = os.O_RDONLY | os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NUMBER = 4
_MOST = 16384


def serve(arguments: dict[str, Any], fds: Sequence[int], tell: Callable[[int], None]) -> dict[str, Any]:
    """A job of ``userns``. ``fds``: the tree, and a socket that asks; until the other end closes it."""
    with socket.socket(fileno=os.dup(fds[1])) as asked:
        os.close(fds[1])
        while request := asked.recv(_MOST):
            flags, path = int.from_bytes(request[:_NUMBER], "little"), request[_NUMBER:]
            try:
                fd = open_in(fds[0], path, flags & _ALLOWED)
            except (OSError, ValueError) as error:
                asked.send((getattr(error, "errno", None) or errno.EINVAL).to_bytes(_NUMBER, "little"))
                continue
            try:
                socket.send_fds(asked, [bytes(_NUMBER)], [fd])
            finally:
                os.close(fd)
    return {}


class Opener:
    """Asks such a child, which is started when it is first needed. Any thread; ``close`` ends it."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def open(self, path: bytes, flags: int) -> int:
        """OSError; EngineError if there is no such child to be had."""
        with self._lock:
            if self._socket is None:
                self._start()
            assert self._socket is not None
            try:
                self._socket.send(flags.to_bytes(_NUMBER, "little") + path)
                said, fds, _, _ = socket.recv_fds(self._socket, _NUMBER, 1)
            except (BrokenPipeError, ConnectionResetError):
                said, fds = b"", []
            if len(said) < _NUMBER:
                self._give_up()
            number = int.from_bytes(said, "little")
            if number or not fds:
                raise OSError(number or errno.EIO, os.strerror(number or errno.EIO), os.fsdecode(path))
            return fds[0]

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket, self._failure = ours, None
        self._thread = threading.Thread(target=self._work, args=(theirs,), name="sloplet-open", daemon=True)
        self._thread.start()

    def _work(self, theirs: socket.socket) -> None:
        from . import userns

        try:
            userns.run("open", {}, [self._root, theirs.fileno()])
        except BaseException as error:
            self._failure = error
        finally:
            theirs.close()

    def _give_up(self) -> None:
        self._end()
        failure = self._failure
        raise failure if isinstance(failure, SlopletError) else OSError(errno.EIO, "the child that opens files ended")

    def _end(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._end()
