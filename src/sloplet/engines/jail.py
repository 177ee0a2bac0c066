"""From a spec, an image and machine facts to a launcher plan for the container rung. Pure.

The order of the steps is the order of the kernel calls: scratch, root, what the image is made of, /proc, /dev,
and last the pivot after which nothing of the host is reachable.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ..images import host
from ..spec import SandboxSpec
from . import mounting
from .base import HelloConfig, Mount, ResolvedImage
from .cgroups import GroupPlan
from .controls import Controls
from .machine import FIRST_RANGE, RANGE_SIZE, Machine
from .plan import FILE_IF_ALLOWED, Attr, Do, OverlayFlag, PlanFlag, Seccomp, Set, Step, TreeFlag, step

QUIET = Attr.NOSUID | Attr.NODEV
INERT = Attr.NOSUID | Attr.NODEV | Attr.NOEXEC
_PLAIN = TreeFlag(0)
_PLAIN_OVERLAY = OverlayFlag(0)
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SCOPES = 3  # Landlock: abstract sockets and signals stay inside
AGENT_UID = 1000

#: What the agent keeps, in the sandbox's user namespace only:
#: CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID, SETPCAP.
AGENT_CAPS = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8

#: What root's commands have of them where it has powers, and two more: FSETID, NET_BIND_SERVICE, SYS_CHROOT.
POWERS = AGENT_CAPS & ~(1 << 8) | 1 << 4 | 1 << 10 | 1 << 18
#: Where `sudo` is then, and the way to it.
SUDO = "run/sloplet/bin/sudo"

#: Controls that tests switch off one at a time, to prove that their probes would notice.
WEAKENABLE = frozenset({"seccomp", "masks", "landlock", "caps", "cgroup", "nosuid"})


@dataclass(frozen=True)
class JailRequest:
    """What is particular to one sandbox."""

    id: str
    spec: SandboxSpec
    image: ResolvedImage
    place: str
    holder: int
    group: GroupPlan = field(default_factory=GroupPlan)
    template: str = ""  #: the formatted image that an ext4 scratch is a copy of
    id_range: int = 0  #: which range of ids, where root maps a whole one
    weaken: AbstractSet[str] = frozenset()
    probe: bool = False
    egress: bool = False  #: what leaves is brought to the agent
    volumes: tuple[Mount, ...] = ()
    held: tuple[int, ...] = ()  #: descriptors that stay open as long as it runs
    boot: str = ""  #: what it says of this start of it: boot_id; "": the host's own
    user: tuple[int, int] = (0, 0)  #: whose ids inside a volume's owner has; root: nobody is anybody else


def mode(machine: Machine) -> str:
    """Who is inside: a range of high ids (root), the caller and his subordinate ids (range), the caller (single)."""
    if machine.root:
        return "root"
    return "range" if machine.helpers else "single"


def hostname(spec: SandboxSpec, sandbox_id: str) -> str:
    """One word: of a name with dots the C library takes what follows the first for a domain, and looks names up in it
    first (`db.box` for `db` in `my.box`), which every policy would have to answer."""
    return (spec.hostname or spec.name or sandbox_id).replace("_", "-").replace(".", "-")[:63]


def powers(request: JailRequest, machine: Machine) -> bool:
    """Whether root inside can do what root does. With one user there is no root."""
    return bool(request.spec.sudo) and mode(machine) != "single"


def hello(request: JailRequest, machine: Machine, view: host.HostView) -> HelloConfig:
    path = _PATH
    if request.image.kind == "host":
        path = ":".join([*host.python_path(view), _PATH])
    env = {"PATH": path, "LANG": "C.UTF-8", **dict(request.spec.env)}
    if request.spec.sudo:
        env["PATH"] = f"/{SUDO.rpartition('/')[0]}:{env['PATH']}"
    single = mode(machine) == "single"
    return HelloConfig(
        user=request.spec.run_user,
        workdir=request.spec.run_workdir,
        home="/home/agent" if single else None,
        env=tuple(env.items()),
        no_users=single,
        egress=request.egress,
    )


def id_maps(machine: Machine, id_range: int, user: tuple[int, int] = (0, 0)) -> list[Step]:
    """The settings that say who root and the others inside are outside. Root inside is never root outside. ``user``:
    who inside is the caller himself, where he has subordinate ids."""
    kind = mode(machine)
    if kind == "root":
        text = f"0 {FIRST_RANGE + id_range * RANGE_SIZE} {RANGE_SIZE}\n"
        return [step(Set.UID_MAP, text), step(Set.GID_MAP, text), step(Set.IDENTITY, 0, 0)]
    if kind == "range":
        assert machine.subuid is not None
        assert machine.subgid is not None
        users, groups = machine.subuid, machine.subgid
        most = RANGE_SIZE - 1
        return [
            step(Set.UID_MAP, mounting.callers_map(machine.uid, users[0], min(users[1], most), user[0])),
            step(Set.GID_MAP, mounting.callers_map(machine.gid, groups[0], min(groups[1], most), user[1])),
            step(Set.MAP_HELPERS, machine.newuidmap or "", machine.newgidmap or ""),
            step(Set.IDENTITY, 0, 0),
        ]
    return [
        step(Set.UID_MAP, f"{AGENT_UID} {machine.uid} 1\n"),
        step(Set.GID_MAP, f"{AGENT_UID} {machine.gid} 1\n"),
        step(Set.IDENTITY, AGENT_UID, AGENT_UID),
    ]


def common_settings(request: JailRequest, controls: Controls) -> list[Step]:
    """Settings that both rungs share: the holder, cgroups, rlimits."""
    settings = [step(Set.HOLDER, request.holder), *mounting.settings(request)]
    if "cgroup" not in request.weaken:
        settings += [step(Set.CGROUP_JOIN, path) for path in request.group.join]
        if request.group.into:
            settings.append(step(Set.CGROUP_INTO, request.group.into))
        settings += [step(Set.CGROUP_WORK, path) for path in request.group.work]
    settings += [step(Set.CGROUP_REMOVE, path) for path in reversed(request.group.folders)]
    settings += [step(Set.OOM_FILE, *each) for each in request.group.oom]
    settings += [step(Set.RLIMIT, resource, value) for resource, value in controls.rlimits]
    if controls.pinned:
        settings.append(step(Set.CPUS, sum(1 << cpu for cpu in controls.pinned)))
    return settings


def _settings(request: JailRequest, machine: Machine, controls: Controls) -> list[Step]:
    flags = PlanFlag.NAMESPACES
    if machine.root:
        flags |= PlanFlag.HOST_MOUNTS
    if mode(machine) == "single":
        flags |= PlanFlag.DENY_SETGROUPS
    if request.probe:
        flags |= PlanFlag.PROBE
    caps = (1 << 41) - 1 if "caps" in request.weaken else AGENT_CAPS
    flags |= mounting.flags(request.volumes)
    if powers(request, machine):
        flags |= PlanFlag.POWERS
        caps |= POWERS
    settings = [
        step(Set.FLAGS, flags),
        *id_maps(machine, request.id_range, request.user),
        step(Set.HOSTNAME, hostname(request.spec, request.id)),
        *common_settings(request, controls),
        step(Set.CAPS, caps),
    ]
    if "seccomp" not in request.weaken:
        settings.append(step(Set.SECCOMP, Seccomp.ON | (Seccomp.NO_AFFINITY if controls.pinned else Seccomp(0))))
    if machine.landlock_abi >= 6 and "landlock" not in request.weaken:
        settings.append(step(Set.LANDLOCK, 0, 0, _SCOPES))
    return settings


class Mounts:
    """Collects steps. Trees first: as root they are made before the sandbox's own side runs."""

    def __init__(self, machine: Machine, quiet: int, shown: OverlayFlag = _PLAIN_OVERLAY) -> None:
        self.machine = machine
        self.quiet = quiet
        self.shown = shown  # SHOWN: what is written goes elsewhere
        self.trees: list[Step] = []
        self.steps: list[Step] = []
        self._slots = 1  # 0 is the scratch

    def tree(self, source: str, attributes: int, bits: TreeFlag = _PLAIN) -> int:
        slot, self._slots = self._slots, self._slots + 1
        self.trees.append(step(Do.TREE, slot, bits, attributes, source))
        return slot

    def layer(self, source: str) -> int:
        bits = TreeFlag.IDMAP if self.machine.idmap else _PLAIN
        return self.tree(source, self.quiet | Attr.RDONLY, bits)

    def bind(self, source: str, path: str, attributes: int, bits: TreeFlag = _PLAIN) -> None:
        self.steps.append(step(Do.MOUNT, self.tree(source, attributes, bits), path))

    def overlay(self, path: str, source: str, *, guarded: bool) -> None:
        bits = OverlayFlag.GUARDED if guarded else _PLAIN_OVERLAY
        if path:
            bits |= self.shown
        self.steps.append(step(Do.OVERLAY, bits, self.quiet, path, self.layer(source)))

    def add(self, kind: Do, *args: int | str | bytes) -> None:
        self.steps.append(step(kind, *args))


def inside(path: str) -> str:
    return path.lstrip("/")


def _host_part(mounts: Mounts, part: host.Part, view: host.HostView) -> None:
    if isinstance(part, host.Folder):
        mounts.add(Do.MKDIR, part.mode, inside(part.path))
    elif isinstance(part, host.Link):
        mounts.add(Do.SYMLINK, part.target, inside(part.path))
    elif isinstance(part, host.File):
        mounts.add(Do.MKDIR, 0o755, inside(part.path).rpartition("/")[0])
        mounts.add(Do.FILE, part.mode, inside(part.path), part.content)
    elif isinstance(part, host.Bind):
        mounts.bind(part.source, inside(part.path), mounts.quiet | Attr.RDONLY, TreeFlag.OPTIONAL)
    else:
        _host_overlay(mounts, part.path, host.submounts(view, part.path))


def _host_overlay(mounts: Mounts, path: str, submounts: tuple[str, ...]) -> None:
    """An overlay shows one filesystem only. Mounts below it: root adds them one by one, read-only; others may not take
    a folder apart that has locked mounts in it, and get the whole of it read-only."""
    if submounts and not mounts.machine.root:
        mounts.bind(path, inside(path), mounts.quiet | Attr.RDONLY, TreeFlag.RECURSIVE)
        return
    # With owners as they are (idmap), root inside would read what only root may read on the host: guarded.
    mounts.overlay(inside(path), path, guarded=mounts.machine.idmap)
    for point in submounts:
        mounts.bind(point, inside(point), mounts.quiet | Attr.RDONLY, TreeFlag.OPTIONAL)


def image_steps(mounts: Mounts, image: ResolvedImage, view: host.HostView) -> None:
    if image.kind == "host":
        mounts.add(Do.ROOT)
        made: set[Step] = set()
        for part in host.layout(view):
            before = len(mounts.steps)
            _host_part(mounts, part, view)
            fresh = [item for item in mounts.steps[before:] if item not in made]
            made.update(item for item in fresh if item.kind is Do.MKDIR)
            mounts.steps[before:] = fresh
        return
    assert image.path is not None
    mounts.overlay("", str(image.path), guarded=False)
    for folder, bits in (("etc", 0o755), ("proc", 0o755), ("dev", 0o755), ("run", 0o755), ("tmp", 0o1777)):
        mounts.add(Do.MKDIR, bits, folder)
    for path in image.config.volumes if image.config is not None else ():
        # Nothing to keep beyond the sandbox: that is what volumes= is for. But there it is, as the image expects.
        if path.startswith("/") and ".." not in path.split("/") and path.strip("/"):
            mounts.add(Do.MKDIR, 0o755, inside(path.rstrip("/")))


def sudo_steps(mounts: Mounts, program: bytes) -> None:
    if program:
        mounts.add(Do.MKDIR, 0o755, SUDO.rpartition("/")[0])
        mounts.add(Do.FILE, 0o555, SUDO, program)


def _proc(mounts: Mounts, machine: Machine, weaken: AbstractSet[str]) -> None:
    mounts.add(Do.FS, INERT, "proc", "", "proc")
    mounts.add(Do.LOOPBACK)
    # before /proc/sys turns read-only: servers inside may listen on ports below 1024 without being root
    mounts.add(Do.WRITE, "proc/sys/net/ipv4/ip_unprivileged_port_start", b"0")
    if "masks" in weaken:
        return
    for name in machine.proc_masked:
        mounts.add(Do.MASK, "proc/" + name)
    for name in machine.proc_readonly:
        mounts.add(Do.READONLY, "proc/" + name)


def _dev(mounts: Mounts, machine: Machine, controls: Controls) -> None:
    mounts.add(Do.FS, Attr.NOSUID | Attr.NOEXEC, "tmpfs", "mode=755,size=64k,nr_inodes=64", "dev")
    for name in DEVICES:
        mounts.bind("/dev/" + name, "dev/" + name, Attr.NOSUID | Attr.NOEXEC)
    terminals = "ptmxmode=0666,mode=0620" + (",gid=5" if mode(machine) != "single" else "")
    mounts.add(Do.FS, Attr.NOSUID | Attr.NOEXEC, "devpts", terminals, "dev/pts")
    shared = controls.limits.memory // 4 if machine.cgroup.enforces("memory") else 64 * 2**20
    mounts.add(Do.FS, QUIET, "tmpfs", f"mode=1777,size={shared},nr_inodes=16384", "dev/shm")
    for target, link in (("pts/ptmx", "ptmx"), ("/proc/self/fd", "fd")):
        mounts.add(Do.SYMLINK, target, "dev/" + link)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mounts.add(Do.SYMLINK, f"/proc/self/fd/{number}", "dev/" + name)


def _quiet(weaken: AbstractSet[str]) -> Attr:
    return Attr(0) if "nosuid" in weaken else QUIET


def fixed_steps(
    image: ResolvedImage,
    machine: Machine,
    view: host.HostView,
    controls: Controls,
    weaken: AbstractSet[str] = frozenset(),
    sudo: bytes = b"",
) -> tuple[Step, ...]:
    """The long part of a plan, the same for all sandboxes of an image, a machine and a memory limit. ``sudo``: the
    program of that name, where root has powers."""
    mounts = Mounts(machine, _quiet(weaken))
    mounts.add(Do.STAGE, 0)
    image_steps(mounts, image, view)
    sudo_steps(mounts, sudo)
    _proc(mounts, machine, weaken)
    _dev(mounts, machine, controls)
    return (*mounts.trees, *mounts.steps)


def first_steps(request: JailRequest, machine: Machine, controls: Controls) -> tuple[Step, ...]:
    """Settings, the scratch filesystem and volumes."""
    volumes = mounting.tree_steps(request, machine)
    return (*_settings(request, machine, controls), scratch_step(request, controls), *volumes)


def scratch_step(request: JailRequest, controls: Controls) -> Step:
    scratch, attributes = controls.scratch, _quiet(request.weaken) | Attr.NOATIME
    if scratch.kind == "ext4":
        return step(Do.EXT4, 0, attributes, request.template, request.place)
    return step(Do.TMPFS, 0, attributes, f"mode=755,size={scratch.size},nr_inodes={scratch.inodes}")


def last_steps(request: JailRequest) -> tuple[Step, ...]:
    """The sandbox's own name, its volumes, its way out, and the pivot."""
    allowed = FILE_IF_ALLOWED if request.image.kind == "rootfs" else 0
    files = host.naming_files(hostname(request.spec, request.id))
    boot = (step(Do.COVER, "proc/sys/kernel/random/boot_id", f"{request.boot}\n".encode()),) if request.boot else ()
    return (
        *boot,
        *(step(Do.FILE, file.mode | allowed, inside(file.path), file.content) for file in files),
        *mounting.place_steps(request.volumes),
        *((step(Do.EGRESS),) if request.egress else ()),
        step(Do.PIVOT),
    )


def container_plan(request: JailRequest, machine: Machine, view: host.HostView, controls: Controls) -> tuple[Step, ...]:
    """The whole plan of a container sandbox."""
    fixed = fixed_steps(request.image, machine, view, controls, request.weaken)
    return (*first_steps(request, machine, controls), *fixed, *last_steps(request))
