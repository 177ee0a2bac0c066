"""A TCP proxy that cuts connections: at any moment, between any two bytes, on either side."""

from __future__ import annotations

import random
import selectors
import socket
import struct
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

_RESET = struct.pack("ii", 1, 0)


class Cutter:
    """Passes connections on to ``(host, port)``. ``cut()`` breaks all there are; ``every`` breaks each after a random
    number of bytes up to that; ``dark`` takes bytes and passes none on, and no connection is refused."""

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        self._target = (host, port)
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._lines: set[tuple[socket.socket, socket.socket]] = set()
        self._over = False
        self.every: int | None = None
        self.dark = False
        self.cuts = 0
        self.taken = 0  #: connections
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._thread.join(10)

    def cut(self) -> int:
        """Break what is connected now; how many that were."""
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            self._break(line)
        return len(lines)

    def _break(self, line: tuple[socket.socket, socket.socket]) -> None:
        self.cuts += 1
        for one in line:
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._over:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            self.taken += 1
            try:
                there = socket.create_connection(self._target, 10)
            except OSError:
                here.close()
                continue
            threading.Thread(target=self._carry, args=(here, there), daemon=True).start()

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        line = (here, there)
        with self._lock:
            self._lines.add(line)
        left = self._random.randrange(1, self.every) if self.every else None
        chooser = selectors.DefaultSelector()
        chooser.register(here, selectors.EVENT_READ, there)
        chooser.register(there, selectors.EVENT_READ, here)
        try:
            while True:
                for key, _ in chooser.select():
                    data = key.fileobj.recv(65536 if left is None else min(65536, left))  # type: ignore[union-attr]
                    if not data:
                        return
                    if not self.dark:
                        key.data.sendall(data)
                    if left is not None:
                        left -= len(data)
                        if left <= 0:
                            self._break(line)
                            return
        except OSError:
            return
        finally:
            with self._lock:
                self._lines.discard(line)
            chooser.close()
            for one in line:
                with suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                one.close()
