"""A leak detector: what this process, its descendants and the machine hold of ours, before and after.

    before = snapshot(home)
    ...                                  # make, use and destroy sandboxes
    assert settled(before, home) == []   # [] or one line for each thing that is there and was not, or is gone

Inside ``with adopted_orphans():`` whatever a dying parent leaves comes to this process instead of init, and so is
found as a descendant. Only what is ours is looked at, so that other programs on the machine make no noise: processes
below this one, cgroups named ``sloplet*`` that are empty or hold our processes, loop devices on files of the home. What
the whole machine shares may become less meanwhile, never more.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from .bench.memory import descendants, parent_of

_PR_SET_CHILD_SUBREAPER = 36
_CGROUPS = Path("/sys/fs/cgroup")
_SHARED = ("mounts", "cgroups", "loop_devices")  # kinds that other programs have too
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


@dataclass(frozen=True)
class Snapshot:
    """Multisets of names; ``diff`` compares each."""

    processes: Counter[str]
    namespaces: Counter[str]
    mounts: Counter[str]
    cgroups: Counter[str]
    loop_devices: Counter[str]
    open_files: Counter[str]
    threads: Counter[str]
    home: Counter[str]
    records: Counter[str]


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Be the parent of every descendant whose own parent dies (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _subreaper(1)
    try:
        yield
    finally:
        _subreaper(0)


def _subreaper(on: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, on, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def bury_orphans() -> None:
    """Wait for adopted children that have ended; nobody else will. Only zombies are touched."""
    for pid in descendants():
        if parent_of(pid) == os.getpid() and _state(pid) == "Z":
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


def snapshot(home: str | os.PathLike[str] | None = None) -> Snapshot:
    """What there is now. What earlier code has dropped is collected first: its files close now, and not amid what is
    being watched, where fewer files would be a difference too."""
    gc.collect()
    return _look(home)


def _look(home: str | os.PathLike[str] | None = None) -> Snapshot:
    """All that could leak, now. ``home`` is a SLOPLET_HOME."""
    family = descendants()
    folder = Path(home) if home is not None else None
    return Snapshot(
        processes=Counter(f"{pid} {_state(pid)} {_command(pid)}" for pid in family if _command(pid)),
        namespaces=_namespaces({*family, os.getpid()}),
        mounts=_mounts(),
        cgroups=_cgroups(family),
        loop_devices=_loop_devices(folder),
        open_files=_open_files(),
        threads=Counter(re.sub(r"\d+$", "", thread.name) for thread in threading.enumerate()),
        home=_files(folder),
        records=_records(folder),
    )


def diff(before: Snapshot, after: Snapshot) -> list[str]:
    """One line for each thing more or less; empty when nothing leaked and nothing is missing."""
    lines = []
    for kind in (field.name for field in fields(Snapshot)):
        was, is_ = getattr(before, kind), getattr(after, kind)
        lines += [f"{kind}: +{count} {name}" for name, count in sorted((is_ - was).items())]
        if kind not in _SHARED:
            lines += [f"{kind}: -{count} {name}" for name, count in sorted((was - is_).items())]
    return lines


def settled(
    before: Snapshot, home: str | os.PathLike[str] | None = None, *, bury: bool = False, within: float = 30.0
) -> list[str]:
    """The difference to ``before`` once it is empty, or as it is after ``within`` seconds: the kernel takes a moment
    to remove a cgroup or a namespace whose last process has just ended, and seconds for a loop device while the disk is
    busy (mounts of a dead namespace are put away one after the other). ``bury``: wait for orphans, as init would."""
    give_up = time.monotonic() + within
    while True:
        if bury:
            bury_orphans()
        found = diff(before, _look(home))
        if not found or time.monotonic() > give_up:
            return found
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return "?"
    return stat.rpartition(b")")[2].split()[0].decode()


def _command(pid: int) -> str:
    """The command line, or the kernel's name for a process that has none; empty if it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
        name = raw.replace(b"\0", b" ").strip() or Path(f"/proc/{pid}/comm").read_bytes().strip()
    except OSError:
        return ""
    return name.decode("utf-8", "replace")[:200]


def _namespaces(pids: set[int]) -> Counter[str]:
    found = set()
    for pid in pids:
        for kind in _NAMESPACES:
            try:
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
            except OSError:
                pass
    return Counter(found)


def _mounts() -> Counter[str]:
    found: Counter[str] = Counter()
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            first, _, second = line.partition(" - ")
            found[f"{second.split()[0]} on {first.split()[4]}"] += 1
    return found


def _cgroups(family: set[int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for folder, names, _ in os.walk(_CGROUPS):
        for name in names:
            if name.startswith("sloplet") and _ours(Path(folder, name), family):
                found[os.path.join(folder, name)] += 1
    return found


def _ours(cgroup: Path, family: set[int]) -> bool:
    try:
        inside = {int(pid) for path in cgroup.rglob("cgroup.procs") for pid in path.read_text().split()}
        inside |= {int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()}
    except OSError:
        return False
    return not inside or bool(inside & family)


def _loop_devices(home: Path | None) -> Counter[str]:
    """The files of those on a home's, or of all."""
    below = f"{home.resolve()}/" if home is not None else ""
    found: Counter[str] = Counter()
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name = path.read_text("utf-8", "replace").strip()
        except OSError:
            continue
        if name.startswith(below):
            found[name] += 1
    return found


def _open_files() -> Counter[str]:
    """Open files by kind: pipes, sockets and the like without their numbers, which change from one to the next."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the one that listed the folder
        if target != f"/proc/{os.getpid()}/fd":
            found[re.sub(r"\[\d+\]", "", target)] += 1
    return found


def _files(home: Path | None) -> Counter[str]:
    found: Counter[str] = Counter()
    for folder, folders, names in os.walk(home) if home is not None else ():
        for name in (*folders, *names):
            found[os.path.relpath(os.path.join(folder, name), home)] += 1
    return found


_LIST = """
import sys
from sloplet.state.home import Home
from sloplet.state.store import Store
print(*(info.id for info in Store(Home(sys.argv[1])).list()))
"""


def _records(home: Path | None) -> Counter[str]:
    """Asked by another process: closing a second connection here would leave SQLite a descriptor of ours open."""
    if home is None or not (home / "state.db").exists():
        return Counter()
    asked = subprocess.run([sys.executable, "-c", _LIST, str(home)], check=True, capture_output=True, text=True)
    return Counter(asked.stdout.split())
