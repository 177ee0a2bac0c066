"""Processes that are asyncio tasks: a tree, signals, users, limits. Nothing runs outside this Python process.

A signal that ends a process cancels its task. A whole tree (everything a command started, also what it left
in the background) is a ``Tree``; the limits on processes and memory count over all of them.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from .streams import Bell, Device, DiskFile, File
from .vfs import ROOT, Cred, Node, Vfs, fail

IGNORED = {signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG}
#: Programs see their own copies of this; PATH is where the fake's commands are.
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_BASE_MEMORY = 256 * 1024


@dataclass
class Context:
    """What a program gets: its arguments, environment and open files."""

    kernel: Kernel
    proc: Proc
    argv: list[str]
    env: dict[str, str]
    cwd: str
    fds: dict[int, File]

    async def out(self, data: str | bytes) -> None:
        await self._write(1, data)

    async def err(self, text: str) -> None:
        await self._write(2, f"{self.argv[0].rpartition('/')[2]}: {text}\n")

    async def _write(self, number: int, data: str | bytes) -> None:
        raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
        self.kernel.cpu_us += 1 + len(raw) // 200
        if number not in self.fds:
            raise fail(errno.EBADF, "write")
        await self.fds[number].write(raw)

    async def read(self, most: int = 65536) -> bytes:
        return await self.fds[0].read(most) if 0 in self.fds else b""

    async def read_all(self) -> bytes:
        parts = []
        while piece := await self.read():
            self.proc.charge(len(piece))
            parts.append(piece)
        return b"".join(parts)


Program = Callable[[Context], Awaitable[int]]


class Exited(BaseException):
    """Raised inside a program to end its process with a code."""

    def __init__(self, code: int) -> None:
        self.code = code & 0xFF


@dataclass(eq=False)
class Tree:
    """A command and everything it started."""

    members: set[Proc] = field(default_factory=set)
    cpu_us: int = 0
    peak: int = 0

    def signal(self, number: int) -> int:
        alive = [proc for proc in self.members if proc.status is None]
        for proc in alive:
            proc.signal(number)
        return len(alive)


@dataclass(eq=False)
class Proc:
    """A process. ``status`` is None while it runs, then the exit code, or minus the signal that ended it."""

    kernel: Kernel
    tree: Tree
    pid: int
    argv: list[str]
    cred: Cred
    parent: Proc | None
    fds: dict[int, File]
    cwd: str
    status: int | None = None
    memory: int = _BASE_MEMORY
    signalled: int = 0
    ignored: set[int] = field(default_factory=set)
    traps: dict[int, str] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)
    bell: Bell = field(default_factory=Bell)
    task: asyncio.Task[int] | None = None
    on_exit: Callable[[], None] | None = None

    def signal(self, number: int) -> None:
        if self.status is not None or number == 0:
            return
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            if number in self.ignored:
                return
            if number in self.traps:
                self.pending.append(number)
                self.bell.ring()
                return
        if number in IGNORED or number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            return  # nothing is ever stopped here
        self.signalled = self.signalled or number
        if self.task is not None:
            self.task.cancel()

    async def wait(self) -> int:
        while self.status is None:
            await self.bell.wait()
        return self.status

    def charge(self, count: int) -> None:
        """Use that much more memory; over the sandbox's limit the process is killed, as the kernel would."""
        self.memory += count
        self.tree.peak = max(self.tree.peak, self.memory)
        if self.kernel.memory() > self.kernel.memory_limit:
            self.kernel.oom_kills += 1
            self.signalled = signal.SIGKILL
            raise asyncio.CancelledError

    def drop_files(self) -> None:
        files, self.fds = self.fds, {}
        for file in files.values():
            file.close()


def shell_code(status: int) -> int:
    """A status as $? shows it."""
    return 128 - status if status < 0 else status


class Kernel:
    """All processes and files of one fake sandbox."""

    def __init__(self, vfs: Vfs, *, pids: int, memory: int, open_files: int) -> None:
        self.vfs = vfs
        self.pids_limit = pids
        self.memory_limit = memory
        self.open_files = open_files
        self.programs: dict[str, Program] = {}
        self.procs: dict[int, Proc] = {}
        self.cpu_us = 0
        self.oom_kills = 0
        self.started = time.monotonic()
        self._next = 2  # 1 is the agent
        self.users: dict[str, Cred] = {"root": ROOT}

    def memory(self) -> int:
        return sum(proc.memory for proc in self.procs.values())

    def user(self, text: str) -> Cred:
        """A user by name or ``uid[:gid]``. ESRCH if there is none."""
        if text in self.users:
            return self.users[text]
        uid, _, gid = text.partition(":")
        if not (uid.isascii() and uid.isdigit() and (not gid or (gid.isascii() and gid.isdigit()))):
            raise fail(errno.ESRCH, text)
        if int(uid) >= 2**32 - 1 or (gid and int(gid) >= 2**32 - 1):
            raise fail(errno.ESRCH, text)
        known = next((cred for cred in self.users.values() if cred.uid == int(uid)), None)
        group = int(gid) if gid else known.gid if known else int(uid)
        return Cred(int(uid), group, known.name if known else "", known.home if known else "/")

    def fork(
        self,
        tree: Tree,
        parent: Proc | None,
        argv: list[str],
        cred: Cred,
        cwd: str,
        fds: dict[int, File],
        main: Callable[[Proc], Awaitable[int]],
    ) -> Proc:
        """Start a process; it owns ``fds`` from now on. EAGAIN at the limit (then the files stay the caller's)."""
        if len(self.procs) + 1 > self.pids_limit - 1:
            raise fail(errno.EAGAIN, "fork")
        proc = Proc(self, tree, self._next, argv, cred, parent, fds, cwd)
        if parent is not None:
            proc.ignored = set(parent.ignored)
        self._next += 1
        self.procs[proc.pid] = proc
        tree.members.add(proc)
        self.cpu_us += 100
        proc.task = asyncio.get_running_loop().create_task(self._run(proc, main))
        proc.task.add_done_callback(lambda task: self._ended(proc, task))
        return proc

    async def _run(self, proc: Proc, main: Callable[[Proc], Awaitable[int]]) -> int:
        try:
            return await main(proc) & 0xFF
        except Exited as end:
            return end.code
        except BrokenPipeError:
            return -signal.SIGPIPE

    def _ended(self, proc: Proc, task: asyncio.Task[int]) -> None:
        if task.cancelled():
            proc.status = -(proc.signalled or signal.SIGKILL)
        elif task.exception() is not None:
            proc.status = 70
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"a program of the fake sandbox failed: {proc.argv}", "exception": task.exception()}
            )
        else:
            proc.status = task.result()
        proc.drop_files()
        self.procs.pop(proc.pid, None)
        proc.tree.members.discard(proc)
        if proc.on_exit is not None:
            proc.on_exit()
        proc.bell.ring()

    async def call(self, program: Program, context: Context) -> int:
        """Run a program's code; errors of its files become its message and exit code 1."""
        try:
            return await program(context)
        except BrokenPipeError:
            raise
        except OSError as error:
            what = f"{error.filename}: " if error.filename not in (None, "write", "read") else "write error: "
            try:
                await context.err(f"{what}{error.strerror}")
            except OSError:
                pass
            return 1

    def open(self, path: str, cwd: str, cred: Cred, how: str, controlling: File | None = None) -> File:
        """Open for ``r``, ``w`` or ``a``."""
        vfs = self.vfs
        if how == "r":
            node = vfs.find(path, cwd, cred)
            if not node.allows(cred, 4):
                raise fail(errno.EACCES, path)
        else:
            folder, name, found = vfs.locate(path, cwd, cred, follow=True)
            node = found if found is not None and found.device else vfs.create(path, cwd, cred, 0o644)
        if node.device == "tty":
            if controlling is None:
                raise fail(errno.ENXIO, path)
            return controlling.dup()
        if node.device:
            return Device(node.device)
        if how == "r":
            if node.is_dir:
                raise fail(errno.EISDIR, path)
            return DiskFile(vfs, node)
        if how == "w":
            vfs.truncate(node)
        from ...wire.schema import WatchMask

        return DiskFile(vfs, node, append=how == "a", on_written=lambda: vfs.emit(WatchMask.MODIFIED, folder, name))

    def program_of(self, node: Node) -> tuple[Program, str] | None:
        """The program behind an executable file, and the script it is to run if the file is one."""
        if node.program:
            program = self.programs.get(node.program)
            return (program, "") if program else None
        first = bytes(node.data[:256]).partition(b"\n")[0].decode("utf-8", "replace")
        if first.startswith("#!"):
            name = first[2:].strip().partition(" ")[0].rpartition("/")[2]
            if name in self.programs:
                return self.programs[name], "script"
        return None


def start(
    kernel: Kernel,
    tree: Tree,
    parent: Proc | None,
    node: Node,
    argv: list[str],
    env: dict[str, str],
    fds: dict[int, File],
    *,
    cred: Cred | None = None,
    cwd: str | None = None,
    strict: bool = False,
) -> Proc:
    """Start the program behind an executable file. ``fds`` stay the caller's: the process gets copies.
    ``strict``: a file without ``#!`` is ENOEXEC, as for execve; otherwise the shell runs it."""
    found = kernel.program_of(node)
    if found is None and strict:
        raise fail(errno.ENOEXEC, argv[0])
    program, script = found or (kernel.programs["sh"], "script")
    if script:
        argv = ["sh", argv[0], *argv[1:]]

    async def main(proc: Proc) -> int:
        return await kernel.call(program, Context(kernel, proc, argv, dict(env), proc.cwd, proc.fds))

    who = cred or (parent.cred if parent else ROOT)
    where = cwd if cwd is not None else (parent.cwd if parent else "/")
    mine = {number: file.dup() for number, file in fds.items()}
    try:
        return kernel.fork(tree, parent, argv, who, where, mine, main)
    except OSError:
        for file in mine.values():
            file.close()
        raise
