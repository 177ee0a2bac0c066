"""From a spec, an image and machine facts to a launcher plan for the gVisor rung. Pure.

Two roots in one another: the sandbox's image, put together as on the container rung but read-only (gVisor keeps what
is written on top of it), lies within a *shell*, which holds what runsc needs: itself, /proc, a few devices, a folder
for its state and one for what the sandbox writes. The shell is all that runsc's processes see of the host.
"""

from __future__ import annotations

from ..images import host
from . import jail, mounting, oci, verbs
from .base import HelloConfig, ResolvedImage
from .cgroups import PIDS_EXTRA
from .controls import Controls
from .jail import JailRequest, Mounts, inside
from .machine import Machine
from .plan import FILE_IF_ALLOWED, MAX_SLOTS, Attr, Do, OverlayFlag, PlanFlag, Set, Step, TreeFlag, step

#: Slots beyond those that an image takes.
_DEVICE_SLOTS, _PROGRAM_SLOT = MAX_SLOTS - 10, MAX_SLOTS - 1
_SHELL_FOLDERS = ("bundle", "filestore", "proc", "run/runsc", "tmp")
#: What runsc needs in the sandbox's user namespace to build its own, and hands on in part: CHOWN, DAC_OVERRIDE,
#: DAC_READ_SEARCH, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, SYS_CHROOT, SYS_PTRACE, SYS_ADMIN,
#: SETFCAP (to map root).
_RUNSC_CAPS = 0x1FF | 1 << 18 | 1 << 19 | 1 << 21 | 1 << 31
#: And to hand on what the agent needs for the way out: NET_RAW. There is no device to use it on.
_EGRESS_CAPS = 1 << 13


def id_maps(machine: Machine, id_range: int, user: tuple[int, int] = (0, 0)) -> list[Step]:
    """As on the container rung, but runsc wants to be root of its namespace: of one id, too."""
    if jail.mode(machine) != "single":
        return jail.id_maps(machine, id_range, user)
    return [
        step(Set.UID_MAP, f"0 {machine.uid} 1\n"),
        step(Set.GID_MAP, f"0 {machine.gid} 1\n"),
        step(Set.IDENTITY, 0, 0),
    ]


def _settings(request: JailRequest, machine: Machine, controls: Controls) -> list[Step]:
    flags = PlanFlag.NAMESPACES | PlanFlag.MINDER
    if machine.root:
        flags |= PlanFlag.HOST_MOUNTS
    if jail.mode(machine) == "single":
        flags |= PlanFlag.DENY_SETGROUPS
    if request.probe:
        flags |= PlanFlag.PROBE
    return [
        step(Set.FLAGS, flags),
        *id_maps(machine, request.id_range, request.user),
        step(Set.HOSTNAME, "sandbox"),
        *jail.common_settings(request, controls),
        step(
            Set.CAPS, _RUNSC_CAPS | (_EGRESS_CAPS if request.egress else 0) | (jail.POWERS if request.spec.sudo else 0)
        ),
    ]


def fixed_steps(
    image: ResolvedImage, machine: Machine, view: host.HostView, program: str, agent: bytes, *, sudo: bool = False
) -> list[Step]:
    """The long part, the same for all sandboxes of an image: the image, the agent in it, the shell around it."""
    mounts = Mounts(machine, jail.QUIET, OverlayFlag.SHOWN)
    mounts.add(Do.STAGE, 0)
    jail.image_steps(mounts, image, view)
    jail.sudo_steps(mounts, agent if sudo else b"")
    folder = inside(verbs.AGENT).rpartition("/")[0]
    mounts.add(Do.MKDIR, 0o755, folder)
    mounts.add(Do.FILE, 0o555, inside(verbs.AGENT), agent)
    shown = step(Do.TREE, _PROGRAM_SLOT, TreeFlag(0), jail.QUIET | Attr.RDONLY, program)
    return [*mounts.trees, shown, *mounts.steps]


def last_steps(request: JailRequest, controls: Controls) -> list[Step]:
    """The sandbox's own name, the shell, and the pivot."""
    allowed = FILE_IF_ALLOWED if request.image.kind == "rootfs" else 0
    files = host.naming_files(jail.hostname(request.spec, request.id))
    limits = controls.limits
    shell = oci.config(
        open_files=limits.open_files,
        shared_memory=limits.memory // 4,
        pids=limits.pids,
        agents_own=PIDS_EXTRA,
        egress=request.egress,
        powers=bool(request.spec.sudo),
        volumes=mounting.oci_mounts(request.volumes),
        words=mounting.guest_words(request.volumes),
    )
    devices = [step(Do.MOUNT, _DEVICE_SLOTS + i, "dev/" + name) for i, name in enumerate(jail.DEVICES)]
    return [
        *(step(Do.FILE, file.mode | allowed, inside(file.path), file.content) for file in files),
        *mounting.point_steps(request.volumes),
        step(Do.WRAP, Attr.RDONLY | jail.QUIET, inside(verbs.IMAGE)),
        *(step(Do.MKDIR, 0o755, folder) for folder in _SHELL_FOLDERS),
        step(Do.FS, jail.INERT, "proc", "", "proc"),
        *(_egress_steps() if request.egress else ()),
        step(Do.FS, Attr.NOSUID | Attr.NOEXEC, "tmpfs", "mode=755,size=64k,nr_inodes=64", "dev"),
        *devices,
        step(Do.MOUNT, _PROGRAM_SLOT, inside(verbs.PROGRAM)),
        *mounting.shell_steps(request.volumes),
        step(Do.FILE, 0o644, inside(verbs.BUNDLE) + "/config.json", oci.encode(shell)),
        step(Do.PIVOT),
    ]


def _egress_steps() -> list[Step]:
    """What runsc copies the addresses of. It takes one sysctl for a sign of the host's own network namespace, which
    newer kernels have in every one."""
    return [step(Do.LOOPBACK), step(Do.ADDRESSES), step(Do.MASK, "proc/sys/net")]


def first_steps(request: JailRequest, machine: Machine, controls: Controls) -> list[Step]:
    """Settings, the scratch filesystem, the devices of the shell and volumes."""
    devices = [
        step(Do.TREE, _DEVICE_SLOTS + i, TreeFlag(0), Attr.NOSUID | Attr.NOEXEC, "/dev/" + name)
        for i, name in enumerate(jail.DEVICES)
    ]
    volumes = mounting.tree_steps(request, machine)
    return [*_settings(request, machine, controls), jail.scratch_step(request, controls), *devices, *volumes]


def hello(request: JailRequest, machine: Machine, view: host.HostView, memory: int) -> HelloConfig:
    """What the agent is told. There are several users even where the host gives one id: they are gVisor's."""
    told = jail.hello(request, machine, view)
    return HelloConfig(
        user=told.user,
        workdir=told.workdir,
        home=None,
        env=told.env,
        no_users=False,
        hostname=jail.hostname(request.spec, request.id),
        memory=memory,
        egress=told.egress,
    )
