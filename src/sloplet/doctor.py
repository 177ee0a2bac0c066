"""What this machine can do, what is missing, why, and the command that fixes it: facts and probes in, a report out.

The proofs (a sandbox really started on each engine that says it can) are made by ``prove`` and handed in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .engines.base import Probe
from .errors import EngineError, SlopletError
from .setup.facts import Facts
from .setup.plan import plan, runsc_is_good, subids_fix, userns_fix

if TYPE_CHECKING:
    from .sandbox import AsyncSandbox

_LATER = "the engine arrives in a later release"
_MIB = 2**20


@dataclass(frozen=True)
class Check:
    """One fact about the machine. ``state``: ok, missing (something would be better with it), failed (in the way)."""

    name: str
    state: str
    found: str
    why: str = ""  #: what it is for
    fix: str = ""  #: the command to run

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "state": self.state, "found": self.found, "why": self.why, "fix": self.fix}


@dataclass(frozen=True)
class Proof:
    """A sandbox was started, ran a command, and ended: how long that took; or why it did not. Where the engine can save
    running processes it was also saved (None: it cannot), and a copy went on from there."""

    start_ms: float = 0.0
    run_ms: float = 0.0
    stop_ms: float = 0.0
    error: str = ""
    save_ms: float | None = None
    restore_ms: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": not self.error, "start_ms": round(self.start_ms, 1), "run_ms": round(self.run_ms, 1),
            "stop_ms": round(self.stop_ms, 1), "error": self.error, "save_ms": _rounded(self.save_ms),
            "restore_ms": _rounded(self.restore_ms),
        }  # fmt: skip

    def describe(self) -> str:
        """The times in a sentence."""
        saved = ""
        if self.save_ms is not None and self.restore_ms is not None:
            saved = f"saved in {self.save_ms:.0f} ms, restored in {self.restore_ms:.0f} ms, "
        first = f"started in {self.start_ms:.0f} ms, a command in {self.run_ms:.0f} ms"
        return f"{first}, {saved}gone in {self.stop_ms:.0f} ms"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


@dataclass(frozen=True)
class Rung:
    """One way to isolate. ``state``: works, available (not tried), broken (tried and failed), missing, later."""

    engine: str
    rung: str
    state: str
    needs: str
    reason: str = ""
    fix: str = ""
    details: tuple[str, ...] = ()
    proof: Proof | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine, "rung": self.rung, "state": self.state, "needs": self.needs, "reason": self.reason,
            "fix": self.fix, "details": list(self.details), "proof": self.proof.to_dict() if self.proof else None,
        }  # fmt: skip


@dataclass(frozen=True)
class Report:
    """Everything `sloplet doctor` shows."""

    rungs: tuple[Rung, ...]
    checks: tuple[Check, ...]
    auto: str = ""  #: what engine="auto" takes here; empty: nothing

    @property
    def ok(self) -> bool:
        """Whether at least one rung works here."""
        return any(rung.state in ("works", "available") for rung in self.rungs)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok, "auto": self.auto, "rungs": [rung.to_dict() for rung in self.rungs],
            "checks": [check.to_dict() for check in self.checks],
        }  # fmt: skip


NEEDS = {
    "process": "Linux 5.13 or newer with Landlock and seccomp",
    "container": "Linux 5.11 or newer with user namespaces, or root",
    "gvisor": "runsc of 2024 or newer",
    "microvm": "QEMU and a kernel for guests; KVM to be fast and to count as hardware isolation",
    "docker": "a Docker or Podman socket",
    "vm": "an account with a cloud, or a machine reached by ssh",
}
#: The engines of the ladder, weakest first; those without a probe yet are shown with what can be said of them.
LADDER = ("process", "container", "gvisor", "microvm", "docker", "vm")


def make_report(facts: Facts, probes: Mapping[str, Probe], proofs: Mapping[str, Proof], auto: str = "") -> Report:
    """The report. ``probes`` by engine name, of the engines that this release has; ``proofs`` of those tried."""
    names = [*LADDER, *(name for name in probes if name not in LADDER)]
    rungs = tuple(_probed(probes[name], proofs.get(name)) if name in probes else _later(name, facts) for name in names)
    return Report(rungs, tuple(machine_checks(facts)), auto)


def _probed(probe: Probe, proof: Proof | None) -> Rung:
    needs = NEEDS.get(probe.engine, "")
    if not probe.available:
        return Rung(probe.engine, probe.rung, "missing", needs, probe.reason, probe.fix, probe.details)
    if proof is None:
        return Rung(probe.engine, probe.rung, "available", needs, details=probe.details)
    if proof.error:
        return Rung(probe.engine, probe.rung, "broken", needs, proof.error, probe.fix, probe.details, proof)
    return Rung(probe.engine, probe.rung, "works", needs, details=probe.details, proof=proof)


def _later(name: str, facts: Facts) -> Rung:
    """An engine that this release does not have: said so, with whether its tools are here."""
    rung = "container" if name == "docker" else name
    tool, fix = _tool(name, facts)
    return Rung(name, rung, "later", NEEDS[name], f"{_LATER}; {tool}", fix)


def _tool(name: str, facts: Facts) -> tuple[str, str]:
    if name == "gvisor":
        if runsc_is_good(facts):
            return f"runsc of {facts.runsc_date} is here ({facts.runsc})", ""
        if facts.runsc:
            return (
                f"runsc is too old here ({facts.runsc}, of {facts.runsc_date or 'an unknown date'})",
                "sloplet setup gvisor",
            )
        return "runsc is not here", "sloplet setup gvisor"
    if name == "microvm":
        missing = [text for text, here in (("QEMU", facts.qemu), ("a kernel for guests", facts.vm_kernel)) if not here]
        if missing:
            return f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not here", "sloplet setup microvm"
        return f"{facts.qemu_version or 'QEMU'} and a kernel are here", ""
    if name == "docker":
        return (f"a socket is here ({facts.docker})", "") if facts.docker else ("no socket that answers is here", "")
    return "nothing to look for on this machine", ""


def machine_checks(facts: Facts) -> list[Check]:
    """The parts of the machine that isolation is made of."""
    return [
        Check("system", "ok", f"{facts.distro_name}, Linux {facts.kernel}, {facts.arch}, user {facts.user}"),
        _agent(facts),
        _home(facts),
        _userns(facts),
        _subids(facts),
        _overlay(facts),
        _cgroups(facts),
        Check("landlock", "ok", f"ABI {facts.landlock_abi}", "keeps commands away from the host's files")
        if facts.landlock_abi
        else Check("landlock", "missing", "not offered by this kernel", "the process engine stands on it",
                   "boot with lsm=landlock,... or a kernel of 5.13 or newer"),
        Check("seccomp", "ok", "filters are offered", "refuses dangerous system calls")
        if facts.seccomp
        else Check("seccomp", "failed", "not offered by this kernel", "refuses dangerous system calls",
                   "use a kernel with CONFIG_SECCOMP_FILTER"),
        _kvm(facts),
    ]  # fmt: skip


def _agent(facts: Facts) -> Check:
    why = "the program that runs inside every sandbox"
    if facts.agent_problem:
        return Check("agent", "failed", facts.agent_problem, why, "pip install --force-reinstall sloplet")
    return Check("agent", "ok", facts.agent, why)


def _home(facts: Facts) -> Check:
    why = "state, images and snapshots live there"
    if facts.home_problem:
        return Check(
            "home", "failed", f"{facts.home}: {facts.home_problem}", why, "export SLOPLET_HOME=/a/folder/of/yours"
        )
    free = facts.home_free // _MIB
    if free < 1024:
        return Check("home", "missing", f"{facts.home}: only {free} MiB are free", why, "free some space")
    return Check("home", "ok", f"{facts.home} ({free // 1024} GiB free)", why)


def _userns(facts: Facts) -> Check:
    why = "containers without root are made of them, and root's are safer with them"
    if not facts.user_namespaces:
        return Check("user namespaces", "ok", "they work for this user", why)
    return Check("user namespaces", "failed", facts.user_namespaces, why, userns_fix(facts))


def _subids(facts: Facts) -> Check:
    why = "several users in one sandbox, root among them"
    if facts.root:
        return Check("subordinate ids", "ok", "root needs none", why)
    if not facts.uidmap_helpers:
        fix = plan("container", facts)
        command = next((step.command for step in fix if step.name == "uidmap"), "")
        return Check("subordinate ids", "missing", "newuidmap is not installed", why, command)
    if facts.subids < 65536:
        found = f"{facts.user} has {facts.subids or 'none'} in /etc/subuid and /etc/subgid"
        return Check("subordinate ids", "missing", found, why, subids_fix(facts))
    return Check("subordinate ids", "ok", f"{facts.user} has {facts.subids}", why)


def _overlay(facts: Facts) -> Check:
    why = "a private, writable view of the host's files"
    if facts.overlay:
        return Check(
            "overlayfs", "missing", f"not in a user namespace: {facts.overlay}", why, "use Linux 5.11 or newer"
        )
    return Check("overlayfs", "ok", "mounts in a user namespace", why)


def _cgroups(facts: Facts) -> Check:
    why = "limits of memory, CPU and processes for a sandbox as a whole"
    wanted = {"memory", "cpu", "pids"}
    have = wanted & set(facts.cgroup_controllers)
    if have == wanted:
        return Check("cgroups", "ok", f"version {facts.cgroup_version}: {', '.join(sorted(have))} are ours to use", why)
    fix = "systemd-run --user --scope -p Delegate=yes sloplet ..." if not facts.root else ""
    if have:
        found = f"version {facts.cgroup_version}: only {', '.join(sorted(have))} ({facts.cgroup_reason})"
        return Check("cgroups", "missing", found, why, fix)
    return Check("cgroups", "missing", facts.cgroup_reason or "none is writable", why, fix)


def _kvm(facts: Facts) -> Check:
    why = "microVMs at full speed, isolated by the CPU"
    if not facts.kvm_cpu:
        device = " (/dev/kvm is there, but cannot run guests)" if facts.kvm_device else ""
        found = f"the CPU offers no virtualisation to this kernel{device}"
        return Check(
            "kvm", "missing", found, why, "switch it on in the firmware, or allow nested virtualisation on the host"
        )
    if not facts.kvm_device:
        return Check("kvm", "missing", "there is no /dev/kvm", why, "sudo modprobe kvm_intel || sudo modprobe kvm_amd")
    if not facts.kvm_usable:
        return Check(
            "kvm", "missing", f"/dev/kvm is not open to {facts.user}", why, f"sudo usermod -aG kvm {facts.user}"
        )
    return Check("kvm", "ok", "/dev/kvm is usable and the CPU virtualises", why)


async def prove(engine: str, *, saves: bool = False) -> Proof:
    """Start a sandbox on that engine, run a command, end it. ``saves``: save it too, and let a copy go on."""
    from .sandbox import AsyncSandbox

    save: float | None = None
    restore: float | None = None
    began = time.perf_counter()
    try:
        box = AsyncSandbox(engine=engine)
        await box.start()
        try:
            started = time.perf_counter()
            result = await box.run(["/bin/sh", "-c", "echo sloplet | tee proof"], timeout=20)
            ran = time.perf_counter()
            if saves:
                save, restore = await _prove_saving(box)
            closing = time.perf_counter()
        finally:
            await box.close()
        ended = time.perf_counter()
    except SlopletError as error:
        return Proof(error=str(error))
    if result.stdout != "sloplet\n":
        return Proof(error=f"a command in it failed: {result.describe()}: {result.stderr.strip()[:200]}")
    times = ((started - began) * 1000, (ran - started) * 1000, (ended - closing) * 1000)
    return Proof(*times, save_ms=save, restore_ms=restore)


async def _prove_saving(box: AsyncSandbox) -> tuple[float, float]:
    """Milliseconds of a snapshot, and of a copy that goes on from it. Raises EngineError if the copy is not one."""
    began = time.perf_counter()
    snapshot = await box.snapshot()
    saved = time.perf_counter()
    (copy,) = await box.fork(1, snapshot=snapshot)
    try:
        restored = time.perf_counter()
        result = await copy.run(["cat", "proof"], timeout=20)
    finally:
        await copy.close()
    if result.stdout != "sloplet\n":
        raise EngineError(f"a restored copy is not whole: {result.describe()}: {result.stderr.strip()[:200]}")
    return (saved - began) * 1000, (restored - saved) * 1000
