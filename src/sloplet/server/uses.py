"""Which program uses which sandbox: a named one is paused when the last of them lets go of it. And whether a program is
still there: what it made for itself alone (``leases.py``) goes with it.

A program is a word that it chose (``Sloplet-Client``), within its tenant. It is there while it has a tunnel, and for a
while after its last request. Programs that do not say who they are use nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_MOST = 100_000  # programs that are remembered: those that have a tunnel always are


@dataclass
class Program:
    heard: float
    tunnels: int = 0
    left: bool = False  #: it said that it has ended
    using: set[str] = field(default_factory=set)


class Uses:
    """All in the server's loop. ``grace``: seconds after which a program that is not heard of counts as gone."""

    def __init__(self, grace: float = 60.0, now: Callable[[], float] = time.monotonic) -> None:
        self._grace = grace
        self._now = now
        self._began = now()
        self._programs: dict[tuple[str, str], Program] = {}
        self._looked = now()

    def heard(self, tenant: str, client: str) -> None:
        """A request of it."""
        if client:
            self._program(tenant, client)

    def came(self, tenant: str, client: str) -> None:
        """It has a tunnel (one more)."""
        if client:
            self._program(tenant, client).tunnels += 1

    def went(self, tenant: str, client: str, *, ended: bool) -> None:
        """A tunnel of it is gone for good. ``ended``: it said that it needs none any more."""
        if client:
            program = self._program(tenant, client)
            program.tunnels -= 1
            if not program.tunnels:
                program.using.clear()
                program.left = ended

    def use(self, tenant: str, client: str, *sandboxes: str) -> None:
        """It uses them from now on, until it releases them or is gone."""
        if client:
            self._program(tenant, client).using.update(sandboxes)

    def forget(self, tenant: str, client: str, sandbox: str) -> None:
        """It turned out that there is no such sandbox."""
        if program := self._programs.get((tenant, client)):
            program.using.discard(sandbox)

    def release(self, tenant: str, client: str, sandbox: str) -> bool:
        """It uses this one no more. Whether nobody else does."""
        self._look()
        if client:
            self._program(tenant, client).using.discard(sandbox)
        return not any(
            sandbox in program.using and self._is_there(program)
            for (whose, _), program in self._programs.items()
            if whose == tenant
        )

    def present(self, tenant: str, client: str) -> bool:
        """Whether that program is there, or may come back. After the server's own start everybody has a while."""
        program = self._programs.get((tenant, client))
        if program is None:
            return self._now() - self._began < self._grace
        return self._is_there(program)

    def _is_there(self, program: Program) -> bool:
        return program.tunnels > 0 or (not program.left and self._now() - program.heard < self._grace)

    def _program(self, tenant: str, client: str) -> Program:
        now = self._now()
        found = self._programs.get((tenant, client))
        if found is None:
            if len(self._programs) >= _MOST:
                self._forget()
            found = self._programs[tenant, client] = Program(now)
        found.heard = now
        found.left = False
        return found

    def _look(self) -> None:
        if self._now() - self._looked > self._grace:
            self._looked = self._now()
            self._forget()

    def _forget(self) -> None:
        self._programs = {who: program for who, program in self._programs.items() if self._is_there(program)}
