"""The container rung: namespaces, a private root, seccomp, no capabilities, cgroups. Our own launcher does it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from ..errors import EngineUnavailable, UnsupportedOperation
from ..images import host
from ..spec import Limits, SandboxSpec
from . import cgroups, jail, scratch
from .base import Capabilities, Guarantee, Instance, Probe, ResolvedImage, StartRequest, StateFormat
from .controls import Controls, Scratch, decide, enforceable
from .launcher import launch, try_plan
from .machine import RANGES, Machine, machine
from .plan import encode_steps, frame

_SINGLE_USERS = frozenset({"agent", "1000", "1000:1000"})
_SUBIDS = (
    "install newuidmap (`apt-get install uidmap`) and give this user ids: "
    "`usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`"
)
USERNS_FIX = (
    "allow user namespaces (`sysctl user.max_user_namespaces=65536`; on Debian also "
    "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0), or run as root"
)
_KEPT_PLANS = 16


class ContainerEngine:
    """Constructed once per runtime. ``weaken`` is for tests alone: it switches single controls off, to prove that the
    probe which watches them would notice."""

    name = "container"
    rung = "container"

    def __init__(self, *, weaken: Iterable[str] = (), facts: Machine | None = None) -> None:
        self._weaken = frozenset(weaken)
        self._facts = facts
        self._ranges: set[int] = set()  # ids in use by sandboxes of this process
        self._fixed_part: dict[tuple[ResolvedImage, int], bytes] = {}
        unknown = self._weaken - jail.WEAKENABLE
        if unknown:
            raise ValueError(f"no such controls: {sorted(unknown)}")

    @property
    def machine(self) -> Machine:
        return self._facts or machine()

    @cached_property
    def _view(self) -> host.HostView:
        return host.look()

    @cached_property
    def _probe(self) -> Probe:
        facts = self.machine
        capabilities = Capabilities(
            images=frozenset({"host", "rootfs"}),
            controls=self._controls(facts),
            private_filesystem=True,
            private_processes=True,
            users=jail.mode(facts) != "single",
            disk_snapshots=True,
        )
        reason, fix = self._trouble(facts)
        return Probe(self.name, self.rung, not reason, reason, fix, self._details(facts), capabilities)

    def probe(self) -> Probe:
        return self._probe

    def _controls(self, facts: Machine) -> dict[str, str]:
        decided = decide(SandboxSpec(), facts, "probe", namespaces=True)
        return enforceable((*decided.guarantees, *self._fixed(facts)), facts)

    def _trouble(self, facts: Machine) -> tuple[str, str]:
        if facts.kernel < (5, 12):
            return f"Linux {facts.kernel[0]}.{facts.kernel[1]} is too old", "5.12 or newer is needed"
        if facts.arch not in ("x86_64", "aarch64"):
            return f"the system call filter does not know {facts.arch}", ""
        if not facts.seccomp:
            return "this kernel has no seccomp filters", ""
        # The only honest test is to build one: whole, except that nothing is served.
        limits = Limits(disk=2**20, explicit=frozenset({"disk"}))
        spec = SandboxSpec(limits=limits)
        decided = decide(spec, facts, "probe", namespaces=True)
        request = jail.JailRequest("probe", spec, ResolvedImage("host"), "/", os.getpid(), probe=True)
        words = try_plan(frame(encode_steps(jail.container_plan(request, facts, self._view, decided))))
        if not words:
            return "", ""
        return words, USERNS_FIX if words.startswith(("namespaces", "userns", "filesystem")) else ""

    def _details(self, facts: Machine) -> tuple[str, ...]:
        kinds = {
            "root": "root: ids inside are a high range of their own outside",
            "range": f"user {facts.user} with subordinate ids",
            "single": f"user {facts.user} without subordinate ids: one user inside ({_SUBIDS})",
        }
        group = facts.cgroup
        return (
            kinds[jail.mode(facts)],
            f"cgroup v{group.version}: {', '.join(group.bases)}" if group.version else f"no cgroups: {group.reason}",
            f"Landlock ABI {facts.landlock_abi}",
        )

    def _fixed(self, facts: Machine) -> tuple[Guarantee, ...]:
        """The controls that do not depend on limits."""
        users = {
            "root": "a user namespace: root inside is an ordinary high id outside",
            "range": "a user namespace: root inside is the calling user outside, all others are his subordinate ids",
            "single": "a user namespace with one user: the calling user, without any privilege",
        }[jail.mode(facts)]
        weak = self._weaken
        return (
            Guarantee("filesystem", True, "mount namespace, a root of its own (pivot_root), nosuid and nodev"),
            Guarantee("processes", True, "pid namespace"),
            Guarantee("network", True, "network namespace without devices: there is no way out", "none"),
            Guarantee("ipc", True, "ipc namespace"),
            Guarantee("syscalls", "seccomp" not in weak, "seccomp allowlist on every ABI of the kernel"),
            Guarantee("privileges", "caps" not in weak, "no_new_privs; commands have no capabilities"),
            Guarantee("users", True, users),
        )

    def _decide(self, request: StartRequest) -> Controls:
        probe = self.probe()
        if not probe.available:
            raise EngineUnavailable(f"engine 'container' cannot run here: {probe.reason}", hint=probe.fix or None)
        if request.image.kind not in probe.capabilities.images:
            raise UnsupportedOperation(f"engine 'container' cannot use an image of kind {request.image.kind!r}")
        user = request.spec.user
        if jail.mode(self.machine) == "single" and user not in _SINGLE_USERS:
            raise UnsupportedOperation(
                f"user={user!r} is not possible here: there is one user inside, 'agent'", hint=_SUBIDS
            )
        return decide(request.spec, self.machine, request.id, namespaces=True)

    def check(self, request: StartRequest) -> tuple[Guarantee, ...]:
        return (*self._decide(request).guarantees, *self._fixed(self.machine))

    def _take_range(self, sandbox_id: str) -> int:
        """A range of ids that no other sandbox of this process has."""
        start = zlib.crc32(sandbox_id.encode()) % RANGES
        number = next((n for i in range(RANGES) if (n := (start + i) % RANGES) not in self._ranges), start)
        self._ranges.add(number)
        return number

    def _plan(self, request: jail.JailRequest, decided: Controls) -> bytes:
        """The encoded plan. Its long part is kept: working it out costs as much as starting a process."""
        key = (request.image, decided.limits.memory)
        fixed = self._fixed_part.get(key)
        if fixed is None:
            fixed = encode_steps(jail.fixed_steps(request.image, self.machine, self._view, decided, self._weaken))
            if len(self._fixed_part) >= _KEPT_PLANS:
                self._fixed_part.clear()
            self._fixed_part[key] = fixed
        first = encode_steps(jail.first_steps(request, self.machine, decided))
        return frame(first + fixed + encode_steps(jail.last_steps(request)))

    async def start(self, request: StartRequest) -> Instance:
        facts = self.machine
        decided = self._decide(request)
        group = cgroups.plan(facts.cgroup, request.id, decided.limits)
        number = self._take_range(request.id)
        try:
            jailed = jail.JailRequest(
                id=request.id,
                spec=request.spec,
                image=request.image,
                place=str(request.place),
                holder=os.getpid(),
                group=group,
                template=scratch_template(request, decided.scratch, facts),
                id_range=number,
                weaken=self._weaken,
            )
            plan = self._plan(jailed, decided)
            hello = replace(jail.hello(jailed, facts, self._view), memory=decided.watched)
        except BaseException:
            self._ranges.discard(number)
            raise
        guarantees = (*decided.guarantees, *self._fixed(facts))
        return await launch(plan, hello, guarantees, facts.cgroup, group, lambda: self._ranges.discard(number))

    def state_format(self) -> StateFormat:
        return StateFormat(self.name, "files 1")

    def reap(self, sandbox_id: str) -> None:
        cgroups.remove(cgroups.find_leftovers(self.machine.cgroup, sandbox_id), seconds=2.0)


def scratch_template(request: StartRequest, wanted: Scratch, facts: Machine) -> str:
    """The formatted image that an ext4 scratch starts as a copy of; "" for other kinds. Raises StartFailed."""
    if wanted.kind != "ext4":
        return ""
    assert facts.mkfs is not None
    return scratch.template(request.place, wanted.size, wanted.inodes, facts.mkfs)
