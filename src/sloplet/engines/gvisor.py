"""The gvisor rung: the sandbox has a kernel of its own, gVisor's, in a jail of ours. It can be saved while it runs."""

from __future__ import annotations

import hashlib
import platform
import re
import socket
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from ..errors import UnsupportedOperation
from ..setup import runsc
from ..spec import Limits, SandboxSpec
from . import cgroups, jail, mounting, shell, verbs
from .base import Capabilities, Guarantee, Instance, Probe, StartRequest, StateFormat, wants_egress
from .controls import Controls, decide_for_own_kernel, enforceable, own_kernel_memory
from .launcher import launch, try_plan
from .machine import FIRST_RANGE, RANGE_SIZE, Machine
from .minder import Minded, Verbs
from .plan import encode_steps, frame
from .rung import SUBIDS, JailRung, network_guarantee, privileges

_FIX = "sloplet setup gvisor"


class GvisorEngine(JailRung):
    name = "gvisor"
    rung = "gvisor"
    weakenable = frozenset({"cgroup"})

    def __init__(self, *, weaken: Iterable[str] = (), facts: Machine | None = None) -> None:
        super().__init__(weaken=weaken, facts=facts)
        self._probes: dict[runsc.Runsc | None, Probe] = {}

    def probe(self) -> Probe:
        found = runsc.find()
        if found not in self._probes:
            self._probes[found] = self._look(found)
        return self._probes[found]

    def _look(self, found: runsc.Runsc | None) -> Probe:
        facts = self.machine
        reason, fix = self._trouble(facts, found)
        capabilities = Capabilities(
            images=frozenset({"host", "rootfs"}),
            controls=enforceable((*self._decide_for(SandboxSpec(), "probe").guarantees, *self._fixed()), facts),
            private_filesystem=True,
            private_processes=True,
            shared_kernel=False,
            users=True,
            echoes_controls=False,
            live_snapshots=True,
            disk_snapshots=True,
            egress=not self._no_egress,
            no_egress=self._no_egress,
            ports=True,
            volumes=True,
        )
        return Probe(self.name, self.rung, not reason, reason, fix, self._details(found), capabilities)

    def _trouble(self, facts: Machine, found: runsc.Runsc | None) -> tuple[str, str]:
        if facts.arch not in ("x86_64", "aarch64"):
            return f"gVisor does not run on {facts.arch}", ""
        if not facts.seccomp:
            return "this kernel has no seccomp filters", ""
        if found is None:
            return "runsc is not here", _FIX
        if not found.good:
            return f"{found.path} is too old or does not run ({found.version or 'no version'})", _FIX
        if facts.kernel < (5, 12):
            return f"Linux {facts.kernel[0]}.{facts.kernel[1]} is too old", "5.12 or newer is needed"
        return self._try(partial(self._attempt, found))

    def _attempt(self, found: runsc.Runsc, request: jail.JailRequest) -> str:
        decided = self._decide_for(request.spec, request.id)
        return try_plan(self._plan(request, decided, found), control=True)

    def _details(self, found: runsc.Runsc | None) -> tuple[str, ...]:
        if found is None:
            return ()
        lines = (f"runsc {found.version or '?'}: {found.path}", f"platform {verbs.PLATFORM}")
        return (*lines, f"no network by policy: {self._no_egress}") if self._no_egress else lines

    def _fixed(self, *, egress: bool = False, sudo: bool = False) -> tuple[Guarantee, ...]:
        """The controls that do not depend on limits."""
        outside = {
            "root": "root inside is an ordinary high id outside",
            "range": "all ids inside are the calling user outside, or his subordinate ids",
            "single": "all ids inside are the calling user outside",
        }[jail.mode(self.machine)]
        return (
            Guarantee("filesystem", True, "gVisor's own, in a mount namespace that holds the image alone, read-only"),
            Guarantee("processes", True, "gVisor's own, in a pid namespace"),
            network_guarantee("gVisor's own loopback, in a network namespace without devices", egress=egress),
            Guarantee("ipc", True, "gVisor's own, in an ipc namespace"),
            Guarantee(
                "syscalls", True, "gVisor's kernel answers them; what it asks of the host's is filtered by seccomp"
            ),
            Guarantee("privileges", True, privileges(sudo=sudo, where=", in gVisor" if sudo else ", in gVisor either")),
            Guarantee("users", True, f"gVisor's own, in a user namespace: {outside}"),
        )

    def _decide_for(self, spec: SandboxSpec, sandbox_id: str) -> Controls:
        return decide_for_own_kernel(spec, self.machine, sandbox_id)

    def _decide(self, request: StartRequest) -> tuple[Controls, runsc.Runsc]:
        self._require(request)
        mounted = any(volume.mounted for volume in request.spec.volumes)
        if mounted and jail.mode(self.machine) == "single" and request.spec.run_user not in ("root", "0", "0:0"):
            raise UnsupportedOperation(
                "engine 'gvisor' can give volumes to root inside only: this user has no subordinate ids",
                hint=f"use user='root', engine='container', or {SUBIDS}",
            )
        found = runsc.find()
        assert found is not None
        return self._decide_for(request.spec, request.id), found

    def check(self, request: StartRequest) -> tuple[Guarantee, ...]:
        fixed = self._fixed(egress=wants_egress(request.spec), sudo=bool(request.spec.sudo))
        return (*self._decide(request)[0].guarantees, *fixed)

    def _plan(self, request: jail.JailRequest, decided: Controls, found: runsc.Runsc) -> bytes:
        program, sudo = str(found.path), bool(request.spec.sudo)
        fixed = self._kept(
            (request.image, program, sudo),
            lambda: shell.fixed_steps(request.image, self.machine, self._view, program, self._agent, sudo=sudo),
        )
        first = encode_steps(shell.first_steps(request, self.machine, decided))
        return frame(first + fixed + encode_steps(shell.last_steps(request, decided)))

    async def start(self, request: StartRequest) -> Instance:
        facts = self.machine
        decided, found = self._decide(request)
        hierarchy = replace(facts.cgroup, split=False)
        group = cgroups.plan(hierarchy, request.id, _outside(decided.limits))
        with self._jail(request, decided, group) as jailed:
            plan = self._plan(jailed, decided, found)
            hello = shell.hello(jailed, facts, self._view, decided.limits.memory)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fixed = self._fixed(egress=jailed.egress, sudo=bool(request.spec.sudo))
        guarantees = (*decided.guarantees, *fixed, *mounting.guarantees(request.volumes, shared_kernel=False))
        released = partial(self._ranges.give_back, jailed.id_range)
        try:
            instance = await launch(
                plan,
                hello,
                guarantees,
                hierarchy,
                group,
                released,
                control=theirs.fileno(),
                given=mounting.given(jailed),
                kind=Minded,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        outside = FIRST_RANGE + jailed.id_range * RANGE_SIZE if facts.root else None
        instance.attach(Verbs(ours), outside, egress=jailed.egress)
        try:
            await instance.bring_up(request.restore)
        except BaseException:
            await instance.give_up()
            raise
        return instance

    def state_format(self) -> StateFormat:
        found = runsc.find()
        agent = hashlib.sha256(self._agent).hexdigest()[:12]
        version = f"runsc {found.version if found else 'unknown'}, agent {agent}"
        return StateFormat(self.name, version, verbs.PLATFORM, self.machine.arch, cpu_features(_cpuinfo()))


def _outside(limits: Limits) -> Limits:
    """What the whole of runsc may use: the sandbox's own, and gVisor's on top."""
    return replace(limits, memory=limits.memory + own_kernel_memory(limits), pids=limits.pids * 4 + 512)


def _cpuinfo() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return platform.processor()


#: Of a processor's flags those that a program may find and use: kinds of instructions, not what the host's kernel says.
_INSTRUCTIONS = re.compile(
    r"(avx|sse|ssse|fma|f16c|bmi|adx|aes|vaes|vpclmul|pclmul|sha|gfni|amx|popcnt|movbe|abm|lzcnt|rdrand|rdseed|rdpid|"
    r"xsave|fsgsbase|erms|fsrm|rtm|hle|cx16|lahf|clflush|clwb|movdir|serialize|asimd|sve|sme|crc32|atomics|fp|pmull)"
)


def cpu_features(cpuinfo: str) -> tuple[str, ...]:
    """The instructions that a saved program may be using, sorted."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return tuple(sorted({flag for flag in match[1].split() if _INSTRUCTIONS.match(flag)})) if match else ()
