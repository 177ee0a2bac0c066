"""The gvisor rung: the sandbox has a kernel of its own, gVisor's, in a jail of ours. It can be saved while it runs."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from ..errors import EngineUnavailable, UnsupportedOperation
from ..images import host
from ..setup import runsc
from ..spec import Limits, SandboxSpec
from . import cgroups, jail, shell, verbs
from .agentbin import agent_path
from .base import Capabilities, Guarantee, Instance, Probe, ResolvedImage, StartRequest, StateFormat
from .container import USERNS_FIX, scratch_template
from .controls import Controls, decide_for_own_kernel, enforceable, own_kernel_memory
from .launcher import launch, try_plan
from .machine import FIRST_RANGE, RANGE_SIZE, RANGES, Machine, machine
from .minder import Minded, Verbs
from .plan import encode_steps, frame

_FIX = "sloplet setup gvisor"
_KEPT_PLANS = 16
WEAKENABLE = frozenset({"cgroup"})


class GvisorEngine:
    """Constructed once per runtime. ``weaken`` is for tests alone, as on the container rung."""

    name = "gvisor"
    rung = "gvisor"

    def __init__(self, *, weaken: Iterable[str] = (), facts: Machine | None = None) -> None:
        self._weaken = frozenset(weaken)
        if unknown := self._weaken - WEAKENABLE:
            raise ValueError(f"no such controls: {sorted(unknown)}")
        self._facts = facts
        self._ranges: set[int] = set()
        self._fixed_part: dict[tuple[ResolvedImage, str], bytes] = {}
        self._probes: dict[runsc.Runsc | None, Probe] = {}

    @property
    def machine(self) -> Machine:
        return self._facts or machine()

    @cached_property
    def _view(self) -> host.HostView:
        return host.look()

    @cached_property
    def _agent(self) -> bytes:
        return agent_path().read_bytes()

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
            disk_snapshots=False,
        )
        return Probe(self.name, self.rung, not reason, reason, fix, self._details(found), capabilities)

    def _trouble(self, facts: Machine, found: runsc.Runsc | None) -> tuple[str, str]:
        if facts.arch not in ("x86_64", "aarch64"):
            return f"gVisor does not run on {facts.arch}", ""
        if found is None:
            return "runsc is not here", _FIX
        if not found.good:
            return f"{found.path} is too old or does not run ({found.version or 'no version'})", _FIX
        if facts.kernel < (5, 12):
            return f"Linux {facts.kernel[0]}.{facts.kernel[1]} is too old", "5.12 or newer is needed"
        limits = Limits(disk=2**20, explicit=frozenset({"disk"}))
        spec = SandboxSpec(limits=limits)
        decided = self._decide_for(spec, "probe")
        request = jail.JailRequest("probe", spec, ResolvedImage("host"), "/", os.getpid(), probe=True)
        words = try_plan(self._plan(request, decided, found), control=True)
        return (
            (words, USERNS_FIX if words.startswith(("namespaces", "userns", "filesystem")) else "")
            if words
            else ("", "")
        )

    def _details(self, found: runsc.Runsc | None) -> tuple[str, ...]:
        if found is None:
            return ()
        return (f"runsc {found.version or '?'}: {found.path}", f"platform {verbs.PLATFORM}")

    def _fixed(self) -> tuple[Guarantee, ...]:
        """The controls that do not depend on limits."""
        outside = {
            "root": "root inside is an ordinary high id outside",
            "range": "all ids inside are the calling user outside, or his subordinate ids",
            "single": "all ids inside are the calling user outside",
        }[jail.mode(self.machine)]
        return (
            Guarantee("filesystem", True, "gVisor's own, in a mount namespace that holds the image alone, read-only"),
            Guarantee("processes", True, "gVisor's own, in a pid namespace"),
            Guarantee(
                "network", True, "gVisor's own loopback; no way out, and a network namespace without devices", "none"
            ),
            Guarantee("ipc", True, "gVisor's own, in an ipc namespace"),
            Guarantee(
                "syscalls", True, "gVisor's kernel answers them; what it asks of the host's is filtered by seccomp"
            ),
            Guarantee("privileges", True, "no_new_privs; commands have no capabilities, in gVisor either"),
            Guarantee("users", True, f"gVisor's own, in a user namespace: {outside}"),
        )

    def _decide_for(self, spec: SandboxSpec, sandbox_id: str) -> Controls:
        return decide_for_own_kernel(spec, self.machine, sandbox_id)

    def _decide(self, request: StartRequest) -> tuple[Controls, runsc.Runsc]:
        probe = self.probe()
        if not probe.available:
            raise EngineUnavailable(f"engine 'gvisor' cannot run here: {probe.reason}", hint=probe.fix or None)
        if request.image.kind not in probe.capabilities.images:
            raise UnsupportedOperation(f"engine 'gvisor' cannot use an image of kind {request.image.kind!r}")
        found = runsc.find()
        assert found is not None
        return self._decide_for(request.spec, request.id), found

    def check(self, request: StartRequest) -> tuple[Guarantee, ...]:
        return (*self._decide(request)[0].guarantees, *self._fixed())

    def _take_range(self, sandbox_id: str) -> int:
        """A range of ids that no other sandbox of this process has."""
        start = zlib.crc32(sandbox_id.encode()) % RANGES
        number = next((n for i in range(RANGES) if (n := (start + i) % RANGES) not in self._ranges), start)
        self._ranges.add(number)
        return number

    def _plan(self, request: jail.JailRequest, decided: Controls, found: runsc.Runsc) -> bytes:
        """The encoded plan. Its long part is kept."""
        key = (request.image, str(found.path))
        fixed = self._fixed_part.get(key)
        if fixed is None:
            steps = shell.fixed_steps(request.image, self.machine, self._view, str(found.path), self._agent)
            fixed = encode_steps(steps)
            if len(self._fixed_part) >= _KEPT_PLANS:
                self._fixed_part.clear()
            self._fixed_part[key] = fixed
        first = encode_steps(shell.first_steps(request, self.machine, decided))
        return frame(first + fixed + encode_steps(shell.last_steps(request, self.machine, decided)))

    async def start(self, request: StartRequest) -> Instance:
        facts = self.machine
        decided, found = self._decide(request)
        hierarchy = replace(facts.cgroup, split=False)
        group = cgroups.plan(hierarchy, request.id, _outside(decided.limits))
        number = self._take_range(request.id)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
            plan = self._plan(jailed, decided, found)
            hello = shell.hello(jailed, facts, self._view, decided.limits.memory)
            guarantees = (*decided.guarantees, *self._fixed())
            instance = await launch(
                plan, hello, guarantees, hierarchy, group, lambda: self._ranges.discard(number),
                control=theirs.fileno(), kind=Minded,
            )  # fmt: skip
        except BaseException:
            self._ranges.discard(number)
            ours.close()
            raise
        finally:
            theirs.close()
        instance.attach(Verbs(ours), FIRST_RANGE + number * RANGE_SIZE if facts.root else None)
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

    def reap(self, sandbox_id: str) -> None:
        cgroups.remove(cgroups.find_leftovers(self.machine.cgroup, sandbox_id), seconds=2.0)


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
