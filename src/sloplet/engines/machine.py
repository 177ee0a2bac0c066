"""What this machine offers to the engines that share its kernel. Probed once per process, in milliseconds."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from dataclasses import dataclass, field
from functools import cache

from . import cgroups
from .agentbin import agent_program

#: Where the ids of sandboxes lie that root makes: unused by distributions, below 2**31. One range of 65,536 each.
FIRST_RANGE = 0x70000000
RANGE_SIZE = 65536
RANGES = 0xFFE

_MASKABLE = (
    "acpi", "asound", "interrupts", "kallsyms", "kcore", "keys", "latency_stats", "sched_debug", "scsi",
    "sysrq-trigger", "timer_list", "timer_stats",
)  # fmt: skip
_READ_ONLY = ("bus", "fs", "irq", "sys")


@dataclass(frozen=True)
class Machine:
    """Facts. Pure planning takes these and never looks by itself."""

    kernel: tuple[int, int] = (6, 1)
    arch: str = "x86_64"
    uid: int = 1000
    gid: int = 1000
    user: str = ""
    root: bool = False  #: may do everything a sandbox needs in the first user namespace
    drops: bool = False  #: may at least become any other user (root in a container, too)
    subuid: tuple[int, int] | None = None  #: first id, count
    subgid: tuple[int, int] | None = None
    newuidmap: str | None = None
    newgidmap: str | None = None
    landlock_abi: int = 0
    seccomp: bool = True
    loop: bool = False
    mkfs: str | None = None
    memory: int = 2**34
    cpus: tuple[int, ...] = (0, 1)  #: those this process may use
    open_files: int = 1024  #: the hard limit
    proc_masked: tuple[str, ...] = ()
    proc_readonly: tuple[str, ...] = ()
    cgroup: cgroups.Hierarchy = field(default_factory=lambda: cgroups.Hierarchy(0))

    @property
    def idmap(self) -> bool:
        """Idmapped layers below an overlay: Linux 5.19."""
        return self.root and self.kernel >= (5, 19)

    @property
    def helpers(self) -> bool:
        """Whether an ordinary user gets a whole range of ids."""
        return bool(self.newuidmap and self.newgidmap and self.subuid and self.subgid)


def parse_kernel(release: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def parse_subids(text: str, user: str, uid: int) -> tuple[int, int] | None:
    """The largest range of ``user`` in /etc/subuid or /etc/subgid."""
    best: tuple[int, int] | None = None
    for line in text.splitlines():
        words = line.strip().split(":")
        if len(words) != 3 or words[0] not in (user, str(uid)):
            continue
        if words[1].isdigit() and words[2].isdigit() and (best is None or int(words[2]) > best[1]):
            best = (int(words[1]), int(words[2]))
    return best


def maps_high_ids(uid_map: str) -> bool:
    """Whether our own user namespace knows the ids that sandboxes of root get."""
    for line in uid_map.splitlines():
        words = line.split()
        if len(words) == 3:
            first, count = int(words[0]), int(words[2])
            if first <= FIRST_RANGE and first + count >= FIRST_RANGE + (RANGES + 1) * RANGE_SIZE:
                return True
    return False


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


_CAN_DROP = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7  # CHOWN, KILL, SETGID, SETUID
_CAN_ADMIN = _CAN_DROP | 1 << 21  # SYS_ADMIN


def _has_capabilities(status: str, wanted: int) -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return match is not None and int(match[1], 16) & wanted == wanted


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _landlock_abi() -> int:
    """Asked of the kernel by the agent's program, since Python has no call for it."""
    read, write = os.pipe()
    try:
        with os.fdopen(read, "rb") as answer:
            try:
                argv = ["sloplet-agent", "launch", "facts"]
                pid = os.posix_spawn(agent_program(), argv, {}, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)])
            finally:
                os.close(write)
            text = answer.read(256).decode("ascii", "replace")
        os.waitpid(pid, 0)
    except OSError:
        return 0
    match = re.match(r"landlock (\d+)", text)
    return int(match[1]) if match else 0


def _memory(meminfo: str) -> int:
    match = re.search(r"^MemTotal:\s*(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else 2**62


@cache
def machine() -> Machine:
    """This machine. Cheap, and kept: what it says does not change while a process runs."""
    uid = os.geteuid()
    status = _read("/proc/self/status")
    all_ids = uid == 0 and maps_high_ids(_read("/proc/self/uid_map"))
    root = all_ids and _has_capabilities(status, _CAN_ADMIN)
    user = "root" if uid == 0 else _user_name(uid)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin"
    entries = set(os.listdir("/proc")) if os.path.isdir("/proc") else set()
    kernel = parse_kernel(platform.release())
    return Machine(
        kernel=kernel,
        arch=platform.machine(),
        uid=uid,
        gid=os.getegid(),
        user=user,
        root=root,
        drops=all_ids and _has_capabilities(status, _CAN_DROP),
        subuid=None if root else parse_subids(_read("/etc/subuid"), user, uid),
        subgid=None if root else parse_subids(_read("/etc/subgid"), user, uid),
        newuidmap=shutil.which("newuidmap", path=path),
        newgidmap=shutil.which("newgidmap", path=path),
        landlock_abi=_landlock_abi(),
        seccomp=os.path.exists("/proc/sys/kernel/seccomp/actions_avail"),
        loop=root and os.path.exists("/dev/loop-control"),
        mkfs=shutil.which("mkfs.ext4", path=path) if root else None,
        memory=_memory(_read("/proc/meminfo")),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        open_files=hard if hard != resource.RLIM_INFINITY else 2**31 - 1,
        proc_masked=tuple(name for name in _MASKABLE if name in entries),
        proc_readonly=tuple(name for name in _READ_ONLY if name in entries),
        cgroup=cgroups.find(cgroups.RealFiles(), root=root, kernel=kernel),
    )
