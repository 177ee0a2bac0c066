"""From limits and machine facts to what is enforced, by what, and at which value. Pure.

The one place that decides what "enforced" means without cgroups. ``Controls`` holds both the honest sentence for
``guarantees()`` and the settings that make it true.
"""

from __future__ import annotations

import math
import resource
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import ControlUnavailable, InvalidLimit
from ..spec import Limits, SandboxSpec
from . import headroom
from .base import Guarantee
from .cgroups import CPUS_EXTRA, MEMORY_EXTRA, PIDS_EXTRA
from .machine import Machine

_MIB = 2**20
_GIB = 2**30
_TMPFS_SHARE = 2  # a disk kept in memory takes at most one part in this many of the memory limit
_EXT4_LEAST = 8 * _MIB
_RLIMIT_MSGQUEUE = 12
_KERNEL_FILES = 1 << 20  # what a kernel of the sandbox's own may open of the host's


@dataclass(frozen=True)
class Scratch:
    """Where writes go. ``ext4``: a sparse file behind a loop device; ``tmpfs``: memory; ``folder``: the host's disk."""

    kind: str
    size: int

    @property
    def inodes(self) -> int:
        return max(4096, self.size // 4096)  # source trees and node_modules: small files by the thousand


@dataclass(frozen=True)
class Controls:
    guarantees: tuple[Guarantee, ...]
    limits: Limits  #: with defaults that this machine cannot give lowered to what it can
    scratch: Scratch
    rlimits: tuple[tuple[int, int], ...]
    pinned: tuple[int, ...] = ()  #: cpus, where affinity stands in for a quota
    watched: int | None = None  #: bytes, where the agent's watchdog stands in for a memory cgroup


def size_text(count: int) -> str:
    for unit, factor in (("g", 2**30), ("m", 2**20), ("k", 2**10)):
        if count % factor == 0 and count >= factor:
            return f"{count // factor}{unit}"
    return str(count)


def fit(limits: Limits, machine: Machine) -> Limits:
    """Refuse what the host does not have; lower defaults to what it has."""
    asked = limits.explicit
    if limits.memory > machine.memory and "memory" in asked:
        raise InvalidLimit(
            f"memory={size_text(limits.memory)} is more than this host has",
            hint=f"the most is {machine.memory // _MIB}m",
        )
    if limits.cpus > len(machine.cpus) and "cpus" in asked:
        raise InvalidLimit(f"cpus={limits.cpus:g} is more than this host has", hint=f"the most is {len(machine.cpus)}")
    return Limits(
        cpus=min(limits.cpus, float(len(machine.cpus))),
        memory=min(limits.memory, machine.memory),
        disk=limits.disk,
        pids=limits.pids,
        open_files=limits.open_files,
        explicit=asked,
    )


def choose_scratch(limits: Limits, machine: Machine) -> Scratch:
    """A disk of its own where root can make one, else memory (docs/adr/0002). A default that is kept in memory leaves
    most of the memory limit to processes, so that filling it is ENOSPC and not an out-of-memory kill."""
    if machine.loop and machine.mkfs and machine.idmap and limits.disk >= _EXT4_LEAST:
        return Scratch("ext4", limits.disk // _MIB * _MIB)
    if "disk" in limits.explicit:
        return Scratch("tmpfs", limits.disk)
    return Scratch("tmpfs", min(limits.disk, limits.memory // _TMPFS_SHARE))


def _cpus(limits: Limits, machine: Machine, sandbox_id: str) -> tuple[Guarantee, tuple[int, ...]]:
    value = f"{limits.cpus:g}"
    if machine.cgroup.enforces("cpus"):
        more = f" (and at most {CPUS_EXTRA:g} for the agent's own)" if machine.cgroup.split else ""
        return Guarantee("cpus", True, f"cgroup v{machine.cgroup.version} cpu quota{more}", value), ()
    count = math.ceil(limits.cpus)
    usable = [cpu for cpu in machine.cpus if cpu < 64]
    if not usable:
        return Guarantee("cpus", False, f"not enforced: {machine.cgroup.reason}", value), ()
    start = zlib.crc32(sandbox_id.encode())
    chosen = tuple(sorted({usable[(start + i) % len(usable)] for i in range(count)}))
    whole = limits.cpus == count
    how = "pinned to that many cpus, and may not change it" if whole else f"only whole cpus: pinned to {count}"
    return Guarantee("cpus", whole, how, value if whole else str(count)), chosen


def _memory(limits: Limits, machine: Machine) -> tuple[Guarantee, list[tuple[int, int]]]:
    value = size_text(limits.memory)
    if machine.cgroup.enforces("memory"):
        swap = " without swap" if machine.cgroup.version == 2 or machine.cgroup.memsw else ""
        more = f" (and {MEMORY_EXTRA // _MIB} MiB more for the agent's own)" if machine.cgroup.split else ""
        return Guarantee("memory", True, f"cgroup v{machine.cgroup.version} memory{swap}{more}", value), []
    # A sampled limit can be overshot between two looks: it is no enforcement (docs/adr/0006).
    how = (
        "each process by RLIMIT_DATA; the sandbox as a whole by a watchdog that looks 20 times a second "
        f"({machine.cgroup.reason})"
    )
    return Guarantee("memory", False, how, value), [(resource.RLIMIT_DATA, limits.memory)]


def _each(sudo: bool) -> str:
    return "for each user inside" + (", and root with powers can be many of them" if sudo else "")


def _pids(
    limits: Limits, machine: Machine, *, namespaces: bool, sudo: bool = False
) -> tuple[Guarantee, list[tuple[int, int]]]:
    value = str(limits.pids)
    if machine.cgroup.enforces("pids"):
        more = 2 * PIDS_EXTRA if machine.cgroup.split else PIDS_EXTRA
        how = f"cgroup v{machine.cgroup.version} pids (and {more} more for the agent's own)"
        return Guarantee("pids", True, how, value), []
    if namespaces and machine.kernel >= (5, 14):
        how = f"RLIMIT_NPROC in its own user namespace, {_each(sudo)}"
        if machine.root or machine.helpers:  # the agent's own count as another user's
            return Guarantee("pids", not sudo, how, value), [(resource.RLIMIT_NPROC, limits.pids)]
        how += f" (and {PIDS_EXTRA} more for the agent's own)"
        return Guarantee("pids", True, how, value), [(resource.RLIMIT_NPROC, limits.pids + PIDS_EXTRA)]
    if machine.drops:  # the process rung: a uid of its own, counted by itself
        how = f"RLIMIT_NPROC of a uid of its own (and {PIDS_EXTRA} more for the agent's own)"
        return Guarantee("pids", True, how, value), [(resource.RLIMIT_NPROC, limits.pids + PIDS_EXTRA)]
    return Guarantee("pids", False, f"not enforced: {machine.cgroup.reason}", ""), []


def _open_files(limits: Limits, machine: Machine) -> Guarantee:
    enough = limits.open_files <= machine.open_files
    value = min(limits.open_files, machine.open_files)
    how = "RLIMIT_NOFILE of each process"
    return Guarantee("open_files", enough, how if enough else f"{how}: the host's own hard limit is lower", str(value))


def _disk(limits: Limits, scratch: Scratch) -> Guarantee:
    value = size_text(scratch.size)
    inodes = f"{scratch.inodes} files"
    if scratch.kind == "ext4":
        return Guarantee("disk", True, f"an ext4 filesystem of its own in a sparse file; {inodes}", value)
    if scratch.kind == "tmpfs":
        return Guarantee("disk", True, f"a tmpfs: kept in memory, and counted as such; {inodes}", value)
    how = "each file at most this size (RLIMIT_FSIZE), but any number of files"
    return Guarantee("disk", False, how, size_text(limits.disk))


def decide(spec: SandboxSpec, machine: Machine, sandbox_id: str, *, namespaces: bool) -> Controls:
    """All resource controls. Raises InvalidLimit above the host's own, ControlUnavailable for what was asked for and
    cannot be enforced (unless ``spec.allow_weaker``)."""
    limits = fit(spec.limits, machine)
    scratch = choose_scratch(limits, machine) if namespaces else Scratch("folder", limits.disk)
    cpus, pinned = _cpus(limits, machine, sandbox_id)
    memory, memory_rlimits = _memory(limits, machine)
    pids, pids_rlimits = _pids(limits, machine, namespaces=namespaces, sudo=bool(spec.sudo))
    found = (cpus, memory, _disk(limits, scratch), pids, _open_files(limits, machine))
    _refuse_weaker(found, spec, limits, namespaces=namespaces)
    open_files = min(limits.open_files, machine.open_files)
    rlimits = [
        *memory_rlimits,
        *pids_rlimits,
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, min(limits.memory, 64 * _MIB)),
        (_RLIMIT_MSGQUEUE, 819200),
    ]
    if scratch.kind == "folder":
        rlimits.append((resource.RLIMIT_FSIZE, limits.disk))
    watched = None if machine.cgroup.enforces("memory") else limits.memory
    return Controls(found, limits, scratch, tuple(rlimits), pinned, watched)


def decide_for_own_kernel(spec: SandboxSpec, machine: Machine, sandbox_id: str) -> Controls:
    """As ``decide``, where the sandbox has a kernel of its own (gVisor): that counts processes and memory by itself,
    and the host's limits hold for it as a whole. Which files and processes it needs of the host is its own affair."""
    limits = fit(spec.limits, machine)
    scratch = choose_scratch(limits, machine)
    cpus, pinned = _cpus(limits, replace(machine, cgroup=replace(machine.cgroup, split=False)), sandbox_id)
    each = _each(bool(spec.sudo))
    how = f"RLIMIT_NPROC of gVisor's own kernel, {each} (and {PIDS_EXTRA} more for the agent's own)"
    pids = Guarantee("pids", not spec.sudo, how, str(limits.pids))
    found = (cpus, _own_memory(limits, machine), _own_disk(scratch), pids, _open_files(limits, machine))
    _refuse_weaker(found, spec, limits, namespaces=True)
    rlimits = ((resource.RLIMIT_NOFILE, min(machine.open_files, _KERNEL_FILES)), (resource.RLIMIT_CORE, 0))
    return Controls(found, limits, scratch, rlimits, pinned, limits.memory)


def own_kernel_memory(limits: Limits) -> int:
    """What gVisor's kernel and its helper may use beside the sandbox's own: some for all, and what the host needs for
    each process. Measured: docs/adr/0040."""
    return 128 * _MIB + min(limits.pids * _MIB // 2, 2048 * _MIB)


def _own_memory(limits: Limits, machine: Machine) -> Guarantee:
    inside = "gVisor's kernel counts it and the agent ends the largest process, looking up to 100 times a second"
    if machine.cgroup.enforces("memory"):
        more = own_kernel_memory(limits) // _MIB
        most = (
            f"cgroup v{machine.cgroup.version} memory with {more} MiB more for gVisor itself"
            f" (and up to {headroom.MOST // _GIB} GiB while it is saved)"
        )
        return Guarantee("memory", True, f"{most}; within it {inside}", size_text(limits.memory))
    return Guarantee("memory", False, f"{inside} ({machine.cgroup.reason})", size_text(limits.memory))


def _own_disk(scratch: Scratch) -> Guarantee:
    where = "an ext4 filesystem of its own in a sparse file" if scratch.kind == "ext4" else "a tmpfs: kept in memory"
    how = f"gVisor keeps what is written in {where}; names and empty files count as gVisor's own memory"
    return Guarantee("disk", True, how, size_text(scratch.size))


def _refuse_weaker(found: Iterable[Guarantee], spec: SandboxSpec, limits: Limits, *, namespaces: bool) -> None:
    for item in found:
        if item.control in limits.explicit and not item.enforced and not spec.allow_weaker:
            raise ControlUnavailable(
                f"{item.control}={getattr(spec.limits, item.control)!r} cannot be enforced here: {item.how}",
                hint=_advice(item.control, namespaces=namespaces, sudo=bool(spec.sudo)),
            )


def enforceable(guarantees: Iterable[Guarantee], machine: Machine) -> dict[str, str]:
    """For ``Capabilities.controls``: what can be enforced here at any value. Pinning does whole cpus only."""
    found = {item.control: item.how for item in guarantees if item.enforced}
    if not machine.cgroup.enforces("cpus"):
        found.pop("cpus", None)
    return found


def _advice(control: str, *, namespaces: bool, sudo: bool = False) -> str:
    if control == "pids" and sudo:
        return "sudo=False (--no-sudo) can, and so can engine='container' with a cgroup; or pass allow_weaker=True"
    if control == "disk" and not namespaces:
        return "engine='container' can"
    if control == "open_files":
        return "raise the hard limit of the calling process, ask for less, or pass allow_weaker=True"
    return "root, or a delegated cgroup (systemd-run --user --scope -p Delegate=yes), can; or pass allow_weaker=True"
