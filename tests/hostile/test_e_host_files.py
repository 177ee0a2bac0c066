"""E-05, E-06, E-12: files of the kernel and of the host that a sandbox must not change, by any way there is."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from hostile_kit import Target, ask, ask_host, fingerprint, install

from sloplet import Sandbox
from sloplet.errors import FileError

KERNEL_FILES = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/panic_on_oom",
    "/proc/sys/kernel/hotplug",
    "/proc/sysrq-trigger",
    "/proc/sys/fs/binfmt_misc/register",
    "/proc/sys/kernel/randomize_va_space",
    "/proc/sys/net/ipv4/ip_forward",
    "/sys/kernel/uevent_helper",
    "/sys/fs/cgroup/release_agent",
    "/proc/irq/default_smp_affinity",
    "/sys/fs/cgroup/memory/release_agent",
    "/sys/fs/cgroup/devices/devices.allow",
    "/proc/1/oom_score_adj",
    "/proc/acpi/x",
    "/sys/kernel/debug/x",
    "/proc/bus/pci/00/00.0",
    "/proc/kcore",
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/kernel/shmmax",
)
DEV = ("null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "fd", "shm", "stdin", "stdout", "stderr")
DEVICES = (
    "/dev/kmsg",
    "/dev/mem",
    "/dev/vda",
    "/dev/sda",
    "/dev/loop0",
    "/dev/loop-control",
    "/dev/fuse",
    "/dev/console",
)


@pytest.mark.parametrize("user", ["agent", "root"])
def test_e05_kernel_files(target: Target, box: Sandbox, user: str) -> None:
    if user == "root":
        target.need("users")
    before = {path: _content(path) for path in KERNEL_FILES}
    names = " ".join(KERNEL_FILES)
    script = f'for f in {names}; do (echo "|/tmp/evil" > $f) 2>/dev/null && echo "WROTE $f"; done; true'
    result = box.run(script, user=user)
    assert result.stdout == ""
    script = "mkdir -p cg && mount -t cgroup -o memory x cg || mount -t binfmt_misc x cg || echo REFUSED"
    result = box.run(script, user=user)
    assert "REFUSED" in result.stdout
    assert {path: _content(path) for path in KERNEL_FILES} == before
    assert not box.run("ls /sys/fs/cgroup /sys/kernel").ok


def _content(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace")[:4096] if "kcore" not in path and "trigger" not in path else None
    except OSError:
        return None


def test_e05_positive_control(target: Target) -> None:
    """Without the masks a sysctl of the sandbox's own namespace can be written: the probe would notice."""
    target.need("private_filesystem", "users")
    if not target.weakened("masks").weaken:
        pytest.skip("this engine has no masks")
    script = "(echo 4096 > /proc/sys/kernel/shmmax) && echo WROTE; cat /proc/interrupts | wc -c"
    with target.weakened("masks").box() as weak:
        wrote, size = weak.run(script, user="root").stdout.split()
        assert wrote == "WROTE"
        assert int(size) > 100
    with target.box() as box:
        assert box.run(script, user="root").stdout.split() == ["0"]


def test_e05_masked_files_are_empty(target: Target, box: Sandbox) -> None:
    names = "acpi interrupts kallsyms kcore keys kmsg latency_stats sched_debug scsi sysrq-trigger timer_list"
    result = box.run(f"for f in {names}; do timeout 1 cat /proc/$f/* /proc/$f 2>/dev/null; done | wc -c")
    assert result.stdout.strip() == "0"


def test_e05_core_dumps_stay_off(target: Target, box: Sandbox) -> None:
    """A crash inside never runs the host's core_pattern program: the limit is 0 and cannot be raised."""
    result = box.run("ulimit -c unlimited 2>&1; ulimit -c; sh -c 'kill -SEGV $$'; true")
    assert result.stdout.split()[-1] == "0" or "\n0\n" in "\n" + result.stdout
    assert not [name for name in box.run("ls -a").stdout.split() if name.startswith("core")]


@pytest.mark.parametrize("user", ["agent", "root"])
def test_e06_host_devices(target: Target, box: Sandbox, user: str) -> None:
    if user == "root":
        target.need("users")
    found = ask(box, "devices", box.workdir, *DEVICES, user=user)
    opened = {name for name, code in found.lines.items() if code == "0"}
    assert opened == set()
    if target.can.private_filesystem:
        names = set(box.run("ls /dev").stdout.split())
        assert names <= set(DEV)


def test_e06_positive_control(target: Target, tmp_path: Path) -> None:
    """On the bare host, as root, the same probe opens the kernel's log or a disk."""
    if os.geteuid() == 0:
        found = ask_host("devices", str(tmp_path), *DEVICES)
        assert "0" in found.lines.values()
    else:  # without the fence the process sees the host's nodes, and the null device can be opened through one
        found = ask_host("devices", str(tmp_path), "/dev/null")
        assert found["/dev/null"] == "0"


@pytest.fixture
def canary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of the caller's own, in view of the sandbox because it is the running interpreter's."""
    folder = tmp_path_factory.mktemp("canary")
    path = folder / "lib" / "canary.txt"
    path.parent.mkdir()
    path.write_text("canary of the host\n")
    for parent in (path.parent, folder):
        parent.chmod(0o755)
    folder.parent.chmod(0o755)
    folder.parent.parent.chmod(0o755)
    return path


@pytest.mark.parametrize("user", ["agent", "root"])
def test_e12_files_of_the_caller_in_view(
    target: Target, canary: Path, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter's own folder is in view and belongs to the caller: no way to change anything of it."""
    if user == "root":
        target.need("users")
    folder = canary.parents[1]
    monkeypatch.setattr(sys, "prefix", str(folder))
    fresh = type(target.engine)(facts=target.facts)  # type: ignore[call-arg]
    from sloplet.engines import registry

    monkeypatch.setitem(registry._loaded, target.name, fresh)
    before = fingerprint(folder)
    with Sandbox(engine=target.name) as box:
        if target.can.private_filesystem:
            box.run(f"cat {canary}", check=True)
        said = ask(box, "writes", str(canary), box.workdir, user=user)
        if not target.can.private_filesystem:  # there is one file system: nothing at all may have worked
            worked = {way for way, code in said.lines.items() if code == "0"}
            assert worked <= {"read", "getflags", "fsgetxattr"}, worked
            box.files.symlink("to-file", str(canary))
            box.files.symlink("to-folder", str(folder))
            for path in ("to-file", "to-folder", str(canary), str(folder)):
                with pytest.raises(FileError):
                    box.files.set_attributes(path, {"user.a": "1"})
                with pytest.raises(FileError):
                    box.files.write(path, "x", in_place=True)
            assert os.listxattr(canary) == os.listxattr(folder) == []
            box.files.mkdir("own")
            box.files.write("own/file", "x")
            try:  # positive control
                box.files.set_attributes("own", {"user.a": "1"})
                box.files.set_attributes("own/file", {"user.a": "1"})
            except FileError as error:
                if error.errno != errno.ENOTSUP:
                    raise
    assert fingerprint(folder) == before
    assert canary.read_text() == "canary of the host\n"


def test_e12_positive_control(canary: Path, tmp_path: Path) -> None:
    before = fingerprint(canary.parents[1])
    found = ask_host("writes", str(canary), str(tmp_path))
    assert sum(code == "0" for code in found.lines.values()) > 15
    assert fingerprint(canary.parents[1]) != before


@pytest.mark.parametrize("user", ["agent", "root"])
def test_e12_usr_of_the_host(target: Target, box: Sandbox, user: str) -> None:
    if user == "root":
        target.need("users")
    watched = ("/usr/bin", "/usr/sbin", "/usr/lib/os-release", "/etc")
    before = fingerprint(*watched)
    ask(box, "writes", "/usr/bin/env", box.workdir, user=user)
    for script in (
        "echo evil > /usr/bin/sloplet-evil",
        "rm -f /usr/bin/env",
        "mv /usr/bin/id /usr/bin/ls",
        "chmod 777 /usr/bin",
        "mount -o remount,rw /usr",
        "mount --bind /tmp /usr",
        "ln -f /usr/bin/env hard && echo x >> hard",
        "ln -s /usr soft && echo x > soft/bin/evil",
        "echo x > /proc/self/root/usr/bin/evil",
        "exec 9</usr/bin/id; echo x > /proc/self/fd/9",
        "truncate -s 0 /usr/bin/id",
        "setfattr -n user.x -v y /usr/bin/id",
        "echo x >> /etc/passwd",
        "chattr +i /usr/bin/id",
        "touch -d 2000-01-01 /usr/bin",
        "dd if=/dev/zero of=/usr/bin/id count=1",
    ):
        box.run(script, user=user)
    assert fingerprint(*watched) == before


@pytest.mark.parametrize("user", ["agent", "root"])
def test_e12_folder_as_image(target: Target, rootfs: Path, user: str) -> None:
    """A plain folder as an image is the lower layer: it is never written, whatever happens above it."""
    if "rootfs" not in target.can.images:
        pytest.skip("no rootfs images")
    if user == "root":
        target.need("users")
    before = fingerprint(rootfs)
    with target.box(image=str(rootfs)) as box:
        assert box.run("cat /canary").stdout == "the image's own\n"
        box.run([install(box, "writes"), "/canary", box.workdir], user=user)
        box.run("echo x > /canary; rm -rf /bin/canary /lib; mv /bin /nib; chmod 777 /; touch /new", user=user)
    with target.box(image=str(rootfs)) as again:
        assert again.run("cat /canary").stdout == "the image's own\n"
    assert fingerprint(rootfs) == before


def test_e12_rm_rf_root(target: Target, box: Sandbox, neighbour: Sandbox, tmp_path: Path) -> None:
    """``rm -rf --no-preserve-root /``: the sandbox suffers, the host does not."""
    user = "root" if target.can.users else "agent"
    kept = tmp_path / "kept"
    kept.write_text("kept")
    before = fingerprint("/usr/bin", "/usr/sbin", "/etc", tmp_path, os.environ["SLOPLET_HOME"] + "/run")
    listing = sorted(os.listdir("/")), sorted(os.listdir("/dev"))
    result = box.run(["rm", "-rf", "--no-preserve-root", "/"], user=user, timeout=60)
    assert not result.timed_out
    assert result.exit_code != 0, "not even there was everything to be removed"
    assert fingerprint("/usr/bin", "/usr/sbin", "/etc", tmp_path, os.environ["SLOPLET_HOME"] + "/run") == before
    assert (sorted(os.listdir("/")), sorted(os.listdir("/dev"))) == listing
    assert kept.read_text() == "kept"
    assert neighbour.run("ls /usr/bin/env").ok
