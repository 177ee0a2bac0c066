"""The plan of the process rung: Landlock, seccomp and rlimits around an ordinary process. Pure.

There is no private root: a sandbox sees the host's programs read-only and writes only into folders of its own. What
Landlock does not guard (modes, owners, times; other processes of the same user on old kernels) seccomp refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..images import host
from .base import HelloConfig
from .controls import Controls
from .jail import JailRequest, common_settings
from .machine import FIRST_RANGE, RANGE_SIZE, Machine
from .plan import AllowFlag, Do, PlanFlag, Seccomp, Set, Step, step

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_READ = _READ_FILE | _READ_DIR
_RUN = _READ | _EXECUTE
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")  # tty: whatever terminal a process has got already
_PUBLIC_ETC = ("passwd", "group", "nsswitch.conf", "hosts")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_KERNEL_FILES = ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version")
_ALL = AllowFlag(0)
FOLDERS = ("workspace", "home", "tmp")


@dataclass(frozen=True)
class Folders:
    """Where this sandbox may write, on the host. ``top`` holds nothing else. ``nested`` False: all are ``top`` itself
    (of a plan that is only tried)."""

    top: str
    nested: bool = True

    def path(self, name: str) -> str:
        return f"{self.top}/{name}" if self.nested else self.top


def filesystem_rights(abi: int) -> int:
    """All rights that a kernel of this Landlock ABI can guard."""
    known = 13  # execute .. make_sym
    for least, more in ((2, 1), (3, 1), (5, 1)):
        known += more if abi >= least else 0
    return (1 << known) - 1


def own_uid(machine: Machine, id_range: int) -> int | None:
    """For root, a sandbox runs under an id of its own; otherwise under the caller's."""
    return FIRST_RANGE + id_range * RANGE_SIZE + 1000 if machine.drops else None


def _readable(view: host.HostView, machine: Machine) -> list[str]:
    parts = [part.path for part in host.interpreter_parts(view) if isinstance(part, host.Overlay)]
    # Before ABI 3 a file that may be read can be truncated too, if its owner tries: keep the caller's own files away.
    return [*_SYSTEM, *(parts if machine.drops or machine.landlock_abi >= 3 else [])]


def _rules(machine: Machine, view: host.HostView, folders: Folders) -> list[Step]:
    guarded = filesystem_rights(machine.landlock_abi)

    def allow(rights: int, path: str, bits: AllowFlag = _ALL) -> Step:
        return step(Do.ALLOW, bits, rights & guarded, path)

    rules = [allow(_RUN, path) for path in _readable(view, machine)]
    etc = [path for path in view.entries if path.startswith("/etc/")]
    rules += [allow(_READ, path) for path in (*etc, *(f"/etc/{name}" for name in _PUBLIC_ETC))]
    rules += [allow(_READ_FILE, f"/proc/{name}") for name in _KERNEL_FILES]
    rules.append(allow(_READ, "/proc", AllowFlag.AGENT_ONLY))  # to see its own processes; a command would see all
    device = _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL
    rules += [allow(device, f"/dev/{name}") for name in _DEVICES]
    # The agent opens terminals; commands get theirs open. Under the caller's uid his other ones lie there too.
    terminals = _ALL if machine.drops else AllowFlag.AGENT_ONLY
    rules += [allow(device | _READ_DIR, path, terminals) for path in ("/dev/ptmx", "/dev/pts")]
    rules += [allow(~_IOCTL, folders.path(name)) for name in FOLDERS]
    return rules


def process_plan(
    request: JailRequest,
    machine: Machine,
    view: host.HostView,
    controls: Controls,
    folders: Folders,
    *,
    owned_in_view: bool,
) -> tuple[Step, ...]:
    """The whole plan of a process sandbox. ``owned_in_view``: it can read files of the caller's own (his interpreter),
    whose modes and times an owner may change through any descriptor."""
    seccomp = Seccomp.ON | Seccomp.BARE
    if not machine.drops:
        seccomp |= Seccomp.NO_METADATA | (Seccomp.FENCED if owned_in_view else Seccomp(0))
    if controls.pinned:
        seccomp |= Seccomp.NO_AFFINITY
    settings = [step(Set.FLAGS, PlanFlag.PROBE if request.probe else 0), *common_settings(request, controls)]
    uid = own_uid(machine, request.id_range)
    if uid is not None:
        settings.append(step(Set.DROP_TO, uid, uid))
    if "seccomp" not in request.weaken:
        settings.append(step(Set.SECCOMP, seccomp))
    rules: list[Step] = []
    if "landlock" not in request.weaken:
        abi = machine.landlock_abi
        settings.append(step(Set.LANDLOCK, filesystem_rights(abi), 3 if abi >= 4 else 0, 3 if abi >= 6 else 0))
        rules = _rules(machine, view, folders)
    return (*settings, *rules, step(Do.CHDIR, folders.path("workspace")))


def hello(request: JailRequest, folders: Folders, programs: list[str]) -> HelloConfig:
    """``programs``: folders to search before the system's."""
    path = ":".join([*programs, "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"])
    home, tmp = folders.path("home"), folders.path("tmp")
    env = (("PATH", path), ("LANG", "C.UTF-8"), ("HOME", home), ("TMPDIR", tmp), *request.spec.env)
    return HelloConfig(user="agent", workdir=folders.path("workspace"), home=home, env=env, no_users=True)
