"""A tracer that ends a process at its N-th system call, or lets that call fail: ptrace(2), from Python.

All threads of the process are counted together, from the moment it is seized, and no other process is: what it starts
runs untraced (or, with ``children=True``, is what is counted instead). So the N-th call is wherever in the operation
under test it happens to be, whichever thread makes it, and what came before (imports, set-up) costs no points.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

_SEIZE, _INTERRUPT, _LISTEN, _SYSCALL, _SYSCALL_INFO = 0x4206, 0x4207, 0x4208, 24, 0x420E
_GETREGS, _SETREGS = 12, 13
_TRACESYSGOOD, _TRACEFORK, _TRACEVFORK, _TRACECLONE, _TRACEEXEC, _EXITKILL = 1, 2, 4, 8, 16, 0x100000
_EVENT_STOP = 128
_ENTRY, _EXIT = 1, 2
_WALL = 0x40000000
_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long

#: Where faults are put (x86_64): calls that really can fail, by what they need.
CALLS = {
    "read": 0, "write": 1, "mmap": 9, "pread64": 17, "pwrite64": 18, "clone": 56, "fork": 57, "vfork": 58,
    "execve": 59, "wait4": 61, "fcntl": 72, "flock": 73, "fsync": 74, "ftruncate": 77, "rename": 82, "mkdir": 83,
    "rmdir": 84, "unlink": 87, "chmod": 90, "fchmod": 91, "chown": 92, "getdents64": 217, "epoll_wait": 232,
    "epoll_ctl": 233, "waitid": 247, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263,
    "renameat": 264, "eventfd2": 290, "epoll_create1": 291, "pipe2": 293, "memfd_create": 319, "socketpair": 53,
    "socket": 41, "connect": 42, "pidfd_open": 434, "clone3": 435, "mount": 165, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "move_mount": 429, "open_tree": 428, "unshare": 272, "setns": 308, "pivot_root": 155,
    "ioctl": 16, "openat2": 437, "mount_setattr": 442, "dup3": 292, "sethostname": 170, "symlinkat": 266,
    "copy_file_range": 326, "sendfile": 40, "prctl": 157, "seccomp": 317, "fallocate": 285,
}  # fmt: skip
_NAMES = {number: name for name, number in CALLS.items()}


class _Info(ctypes.Structure):
    """struct ptrace_syscall_info, as far as we look."""

    _fields_ = [
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("nr", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 8),
    ]


class _Regs(ctypes.Structure):
    """struct user_regs_struct of x86_64: rax is the 11th, orig_rax the 16th of 27."""

    _fields_ = [("word", ctypes.c_uint64 * 27)]


_RAX, _ORIG_RAX = 10, 15


def can_fail_calls() -> bool:
    return os.uname().machine == "x86_64"


def _ptrace(request: int, tid: int, address: int = 0, data: object = 0) -> int:
    pointer = ctypes.cast(ctypes.byref(data), ctypes.c_void_p) if isinstance(data, ctypes.Structure) else data
    result: int = _libc.ptrace(request, tid, address, pointer)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@dataclass
class Plan:
    """What to do at the ``at``-th call (0: never): kill the process, or let the call fail with ``errno``."""

    at: int = 0
    errno: int = 0
    calls: frozenset[int] = frozenset()  #: only these are counted; all if empty
    children: bool = False  #: count what the processes it starts do, instead
    seconds: float = 10.0


@dataclass
class Told:
    """What happened."""

    count: int = 0
    hit: str = ""  #: the call at which it was done
    hang: bool = False
    status: int | None = None  #: of the process, as waitpid gives it
    others: dict[int, int] = field(default_factory=dict)


class Tracer:
    """Traces one process, a child of ours."""

    def __init__(self, pid: int, plan: Plan) -> None:
        self.pid = pid
        self.plan = plan
        self.told = Told()
        self._helper = 0
        self._fail: dict[int, bool] = {}
        self._mine: set[int] = set()  # threads of the process itself
        self._options = _TRACESYSGOOD | _TRACECLONE | _EXITKILL
        if plan.children:
            self._options |= _TRACEFORK | _TRACEVFORK | _TRACEEXEC

    def seize(self) -> None:
        for name in os.listdir(f"/proc/{self.pid}/task"):
            _ptrace(_SEIZE, int(name), 0, self._options)
            self._mine.add(int(name))
            _ptrace(_INTERRUPT, int(name))

    def run(self, helper: int = 0, then: Callable[[], None] | None = None) -> Told:
        """Until the process has ended. ``helper``: a child of ours, whose end is waited for too; if it ends first,
        ``then`` is called (kill the process, say)."""
        self._helper = helper
        signal.signal(signal.SIGALRM, self._too_long)
        signal.setitimer(signal.ITIMER_REAL, self.plan.seconds)
        while self.told.status is None or (helper and helper not in self.told.others):
            try:
                tid, status = os.waitpid(-1, _WALL)
            except ChildProcessError:
                break
            if os.WIFSTOPPED(status):
                with suppress(ProcessLookupError):
                    self._stopped(tid, status)
                continue
            if tid == self.pid:
                self.told.status = status
            else:
                self.told.others[tid] = status
                if tid == helper and self.told.status is None and then is not None:
                    then()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return self.told

    def _too_long(self, *_: object) -> None:
        self.told.hang = True
        for pid in filter(None, (self.pid, self._helper)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stopped(self, tid: int, status: int) -> None:
        number, event = (status >> 8) & 0xFF, status >> 16
        if event == _EVENT_STOP and number in _STOPS:
            _ptrace(_LISTEN, tid)
            return
        deliver = 0
        if number == signal.SIGTRAP | 0x80:
            self._call(tid)
        elif not event:
            deliver = number
        _ptrace(_SYSCALL, tid, 0, deliver)

    def _belongs(self, tid: int) -> bool:
        if tid in self._mine:
            return True
        try:
            with open(f"/proc/{tid}/status", encoding="ascii", errors="replace") as file:
                own = any(line.split() == ["Tgid:", str(self.pid)] for line in file)
        except OSError:
            return False
        if own:
            self._mine.add(tid)
        return own

    def _call(self, tid: int) -> None:
        info = _Info()
        _ptrace(_SYSCALL_INFO, tid, ctypes.sizeof(info), info)
        plan = self.plan
        if info.op == _EXIT:
            if self._fail.pop(tid, False):
                self._set(tid, _RAX, -plan.errno)
            return
        if info.op != _ENTRY or (plan.calls and info.nr not in plan.calls):
            return
        if plan.children and self._belongs(tid):
            return
        self.told.count += 1
        if self.told.count != plan.at:
            return
        self.told.hit = _NAMES.get(info.nr, str(info.nr))
        if plan.errno:
            self._set(tid, _ORIG_RAX, -1)
            self._fail[tid] = True
        else:
            with suppress(ProcessLookupError):
                os.kill(tid if plan.children else self.pid, signal.SIGKILL)

    @staticmethod
    def _set(tid: int, word: int, value: int) -> None:
        regs = _Regs()
        _ptrace(_GETREGS, tid, 0, regs)
        regs.word[word] = value & (2**64 - 1)
        _ptrace(_SETREGS, tid, 0, regs)


def wait_until(check: Callable[[], object], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not check():
        if time.monotonic() > until:
            return False
        time.sleep(0.003)
    return True
