"""What this machine is and has, gathered once and then only read: doctor and setup are pure functions over it.

Trying is better than reading settings: user namespaces and overlays in them are really made, in a child process
that is gone a moment later.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import SlopletError
from ..state.home import Home
from . import tools
from .runsc import find as find_runsc

_CLONE_NEWUSER, _CLONE_NEWNS = 0x10000000, 0x00020000
_MANAGERS = ("apt-get", "dnf", "pacman", "zypper", "apk")


@dataclass(frozen=True)
class Facts:
    """Everything doctor and setup decide by. Defaults describe a bare machine."""

    distro_name: str = "Linux"
    manager: str = ""  #: apt-get, dnf, pacman, zypper, apk
    arch: str = "x86_64"
    kernel: str = ""
    root: bool = False
    user: str = ""
    user_namespaces: str = ""  #: why there are none; empty: they work
    overlay: str = ""  #: why overlayfs cannot be mounted by this user; empty: it works
    userns_limit: int | None = None
    userns_apparmor: bool = False  #: Ubuntu's restriction on unprivileged user namespaces
    userns_clone_off: bool = False  #: Debian's old switch
    subids: int = 0  #: how many subordinate ids the user has
    uidmap_helpers: bool = False
    cgroup_version: int = 0
    cgroup_controllers: tuple[str, ...] = ()
    cgroup_reason: str = ""
    landlock_abi: int = 0
    seccomp: bool = False
    kvm_device: bool = False
    kvm_usable: bool = False  #: may be opened for writing
    kvm_cpu: bool = False  #: the CPU offers hardware virtualisation to this kernel
    runsc: str = ""
    runsc_date: int | None = None
    qemu: str = ""
    qemu_version: str = ""
    vm_kernel: str = ""
    docker: str = ""  #: a socket that answers to open()
    agent: str = ""
    agent_problem: str = ""
    home: str = ""
    home_problem: str = ""
    home_free: int = 0


def gather(home: Home | None = None) -> Facts:
    """Look at the machine. Some hundred milliseconds; leaves nothing behind."""
    from ..engines.machine import machine

    home = home or Home()
    known = machine()
    release = _os_release()
    subids = min((known.subuid or (0, 0))[1], (known.subgid or (0, 0))[1])
    runsc = find_runsc(home)
    qemu = tools.find_tool(f"qemu-system-{known.arch}", home)
    agent, agent_problem = _agent()
    home_problem, home_free = _home(home)
    return Facts(
        distro_name=release.get("PRETTY_NAME", "Linux"),
        manager=next((name for name in _MANAGERS if shutil.which(name)), ""),
        arch=known.arch,
        kernel=os.uname().release,
        root=os.geteuid() == 0,
        user=known.user,
        user_namespaces=_in_child(_try_userns),
        overlay=_in_child(_try_overlay),
        userns_limit=_number("/proc/sys/user/max_user_namespaces"),
        userns_apparmor=_number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1,
        userns_clone_off=_number("/proc/sys/kernel/unprivileged_userns_clone") == 0,
        subids=subids,
        uidmap_helpers=bool(known.newuidmap and known.newgidmap),
        cgroup_version=known.cgroup.version,
        cgroup_controllers=tuple(known.cgroup.bases),
        cgroup_reason=known.cgroup.reason,
        landlock_abi=known.landlock_abi,
        seccomp=known.seccomp,
        kvm_device=os.path.exists("/dev/kvm"),
        kvm_usable=os.access("/dev/kvm", os.R_OK | os.W_OK),
        kvm_cpu=cpu_virtualises(_read("/proc/cpuinfo"), known.arch),
        runsc=str(runsc.path) if runsc else "",
        runsc_date=runsc.date if runsc else None,
        qemu=str(qemu or ""),
        qemu_version=_first_line(tools.version_text(qemu)) if qemu else "",
        vm_kernel=_vm_kernel(home),
        docker=docker_socket(),
        agent=agent,
        agent_problem=agent_problem,
        home=str(home.path),
        home_problem=home_problem,
        home_free=home_free,
    )


def cpu_virtualises(cpuinfo: str, arch: str) -> bool:
    """Whether the CPU shows VMX or SVM. A /dev/kvm without it cannot run a guest. Other architectures show no flag."""
    if arch not in ("x86_64", "i686"):
        return True
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return flags is not None and bool({"vmx", "svm"} & set(flags[1].split()))


def docker_socket() -> str:
    """The Docker or Podman socket that this user may use, if there is one."""
    named = os.environ.get("DOCKER_HOST", "")
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    candidates = [named.removeprefix("unix://")] if named.startswith("unix://") else []
    candidates += [
        "/var/run/docker.sock",
        f"{runtime}/docker.sock",
        f"{runtime}/podman/podman.sock",
        "/run/podman/podman.sock",
    ]
    for path in candidates:
        if Path(path).is_socket() and os.access(path, os.W_OK) and _answers(path):
            return path
    return ""


def _answers(path: str) -> bool:
    import socket

    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2)
        try:
            sock.connect(path)
        except OSError:
            return False
    return True


def _os_release() -> dict[str, str]:
    import platform

    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _vm_kernel(home: Home) -> str:
    own = tools.kernel_folder(home) / "vmlinuz"
    if own.is_file():
        return str(own)
    found = sorted(Path("/boot").glob("vmlinuz-*cloud*")) if os.access("/boot", os.R_OK) else []
    return str(found[-1]) if found and os.access(found[-1], os.R_OK) else ""


def _agent() -> tuple[str, str]:
    from ..engines.agentbin import agent_path

    try:
        path = agent_path()
        return f"{path} ({path.stat().st_size // 1024} KiB)", ""
    except (SlopletError, OSError) as error:
        return "", str(error)


def _home(home: Home) -> tuple[str, int]:
    """Whether SLOPLET_HOME can hold state, and how much room is there. Makes it only if it is there already."""
    from ..state.store import Store

    try:
        if not home.path.exists():
            parent = next(p for p in home.path.parents if p.exists())
            with tempfile.TemporaryFile(dir=parent):  # nothing of it is ever seen, and access() lies to root
                return "", shutil.disk_usage(parent).free
        home.open()
        free = shutil.disk_usage(home.path).free
        if home.database.exists():
            store = Store(home)
            try:
                wrong = store.check()
            finally:
                store.close()
            if wrong:
                return f"state.db is damaged: {wrong[0]}", free
        with tempfile.TemporaryFile(dir=home.run) as probe:
            probe.write(b"x" * 4096)
        return "", free
    except (SlopletError, OSError) as error:
        return str(error), 0


def _in_child(attempt: Callable[[], None]) -> str:
    """Run ``attempt`` in a forked child; why it failed, or "". For things that a process cannot undo."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            try:
                attempt()
            except BaseException as error:
                os.write(write, (str(error) or type(error).__name__).encode()[:500])
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read(500).decode("utf-8", "replace")
    os.waitpid(pid, 0)
    return text


def _libc(call: str, *arguments: object) -> None:
    if getattr(_LIBC, call)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


_LIBC = ctypes.CDLL(None, use_errno=True)


def _try_userns() -> None:
    uid, gid = os.geteuid(), os.getegid()
    try:
        _libc("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        # A restriction by AppArmor shows only here: the namespace is made, but holds no capability.
        _libc("mount", b"none", b"/", None, 0x44000, None)
    except OSError as error:
        raise OSError(error.strerror) from None


def _try_overlay() -> None:
    _try_userns()
    folder = b"/tmp"
    try:
        _libc("mount", b"tmpfs", folder, b"tmpfs", 0, b"size=64k,mode=700")
        for name in ("lower", "upper", "work", "all"):
            os.mkdir(folder + b"/" + name.encode())
        options = b"lowerdir=/tmp/lower,upperdir=/tmp/upper,workdir=/tmp/work"
        _libc("mount", b"overlay", folder + b"/all", b"overlay", 0, options)
    except OSError as error:
        raise OSError(error.strerror) from None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
