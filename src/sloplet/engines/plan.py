"""The launcher's plan as values, and its encoding. docs/launch.md is the format; agent/launch.h has the same numbers
(a test compares them)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, IntFlag

MAGIC = 0x31504C53
MAX_SLOTS = 96
FILE_IF_ALLOWED = 0x80000000


class Set(IntEnum):
    FLAGS = 1
    HOLDER = 2
    UID_MAP = 3
    GID_MAP = 4
    MAP_HELPERS = 5
    IDENTITY = 6
    HOSTNAME = 7
    CGROUP_JOIN = 8
    CGROUP_INTO = 9
    CGROUP_REMOVE = 10
    OOM_FILE = 11
    RLIMIT = 12
    CAPS = 13
    SECCOMP = 14
    LANDLOCK = 15
    CPUS = 16
    DROP_TO = 17
    CGROUP_WORK = 18
    GIVEN = 19


class Do(IntEnum):
    TREE = 64
    TMPFS = 65
    EXT4 = 66
    STAGE = 67
    ROOT = 68
    OVERLAY = 69
    MKDIR = 70
    SYMLINK = 71
    FILE = 72
    MOUNT = 73
    FS = 74
    MASK = 75
    READONLY = 76
    PIVOT = 77
    LOOPBACK = 78
    WRITE = 79
    ALLOW = 80
    CHDIR = 81
    WRAP = 82
    EGRESS = 83
    ADDRESSES = 84
    VOLUME = 85
    PLACE = 86
    COVER = 87


class PlanFlag(IntFlag):
    NAMESPACES = 1
    HOST_MOUNTS = 2
    PROBE = 4
    DENY_SETGROUPS = 8
    MINDER = 16
    POWERS = 32
    NO_SETID = 64
    NO_LEASES = 128


class TreeFlag(IntFlag):
    RECURSIVE = 1
    IDMAP = 2
    OPTIONAL = 4


class VolumeFlag(IntFlag):
    WHOLE = 1


class AllowFlag(IntFlag):
    AGENT_ONLY = 1


class OverlayFlag(IntFlag):
    GUARDED = 1
    SHOWN = 2


class Seccomp(IntFlag):
    ON = 1
    BARE = 2
    NO_METADATA = 4
    NO_AFFINITY = 8
    FENCED = 16


class Attr(IntFlag):
    """Attributes of a mount: the kernel's numbers."""

    RDONLY = 1
    NOSUID = 2
    NODEV = 4
    NOEXEC = 8
    NOATIME = 16


class End(IntEnum):
    """How the supervisor's exit code reads."""

    CLEAN = 0
    START_FAILED = 1
    AGENT_FAILED = 2
    STOPPED = 3
    SIGNAL = 32
    OOM = 128


@dataclass(frozen=True)
class Step:
    """One setting or step: numbers and texts, in the order the launcher reads them."""

    kind: Set | Do
    args: tuple[int | str | bytes, ...] = ()


def step(kind: Set | Do, *args: int | str | bytes) -> Step:
    return Step(kind, args)


def _encode_step(item: Step) -> bytes:
    parts = []
    for value in item.args:
        if isinstance(value, int):
            parts.append(struct.pack("<Q", value & 0xFFFFFFFFFFFFFFFF))
        else:
            data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
            parts.append(struct.pack("<I", len(data)) + data + b"\0")
    body = b"".join(parts)
    return struct.pack("<II", item.kind, len(body)) + body


def encode_steps(steps: Iterable[Step]) -> bytes:
    return b"".join(map(_encode_step, steps))


def frame(body: bytes) -> bytes:
    """A plan out of encoded steps. All settings come before all steps."""
    return struct.pack("<II", MAGIC, len(body) + 8) + body
