"""What the numbers were measured on, as far as it matters to them. Names nobody."""

from __future__ import annotations

import os
import platform
from typing import Any

from ... import __version__


def describe() -> dict[str, Any]:
    return {
        "sloplet": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "system": _first("/etc/os-release", "PRETTY_NAME", "=").strip('"'),
        "user": "root" if os.geteuid() == 0 else "ordinary user",
        "load": list(os.getloadavg()),
    }


def _first(path: str, key: str, sign: str = ":") -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, found, value = line.partition(sign)
                if found and name.strip() == key:
                    return value.strip()
    except OSError:
        pass
    return ""
