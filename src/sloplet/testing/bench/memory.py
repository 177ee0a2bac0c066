"""How much memory processes use: PSS out of /proc/PID/smaps_rollup, where a page shared by n counts 1/n for each.

A page of the agent's code that 500 sandboxes share is counted once in the sum, as it is in the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

MIB = 2**20


def pss(pid: int | str = "self") -> int:
    """Bytes; 0 for a process that is gone. PermissionError if the kernel does not let us look."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
            return parse_pss(rollup.read())
    except (FileNotFoundError, ProcessLookupError):
        return 0


def parse_pss(text: str) -> int:
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def descendants(root: int | None = None) -> set[int]:
    """Every process below ``root`` (this one, if not said), in whatever namespace it is."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            parent = parent_of(int(entry.name))
            if parent is not None:
                children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    queue = [root or os.getpid()]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in found:
                found.add(child)
                queue.append(child)
    return found


def parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[1])


def weigh(pids: Iterable[int]) -> tuple[int, int]:
    """Their PSS together, and for how many of them it is RSS instead: an ordinary user is not shown the PSS of a
    process that has other ids than he (a sandbox's). RSS is never less, so the sum is never too small."""
    total = guessed = 0
    for pid in pids:
        try:
            total += pss(pid)
        except PermissionError:
            total += rss(pid)
            guessed += 1
    return total, guessed


def rss(pid: int | str = "self") -> int:
    try:
        return _field(f"/proc/{pid}/status", "VmRSS:") * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0


def machine_available() -> int:
    """MemAvailable: what the kernel thinks could still be given out."""
    return _field("/proc/meminfo", "MemAvailable:") * 1024


def reset_peak() -> None:
    """Begin anew with this process's peak resident size (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_resident() -> int:
    return _field("/proc/self/status", "VmHWM:") * 1024


def _field(path: str, name: str) -> int:
    with open(path, encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith(name):
                return int(line.split()[1])
    return 0
