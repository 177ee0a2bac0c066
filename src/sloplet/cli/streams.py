"""This process's own stdin, stdout and stderr, byte-exact and without ever holding up the event loop.

The file descriptors are shared with whoever started us, so they are never made non-blocking: that would change them for
the shell too. Reading waits for readiness; writing that might block happens in a thread.
"""

from __future__ import annotations

import asyncio
import os
import queue
import select
import stat
import threading
from collections.abc import AsyncIterator

_READ_SIZE = 65536
_PIPE_BUF = 4096  # a pipe that polls as writable takes this much at once


async def read_chunks(fd: int) -> AsyncIterator[bytes]:
    """What arrives on ``fd``, as it arrives, until its end."""
    loop = asyncio.get_running_loop()
    pollable = True
    while True:
        if pollable:
            ready: asyncio.Future[None] = loop.create_future()
            try:
                loop.add_reader(fd, _wake, ready)
            except PermissionError:  # a regular file, /dev/null: always ready
                pollable = False
            else:
                try:
                    await ready
                finally:
                    loop.remove_reader(fd)
        try:
            data = os.read(fd, _READ_SIZE)
        except BlockingIOError:
            continue
        except OSError:  # a terminal that went away
            return
        if not data:
            return
        yield data


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Output:
    """Writes bytes to a file descriptor. ``write`` raises OSError: BrokenPipeError when nobody reads any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        mode = os.fstat(fd).st_mode
        self._never_blocks = stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not os.isatty(fd))
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._jobs: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] | None = None
        self.waiting: asyncio.Future[None] | None = None  #: the write that our reader has not taken yet

    async def write(self, data: bytes) -> None:
        """Returns when all of it is written. Called by one task at a time."""
        if self._never_blocks or (len(data) <= _PIPE_BUF and self._poll.poll(0)):
            try:
                data = data[os.write(self.fd, data) :]
            except BlockingIOError:
                pass
            if not data:
                return
        await self._in_thread(data)

    async def _in_thread(self, data: bytes) -> None:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # A daemon: a reader that never reads must not keep us from ending.
            threading.Thread(target=self._serve, args=(self._jobs,), daemon=True).start()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put((data, done))
        self.waiting = done
        try:
            await done
        finally:
            self.waiting = None

    def _serve(self, jobs: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]]) -> None:
        while True:
            data, done = jobs.get()
            failure: OSError | None = None
            try:
                self._write_all(data)
            except OSError as error:
                failure = error
            try:
                done.get_loop().call_soon_threadsafe(_finish, done, failure)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:  # whoever shares it made it non-blocking
                self._poll.poll()


def _finish(done: asyncio.Future[None], failure: OSError | None) -> None:
    if not done.done():
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)
