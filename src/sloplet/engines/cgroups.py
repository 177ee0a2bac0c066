"""Control groups, version 1 and 2: where a sandbox's limits may live, what to write there, and doing it.

Planning is pure over ``Files`` (what the cgroup filesystem says), so that both versions and delegation are
tested on any machine. A sandbox's folders are called ``sloplet-ID``, so that whatever a crash leaves is found.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..spec import Limits
from .base import HostStats

PERIOD_US = 100_000
#: the agent and one small helper per running command count too; a sandbox gets this much on top for them
PIDS_EXTRA = 16
#: what the agent may use beside a sandbox whose commands have used up all of theirs
MEMORY_EXTRA = 32 << 20
CPUS_EXTRA = 1.0
PREFIX = "sloplet-"
_CONTROLS = {"memory": "memory", "cpus": "cpu", "pids": "pids"}


class Files(Protocol):
    """The part of a filesystem that planning looks at."""

    def read(self, path: str) -> str | None: ...

    def writable(self, path: str) -> bool: ...

    def exists(self, path: str) -> bool: ...


class RealFiles:
    def read(self, path: str) -> str | None:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return None

    def writable(self, path: str) -> bool:
        return os.access(path, os.W_OK)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)


@dataclass(frozen=True)
class Hierarchy:
    """Where sandboxes' groups can be made. ``bases``: controller -> folder (version 2: the same for all)."""

    version: int  #: 0: none
    bases: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""  #: why some controller is missing
    enable: str = ""  #: version 2: a cgroup.subtree_control to write first
    memsw: bool = False
    split: bool = False  #: joining a group is cheap: commands get one within the sandbox's, without the agent

    def enforces(self, control: str) -> bool:
        return _CONTROLS.get(control, "") in self.bases


def find(files: Files, *, root: bool, kernel: tuple[int, int]) -> Hierarchy:
    """The hierarchy this process may use. Version 2 wherever its controllers are, else version 1."""
    mountinfo = files.read("/proc/self/mountinfo") or ""
    mounts = _mounts(mountinfo)
    own = _own_paths(files.read("/proc/self/cgroup") or "")
    unified = _find_unified(files, mounts, own, root)
    split = _moves_cheaply(kernel, mountinfo)
    if unified.bases:
        return replace(unified, split=split)
    bases: dict[str, str] = {}
    for controller in ("memory", "pids", "cpu", "cpuacct"):
        base = _place(mounts.get(controller), own.get(controller))
        if base and files.writable(base) and files.writable(base + "/tasks"):
            bases[controller] = base
    if not any(name in bases for name in _CONTROLS.values()):
        return Hierarchy(0, reason=unified.reason or "no cgroup is writable for this user")
    missing = [name for name in _CONTROLS.values() if name not in bases]
    reason = f"no writable cgroup for {', '.join(missing)}" if missing else ""
    memsw = "memory" in bases and files.exists(bases["memory"] + "/memory.memsw.limit_in_bytes")
    return Hierarchy(1, bases, reason, memsw=memsw, split=split)


def _moves_cheaply(kernel: tuple[int, int], mountinfo: str) -> bool:
    """Linux 6.0 to 6.17 wait for an RCU grace period, many milliseconds, to move a process, unless told otherwise."""
    if kernel == (0, 0):  # unknown
        return False
    if not (6, 0) <= kernel < (6, 18):
        return True
    options = [line.split()[-1].split(",") for line in mountinfo.splitlines() if " - cgroup" in line]
    return bool(options) and all("favordynmods" in each for each in options)


def _mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """controller (or "unified") -> (root within the hierarchy, mount point)."""
    found: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        if len(words) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            found.setdefault("unified", (words[3], words[4]))
        elif kind[0] == "cgroup":
            for option in kind[2].split(","):
                found.setdefault(option, (words[3], words[4]))
    return found


def _own_paths(cgroup: str) -> dict[str, str]:
    own: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for name in names.split(",") if names else ["unified"]:
            own[name] = path
    return own


def _place(mount: tuple[str, str] | None, own: str | None) -> str | None:
    """Our own group's folder: a sandbox stays within the limits that its maker is under."""
    if mount is None or own is None:
        return None
    root, point = mount
    if root != "/" and (own == root or own.startswith(root + "/")):
        own = own[len(root) :]
    elif root != "/" or own.startswith("/.."):
        own = "/"
    return (point + own).rstrip("/")


def _find_unified(files: Files, mounts: Mapping[str, tuple[str, str]], own: Mapping[str, str], root: bool) -> Hierarchy:
    """Version 2: the nearest ancestor that is ours, has the controllers, and from which we may move into a child.

    A group that holds processes can pass no controllers on (unless it is the very root), so our own never serves.
    """
    here = _place(mounts.get("unified"), own.get("unified"))
    if here is None:
        return Hierarchy(0, reason="no cgroup filesystem is mounted")
    top = mounts["unified"][1]
    at = here
    while True:
        available = (files.read(at + "/cgroup.controllers") or "").split()
        wanted = [name for name in _CONTROLS.values() if name in available]
        passed = (files.read(at + "/cgroup.subtree_control") or "").split()
        if wanted and files.writable(at) and files.writable(at + "/cgroup.procs"):
            really_root = at == top and not files.exists(at + "/cgroup.type")
            empty = really_root or not (files.read(at + "/cgroup.procs") or "").strip()
            if all(name in passed for name in wanted) and (empty or root):
                return Hierarchy(2, dict.fromkeys(wanted, at))
            if empty and files.writable(at + "/cgroup.subtree_control"):
                return Hierarchy(2, dict.fromkeys(wanted, at), enable=at + "/cgroup.subtree_control")
        if at == top or len(at) <= len(top):
            break
        at = at.rpartition("/")[0]
    return Hierarchy(
        0,
        reason="no cgroup is delegated to this user "
        "(as root, or in `systemd-run --user --scope -p Delegate=yes ...`, there would be one)",
    )


@dataclass(frozen=True)
class GroupPlan:
    """One sandbox's groups: folders to make, values to write, how a process joins.

    Where the hierarchy is ``split``, commands are in a group within the sandbox's own, so that they can use up neither
    the memory nor the processor time nor the process numbers that the agent needs to end them (docs/adr/0017).
    """

    version: int = 0
    folders: tuple[str, ...] = ()  #: outer ones first
    #: to be set before folders are made within: on Linux before 5.11 (version 1) a limit does not hold for those else
    nesting: str | None = None
    writes: tuple[tuple[str, str], ...] = ()
    optional: tuple[tuple[str, str], ...] = ()  #: written if the kernel has the file
    join: tuple[str, ...] = ()  #: version 1: tasks files
    into: str | None = None  #: version 2: the folder
    work: tuple[str, ...] = ()  #: the files by which commands join theirs; none: they stay where the agent is
    oom: tuple[tuple[str, str], ...] = ()  #: files, and the word before their count of kills
    stats: Mapping[str, str] = field(default_factory=dict)


def plan(hierarchy: Hierarchy, sandbox_id: str, limits: Limits) -> GroupPlan:
    """What to make for a sandbox; empty where there is no hierarchy."""
    if hierarchy.version == 0:
        return GroupPlan()
    name = PREFIX + sandbox_id
    return (_plan_v2 if hierarchy.version == 2 else _plan_v1)(hierarchy, name, limits)


def _quota(cpus: float) -> int:
    return max(1000, round(cpus * PERIOD_US))


def _plan_v1(hierarchy: Hierarchy, name: str, limits: Limits) -> GroupPlan:
    at = {controller: f"{base}/{name}" for controller, base in hierarchy.bases.items()}
    outer = tuple(dict.fromkeys(at.values()))
    work = tuple(folder + "/work" for folder in outer) if hierarchy.split else ()
    agent = (at["cpu"] + "/agent",) if hierarchy.split and "cpu" in at else ()
    writes: list[tuple[str, str]] = []
    optional: list[tuple[str, str]] = []
    stats: dict[str, str] = {}
    oom: tuple[tuple[str, str], ...] = ()
    if "memory" in at:
        for folder, most in _shares(at["memory"], hierarchy.split, limits.memory, MEMORY_EXTRA):
            writes.append((folder + "/memory.limit_in_bytes", str(most)))
            if hierarchy.memsw:
                writes.append((folder + "/memory.memsw.limit_in_bytes", str(most)))
            optional.append((folder + "/memory.swappiness", "0"))
            oom += ((folder + "/memory.oom_control", "oom_kill"),)  # each counts its own only
        stats["memory"] = at["memory"] + "/memory.usage_in_bytes"
        stats["memory_peak"] = at["memory"] + "/memory.max_usage_in_bytes"
    if "pids" in at:
        for folder, most in _shares(at["pids"], hierarchy.split, limits.pids + PIDS_EXTRA, PIDS_EXTRA):
            writes.append((folder + "/pids.max", str(most)))
        stats["pids"] = at["pids"] + "/pids.current"
    if "cpu" in at:
        for folder, cpus in _quotas(at["cpu"], hierarchy.split, limits):
            optional.append((folder + "/cpu.cfs_period_us", str(PERIOD_US)))
            writes.append((folder + "/cpu.cfs_quota_us", str(_quota(cpus))))
    if "cpuacct" in at:
        stats["cpu_ns"] = at["cpuacct"] + "/cpuacct.usage"
    return GroupPlan(
        1,
        outer + agent + work,
        at["memory"] + "/memory.use_hierarchy" if work and "memory" in at else None,
        tuple(writes),
        tuple(optional),
        join=tuple((f"{folder}/agent" if f"{folder}/agent" in agent else folder) + "/tasks" for folder in outer),
        work=tuple(folder + "/tasks" for folder in work),
        oom=oom,
        stats=stats,
    )


def _shares(folder: str, split: bool, most: int, extra: int) -> list[tuple[str, int]]:
    """The limit of the sandbox's group, and that of its commands' where they have one."""
    return [(folder, most + extra), (folder + "/work", most)] if split else [(folder, most)]


def _quotas(folder: str, split: bool, limits: Limits) -> list[tuple[str, float]]:
    """Each its own, and none in common: processes that are busy in the kernel overdraw, and all under a quota pay."""
    if not split:
        return [(folder, limits.cpus)]
    return [(folder + "/work", limits.cpus), (folder + "/agent", CPUS_EXTRA)]


def _enabling(hierarchy: Hierarchy) -> str:
    """For a cgroup.subtree_control."""
    return " ".join("+" + name for name in hierarchy.bases)


def _plan_v2(hierarchy: Hierarchy, name: str, limits: Limits) -> GroupPlan:
    base = next(iter(hierarchy.bases.values()))
    at, split = f"{base}/{name}", hierarchy.split
    writes: list[tuple[str, str]] = []
    optional: list[tuple[str, str]] = []
    stats = {"cpu_stat": at + "/cpu.stat"}
    oom: tuple[tuple[str, str], ...] = ()
    if "memory" in hierarchy.bases:
        for folder, most in _shares(at, split, limits.memory, MEMORY_EXTRA):
            writes.append((folder + "/memory.max", str(most)))
            optional += [(folder + "/memory.swap.max", "0"), (folder + "/memory.oom.group", "0")]
        stats |= {"memory": at + "/memory.current", "memory_peak": at + "/memory.peak"}
        oom = ((at + "/memory.events", "oom_kill"),)
    if "pids" in hierarchy.bases:
        for folder, most in _shares(at, split, limits.pids + PIDS_EXTRA, PIDS_EXTRA):
            writes.append((folder + "/pids.max", str(most)))
        stats["pids"] = at + "/pids.current"
    if "cpu" in hierarchy.bases:
        for folder, cpus in _quotas(at, split, limits):
            writes.append((folder + "/cpu.max", f"{_quota(cpus)} {PERIOD_US}"))
    if not split:
        return GroupPlan(2, (at,), None, tuple(writes), tuple(optional), into=at, oom=oom, stats=stats)
    return GroupPlan(
        2,
        (at, at + "/agent", at + "/work"),
        None,
        # a group that passes controllers on may hold no processes itself
        ((at + "/cgroup.subtree_control", _enabling(hierarchy)), *writes),
        tuple(optional),
        into=at + "/agent",
        work=(at + "/work/cgroup.procs",),
        oom=oom,
        stats=stats,
    )


# -- doing it ------------------------------------------------------------------------


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def make(hierarchy: Hierarchy, group: GroupPlan) -> None:
    """Make the groups and set their limits. Raises OSError, with nothing left behind."""
    try:
        if hierarchy.enable:
            write(hierarchy.enable, _enabling(hierarchy))
        for folder in group.folders:
            os.mkdir(folder, 0o755)
            if group.nesting and folder == os.path.dirname(group.nesting):
                with suppress(OSError):
                    write(group.nesting, "1")
        for path, text in group.writes:
            write(path, text)
        for path, text in group.optional:
            with suppress(OSError):
                write(path, text)
    except OSError:
        remove(group.folders)
        raise


def remove(folders: tuple[str, ...], *, seconds: float = 0.0) -> bool:
    """Kill what is in the groups, outer ones first, and remove them. True when they are gone."""
    until = time.monotonic() + seconds
    while True:
        left = [folder for folder in reversed(folders) if not _rmdir(folder)]
        if not left:
            return True
        for folder in left:
            _kill_all(folder)
        if time.monotonic() >= until:
            return not [folder for folder in left if not _rmdir(folder)]
        time.sleep(0.002)


def _rmdir(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _kill_all(folder: str) -> None:
    with suppress(OSError):
        write(folder + "/cgroup.kill", "1")
        return
    for pid in processes(folder):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def processes(folder: str) -> tuple[int, ...]:
    """The pids in a group, as this process sees them."""
    try:
        with open(folder + "/cgroup.procs", encoding="ascii") as file:
            return tuple(int(line) for line in file if line.strip() not in ("", "0"))
    except (OSError, ValueError):
        return ()


def find_leftovers(hierarchy: Hierarchy, sandbox_id: str) -> tuple[str, ...]:
    """Groups of that sandbox: where we would make them, or (another session made them) anywhere in the tree."""
    name = PREFIX + sandbox_id
    bases = set(hierarchy.bases.values())
    near = tuple(path for base in sorted(bases) if os.path.isdir(path := f"{base}/{name}"))
    if near:
        return _with_inner(near)
    found = []
    mounts = _mounts(RealFiles().read("/proc/self/mountinfo") or "")
    for point in sorted({mounts[key][1] for key in ("memory", "pids", "cpu", "cpuacct", "unified") if key in mounts}):
        for folder, below, _files in os.walk(point):
            if name in below:
                found.append(f"{folder}/{name}")
    return _with_inner(tuple(found))


def _with_inner(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(below for folder in folders for below, _names, _files in os.walk(folder))


def _number(path: str | None) -> int | None:
    if path is None:
        return None
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read(64))
    except (OSError, ValueError):
        return None


def _keyed(path: str, key: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                word, _, value = line.partition(" ")
                if word == key:
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


def oom_kills(group: GroupPlan) -> int | None:
    counts = [count for file, key in group.oom if (count := _keyed(file, key)) is not None]
    return sum(counts) if counts else None


def stats(group: GroupPlan) -> HostStats:
    """Counters now; None for what has no source, or is gone."""
    cpu = _number(group.stats.get("cpu_ns"))
    cpu_us = cpu // 1000 if cpu is not None else None
    if "cpu_stat" in group.stats:
        cpu_us = _keyed(group.stats["cpu_stat"], "usage_usec")
    return HostStats(
        cpu_us=cpu_us,
        memory=_number(group.stats.get("memory")),
        memory_peak=_number(group.stats.get("memory_peak")),
        pids=_number(group.stats.get("pids")),
        oom_kills=oom_kills(group),
    )
