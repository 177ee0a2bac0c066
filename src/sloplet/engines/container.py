"""The container rung: namespaces, a private root, seccomp, no capabilities, cgroups. Our own launcher does it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

from ..errors import UnsupportedOperation
from ..spec import SandboxSpec
from . import cgroups, jail, mounting
from .base import FILES, Capabilities, Guarantee, Instance, Probe, StartRequest, StateFormat, wants_egress
from .controls import Controls, decide, enforceable
from .launcher import launch, try_plan
from .machine import Machine
from .plan import encode_steps, frame
from .rung import SUBIDS, JailRung, network_guarantee, privileges

_SINGLE_USERS = frozenset({"agent", "1000", "1000:1000"})


class ContainerEngine(JailRung):
    name = "container"
    rung = "container"
    weakenable = jail.WEAKENABLE

    @cached_property
    def _probe(self) -> Probe:
        facts = self.machine
        reason, fix = self._trouble(facts)
        capabilities = Capabilities(
            images=frozenset({"host", "rootfs"}),
            controls=self._controls(facts),
            private_filesystem=True,
            private_processes=True,
            users=jail.mode(facts) != "single",
            disk_snapshots=True,
            egress=not self._no_egress,
            no_egress=self._no_egress,
            ports=True,
            volumes=True,
        )
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
        return self._try(self._attempt)

    def _attempt(self, request: jail.JailRequest) -> str:
        decided = decide(request.spec, self.machine, request.id, namespaces=True)
        return try_plan(frame(encode_steps(jail.container_plan(request, self.machine, self._view, decided))))

    def _details(self, facts: Machine) -> tuple[str, ...]:
        kinds = {
            "root": "root: ids inside are a high range of their own outside",
            "range": f"user {facts.user} with subordinate ids",
            "single": f"user {facts.user} without subordinate ids: one user inside ({SUBIDS})",
        }
        group = facts.cgroup
        return (
            kinds[jail.mode(facts)],
            f"cgroup v{group.version}: {', '.join(group.bases)}" if group.version else f"no cgroups: {group.reason}",
            f"Landlock ABI {facts.landlock_abi}",
            f"no network by policy: {self._no_egress}" if self._no_egress else "network by policy: nft tproxy",
        )

    def _fixed(self, facts: Machine, *, egress: bool = False, sudo: bool = False) -> tuple[Guarantee, ...]:
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
            network_guarantee("network namespace without devices", egress=egress),
            Guarantee("ipc", True, "ipc namespace"),
            Guarantee("syscalls", "seccomp" not in weak, "seccomp allowlist on every ABI of the kernel"),
            Guarantee("privileges", "caps" not in weak, privileges(sudo=sudo)),
            Guarantee("users", True, users),
        )

    def _decide(self, request: StartRequest) -> Controls:
        self._require(request)
        user = request.spec.run_user
        if jail.mode(self.machine) == "single" and user not in _SINGLE_USERS:
            raise UnsupportedOperation(
                f"user={user!r} is not possible here: there is one user inside, 'agent'", hint=SUBIDS
            )
        if jail.mode(self.machine) == "single" and request.spec.sudo:
            raise UnsupportedOperation("sudo is not possible here: there is one user inside", hint=SUBIDS)
        return decide(request.spec, self.machine, request.id, namespaces=True)

    def check(self, request: StartRequest) -> tuple[Guarantee, ...]:
        spec = request.spec
        fixed = self._fixed(self.machine, egress=wants_egress(spec), sudo=bool(spec.sudo))
        return (*self._decide(request).guarantees, *fixed)

    def _plan(self, request: jail.JailRequest, decided: Controls) -> bytes:
        sudo = self._agent if jail.powers(request, self.machine) else b""
        fixed = self._kept(
            (request.image, decided.limits.memory, bool(sudo)),
            lambda: jail.fixed_steps(request.image, self.machine, self._view, decided, self._weaken, sudo),
        )
        first = encode_steps(jail.first_steps(request, self.machine, decided))
        return frame(first + fixed + encode_steps(jail.last_steps(request)))

    async def start(self, request: StartRequest) -> Instance:
        facts = self.machine
        decided = self._decide(request)
        group = cgroups.plan(facts.cgroup, request.id, decided.limits)
        with self._jail(request, decided, group) as jailed:
            plan = self._plan(jailed, decided)
            hello = replace(jail.hello(jailed, facts, self._view), memory=decided.watched)
        fixed = self._fixed(facts, egress=jailed.egress, sudo=bool(request.spec.sudo))
        guarantees = (*decided.guarantees, *fixed, *mounting.guarantees(request.volumes, shared_kernel=True))
        released = partial(self._ranges.give_back, jailed.id_range)
        given = mounting.given(jailed)
        return await launch(plan, hello, guarantees, facts.cgroup, group, released, given=given)

    def state_format(self) -> StateFormat:
        return StateFormat(self.name, FILES)
