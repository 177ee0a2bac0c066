"""The plain values that sandboxes give back. No behaviour, no imports of ours but errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Result:
    """How a command ended. A command that fails is a result, not an exception (see ``check=True``).

    ``exit_code`` follows the shell: 128 + n if signal n ended it. ``stdout_size`` counts what the command
    wrote, of which ``stdout_raw`` holds the first ``max_output`` bytes; ``truncated`` says that something is missing.
    """

    exit_code: int
    stdout_raw: bytes = b""
    stderr_raw: bytes = b""
    duration: float = 0.0
    signal: int | None = None
    timed_out: bool = False
    oom: bool = False
    truncated: bool = False
    stdout_size: int = 0
    stderr_size: int = 0
    cpu_seconds: float = 0.0
    max_rss: int = 0
    denied: tuple[str, ...] = ()  #: why connections were refused while it ran, each reason once, 20 at most

    @cached_property
    def stdout(self) -> str:
        """The output as text; bytes that are not UTF-8 become U+FFFD (``stdout_raw`` is exact)."""
        return self.stdout_raw.decode("utf-8", "replace")

    @cached_property
    def stderr(self) -> str:
        return self.stderr_raw.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    def describe(self) -> str:
        """One line on how it ended, for people and models."""
        if self.timed_out:
            return f"it was stopped after {self.duration:.1f} s: the time limit was reached"
        if self.oom:
            who = "it" if self.exit_code else "a process of it"
            return f"{who} was killed: the sandbox's memory limit was reached (exit code {self.exit_code})"
        if self.signal:
            return f"it was ended by signal {self.signal} (exit code {self.exit_code})"
        return f"it ended with exit code {self.exit_code}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code, "stdout": self.stdout, "stderr": self.stderr, "duration": self.duration,
            "signal": self.signal, "timed_out": self.timed_out, "oom": self.oom, "truncated": self.truncated,
            "stdout_size": self.stdout_size, "stderr_size": self.stderr_size, "cpu_seconds": self.cpu_seconds,
            "max_rss": self.max_rss, "denied": list(self.denied),
        }  # fmt: skip


@dataclass(frozen=True)
class ProcessInfo:
    """A process that the agent started, running or ended."""

    pid: int  #: the agent's number for it, for ``attach``
    os_pid: int  #: the kernel's number inside the sandbox
    command: tuple[str, ...]
    running: bool
    started_at: float
    tty: bool = False
    tag: str = ""
    exit_code: int | None = None
    stdout_size: int = 0
    stderr_size: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "pid": self.pid, "os_pid": self.os_pid, "command": list(self.command), "running": self.running,
            "started_at": self.started_at, "tty": self.tty, "tag": self.tag, "exit_code": self.exit_code,
            "stdout_size": self.stdout_size, "stderr_size": self.stderr_size,
        }  # fmt: skip


@dataclass(frozen=True)
class LinkTarget:
    """What a symbolic link leads to, over all links on the way."""

    type: str  #: as of FileInfo, but never symlink
    size: int
    mode: int
    path: str | None = None  #: absolute, without links; None if it has none


@dataclass(frozen=True)
class FileInfo:
    """A file in the sandbox. ``name`` is its path relative to what was listed, or its last part."""

    name: str
    type: str  #: file, dir, symlink, other
    size: int
    mode: int
    uid: int
    gid: int
    modified: float
    target: str | None = None  #: a link's text
    owner: str | None = None  #: with ``owners=True``: the user's name, or the number as text where it has none
    group: str | None = None  #: the same of its group
    leads_to: LinkTarget | None = None  #: of a link, with ``targets=True``; None if it leads nowhere
    attributes: Mapping[str, bytes] = field(default_factory=dict, hash=False)  #: with ``attributes=``: which begin so

    @property
    def is_dir(self) -> bool:
        return self.type == "dir"

    @property
    def is_file(self) -> bool:
        return self.type == "file"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "type": self.type, "size": self.size, "mode": self.mode, "uid": self.uid,
            "gid": self.gid, "modified": self.modified, "target": self.target,
        }  # fmt: skip


@dataclass(frozen=True)
class FileChange:
    """Something that ``files.watch`` saw: created, modified, removed, renamed, attributes, overflow."""

    kind: str
    name: str
    new_name: str | None = None


@dataclass(frozen=True)
class Metrics:
    """What a sandbox uses now. ``source`` says for each value where it was read."""

    cpu_seconds: float
    memory: int
    memory_limit: int
    pids: int
    pids_limit: int
    disk_used: int
    disk_limit: int
    uptime: float
    memory_peak: int | None = None
    oom_kills: int | None = None
    source: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "cpu_seconds": self.cpu_seconds, "memory": self.memory, "memory_limit": self.memory_limit,
            "memory_peak": self.memory_peak, "pids": self.pids, "pids_limit": self.pids_limit,
            "disk_used": self.disk_used, "disk_limit": self.disk_limit, "uptime": self.uptime,
            "oom_kills": self.oom_kills, "source": self.source,
        }  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """Where an upload or download stands."""

    path: str
    files: int
    bytes: int
    total_files: int | None = None
    total_bytes: int | None = None
    skipped: tuple[str, ...] = ()  #: left out: special files, links that lead out, what vanished meanwhile
