"""What the wire calls a process: a command with its rings of output, its followers, its stdin or terminal."""

from __future__ import annotations

import asyncio
import errno
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...wire.fields import Fields
from ...wire.mux import AgentStream
from ...wire.schema import Channel, CtrlKind, ExecFlag, SignalFlag, Tag
from .kernel import Proc, Tree
from .streams import Bell, File, PipeWriter
from .vfs import fail

PIECE = 65536


class Ring:
    """The last ``size`` bytes of a channel, and how many there were in all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept = bytearray()
        self.total = 0

    @property
    def oldest(self) -> int:
        return self.total - len(self.kept)

    def add(self, data: bytes) -> None:
        self.kept += data
        self.total += len(data)
        if len(self.kept) > self.size:
            del self.kept[: len(self.kept) - self.size]

    def part(self, start: int, end: int) -> bytes:
        return bytes(self.kept[start - self.oldest : end - self.oldest])


@dataclass(eq=False)
class Follower:
    """A stream that gets a job's output."""

    stream: AgentStream
    lossy: bool
    kills: bool
    at: dict[int, int]
    sent: dict[int, int] = field(default_factory=lambda: {1: 0, 2: 0})
    discarding: bool = False

    @property
    def holds(self) -> bool:
        """Whether the process must wait for it."""
        return not self.lossy and not self.discarding


class Job:
    """A command that the agent started."""

    def __init__(self, pid: int, argv: list[str], tag: str | None, flags: int, ring: int) -> None:
        self.pid = pid
        self.argv = argv
        self.tag = tag
        self.flags = flags
        self.rings = {int(Channel.OUT): Ring(ring), int(Channel.ERR): Ring(ring)}
        self.tree = Tree()
        self.main: Proc | None = None
        self.os_pid = 0
        self.followers: list[Follower] = []
        self.bell = Bell()
        self.started_ns = time.time_ns()
        self.began = time.monotonic()
        self.wall_us = 0
        self.timed_out = False
        self.status: int | None = None
        self.ends: dict[int, int] = {}
        self.stdin: PipeWriter | Terminal | None = None

    # -- output ------------------------------------------------------------------------

    async def write(self, channel: int, data: bytes) -> None:
        """Put output into the ring; waits while a follower that must miss nothing is behind by a whole ring."""
        ring, at = self.rings[channel], 0
        while at < len(data):
            behind = [f.at[channel] for f in self.followers if f.holds]
            room = ring.size - (ring.total - min(behind)) if behind else ring.size
            if room <= 0:
                await self.bell.wait()
                continue
            ring.add(data[at : at + room])
            at += room
            self.bell.ring()
        await asyncio.sleep(0)

    async def follow(self, follower: Follower) -> None:
        """Send output until the main process has ended and all it wrote is sent; then CLOSE."""
        try:
            while not follower.stream.was_reset:
                if await self._send_some(follower):
                    continue
                if self.status is not None:
                    break
                await self.bell.wait()
            follower.stream.close(self.exit_fields(follower.sent))
        finally:
            if follower in self.followers:
                self.followers.remove(follower)
            self.bell.ring()

    async def _send_some(self, follower: Follower) -> bool:
        sent = False
        for channel, ring in self.rings.items():
            start = max(follower.at[channel], ring.oldest)
            end = min(self.ends.get(channel, ring.total), start + PIECE)
            if follower.discarding or start >= end:
                continue
            piece = ring.part(start, end)
            await follower.stream.send(piece, channel)
            follower.sent[channel] += len(piece)
            follower.at[channel] = start + len(piece)
            self.bell.ring()
            sent = True
        return sent

    def discard(self, follower: Follower) -> None:
        follower.discarding = True
        self.bell.ring()

    # -- the end -----------------------------------------------------------------------

    def ended(self) -> None:
        """The main process is gone; what others of its tree write from now on only goes to the rings."""
        assert self.main is not None
        self.status = self.main.status
        self.wall_us = int((time.monotonic() - self.began) * 1e6)
        self.ends = {channel: ring.total for channel, ring in self.rings.items()}
        self.bell.ring()

    def kill(self) -> None:
        self.tree.signal(signal.SIGKILL)

    def expire(self) -> None:
        if self.status is None:
            self.timed_out = True
            self.kill()

    def exit_fields(self, sent: dict[int, int] | None = None) -> Fields:
        fields = Fields()
        status = self.status if self.status is not None else -signal.SIGKILL
        if status < 0:
            fields.add(Tag.SIGNUM, -status)
        else:
            fields.add(Tag.EXIT_CODE, status)
        totals = {channel: self.ends.get(channel, ring.total) for channel, ring in self.rings.items()}
        fields.add(Tag.TIMED_OUT, int(self.timed_out))
        fields.add(Tag.OUT_TOTAL, totals[1]).add(Tag.ERR_TOTAL, totals[2])
        if sent is not None:
            fields.add(Tag.OUT_LOST, max(0, totals[1] - sent[1])).add(Tag.ERR_LOST, max(0, totals[2] - sent[2]))
        fields.add(Tag.CPU_US, 100).add(Tag.MAXRSS, max(self.tree.peak, 256 * 1024)).add(Tag.WALL_US, self.wall_us)
        return fields

    def record(self) -> Fields:
        fields = Fields((Tag.PID, self.pid), (Tag.OSPID, self.os_pid))
        if self.tag is not None:
            fields.add(Tag.TAG, self.tag)
        for arg in self.argv[:64]:
            fields.add(Tag.ARGV, arg[:256])
        fields.add(Tag.STATE, int(self.status is not None)).add(Tag.FLAGS, self.flags)
        fields.add(Tag.STARTED_NS, self.started_ns)
        if self.status is not None:
            for tag, value in self.exit_fields():
                fields.add(tag, value)
        return fields

    # -- CTRL --------------------------------------------------------------------------

    def control(self, follower: Follower, fields: Fields) -> None:
        kind = fields.integer(Tag.KIND)
        if kind == CtrlKind.DISCARD:
            self.discard(follower)
        elif kind == CtrlKind.SIGNAL:
            self.signal(fields.integer(Tag.SIGNUM), fields.integer(Tag.FLAGS, 0))
        elif kind == CtrlKind.RESIZE and isinstance(self.stdin, Terminal):
            self.stdin.rows, self.stdin.cols = fields.integer(Tag.ROWS), fields.integer(Tag.COLS)
            self.tree.signal(signal.SIGWINCH)

    def signal(self, number: int, flags: int) -> int:
        if not 0 <= number <= 64:
            raise fail(errno.EINVAL, str(number))
        if flags & SignalFlag.MAIN_ONLY:
            if self.main is None or self.main.status is not None:
                return 0
            self.main.signal(number)
            return 1
        return self.tree.signal(number)


class Output(File):
    """A job's stdout or stderr."""

    def __init__(self, job: Job, channel: int) -> None:
        super().__init__()
        self.job = job
        self.channel = channel

    async def write(self, data: bytes) -> None:
        await self.job.write(self.channel, data)


class Terminal:
    """A line discipline: echo, lines, ^C ^D ^U and backspace, newline to CR LF on the way out."""

    def __init__(self, job: Job, rows: int, cols: int) -> None:
        self.job = job
        self.rows = rows
        self.cols = cols
        self.echo = self.lines = self.signals = True
        self.line = bytearray()
        self.ready = bytearray()
        self.ends_of_file = 0
        self.bell = Bell()

    async def feed(self, data: bytes) -> None:
        for byte in data:
            while len(self.ready) > PIECE:
                await self.bell.wait()
            await self._key(byte)
        self.bell.ring()

    async def _key(self, byte: int) -> None:
        if self.signals and byte == 3:
            self.line.clear()
            if self.echo:
                await self.job.write(1, b"^C\r\n")
            self.job.tree.signal(signal.SIGINT)
            return
        if byte == 13:
            byte = 10
        if not self.lines:
            self.ready.append(byte)
        elif byte == 4:
            if self.line:
                self.ready += self.line
                self.line.clear()
            else:
                self.ends_of_file += 1
            return
        elif byte in (8, 127):
            if self.line:
                del self.line[-1:]
                if self.echo:
                    await self.job.write(1, b"\b \b")
            return
        elif byte == 21:
            self.line.clear()
            return
        else:
            self.line.append(byte)
            if byte == 10:
                self.ready += self.line
                self.line.clear()
        if self.echo:
            await self.job.write(1, b"\r\n" if byte == 10 else bytes([byte]))

    async def read(self, most: int) -> bytes:
        while not self.ready:
            if self.ends_of_file:
                self.ends_of_file -= 1
                return b""
            await self.bell.wait()
        end = self.ready.find(b"\n") + 1 if self.lines else 0
        count = min(most, end or len(self.ready))
        data = bytes(self.ready[:count])
        del self.ready[:count]
        self.bell.ring()
        return data


class TerminalFile(File):
    tty = True

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal

    async def read(self, most: int = 65536) -> bytes:
        return await self.terminal.read(most)

    async def write(self, data: bytes) -> None:
        await self.terminal.job.write(1, data.replace(b"\n", b"\r\n"))


async def feed_stdin(job: Job, stream: AgentStream) -> None:
    """Bytes from the host to the command's stdin, as fast as it reads them."""
    target = job.stdin
    try:
        while (piece := await stream.recv()) is not None:
            if isinstance(target, Terminal):
                await target.feed(piece.data)
            elif isinstance(target, PipeWriter):
                try:
                    await target.write(piece.data)
                except BrokenPipeError:
                    pass  # the command does not read: what comes is dropped, as a closed pipe would
        if isinstance(target, Terminal) and not stream.was_reset and job.status is None:
            await target.feed(b"\x04")
    finally:
        if isinstance(target, PipeWriter):
            target.close()


async def obey(job: Job, follower: Follower, on_fault: Callable[[OSError], None]) -> None:
    """CTRL frames of a stream, until it ends."""
    while (fields := await follower.stream.control()) is not None:
        try:
            job.control(follower, fields)
        except OSError as error:
            on_fault(error)


def new_follower(job: Job, stream: AgentStream, flags: int, start: dict[int, int]) -> Follower:
    follower = Follower(
        stream, lossy=bool(flags & ExecFlag.LOSSY), kills=bool(flags & ExecFlag.KILL_ON_RESET), at=dict(start)
    )
    job.followers.append(follower)
    return follower
