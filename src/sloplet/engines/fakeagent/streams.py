"""What a fake process reads and writes: pipes, devices, open files. Reference-counted, bounded, awaitable."""

from __future__ import annotations

import asyncio
import errno
import os

from .vfs import Node, Vfs, fail

PIPE_SIZE = 65536
ZEROS = bytes(65536)


class Bell:
    """Wakes everybody who waits. Waiting is cancel-safe: what is waited for is checked again afterwards."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def ring(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class File:
    """An open file description."""

    tty = False
    node: Node | None = None

    def __init__(self) -> None:
        self.users = 1

    async def read(self, most: int = 65536) -> bytes:
        """Up to ``most`` bytes; b"" at the end."""
        raise fail(errno.EBADF, "read")

    async def write(self, data: bytes) -> None:
        """All of it. BrokenPipeError when nobody can read it."""
        raise fail(errno.EBADF, "write")

    def dup(self) -> File:
        self.users += 1
        return self

    def close(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.closed()

    def closed(self) -> None:
        """The last user is gone."""


class Device(File):
    """/dev/null, zero, full, random."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    async def read(self, most: int = 65536) -> bytes:
        await asyncio.sleep(0)
        if self.name == "null":
            return b""
        if self.name == "random":
            return os.urandom(min(most, 65536))
        return ZEROS if most >= len(ZEROS) else ZEROS[:most]

    async def write(self, data: bytes) -> None:
        await asyncio.sleep(0)
        if self.name == "full":
            raise fail(errno.ENOSPC, "write")


class Pipe:
    """The shared middle of a pipe."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.bell = Bell()
        self.readers = 1
        self.writers = 1


class PipeReader(File):
    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self.pipe = pipe

    async def read(self, most: int = 65536) -> bytes:
        pipe = self.pipe
        while not pipe.buffer:
            if not pipe.writers:
                return b""
            await pipe.bell.wait()
        data = bytes(pipe.buffer[:most])
        del pipe.buffer[:most]
        pipe.bell.ring()
        return data

    def closed(self) -> None:
        self.pipe.readers = 0
        self.pipe.bell.ring()


class PipeWriter(File):
    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self.pipe = pipe

    async def write(self, data: bytes) -> None:
        pipe, at = self.pipe, 0
        while at < len(data):
            if not pipe.readers:
                raise BrokenPipeError(errno.EPIPE, "Broken pipe")
            room = PIPE_SIZE - len(pipe.buffer)
            if room <= 0:
                await pipe.bell.wait()
                continue
            pipe.buffer += data[at : at + room]
            at += room
            pipe.bell.ring()
        await asyncio.sleep(0)

    def closed(self) -> None:
        self.pipe.writers = 0
        self.pipe.bell.ring()


def new_pipe() -> tuple[PipeReader, PipeWriter]:
    pipe = Pipe()
    return PipeReader(pipe), PipeWriter(pipe)


class DiskFile(File):
    """An open file of the Vfs."""

    def __init__(self, vfs: Vfs, node: Node, *, append: bool = False, on_written: object = None) -> None:
        super().__init__()
        self.vfs = vfs
        self.node = node
        self.append = append
        self.at = 0
        self.written = False
        self.on_written = on_written

    async def read(self, most: int = 65536) -> bytes:
        assert self.node is not None
        await asyncio.sleep(0)
        data = bytes(self.node.data[self.at : self.at + most])
        self.at += len(data)
        return data

    async def write(self, data: bytes) -> None:
        assert self.node is not None
        self.written = True
        while data:
            if self.append:
                self.at = len(self.node.data)
            count = self.vfs.write(self.node, self.at, data)
            self.at += count
            data = data[count:]
        await asyncio.sleep(0)

    def closed(self) -> None:
        if self.written and callable(self.on_written):
            self.on_written()
