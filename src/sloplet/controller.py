"""The Controller protocol: what a Sandbox object needs from whoever holds the sandboxes.

Implementations: ``runtime.Runtime`` (this process), ``keeper.KeeperClient`` (the background keeper
of this SLOPLET_HOME), ``remote.RemoteController`` (a server), later Ray, Kubernetes. ``sandbox.py`` knows
only this module.

Commands and files are streams of the one wire (docs/wire.md): ``open`` gives a stream to the agent
whether that is a pipe away or a socket and a relay away.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from .engines.base import Guarantee, HostStats
from .spec import SandboxSpec
from .wire.fields import Fields

if TYPE_CHECKING:
    from .images.config import ImageConfig
    from .netchange import NetworkChange
    from .netspec import NetworkSpec, SecretSpec
    from .network.asks import Ask
    from .network.log import Decision


class Data(NamedTuple):
    """A piece of a stream: the channel (0 in, 1 out, 2 err) and its bytes."""

    channel: int
    data: bytes


class Stream(Protocol):
    """One operation in progress. Errors: what the agent answered (``errors`` tree), ``SandboxDead`` when the
    sandbox ends, ``ProtocolError`` when it lies. Cancelling any of these awaits is safe."""

    async def started(self) -> Fields:
        """The REPLY's fields: the operation has begun. Raises the operation's error if it could not begin."""

    async def recv(self, *, auto_credit: bool = True) -> Data | None:
        """The next DATA; None once there is no more. With auto_credit the peer may go on sending; otherwise
        the caller must ``grant`` what it consumed."""

    def grant(self, count: int) -> None:
        """Allow the peer to send that many more bytes."""

    async def send(self, data: bytes) -> None:
        """Send DATA on channel 0; waits for credit. Silently dropped if the operation has ended."""

    async def send_end(self) -> None:
        """No more DATA from us (a command's stdin sees EOF)."""

    def ctrl(self, fields: Fields) -> None:
        """Send CTRL; dropped if the operation has ended."""

    async def result(self) -> Fields:
        """Wait for CLOSE (discarding DATA that nobody receives is the caller's matter). Raises its error."""

    def reset(self) -> None:
        """Give up. Synchronous, idempotent."""


@dataclass(frozen=True)
class SandboxInfo:
    """What is known about a sandbox without asking it."""

    id: str
    name: str | None
    state: str  #: starting, running, paused (saved; it wakes when it is used), dead (it failed), ended (it was closed)
    engine: str
    rung: str
    holder: str  #: "embedded" or "keeper"
    created_at: float  #: seconds since the epoch
    expires_at: float | None
    workdir: str
    spec: SandboxSpec
    reason: str = ""  #: why it is dead
    saved: str | None = None  #: id of the saved state it would go on from: paused, or dead with a checkpoint
    saved_at: float | None = None  #: when that was written
    head: str | None = None  #: the snapshot it last made, was started from, or was rolled back to
    recovered_from: float | None = None  #: it had died; it went on from a checkpoint of that time

    def to_dict(self, *, known: SandboxSpec | None = None) -> dict[str, Any]:
        """``known``: settings that whoever reads it has already: if they are these, they are left out."""
        return {
            "id": self.id, "name": self.name, "state": self.state, "engine": self.engine, "rung": self.rung,
            "holder": self.holder, "created_at": self.created_at, "expires_at": self.expires_at,
            "workdir": self.workdir, "spec": None if self.spec == known else self.spec.to_dict(),
            "reason": self.reason, "saved": self.saved, "saved_at": self.saved_at, "head": self.head,
            "recovered_from": self.recovered_from,
        }  # fmt: skip

    @staticmethod
    def from_dict(data: dict[str, Any], *, known: SandboxSpec | None = None) -> SandboxInfo:
        values = dict(data)
        left_out = known is not None and values["spec"] is None
        values["spec"] = known if left_out else SandboxSpec.from_dict(values["spec"])
        return SandboxInfo(**values)


@dataclass(frozen=True)
class Snapshot:
    """A saved state of a sandbox."""

    id: str
    name: str | None
    #: why it is there: snapshot (asked for), template, pause, checkpoint (``checkpoint_every``), undo, fork, export
    role: str
    kind: str  #: live (memory, processes and disk) or disk (files only: the computer starts anew with them)
    sandbox: str  #: the id of the sandbox it was made of
    sandbox_name: str | None
    parent: str | None  #: the snapshot that the sandbox had last made, or come from, before this one
    engine: str
    created_at: float
    bytes: int
    spec: SandboxSpec  #: what the sandbox was, template resolved: a restored one is the same
    note: str = ""  #: of an undo point: the command that came after it

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id, "name": self.name, "role": self.role, "kind": self.kind, "sandbox": self.sandbox,
            "sandbox_name": self.sandbox_name, "parent": self.parent, "engine": self.engine,
            "created_at": self.created_at, "bytes": self.bytes, "spec": self.spec.to_dict(), "note": self.note,
        }  # fmt: skip

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Snapshot:
        return Snapshot(**{**data, "spec": SandboxSpec.from_dict(data["spec"])})


@dataclass(frozen=True)
class Change:
    """One file that is not what it was."""

    path: str  #: absolute, inside the sandbox
    kind: str  #: added, changed, removed
    type: str  #: file, dir, symlink, other
    size: int = 0  #: now (of what was removed: 0)
    mode: int = 0
    what: tuple[str, ...] = ()  #: of a changed one: content, mode, owner, type, target
    text: str | None = None  #: a unified diff, where both sides are text and not too long
    binary: bool = False  #: a file whose content is not text (or too long to show)
    below: tuple[str, ...] = ()  #: of a removed folder: what was in it, relative to it; at most 10,000
    #: in a folder that was copied in: what may be where it came from, for ``apply`` to overwrite: words with spaces
    #: between, each a digest of what was there or of what was applied before, or "none"
    before: str = ""
    below_before: tuple[str, ...] = ()  #: the same of each of ``below``

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path, "kind": self.kind, "type": self.type, "size": self.size, "mode": self.mode,
            "what": list(self.what), "text": self.text, "binary": self.binary, "below": list(self.below),
            "before": self.before, "below_before": list(self.below_before),
        }  # fmt: skip

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Change:
        lists = {name: tuple(data[name]) for name in ("what", "below", "below_before")}
        return Change(**{**data, **lists})


@dataclass(frozen=True)
class Diff:
    """All changes, by path."""

    against: str  #: "image", or the snapshot's id
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"against": self.against, "changes": [change.to_dict() for change in self.changes]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Diff:
        return Diff(data["against"], tuple(Change.from_dict(item) for item in data["changes"]))


@dataclass(frozen=True)
class Port:
    """A port of a sandbox that this machine can reach."""

    inside: int
    address: str  #: the address here that is listened on
    outside: int
    problem: str = ""  #: of one of ``ports=`` that could not be had when the sandbox woke: why nothing is listened on

    @property
    def url(self) -> str:
        """ "" if nothing is listened on."""
        if self.problem:
            return ""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)
        return f"http://[{host}]:{self.outside}" if ":" in host else f"http://{host}:{self.outside}"

    def to_dict(self) -> dict[str, Any]:
        found = {"inside": self.inside, "address": self.address, "outside": self.outside, "url": self.url}
        return {**found, "problem": self.problem} if self.problem else found

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Port:
        return Port(int(data["inside"]), str(data["address"]), int(data["outside"]), str(data.get("problem", "")))


@dataclass(frozen=True)
class Event:
    """Something that happened to a sandbox: started, command.started, command.exited, oom, died, expired, killed,
    ttl (it was set anew), paused, resumed, recovered, snapshot, rolled_back, forked, exported, export.progress,
    import.progress, checkpoint.failed, sleep.failed, pool.failed, network.allowed, network.denied, network.failed,
    network.budget, trust.failed, port.failed, cloud_init, and events.lost for a reader that was too slow."""

    time: float
    sandbox: str
    type: str
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"time": self.time, "sandbox": self.sandbox, "type": self.type, "data": self.data}


_Infos = list[SandboxInfo]  # spelled here: inside Controller, `list` is its method
_Snapshots = list[Snapshot]


class NetworkController(Protocol):
    """What is decided about a sandbox's network, outside of it (docs/network.md). Part of ``Controller``.

    A change of one that another process holds, or that is dead for good, is refused as a command would be
    (SandboxError, SandboxDead, SandboxNotFound). One that sleeps can be changed; of a dead one policy and log can be
    read.
    """

    async def set_network(
        self, sandbox_id: str, network: NetworkSpec, values: Mapping[str, str | None] | None = None
    ) -> None:
        """Another policy, at once; open connections that it does not allow are cut. ``values``: ``Network.values``, of
        its headers and its proxy; those that are known, and still wanted, stay. SpecError where the sandbox was not
        made for it: without a network, or without inspection."""

    async def change_network(self, sandbox_id: str, change: NetworkChange) -> NetworkSpec:
        """A part of the policy, of how it is when this is done: two changes at the same time are both made. Gives the
        policy as it is then; otherwise as ``set_network``."""

    async def network(self, sandbox_id: str) -> NetworkSpec:
        """The policy as it is now."""

    async def network_log(self, sandbox_id: str, *, after: int = 0, limit: int = 1000) -> list[Decision]:
        """Decisions with a larger ``seq`` than ``after``, oldest first, ``limit`` at most. One whose connection is open
        comes again, with a ``seq`` of its own, when that has ended."""

    async def learned(self, sandbox_id: str) -> NetworkSpec:
        """The smallest policy that allows what the sandbox has reached so far."""

    async def secrets(self, sandbox_id: str) -> tuple[SecretSpec, ...]:
        """What it has, also of its template: where each may be sent, and what is seen of it inside. Never a value."""

    async def set_secrets(self, sandbox_id: str, values: Mapping[str, str | None]) -> None:
        """The values behind placeholders, by the secrets' names, and ``Network.values``; None: forget it. They are kept
        in memory only."""

    def asks(self, sandbox_id: str) -> AsyncIterator[Ask]:
        """What waits to be decided, and what comes. While somebody listens here, undecided connections wait for an
        answer; otherwise they are refused."""

    async def answer(self, sandbox_id: str, ask_id: int, verdict: str) -> None:
        """``once``, ``always``, ``never`` or ``no``. One that was answered already, or waits no more, is let be."""

    async def expose(self, sandbox_id: str, port: int, *, host_port: int = 0, address: str = "127.0.0.1") -> Port:
        """Listen here for a port of the sandbox; a connection wakes one that sleeps. Idempotent; ``host_port`` 0: the
        one that is there, or any that is free. PortUnavailable."""

    async def ports(self, sandbox_id: str) -> list[Port]:
        """What is listened on for it, by the port inside; and those of ``ports=`` that could not be (``problem``)."""

    async def unexpose(self, sandbox_id: str, port: int) -> None:
        """Listen no more, and cut what is connected. Idempotent. One of ``ports=`` stays so through pause and wake,
        until it is exposed again."""


class Controller(NetworkController, Protocol):
    """Holds sandboxes. ``ref`` is an id or a name; everything raises from the ``errors`` tree only."""

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        """Make and start. SandboxExists if a live sandbox has the name. Nothing is left behind on failure."""

    async def find(self, ref: str) -> SandboxInfo:
        """SandboxNotFound if there is none. A dead sandbox is found, and says dead."""

    async def list(self) -> list[SandboxInfo]:
        """All that are known to this controller, oldest first."""

    async def open(self, sandbox_id: str, request: Fields, *, wake: bool = True) -> Stream:
        """Start an operation of docs/wire.md; wakes a paused sandbox, unless ``wake`` is False: SandboxPaused then, at
        once or of the stream. SandboxDead / SandboxNotFound if there is nobody to ask. A stream that a pause or a
        rollback cuts off fails with SandboxPaused: attach to its process again."""

    async def kill(self, sandbox_id: str) -> None:
        """End it and remove all it had. Idempotent; also removes a dead one. Returns when it is gone."""

    async def guarantees(self, sandbox_id: str) -> tuple[Guarantee, ...]: ...

    async def image_config(self, sandbox_id: str) -> ImageConfig | None:
        """What its image says of how it wants to be run; None: nothing. Wakes one that sleeps."""

    async def stats(self, sandbox_id: str) -> HostStats: ...

    def events(self, sandbox_id: str | None = None) -> AsyncIterator[Event]:
        """What happens from now on (bounded; a slow reader loses the oldest and sees an ``events.lost`` event)."""

    # -- live state (docs/live.md) --------------------------------------------------

    async def set_ttl(self, sandbox_id: str, ttl: float | None) -> SandboxInfo:
        """From now on it has so many seconds to live; None: for ever. What ``spec.on_ttl`` says is done then; 0: at
        once, and it is done when this returns (one that ended is told as "ended"). Also of one that sleeps: it goes
        then, unless it is to sleep at its time's end; that one has no time to live then."""

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> SandboxInfo:
        """Write memory and disk, and end every process. Idempotent. ``memory`` False: the files only; nothing runs in
        it when it wakes. UnsupportedOperation where the engine cannot."""

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        """Go on: a paused sandbox where it was, a dead one from its last checkpoint (``recovered_from``)."""

    async def release(self, sandbox_id: str) -> None:
        """The caller's block has ended: a named sandbox is paused if nobody else uses it and its engine can."""

    async def snapshot(
        self, sandbox_id: str, name: str | None = None, *, role: str = "snapshot", note: str = "", memory: bool = True
    ) -> Snapshot:
        """Save its state; it runs on (a paused one stays paused). ``role``: "snapshot", "template" (needs a name),
        "undo" (a point to go back to: before a cell of code, say; only the last ``spec.undo`` are kept). ``memory``
        False: the files only, also where the engine could save more (UnsupportedOperation of one that sleeps with its
        memory: wake it first)."""

    async def snapshots(self, sandbox_id: str | None = None, *, role: str | None = "snapshot") -> _Snapshots:
        """Those of one sandbox or of all, oldest first. ``role`` None: every role."""

    async def find_snapshot(self, ref: str, sandbox_id: str | None = None) -> Snapshot:
        """By id; by name among a sandbox's snapshots, or, without one, among templates. SnapshotNotFound."""

    async def delete_snapshot(self, snapshot_id: str, *, force: bool = False) -> None:
        """SnapshotInUse if snapshots or live sandboxes descend from it, unless ``force``: they then descend from its
        parent."""

    async def fork(
        self,
        sandbox_id: str,
        count: int,
        *,
        names: Sequence[str] | None = None,
        snapshot: str | None = None,
        ttl: float | None = None,
    ) -> _Infos:
        """``count`` running copies, of how it is now or of one of its snapshots, each with an identity of its own.
        All or none. ``ttl``: what each has to live; None: as the settings of the original say, begun anew."""

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        """Go back to one of its own snapshots, in place: same id, same name. If that fails it runs on as it was."""

    async def undo(self, sandbox_id: str, steps: int = 1) -> Snapshot:
        """Go back to before the last command (or the ``steps``-th last). SnapshotNotFound if none is kept."""

    async def diff(self, sandbox_id: str, against: str | None = None, *, text: bool = True) -> Diff:
        """What its files have become since its image (None), or since one of its snapshots. Does not wake a paused one
        for longer than it takes."""

    async def applied(self, sandbox_id: str, marks: Mapping[str, str]) -> None:
        """Changes were brought back to the folder that they were copied from: paths inside, and what is there now, as
        ``Change.before`` has it. The next ``diff`` knows them."""

    async def export(self, sandbox_id: str, path: str, *, image: bool = True) -> Snapshot:
        """Write one archive of the sandbox to a new file on this machine. ``image``: with its image inside."""

    async def load(self, path: str, *, name: str | None = None) -> SandboxInfo:
        """Start the sandbox that an archive holds, under a new id. Every byte is checked before anything starts."""

    async def aclose(self) -> None:
        """Let go. Embedded sandboxes end; those of the keeper go on."""


@runtime_checkable
class Finder(Protocol):
    """A Controller that opens a name by itself: where what is there cannot be compared from outside, since a server may
    have made less of a spec than was asked for."""

    async def create_or_find(self, spec: SandboxSpec) -> SandboxInfo:
        """A fresh one, or the one of that name, awake. SandboxMismatch if that was made with other settings."""


@dataclass(frozen=True)
class PublicPort:
    """A port of a sandbox that has a name of its own outside: on a server."""

    port: int
    url: str
    public: bool  #: anybody may use it; else who has the token
    token: str | None = field(default=None, repr=False)

    @property
    def link(self) -> str:
        """The URL that works in a browser: with the token, if one is needed."""
        return self.url if self.token is None else f"{self.url.rstrip('/')}/?sloplet_token={self.token}"

    def to_dict(self) -> dict[str, Any]:
        return {"port": self.port, "url": self.url, "public": self.public, "token": self.token}


@runtime_checkable
class Publisher(Protocol):
    """A Controller that can give ports names of their own outside."""

    async def publish(self, sandbox_id: str, port: int, *, public: bool = False) -> PublicPort:
        """Idempotent; one that is there keeps its token."""

    async def published(self, sandbox_id: str) -> list[PublicPort]: ...

    async def unpublish(self, sandbox_id: str, port: int) -> None:
        """Idempotent."""
