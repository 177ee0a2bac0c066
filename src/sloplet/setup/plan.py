"""What `sloplet setup` would do on this machine: facts in, steps out. Pure; perform.py carries them out.

Commands for packages are the distribution's own. Nothing is ever upgraded or removed for our sake: what the
distribution has too old is fetched into SLOPLET_HOME instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .facts import Facts
from .tools import RUNSC_OLDEST

TARGETS = ("container", "gvisor", "microvm")

_INSTALL = {
    "apt-get": "apt-get install -y --no-install-recommends --no-remove",
    "dnf": "dnf install -y",
    "pacman": "pacman -S --noconfirm",
    "zypper": "zypper install -y",
    "apk": "apk add",
}
_UIDMAP = {"apt-get": "uidmap", "dnf": "shadow-utils", "pacman": "shadow", "zypper": "shadow", "apk": "shadow-uidmap"}
_QEMU = {
    "apt-get": {"x86_64": "qemu-system-x86", "aarch64": "qemu-system-arm"},
    "dnf": {"x86_64": "qemu-system-x86-core", "aarch64": "qemu-system-aarch64-core"},
    "pacman": {"x86_64": "qemu-system-x86", "aarch64": "qemu-system-aarch64"},
    "zypper": {"x86_64": "qemu-x86", "aarch64": "qemu-arm"},
    "apk": {"x86_64": "qemu-system-x86_64", "aarch64": "qemu-system-aarch64"},
}
DEBIAN_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Step:
    """One thing to do. ``kind``: done (it is here), package (the command installs it), fetch (perform.py has the
    recipe ``name``), manual (only an administrator can; the command is shown)."""

    target: str
    name: str
    kind: str
    title: str
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "name": self.name,
            "kind": self.kind,
            "title": self.title,
            "command": self.command,
        }


def install_command(facts: Facts, package: str) -> str:
    """The command that installs a package here, with sudo where that is needed."""
    command = f"{_INSTALL[facts.manager]} {package}"
    return command if facts.root else f"sudo {command}"


def plan(target: str, facts: Facts) -> list[Step]:
    """The steps for ``container``, ``gvisor``, ``microvm`` or ``all``."""
    makers = {"container": _container, "gvisor": _gvisor, "microvm": _microvm}
    chosen = TARGETS if target == "all" else (target,)
    return [step for name in chosen for step in makers[name](facts)]


def _package(facts: Facts, target: str, name: str, package: str, title: str) -> Step:
    if not facts.manager:
        return Step(target, name, "manual", f"{title}: install {package} with this system's package manager")
    return Step(
        target, name, "package" if facts.root else "manual", f"{title} (package {package})",
        install_command(facts, package),
    )  # fmt: skip


def _container(facts: Facts) -> list[Step]:
    steps = []
    if facts.user_namespaces:
        steps.append(
            Step("container", "userns", "manual", f"user namespaces: {facts.user_namespaces}", userns_fix(facts))
        )
    if facts.root:
        return steps or [Step("container", "root", "done", "root needs nothing more for containers")]
    if facts.uidmap_helpers:
        steps.append(Step("container", "uidmap", "done", "newuidmap and newgidmap are here"))
    else:
        package = _UIDMAP.get(facts.manager, "uidmap")
        steps.append(_package(facts, "container", "uidmap", package, "newuidmap, for several users in one sandbox"))
    if facts.subids >= 65536:
        steps.append(Step("container", "subids", "done", f"{facts.user} has {facts.subids} subordinate ids"))
    else:
        title = f"subordinate ids for {facts.user}, for several users in one sandbox"
        steps.append(Step("container", "subids", "manual", title, subids_fix(facts)))
    return steps


def userns_fix(facts: Facts) -> str:
    """The command that allows user namespaces to ordinary users."""
    if facts.userns_apparmor:
        return "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    if facts.userns_clone_off:
        return "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    if facts.userns_limit == 0:
        return "sudo sysctl -w user.max_user_namespaces=15000"
    return "ask the administrator of this machine (inside a container: run it with user namespaces allowed)"


def subids_fix(facts: Facts) -> str:
    return f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {facts.user}"


def runsc_is_good(facts: Facts) -> bool:
    return facts.runsc_date is not None and facts.runsc_date >= RUNSC_OLDEST


def _gvisor(facts: Facts) -> list[Step]:
    if runsc_is_good(facts):
        return [Step("gvisor", "runsc", "done", f"runsc of {facts.runsc_date} is here: {facts.runsc}")]
    if facts.arch not in DEBIAN_ARCH:
        return [Step("gvisor", "runsc", "manual", f"gVisor does not run on {facts.arch}")]
    old = f" (the one here is of {facts.runsc_date}, too old)" if facts.runsc_date else ""
    return [Step("gvisor", "runsc", "fetch", f"runsc, gVisor's runtime, into SLOPLET_HOME/bin{old}")]


def _microvm(facts: Facts) -> list[Step]:
    steps = []
    if facts.qemu:
        steps.append(Step("microvm", "qemu", "done", f"{facts.qemu_version or 'QEMU'}: {facts.qemu}"))
    else:
        package = _QEMU.get(facts.manager, {}).get(facts.arch, f"qemu-system-{facts.arch}")
        steps.append(_package(facts, "microvm", "qemu", package, "QEMU"))
    if facts.vm_kernel:
        steps.append(Step("microvm", "kernel", "done", f"a kernel for guests is here: {facts.vm_kernel}"))
    elif facts.manager == "apt-get" and facts.arch in DEBIAN_ARCH:
        steps.append(Step("microvm", "kernel", "fetch", "a small kernel for guests, into SLOPLET_HOME/kernel"))
    else:
        title = "a kernel for guests: put a vmlinuz with virtio built in at SLOPLET_HOME/kernel/vmlinuz"
        steps.append(Step("microvm", "kernel", "manual", title))
    if facts.kvm_cpu and facts.kvm_device and not facts.kvm_usable:
        title = f"/dev/kvm is not open to {facts.user}: without it microVMs are emulated, slowly"
        steps.append(
            Step("microvm", "kvm", "manual", title, f"sudo usermod -aG kvm {facts.user}   # then log in again")
        )
    return steps
