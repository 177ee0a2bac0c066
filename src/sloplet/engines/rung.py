"""What the engines of the launcher share: ids of their own for sandboxes, the refusals, and for jails the plan."""

from __future__ import annotations

import os
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from ..errors import ControlUnavailable, EngineUnavailable, UnsupportedOperation
from ..images import host
from ..spec import Limits, SandboxSpec
from . import cgroups, insiders, jail, scratch
from .agentbin import agent_path
from .base import Guarantee, Probe, ResolvedImage, StartRequest, wants_egress
from .controls import Controls, Scratch
from .machine import RANGES, Machine, machine
from .plan import Step, encode_steps

_USERNS_FIX = (
    "allow user namespaces (`sysctl user.max_user_namespaces=65536`; on Debian also "
    "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0), or run as root"
)
_KEPT_PARTS = 16
SUBIDS = (
    "install newuidmap (`apt-get install uidmap`) and give this user ids: "
    "`usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`"
)


class IdRanges:
    """Which ranges of ids the sandboxes of an engine have, one each."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self, sandbox_id: str) -> int:
        """One that is free. It begins at the sandbox's name, so that other processes' sandboxes have others."""
        start = zlib.crc32(sandbox_id.encode()) % RANGES
        number = next((n for i in range(RANGES) if (n := (start + i) % RANGES) not in self._taken), start)
        self._taken.add(number)
        return number

    def give_back(self, number: int) -> None:
        """Once only: after that it may be another's."""
        self._taken.discard(number)


class Rung(ABC):
    """An ``Engine`` whose sandboxes the launcher makes. Constructed once per runtime. ``weaken`` is for tests alone: it
    switches single controls off, to prove that the probe which watches them would notice."""

    name: str
    weakenable: ClassVar[frozenset[str]]

    def __init__(self, *, weaken: Iterable[str] = (), facts: Machine | None = None) -> None:
        self._weaken = frozenset(weaken)
        if unknown := self._weaken - self.weakenable:
            raise ValueError(f"no such controls: {sorted(unknown)}")
        self._facts = facts
        self._ranges = IdRanges()

    @property
    def machine(self) -> Machine:
        return self._facts or machine()

    @cached_property
    def _view(self) -> host.HostView:
        return host.look()

    @abstractmethod
    def probe(self) -> Probe: ...

    def _require(self, request: StartRequest) -> None:
        """Raises EngineUnavailable, UnsupportedOperation for a kind of image that it cannot do, and ControlUnavailable
        for a network that it cannot give."""
        probe = self.probe()
        if not probe.available:
            raise EngineUnavailable(f"engine {self.name!r} cannot run here: {probe.reason}", hint=probe.fix or None)
        kinds = probe.capabilities.images
        if request.image.kind not in kinds:
            raise UnsupportedOperation(
                f"engine {self.name!r} cannot use an image of kind {request.image.kind!r}",
                hint=None if "rootfs" in kinds else "engine='container' can",
            )
        if request.spec.volumes and not probe.capabilities.volumes:
            raise UnsupportedOperation(
                f"engine {self.name!r} cannot have volumes: it has no filesystem of its own",
                hint="engine='container' can; or upload() what is needed",
            )
        if wants_egress(request.spec) and not probe.capabilities.egress:
            why = probe.capabilities.no_egress or "it has no network of its own"
            others = [name for name in ("container", "gvisor") if name != self.name]
            raise ControlUnavailable(
                f"engine {self.name!r} cannot give a sandbox a network here: {why}",
                hint=f"leave network= out, or use {' or '.join(f'engine={name!r}' for name in others)}",
            )

    def reap(self, sandbox_id: str) -> None:
        cgroups.remove(cgroups.find_leftovers(self.machine.cgroup, sandbox_id), seconds=2.0)


class JailRung(Rung):
    """A rung with a root filesystem of its own for each sandbox."""

    def __init__(self, *, weaken: Iterable[str] = (), facts: Machine | None = None) -> None:
        super().__init__(weaken=weaken, facts=facts)
        self._parts: dict[Hashable, bytes] = {}
        self._no_egress = ""

    @cached_property
    def _agent(self) -> bytes:
        return agent_path().read_bytes()

    def _kept(self, key: Hashable, steps: Callable[[], Sequence[Step]]) -> bytes:
        """The encoded long part of a plan, kept: working it out costs as much as starting a process."""
        part = self._parts.get(key)
        if part is None:
            part = encode_steps(steps())
            if len(self._parts) >= _KEPT_PARTS:
                self._parts.clear()
            self._parts[key] = part
        return part

    def _try(self, attempt: Callable[[jail.JailRequest], str]) -> tuple[str, str]:
        """What is wrong, and what to do about it. The only honest test is to build one: whole, except that nothing is
        served. ``attempt`` does, and returns the launcher's words."""
        spec = SandboxSpec(limits=Limits(disk=2**20, explicit=frozenset({"disk"})))
        request = jail.JailRequest("probe", spec, ResolvedImage("host"), "/", os.getpid(), probe=True, egress=True)
        words, self._no_egress = attempt(request), ""
        if words.startswith("egress"):  # all else may work
            self._no_egress = words
            words = attempt(replace(request, egress=False))
        return words, _USERNS_FIX if words.startswith(("namespaces", "userns", "filesystem")) else ""

    @contextmanager
    def _jail(self, request: StartRequest, decided: Controls, group: cgroups.GroupPlan) -> Iterator[jail.JailRequest]:
        """What is particular to this sandbox. Its ids are given back if the block fails; afterwards they are the
        instance's, to give back when it has ended. Raises StartFailed."""
        number = self._ranges.take(request.id)
        try:
            yield jail.JailRequest(
                id=request.id,
                spec=request.spec,
                image=request.image,
                place=str(request.place),
                holder=os.getpid(),
                group=group,
                template=_scratch_template(request, decided.scratch, self.machine),
                id_range=number,
                weaken=self._weaken,
                egress=wants_egress(request.spec),
                volumes=request.volumes,
                held=request.held,
                boot=str(uuid.uuid4()),
                user=insiders.ids_of(request.spec.run_user, request.image) if request.volumes else (0, 0),
            )
        except BaseException:
            self._ranges.give_back(number)
            raise


def privileges(*, sudo: bool, where: str = "") -> str:
    """How commands are kept from gaining rights."""
    if sudo:
        return f"no_new_privs; root's commands have powers over what is the sandbox's own{where}, others none"
    return f"no_new_privs; commands have no capabilities{where}"


def network_guarantee(own: str, *, egress: bool) -> Guarantee:
    """``own``: what network the sandbox has by itself."""
    if egress:
        return Guarantee("network", True, f"{own}; what leaves goes over the wire, by policy", "by policy")
    return Guarantee("network", True, f"{own}: there is no way out", "none")


def _scratch_template(request: StartRequest, wanted: Scratch, facts: Machine) -> str:
    """The formatted image that an ext4 scratch starts as a copy of; "" for other kinds. Raises StartFailed."""
    if wanted.kind != "ext4":
        return ""
    assert facts.mkfs is not None
    return scratch.template(request.place, wanted.size, wanted.inodes, facts.mkfs)
