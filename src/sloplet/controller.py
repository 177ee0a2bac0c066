"""The Controller protocol: what a Sandbox object needs from whoever holds the sandboxes.

Implementations: ``runtime.Runtime`` (this process), ``keeper.KeeperClient`` (the background keeper
of this SLOPLET_HOME), later HTTP, Ray, Kubernetes. ``sandbox.py`` knows only this module.

Commands and files are streams of the one wire (docs/wire.md): ``open`` gives a stream to the agent
whether that is a pipe away or a socket and a relay away.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .engines.base import Guarantee, HostStats
from .spec import SandboxSpec
from .wire.fields import Fields


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
    state: str  #: starting, running, dead (it failed), ended (it was closed)
    engine: str
    rung: str
    holder: str  #: "embedded" or "keeper"
    created_at: float  #: seconds since the epoch
    expires_at: float | None
    workdir: str
    spec: SandboxSpec
    reason: str = ""  #: why it is dead

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id, "name": self.name, "state": self.state, "engine": self.engine, "rung": self.rung,
            "holder": self.holder, "created_at": self.created_at, "expires_at": self.expires_at,
            "workdir": self.workdir, "spec": self.spec.to_dict(), "reason": self.reason,
        }  # fmt: skip

    @staticmethod
    def from_dict(data: dict[str, Any]) -> SandboxInfo:
        values = dict(data)
        values["spec"] = SandboxSpec.from_dict(values["spec"])
        return SandboxInfo(**values)


@dataclass(frozen=True)
class Event:
    """Something that happened to a sandbox: started, command.started, command.exited, oom, died, expired, killed,
    and events.lost for a reader that was too slow."""

    time: float
    sandbox: str
    type: str
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"time": self.time, "sandbox": self.sandbox, "type": self.type, "data": self.data}


class Controller(Protocol):
    """Holds sandboxes. ``ref`` is an id or a name; everything raises from the ``errors`` tree only."""

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        """Make and start. SandboxExists if a live sandbox has the name. Nothing is left behind on failure."""

    async def find(self, ref: str) -> SandboxInfo:
        """SandboxNotFound if there is none. A dead sandbox is found, and says dead."""

    async def list(self) -> list[SandboxInfo]:
        """All that are known to this controller, oldest first."""

    async def open(self, sandbox_id: str, request: Fields) -> Stream:
        """Start an operation of docs/wire.md. SandboxDead / SandboxNotFound if there is nobody to ask."""

    async def kill(self, sandbox_id: str) -> None:
        """End it and remove all it had. Idempotent; also removes a dead one. Returns when it is gone."""

    async def guarantees(self, sandbox_id: str) -> tuple[Guarantee, ...]: ...

    async def stats(self, sandbox_id: str) -> HostStats: ...

    def events(self, sandbox_id: str | None = None) -> AsyncIterator[Event]:
        """What happens from now on (bounded; a slow reader loses the oldest and sees an ``events.lost`` event)."""

    async def aclose(self) -> None:
        """Let go. Embedded sandboxes end; those of the keeper go on."""
