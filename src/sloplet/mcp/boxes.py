"""The sandboxes of one MCP session: its own, made when it is first used, and those that the model made besides.

A model names a sandbox by its id or by the name that it chose; both mean something in this session only, so there is no
way to reach what others have. Making one is not part of the call that asked for it: a call that is cancelled leaves it
to the next.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ..errors import InvalidName, NotAllowed, QuotaExceeded, SandboxExists, SandboxNotFound
from ..sandbox import AsyncSandbox
from .progress import Say, nobody

MAIN = "main"
_NAME_RE = re.compile(r"[a-z][a-z0-9-]{0,31}\Z")


class Ground(Protocol):
    """Where sandboxes come from. All of it raises from the ``errors`` tree."""

    async def make(self, say: Say, *, main: bool) -> AsyncSandbox:
        """A sandbox as the policy has it, running. ``main``: the session's own."""

    async def fork(self, box: AsyncSandbox, count: int, snapshot: str | None) -> Sequence[AsyncSandbox]:
        """Copies of one of this session's."""

    async def url(self, box: AsyncSandbox, port: int) -> str:
        """Where a server inside can be reached."""

    async def end(self, box: AsyncSandbox) -> None:
        """The session has no more use for it: killed, or kept, as was decided. Idempotent."""

    def lent(self, box: AsyncSandbox) -> bool:
        """Whether it was there for others before, or is to be after: not the model's to throw away."""


@dataclass
class Held:
    """A sandbox of the session."""

    box: AsyncSandbox
    name: str
    origin: str  #: how it came to be, in words
    used_at: float = field(default_factory=time.monotonic)  #: when a call last named it
    snapshots: set[str] = field(default_factory=set)  #: ids of those that the model made
    editing: asyncio.Lock = field(default_factory=asyncio.Lock)  #: reading a file and writing it again are one thing

    @property
    def id(self) -> str:
        return self.box.id


Work = Callable[[], Coroutine[Any, Any, list[Held]]]


class Boxes:
    """``explicit``: there is no session's own; every call must say which it means."""

    def __init__(self, ground: Ground, most: int, *, explicit: bool = False) -> None:
        self._ground = ground
        self._most = most
        self.explicit = explicit
        self._held: dict[str, Held] = {}  # by name
        self._making: dict[str, asyncio.Task[list[Held]]] = {}  # by the name it will have
        self._places = 0  # taken by what is being made
        self._closed = False
        self._made: dict[str, int] = {}
        self._forks = 0

    # -- which -------------------------------------------------------------------------

    async def get(self, ref: str | None, say: Say = nobody) -> Held:
        """The one that is meant; the session's own is made if it is not there yet. SandboxNotFound."""
        if ref is None and self.explicit:
            raise SandboxNotFound(
                "this connection has no session, so it has no sandbox of its own",
                hint="call create_sandbox, and give the id that it answers with as `sandbox`",
            )
        name = MAIN if ref is None else ref
        found = self.find(name)
        if found is not None:
            found.used_at = time.monotonic()
            return found
        if name != MAIN or self.explicit:
            raise SandboxNotFound(
                f"this session has no sandbox {name[:80]!r}", hint="list_sandboxes tells which there are"
            )
        return (await self._wait(self._task(MAIN, 1, partial(self._make, MAIN, "the session's own", say))))[0]

    def find(self, ref: str) -> Held | None:
        """By name or id, if it is there."""
        return self._held.get(ref) or next((held for held in self._held.values() if held.id == ref), None)

    def all(self) -> list[Held]:
        return list(self._held.values())

    # -- more and fewer ----------------------------------------------------------------

    async def create(self, name: str | None, say: Say = nobody) -> Held:
        """Another one. QuotaExceeded."""
        chosen = self._new_name("box") if name is None else self._check_name(name)
        return (await self._wait(self._task(chosen, 1, partial(self._make, chosen, "created", say))))[0]

    async def fork(self, parent: Held, count: int, snapshot: str | None) -> Sequence[Held]:
        """Copies. QuotaExceeded."""
        self._forks += 1
        return await self._wait(self._task(f"forks {self._forks}", count, partial(self._fork, parent, count, snapshot)))

    async def url(self, held: Held, port: int) -> str:
        return await self._ground.url(held.box, port)

    async def delete(self, ref: str) -> Held:
        """End one. If it was the session's own, the next use makes a new one. NotAllowed of one that was only lent."""
        found = self.find(ref)
        if found is None:
            raise SandboxNotFound(
                f"this session has no sandbox {ref[:80]!r}", hint="list_sandboxes tells which there are"
            )
        if self._ground.lent(found.box):
            raise NotAllowed(
                f"{found.name} is a sandbox that whoever started this server keeps",
                hint="remove files in it, or work in one of create_sandbox or fork",
            )
        await asyncio.shield(found.box.kill())
        self._held.pop(found.name, None)
        return found

    async def expire(self, seconds: float) -> None:
        """End those that no call has named for so long: where there is no session, nothing else would."""
        now = time.monotonic()
        over = [held for held in self._held.values() if now - held.used_at > seconds]
        for held in over:
            self._held.pop(held.name, None)
        await asyncio.gather(*(self._ground.end(held.box) for held in over), return_exceptions=True)

    async def close(self) -> None:
        """The session is over. Idempotent; what fails to end does not keep the rest from ending."""
        self._closed = True
        tasks = list(self._making.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        held, self._held = list(self._held.values()), {}
        await asyncio.gather(*(self._ground.end(each.box) for each in held), return_exceptions=True)

    # -- making ------------------------------------------------------------------------

    def _task(
        self, name: str, count: int, work: Callable[[], Coroutine[Any, Any, list[Held]]]
    ) -> asyncio.Task[list[Held]]:
        """The task that makes what will have that name: the one that is at it, or a new one."""
        task = self._making.get(name)
        if task is not None:
            return task
        self._check_room(count)
        self._places += count
        task = self._making[name] = asyncio.ensure_future(work())

        def done(task: asyncio.Task[list[Held]]) -> None:
            self._places -= count
            self._making.pop(name, None)
            if not task.cancelled():
                task.exception()  # a caller may be gone

        task.add_done_callback(done)
        return task

    async def _wait(self, task: asyncio.Task[list[Held]]) -> list[Held]:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise SandboxNotFound("the session is over") from None
            raise

    def _check_room(self, count: int) -> None:
        if self._closed:
            raise SandboxNotFound("the session is over")
        if len(self._held) + self._places + count > self._most:
            raise QuotaExceeded(
                f"this session may have {self._most} sandboxes at a time, and has {len(self._held) + self._places}",
                hint="delete_sandbox ends one; the limit is set by whoever started this server",
            )

    async def _make(self, name: str, origin: str, say: Say) -> list[Held]:
        return [self._hold(Held(await self._ground.make(say, main=name == MAIN), name, origin))]

    async def _fork(self, parent: Held, count: int, snapshot: str | None) -> list[Held]:
        boxes = await self._ground.fork(parent.box, count, snapshot)
        return [self._hold(Held(box, self._new_name("fork"), f"a fork of {parent.name}")) for box in boxes]

    def _hold(self, held: Held) -> Held:
        self._held[held.name] = held
        return held

    def _new_name(self, kind: str) -> str:
        """One that nothing in this session has had: a model may remember what is gone."""
        while True:
            self._made[kind] = self._made.get(kind, 0) + 1
            name = f"{kind}-{self._made[kind]}"
            if name not in self._held and name not in self._making:
                return name

    def _check_name(self, name: str) -> str:
        if not _NAME_RE.match(name):
            raise InvalidName(
                f"{name[:80]!r} is not a name for a sandbox",
                hint="1 to 32 small letters, digits and '-', beginning with a letter",
            )
        if name in self._held or name in self._making or name == MAIN:
            raise SandboxExists(f"there is a sandbox {name!r} in this session already", hint="choose another name")
        return name
