"""The OCI configuration of a gVisor sandbox. Pure. Nothing in it is particular to one sandbox but its limits: what is
restored must find the shape that it was saved in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from . import verbs

#: What the agent may do inside, to gVisor's kernel and nobody else's: what it may on the container rung, and SYS_ADMIN
#: for the sandbox's name and its mounts. Commands have none.
_CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP",
    "CAP_SYS_ADMIN",
)  # fmt: skip
#: And until it has brought what leaves to itself: gVisor's own network reaches nowhere.
_EGRESS = ("CAP_NET_RAW",)


#: What root's commands have where it has powers, beyond those of them that the agent has anyway.
_POWERS = ("CAP_FSETID", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT")


def config(
    *,
    open_files: int,
    shared_memory: int,
    pids: int,
    agents_own: int,
    egress: bool = False,
    powers: bool = False,
    volumes: Sequence[dict[str, Any]] = (),
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """For config.json of the bundle."""
    having = [*_CAPABILITIES, *(_EGRESS if egress else ()), *(_POWERS if powers else ())]
    asked = [*(["egress"] if egress else []), *(["powers"] if powers else []), *words]
    capabilities = dict.fromkeys(("bounding", "effective", "permitted"), having)
    return {
        "ociVersion": "1.0.0",
        "process": {
            "args": [verbs.AGENT, "guest", str(pids), str(agents_own), *asked],
            "env": [],
            "cwd": "/",
            "user": {"uid": 0, "gid": 0},
            "capabilities": {**capabilities, "inheritable": [], "ambient": []},
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": open_files, "hard": open_files}],
            "noNewPrivileges": True,
        },
        "root": {"path": verbs.IMAGE, "readonly": False},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            _tmpfs("/dev", "mode=755", "nosuid", "noexec"),
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["nosuid", "noexec"]},
            _tmpfs("/dev/shm", "mode=1777", f"size={shared_memory}", "nosuid", "nodev"),
            *volumes,
        ],
        "linux": {"namespaces": [_network(egress), *({"type": name} for name in ("pid", "ipc", "uts", "mount"))]},
    }


def _network(egress: bool) -> dict[str, str]:
    """A new one, or the jail's, whose `lo` has the addresses to copy."""
    return {"type": "network", **({"path": "/proc/self/ns/net"} if egress else {})}


def _tmpfs(path: str, *options: str) -> dict[str, Any]:
    return {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": list(options)}


def encode(configuration: dict[str, Any]) -> bytes:
    return json.dumps(configuration, separators=(",", ":")).encode()
