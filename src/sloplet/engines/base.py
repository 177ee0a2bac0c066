"""The contract of an engine: start our agent in an isolated place, hand over its two pipes, stop it.

An engine knows nothing of commands, files or state.db: those are written once, over the wire. What
an engine cannot do is said in its ``Probe`` as data and refused by ``check`` *before anything is
made*. Every engine, ``fake`` too, passes ``sloplet.testing.conformance``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import UnsupportedOperation
from ..spec import SandboxSpec

if TYPE_CHECKING:
    from ..images.config import ImageConfig
    from ..images.lease import Lease


@dataclass(frozen=True)
class Guarantee:
    """One control: is it enforced, at which value, by what. Truthful, for ``box.guarantees()``."""

    #: filesystem, processes, network, ipc, syscalls, privileges, users, cpus, memory, disk, pids, open_files, ttl,
    #: volume (one for each)
    control: str
    enforced: bool
    how: str  #: "cgroup v1 memory", "network namespace without devices", "not enforced: no cgroup is writable here"
    value: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"control": self.control, "enforced": self.enforced, "how": self.how, "value": self.value}


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do on this machine. Tests and refusals go by these, never by engine name."""

    images: frozenset[str] = frozenset({"host"})  #: kinds of image: "host", "rootfs"
    #: control -> how it would be enforced here; a control that is missing cannot be enforced
    controls: dict[str, str] = field(default_factory=dict)
    private_filesystem: bool = False  #: has a root of its own, /workspace is really there
    private_processes: bool = False  #: sees only its own processes
    shared_kernel: bool = True  #: a kernel bug is an escape
    users: bool = False  #: can run commands as several users (root among them)
    echoes_controls: bool = True  #: a terminal shows the control characters that were typed as ^C and the like
    live_snapshots: bool = False
    disk_snapshots: bool = False
    egress: bool = False  #: what leaves can be brought to the agent: network= other than "none"
    no_egress: str = ""  #: why not
    ports: bool = False  #: servers inside can be reached over the wire
    volumes: bool = False  #: folders of the host and named volumes can be mounted


@dataclass(frozen=True)
class Probe:
    """Whether the engine can run here. ``available`` False: ``reason`` says why, ``fix`` the command to run."""

    engine: str
    rung: str
    available: bool
    reason: str = ""
    fix: str = ""
    details: tuple[str, ...] = ()  #: lines for ``sloplet doctor``
    capabilities: Capabilities = field(default_factory=Capabilities)


@dataclass(frozen=True)
class ResolvedImage:
    """What the sandbox's root is made of. ``host``: the host's own /usr and so on; ``rootfs``: a folder."""

    kind: str
    path: Path | None = None
    #: whether files in ``path`` carry the image's own owners (unpacked as root) or all belong to the caller
    owners_kept: bool = False
    config: ImageConfig | None = None  #: what the image says of how it wants to be run; None: it says nothing
    #: keeps ``path`` from being removed; whoever has got it by ``resolve`` or ``held`` closes it
    lease: Lease | None = field(default=None, compare=False, repr=False)

    def held(self) -> ResolvedImage:
        """The same for one more user, who closes it when he has ended."""
        return self if self.lease is None else replace(self, lease=self.lease.share())

    def close(self) -> None:
        """Idempotent."""
        if self.lease is not None:
            self.lease.close()


@dataclass(frozen=True)
class Mount:
    """A volume, opened. Its owner outside is the sandbox's user inside, on every rung."""

    path: str  #: inside
    fd: int  #: of its folder, the caller's; or, if ``whole``, of a filesystem that is mounted nowhere yet
    read_only: bool
    owner: tuple[int, int]  #: uid and gid of the folder
    label: str  #: what it is, for people
    #: outside nobody but the caller gets at it: all owners are kept, and modes harm nobody
    private: bool = False
    whole: bool = False


@dataclass(frozen=True)
class StartRequest:
    """All an engine needs. ``place`` is a folder of the sandbox's own that exists and is empty; the caller
    removes it afterwards. Everything that outlives a crash must be findable from ``id`` alone."""

    id: str
    spec: SandboxSpec
    image: ResolvedImage
    place: Path
    #: go on from what ``Instance.save`` wrote: a descriptor of that folder, the caller's. None: a fresh start
    restore: int | None = None
    volumes: tuple[Mount, ...] = ()  #: outer ones first
    held: tuple[int, ...] = ()  #: descriptors to keep open until every process of the sandbox is gone


#: The version of states that are files only.
FILES = "files 1"


@dataclass(frozen=True)
class StateFormat:
    """What a saved state depends on. One made by another is refused before it is tried."""

    engine: str
    version: str  #: of the program that wrote it, exactly: "runsc release-20240729.0"
    platform: str = ""
    arch: str = ""
    cpu: tuple[str, ...] = ()  #: features of the processor that it may be using

    def to_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine, "version": self.version, "platform": self.platform, "arch": self.arch,
            "cpu": list(self.cpu),
        }  # fmt: skip

    @staticmethod
    def from_dict(data: dict[str, Any]) -> StateFormat:
        return StateFormat(**{**data, "cpu": tuple(data["cpu"])})

    def refuses(self, other: StateFormat) -> str:
        """Why a state of the format ``other`` cannot go on here; "" if it can."""
        for what in ("engine", "version", "platform", "arch"):
            mine, its = getattr(self, what), getattr(other, what)
            if mine != its:
                return f"it was made by another {what}: {its or 'unknown'}, here is {mine or 'unknown'}"
        missing = sorted(set(other.cpu) - set(self.cpu))
        if missing:
            return f"it was made on another processor: this one lacks {', '.join(missing[:8])}"
        return ""


@dataclass(frozen=True)
class HelloConfig:
    """What the runtime must put into the wire's HELLO for this sandbox (see docs/wire.md)."""

    user: str
    workdir: str
    home: str | None
    env: tuple[tuple[str, str], ...]
    no_users: bool = False
    hostname: str | None = None
    #: bytes that the agent's watchdog holds the sandbox to as a whole; None where a cgroup does
    memory: int | None = None
    egress: bool = False  #: the agent serves what programs connect to, and DNS


@dataclass(frozen=True)
class HostStats:
    """Counters read on the host's side; None where there is no source for it."""

    cpu_us: int | None = None
    memory: int | None = None
    memory_peak: int | None = None
    pids: int | None = None
    oom_kills: int | None = None


@dataclass(frozen=True)
class Exit:
    """How a sandbox ended. ``reason`` is a sentence for people; ``oom``: its memory limit ended it."""

    reason: str
    oom: bool = False


class Instance(Protocol):
    """A started sandbox, as its engine holds it.

    ``read_fd`` and ``write_fd`` are the wire (non-blocking is up to the caller; the caller owns and
    closes them). Closing ``write_fd`` ends the sandbox: no sandbox outlives its holder.
    """

    read_fd: int
    write_fd: int
    hello: HelloConfig
    guarantees: tuple[Guarantee, ...]

    async def wait(self) -> Exit:
        """Return once every process of the sandbox is gone. Any number of callers, any number of times."""

    def kill(self) -> None:
        """End every process of the sandbox now. Synchronous, idempotent, safe at interpreter exit; does not wait."""

    def cleanup(self) -> None:
        """After the end: remove what the engine made outside ``place`` (cgroups). Synchronous and idempotent."""

    def oom_kills(self) -> int | None:
        """How often the memory limit killed something so far; cheap (read around every command). None: unknown."""

    def stats(self) -> HostStats:
        """Counters now; never raises, fields are None after the end."""

    def pids(self) -> tuple[int, ...]:
        """The host's pids that belong to this sandbox (for benchmarks and leak checks)."""

    async def save(self, folder: int) -> None:
        """Write memory and disk into an empty folder (a descriptor, the caller's). The agent has been frozen over the
        wire and is silent, and still is when the sandbox goes on. Files may be left in the folder on failure. Raises
        SaveFailed (the sandbox runs on, frozen, unless ``wait`` says otherwise) and UnsupportedOperation where
        ``Capabilities.live_snapshots`` is False."""


class Engine(Protocol):
    """One way to isolate. Constructed once per runtime; must not start anything before ``start``."""

    name: str
    rung: str

    def probe(self) -> Probe:
        """Look at the machine, without side effects that stay; cached by the engine, milliseconds at most."""

    def check(self, request: StartRequest) -> tuple[Guarantee, ...]:
        """Pure after ``probe``: what would be enforced. Raises ControlUnavailable for an explicit control that
        would not be (unless ``spec.allow_weaker``), UnsupportedOperation for an image kind or user it cannot do."""

    async def start(self, request: StartRequest) -> Instance:
        """Start the agent. Raises StartFailed with the launcher's own words; leaves nothing behind then."""

    def state_format(self) -> StateFormat:
        """What a state that is saved here, with all that can be, depends on: see ``format_of``."""

    def reap(self, sandbox_id: str) -> None:
        """Remove whatever a crash left of that sandbox (processes, cgroups). Idempotent; the caller holds its lock."""


def format_of(engine: Engine, kind: str) -> StateFormat:
    """What a state of that kind depends on: files alone on nothing but who reads them."""
    return StateFormat(engine.name, FILES) if kind == "disk" else engine.state_format()


def wants_egress(spec: SandboxSpec) -> bool:
    """Whether a way out was asked for, even one that nothing may take yet."""
    return spec.network.mode != "none"


def cannot_save(engine: str) -> UnsupportedOperation:
    """For ``Instance.save`` where there is no such thing."""
    return UnsupportedOperation(
        f"engine {engine!r} cannot save running processes", hint="engine='gvisor' can; `sloplet setup` installs it"
    )
