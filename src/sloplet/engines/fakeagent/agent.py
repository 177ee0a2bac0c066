"""The fake agent: answers the wire over a socket pair, out of a fake kernel and fake files."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Coroutine
from typing import Any

from ...errors import ProtocolError, SlopletError
from ...wire.fields import Fields, encode_record
from ...wire.mux import AgentMux, AgentStream
from ...wire.schema import ExecFlag, FileType, FreezeFlag, Op, Tag
from .builtins import sh
from .changes import Changes
from .fileops import FileOps
from .jobs import Follower, Job, Output, Terminal, TerminalFile, feed_stdin, new_follower, obey
from .kernel import DEFAULT_PATH, Kernel, Program, start
from .programs import PROGRAMS
from .streams import Device, File, new_pipe
from .tools import TOOLS
from .vfs import EXECUTE, ROOT, Cred, Node, Vfs, fail

_KEPT_JOBS = 256
_DEFAULT_RING = 262144
_GENERATION = "/run/sloplet/generation"


class _Refused(Exception):
    """An OSError about a certain part of the request."""

    def __init__(self, error: OSError, what: str, message: str) -> None:
        self.number = error.errno or errno.EIO
        self.what = what
        self.message = message


class FakeAgent:
    """One fake sandbox's inside. ``gone`` is set once it has ended."""

    def __init__(
        self, fd: int, *, disk: int, memory: int, pids: int, open_files: int, programs: dict[str, Program]
    ) -> None:
        self.fd = fd
        self.kernel = Kernel(Vfs(disk), pids=pids, memory=memory, open_files=open_files)
        self.kernel.programs = {**PROGRAMS, **TOOLS, "sh": sh, **programs}
        self.user = ROOT
        self.workdir = "/"
        self.env: dict[str, str] = {}
        self.ring = _DEFAULT_RING
        self.jobs: dict[int, Job] = {}
        self.next_job = 1
        self.files: FileOps | None = None
        self.changes: Changes | None = None
        self.greeted = asyncio.Event()
        self.gone = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.loop = asyncio.get_running_loop()
        self.mux = AgentMux(fd, fd, self.accept, on_lost=lambda error: self.stop())
        self.ending = self.frozen = self.silent = False
        self._background(self.greet())

    # -- life --------------------------------------------------------------------------

    async def greet(self) -> None:
        hello = await self.mux.peer_hello()
        furnish(self.kernel)
        name = hello.text(Tag.USER, "root")
        uid = 1000 if name == "agent" else None
        if uid is not None and name not in self.kernel.users:
            self.kernel.users[name] = Cred(uid, uid, name, f"/home/{name}")
        self.user = self.kernel.user(name)
        self.workdir = hello.text(Tag.WORKDIR, "/workspace")
        self.ring = hello.integer(Tag.RING, _DEFAULT_RING)
        self.kernel.memory_limit = hello.integer(Tag.MEMORY, self.kernel.memory_limit)
        home = hello.text(Tag.HOME, self.user.home)
        self.env = {"PATH": DEFAULT_PATH, "HOME": home, "USER": name, "LOGNAME": name, "SHELL": "/bin/sh"}
        for pair in hello.all(Tag.ENV):
            key, _, value = os.fsdecode(pair).partition("=")
            self.env[key] = value
        vfs = self.kernel.vfs
        for path in (self.workdir, home):
            node = vfs.mkdir(path, "/", ROOT, parents=True)
            if node.uid == 0 and path != "/":
                node.uid, node.gid = self.user.uid, self.user.gid
        lines = [f"{c.name}:x:{c.uid}:{c.gid}::{c.home}:/bin/sh\n" for c in self.kernel.users.values()]
        vfs.publish("/etc/passwd", "/", ROOT, "".join(lines).encode(), 0o644)
        if Tag.GENERATION in hello:
            vfs.mkdir("/run/sloplet", "/", ROOT, parents=True)
            vfs.publish(_GENERATION, "/", ROOT, f"1 {hello.text(Tag.GENERATION)}\n".encode(), 0o644)
            self.env["SLOPLET_GENERATION_FILE"] = _GENERATION
        vfs.used = 0
        self.changes = Changes(vfs, self.workdir)
        self.files = FileOps(self.kernel, self.workdir, self.user)
        self.greeted.set()
        self.mux.hello(Fields((Tag.PID, 1), (Tag.UID, self.user.uid), (Tag.FEATURES, 0)))

    def stop(self) -> None:
        """End everything. Idempotent; also when the loop is closed already."""
        if self.ending:
            return
        self.ending = True
        if self.loop.is_closed():
            os.close(self.fd)
            return
        for job in self.jobs.values():
            job.kill()
        for proc in list(self.kernel.procs.values()):
            proc.signal(9)
        for task in self.tasks:
            task.cancel()
        self.mux.fail(SlopletError("the fake sandbox has ended"))
        os.close(self.fd)
        self.loop.call_soon(self.gone.set)

    def _background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not isinstance(task.exception(), SlopletError):
            self.loop.call_exception_handler({"message": "the fake agent failed", "exception": task.exception()})
            self.stop()

    # -- requests ----------------------------------------------------------------------

    def accept(self, stream: AgentStream) -> None:
        self._background(self.serve(stream))

    async def serve(self, stream: AgentStream) -> None:
        await self.greeted.wait()
        work = asyncio.ensure_future(self.answer(stream))
        reset = asyncio.ensure_future(stream.reset_or_closed())
        try:
            await asyncio.wait([work, reset], return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not self._outlives(stream):
                work.cancel()
            closing = await work
        except asyncio.CancelledError:
            closing = Fields((Tag.ERRNO, errno.ECANCELED), (Tag.MESSAGE, "it was given up"))
            if self.ending:
                raise
        except _Refused as refused:
            closing = Fields((Tag.ERRNO, refused.number), (Tag.MESSAGE, refused.message), (Tag.WHAT, refused.what))
        except ProtocolError as error:
            closing = Fields((Tag.ERRNO, errno.EPROTO), (Tag.MESSAGE, error.message))
        except OSError as error:
            text = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
            closing = Fields((Tag.ERRNO, error.errno or errno.EIO), (Tag.MESSAGE, text))
        finally:
            for task in (work, reset):
                task.cancel()
        stream.close(closing)
        if self.silent:
            self.mux.hold()

    @staticmethod
    def _outlives(stream: AgentStream) -> bool:
        return stream.request.integer(Tag.OP, 0) in (Op.EXEC, Op.ATTACH)

    async def answer(self, stream: AgentStream) -> Fields:
        request = stream.request
        op = request.integer(Tag.OP)
        check_tags(op, request)
        if op == Op.EXEC:
            return await self.exec(stream, request)
        if op == Op.ATTACH:
            return await self.attach(stream, request)
        if op == Op.SIGNAL:
            job = self.job(request)
            return Fields((Tag.COUNT, job.signal(request.integer(Tag.SIGNUM), request.integer(Tag.FLAGS, 0))))
        if op == Op.PS:
            for job in list(self.jobs.values()):
                await stream.send(encode_record(job.record()))
            return Fields()
        if op == Op.FORGET:
            job = self.job(request)
            if job.status is None:
                raise fail(errno.EBUSY, f"process {job.pid} is still running")
            del self.jobs[job.pid]
            return Fields()
        if op == Op.METRICS:
            return self.metrics()
        if op == Op.SHUTDOWN:
            self.loop.call_later(0.01, self.stop)
            return Fields()
        assert self.files is not None
        assert self.changes is not None
        if op == Op.FREEZE:
            return self.freeze(bool(request.integer(Tag.FLAGS, 0) & FreezeFlag.SERVE))
        if op == Op.THAW:
            return self.thaw()
        if op == Op.CHANGES:
            return await self.changes.tell(stream, request)
        if op == Op.UNPACK:
            return await self.changes.unpack(stream, request)
        return await self.files.answer(stream, request, self.who(request))

    def freeze(self, serves: bool) -> Fields:
        """Nothing is ever stopped here, but the agent falls silent as the real one does."""
        if self.frozen:
            raise fail(errno.EBUSY, "the sandbox was frozen already")
        self.frozen, self.silent = True, not serves
        return Fields((Tag.COUNT, len(self.kernel.procs)), (Tag.PIDS, 0))

    def thaw(self) -> Fields:
        if not self.frozen:
            raise fail(errno.EINVAL, "the sandbox is not frozen")
        self.frozen = self.silent = False
        self.mux.let_go()
        return Fields((Tag.COUNT, len(self.kernel.procs)))

    def who(self, request: Fields) -> Cred:
        if Tag.USER not in request:
            return self.user
        name = request.text(Tag.USER)
        try:
            return self.kernel.user(name)
        except OSError as error:
            raise _Refused(error, "user", f"no such user: {name}") from None

    def job(self, request: Fields) -> Job:
        if (Tag.PID in request) == (Tag.OSPID in request):
            raise fail(errno.EINVAL, "one of PID and OSPID is needed")
        if Tag.PID in request:
            job = self.jobs.get(request.integer(Tag.PID))
        else:
            same = [job for job in self.jobs.values() if job.os_pid == request.integer(Tag.OSPID)]
            job = max(same, key=lambda job: (job.status is None, job.pid), default=None)
        if job is None:
            raise fail(errno.ESRCH, "no process with this number")
        return job

    def metrics(self) -> Fields:
        kernel = self.kernel
        return Fields(
            (Tag.CPU_US, kernel.cpu_us), (Tag.MEMORY, kernel.memory() + 2**20), (Tag.PIDS, len(kernel.procs) + 1),
            (Tag.DISK_USED, kernel.vfs.used), (Tag.DISK_TOTAL, kernel.vfs.limit),
            (Tag.UPTIME_MS, int((time.monotonic() - kernel.started) * 1000)),
        )  # fmt: skip

    # -- commands ----------------------------------------------------------------------

    async def exec(self, stream: AgentStream, request: Fields) -> Fields:
        argv = [os.fsdecode(arg) for arg in request.all(Tag.ARGV)]
        if not argv:
            raise fail(errno.EINVAL, "no command")
        cred = self.who(request)
        env = dict(self.env)
        if Tag.USER in request and cred != self.user:
            env |= {"HOME": cred.home, "USER": cred.name or str(cred.uid), "LOGNAME": cred.name or str(cred.uid)}
        for pair in request.all(Tag.ENV):
            key, has_value, value = os.fsdecode(pair).partition("=")
            if has_value:
                env[key] = value
            else:
                env.pop(key, None)
        cwd = self.directory(os.fsdecode(request.raw(Tag.CWD, b"")) or self.workdir, cred)
        node = self.command(argv[0], env, cwd, cred)
        flags = request.integer(Tag.FLAGS, 0)
        tag = request.text(Tag.TAG) if Tag.TAG in request else None
        job = Job(self.next_job, argv, tag, flags, min(request.integer(Tag.RING, self.ring), 2**26))
        fds = self.plumbing(job, request, flags)
        follower = new_follower(job, stream, flags, {1: 0, 2: 0})
        try:
            job.main = start(self.kernel, job.tree, None, node, argv, env, fds, cred=cred, cwd=cwd, strict=True)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                raise _Refused(error, "command", f"{argv[0]}: {error.strerror}") from None
            raise
        finally:
            for file in fds.values():
                file.close()
        self.next_job += 1
        self.jobs[job.pid] = job
        job.os_pid = job.main.pid
        job.main.on_exit = job.ended
        self.trim()
        timer = None
        if Tag.TIMEOUT_MS in request:
            timer = self.loop.call_later(request.integer(Tag.TIMEOUT_MS) / 1000, job.expire)
        stream.reply(Fields((Tag.PID, job.pid), (Tag.OSPID, job.os_pid)))
        try:
            return await self.follow(job, follower, stdin=bool(flags & (ExecFlag.STDIN | ExecFlag.PTY)))
        finally:
            if timer is not None and (job.status is not None or follower.kills):
                timer.cancel()

    def directory(self, path: str, cred: Cred) -> str:
        try:
            node = self.kernel.vfs.find(path, self.workdir, cred)
            if not node.is_dir:
                raise fail(errno.ENOTDIR, path)
            if not node.allows(cred, EXECUTE):
                raise fail(errno.EACCES, path)
        except OSError as error:
            raise _Refused(error, "cwd", f"cannot use {path[:200]} as working directory: {error.strerror}") from None
        return node.path()

    def command(self, name: str, env: dict[str, str], cwd: str, cred: Cred) -> Node:
        try:
            return self.kernel.vfs.executable(name, env.get("PATH", DEFAULT_PATH), cwd, cred)
        except OSError as error:
            raise _Refused(error, "command", f"{name[:200]}: {error.strerror}") from None

    def plumbing(self, job: Job, request: Fields, flags: int) -> dict[int, File]:
        if flags & ExecFlag.PTY:
            terminal = Terminal(job, request.integer(Tag.ROWS, 24), request.integer(Tag.COLS, 80))
            job.stdin = terminal
            file = TerminalFile(terminal)
            return {0: file, 1: file.dup(), 2: file.dup()}
        fds: dict[int, File] = {0: Device("null"), 1: Output(job, 1)}
        if flags & ExecFlag.STDIN:
            fds[0], job.stdin = new_pipe()
        fds[2] = fds[1].dup() if flags & ExecFlag.MERGE else Output(job, 2)
        return fds

    async def attach(self, stream: AgentStream, request: Fields) -> Fields:
        job = self.job(request)
        begin = {}
        for channel, tag in ((1, Tag.FROM_OUT), (2, Tag.FROM_ERR)):
            ring = job.rings[channel]
            wanted = request.integer(tag, 0)
            begin[channel] = ring.total if wanted < 0 else min(max(wanted, ring.oldest), ring.total)
        follower = new_follower(job, stream, request.integer(Tag.FLAGS, 0), begin)
        numbers = ((Tag.PID, job.pid), (Tag.OSPID, job.os_pid))
        stream.reply(Fields(*numbers, (Tag.OFFSET_OUT, begin[1]), (Tag.OFFSET_ERR, begin[2])))
        return await self.follow(job, follower, stdin=False)

    async def follow(self, job: Job, follower: Follower, *, stdin: bool) -> Fields:
        stream = follower.stream
        helpers = [self._background(obey(job, follower, lambda error: None))]
        if stdin:
            helpers.append(self._background(feed_stdin(job, stream)))
        sending = asyncio.ensure_future(job.follow(follower))
        gone = asyncio.ensure_future(stream.reset_or_closed())
        try:
            await asyncio.wait([sending, gone], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            if stream.was_reset and follower.kills and job.status is None:
                job.kill()
            if stream.was_reset:
                raise fail(errno.ECANCELED, f"process {job.pid}")
            return job.exit_fields(follower.sent)
        finally:
            if follower in job.followers:
                job.followers.remove(follower)
            job.bell.ring()
            for task in (sending, gone, *helpers):
                task.cancel()

    def trim(self) -> None:
        ended = [pid for pid, job in self.jobs.items() if job.status is not None and not job.followers]
        for pid in ended[: max(0, len(self.jobs) - _KEPT_JOBS)]:
            del self.jobs[pid]


_T = Tag
_KNOWN: dict[int, set[Tag]] = {
    Op.EXEC: {
        _T.ARGV, _T.ENV, _T.CWD, _T.USER, _T.FLAGS, _T.ROWS, _T.COLS, _T.TIMEOUT_MS, _T.RING, _T.TAG,
    },
    Op.ATTACH: {_T.PID, _T.OSPID, _T.FLAGS, _T.FROM_OUT, _T.FROM_ERR},
    Op.SIGNAL: {_T.PID, _T.OSPID, _T.SIGNUM, _T.FLAGS}, Op.PS: set(),
    Op.FORGET: {_T.PID}, Op.READ: {_T.OFFSET, _T.LENGTH}, Op.WRITE: {_T.MODE, _T.FLAGS, Tag.OWNER},
    Op.LIST: {_T.FLAGS, _T.DEPTH, _T.PREFIX}, Op.GETXATTRS: {_T.PREFIX},
    Op.SETXATTRS: {_T.FLAGS, _T.PREFIX, _T.ATTRIBUTE}, Op.STAT: {_T.FLAGS, _T.PREFIX},
    Op.MKDIR: {_T.MODE, _T.FLAGS, Tag.OWNER}, Op.REMOVE: {_T.FLAGS}, Op.MOVE: {_T.PATH2, _T.FLAGS},
    Op.CHMOD: {_T.MODE}, Op.CHOWN: {_T.OWNER}, Op.SYMLINK: {_T.PATH2}, Op.WATCH: {_T.FLAGS}, Op.METRICS: set(),
    Op.SHUTDOWN: {_T.TIMEOUT_MS}, Op.FREEZE: {_T.TIMEOUT_MS, _T.FLAGS}, Op.THAW: set(), Op.CHANGES: {_T.PATH, _T.FLAGS},
    Op.UNPACK: {_T.PATH},
}  # fmt: skip


def check_tags(op: int, request: Fields) -> None:
    """A tag or operation that is not known is refused, never ignored."""
    if op not in _KNOWN:
        raise ProtocolError(f"the agent does not know operation {op}")
    known = _KNOWN[op] | {Tag.OP, Tag.USER} | ({Tag.PATH} if Op.READ <= op <= Op.SETXATTRS else set())
    for tag, _ in request:
        if tag not in known:
            raise ProtocolError(f"operation {op} does not know the field {tag.name}")


def furnish(kernel: Kernel) -> None:
    """The directories, devices and commands that every fake sandbox has."""
    vfs = kernel.vfs
    for path in ("/bin", "/usr/local/bin", "/etc", "/dev", "/home", "/var/tmp", "/proc"):
        vfs.mkdir(path, "/", ROOT, parents=True)
    for path, mode in (("/tmp", 0o1777), ("/root", 0o700), ("/dev/shm", 0o1777)):
        vfs.mkdir(path, "/", ROOT, mode)
    vfs.symlink("/usr/bin", "../bin", "/", ROOT)
    devices = {"null": "null", "zero": "zero", "full": "full", "random": "random", "urandom": "random", "tty": "tty"}
    for name, device in devices.items():
        vfs._add(vfs.find("/dev", "/", ROOT), name, Node(FileType.OTHER, 0o666, device=device), quiet=True)
    for name in kernel.programs:
        ours = name in PROGRAMS or name in TOOLS or name == "sh"
        folder = vfs.find("/bin" if ours else "/usr/local/bin", "/", ROOT)
        vfs._add(folder, name, Node(FileType.FILE, 0o755, program=name), quiet=True)
    kernel.users["nobody"] = Cred(65534, 65534, "nobody", "/")
