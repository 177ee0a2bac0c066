"""E-08, E-10, E-11: paths that lead somewhere else than they say, and the runtime's own program."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostile_kit import Target, fingerprint, host_pids, install, make_rootfs, probe

from sloplet import Sandbox
from sloplet.engines.agentbin import agent_path
from sloplet.errors import CommandError, FileError, ImageError, SlopletError, SpecError, StartFailed, WorkdirInvalid

SECONDS = float(os.environ.get("SLOPLET_RACE_SECONDS", "3"))
CWDS = (
    *(f"/proc/self/fd/{number}" for number in range(3, 21)),
    "/proc/1/root",
    "/proc/1/cwd",
    "/proc/self/root",
    "/proc/self/cwd",
    "/proc/self/fd/7/../../..",
    "/proc/thread-self/root",
    "/nonexistent",
    "x" * 5000,
    "/" + "a/" * 3000,
    "",
    "new\nline",
    "/etc/passwd",
)


@pytest.mark.parametrize("user", ["agent", "root"])
def test_e08_working_directories(target: Target, box: Sandbox, user: str) -> None:
    """CVE-2024-21626: a leaked descriptor as a working directory was a folder of the host's."""
    if user == "root":
        target.need("users")
    for cwd in CWDS:
        with pytest.raises((WorkdirInvalid, CommandError, SpecError)):
            box.run("pwd; ls -la", cwd=cwd, user=user)
    with pytest.raises(SlopletError):
        box.run("pwd", cwd="nul\0byte", user=user)
    assert box.run("pwd", user=user).stdout.strip() == box.workdir


def test_e08_links_to_magic_links(target: Target, box: Sandbox) -> None:
    for number, text in enumerate(("/proc/1/root", "/proc/self/fd/8", "/proc/1/cwd", "/proc/self/root/proc/1/root")):
        box.files.symlink(f"trap{number}", text)
        with pytest.raises(SlopletError):
            box.run("ls", cwd=f"{box.workdir}/trap{number}")
        with pytest.raises(FileError):
            box.files.read(f"trap{number}/etc/shadow")


def test_e08_no_descriptor_leaks_into_commands(target: Target, box: Sandbox) -> None:
    """Positive control of the two above: a command really starts with three descriptors and its own folder."""
    result = box.run("ls /proc/self/fd 2>/dev/null | wc -l; pwd -P")
    assert result.stdout.split()[-1] == box.workdir
    if target.can.private_filesystem:
        assert result.stdout.split()[0] == "4", "0, 1, 2 and the one that ls has opened"


def test_e11_overwriting_the_agent(target: Target, box: Sandbox) -> None:
    """CVE-2019-5736: the runtime's program, reached through /proc/PID/exe while it runs in the sandbox."""
    before = hashlib.sha256(agent_path().read_bytes()).hexdigest()
    script = (
        "for round in 1 2 3 4 5; do for p in 1 2 3 4 5 self $PPID; do f=/proc/$p/exe;"
        " (echo evil > $f) 2>/dev/null && echo WROTE; cp $f stolen 2>/dev/null && echo COPIED $p;"
        " (exec 9<$f && sleep 0.01 && echo evil > /proc/self/fd/9) 2>/dev/null && echo WROTE; done; done; true"
    )
    for user in ("agent", "root") if target.can.users else ("agent",):
        attack = box.spawn(script, user=user)
        for _ in range(20):
            assert box.run("true").ok
        result = attack.wait()
        wrote = [line for line in result.stdout.splitlines() if line == "WROTE"]
        assert wrote == []
        copied = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("COPIED")}
        assert "1" not in copied or not target.can.private_processes, "the agent's program is not to be read"
    assert hashlib.sha256(agent_path().read_bytes()).hexdigest() == before
    exe = os.readlink(f"/proc/{host_pids(box)[1]}/exe") if os.geteuid() == 0 else "memfd"
    assert "memfd" in exe, "it runs from a sealed copy in memory, not from the installed file"


def test_e11_sealed_copy(target: Target) -> None:
    """Positive control: the program that sandboxes run can be written by nobody, the host's root included."""
    from sloplet.engines.agentbin import agent_fd

    with pytest.raises(OSError, match=r"not permitted|busy"):
        os.pwrite(agent_fd(), b"evil", 0)
    with pytest.raises(OSError, match=r"not permitted|busy|denied"):
        os.truncate(f"/proc/self/fd/{agent_fd()}", 0)


# -- E-10 ------------------------------------------------------------------------------------------


@pytest.fixture
def bait(tmp_path: Path) -> Iterator[Path]:
    """What a hostile image points at: a folder of the host's that anybody may write."""
    folder = tmp_path / "bait"
    folder.mkdir()
    for name in ("passwd", "group", "hosts", "hostname", "resolv.conf", "null", "sys", "kcore", "shm"):
        (folder / name).write_text("the host's\n")
        (folder / name).chmod(0o666)
    folder.chmod(0o777)
    before = fingerprint(folder)
    yield folder
    assert fingerprint(folder) == before, "WRITE: the host's folder was changed"


SWAPPED = {
    "": ("proc", "dev", "tmp", "run", "workspace"),
    "dev": ("null", "pts", "shm", "tty"),
    "etc": ("passwd", "group", "hosts"),
}
TRAPS = (
    "proc",
    "dev",
    "etc",
    "tmp",
    "run",
    "workspace",
    "home",
    "root",
    "var",
    "dev/pts",
    "dev/null",
    "dev/shm",
    "dev/tty",
    "etc/passwd",
    "etc/group",
    "etc/hosts",
    "etc/hostname",
    "etc/resolv.conf",
    "home/agent",
    "proc/sys",
    "proc/kcore",
)


def _trap(rootfs: Path, name: str, bait: Path) -> None:
    path = rootfs / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()
    path.unlink(missing_ok=True)
    path.symlink_to(bait if "/" not in name else bait / name.rpartition("/")[2])


@pytest.mark.parametrize("absolute", [True, False])
def test_e10_links_in_the_image(target: Target, busybox: Path, bait: Path, tmp_path: Path, absolute: bool) -> None:
    """An image with links to the host where the sandbox mounts and writes: refused, or kept inside."""
    if "rootfs" not in target.can.images:
        pytest.skip("no rootfs images")
    started = refused = 0
    for name in TRAPS:
        rootfs = tmp_path / ("image-" + name.replace("/", "-"))
        rootfs.mkdir()
        make_rootfs(rootfs, busybox)
        _trap(rootfs, name, bait if absolute else Path("../" * 12 + str(bait).lstrip("/")))
        before = fingerprint(rootfs)
        try:
            with target.box(image=str(rootfs)) as box:
                started += 1
                assert "the host's" not in box.run(f"cat {bait}/* /{name} /{name}/passwd", cwd="/").stdout
                script = f"echo evil > /{name}; echo evil > /{name}/passwd; mkdir -p {bait}; echo evil > {bait}/null"
                box.run(script, cwd="/")
                box.files.write("/workspace/passwd", "x", parents=True)
        except (StartFailed, ImageError, FileError):
            refused += 1
        assert fingerprint(rootfs) == before
    assert started > 5, "links that matter to nobody do no harm"
    assert refused > 2, "a link where /proc or /dev is to be mounted is refused"


@contextmanager
def _swapping(folder: Path, target: Path, *names: str) -> Iterator[None]:
    command = [probe("swap"), str(folder), str(target), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == b"swapping\n"
        try:
            yield
        finally:
            assert attacker.poll() is None, "the attacker must have been at work all the time"
            attacker.kill()


def _rounds(seconds: float, least: int) -> Iterator[int]:
    """For some seconds, and on a slow machine until it were enough."""
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until or count < least:
        yield count
        count += 1


@pytest.mark.parametrize("where", ["", "dev", "etc"])
def test_e10_race_while_starting(target: Target, busybox: Path, bait: Path, tmp_path: Path, where: str) -> None:
    """The same, with the names swapped thousands of times a second while sandboxes start."""
    if "rootfs" not in target.can.images:
        pytest.skip("no rootfs images")
    rootfs = tmp_path / "image"
    rootfs.mkdir()
    make_rootfs(rootfs, busybox)
    names = {
        "": ("proc", "dev", "tmp", "run", "workspace"),
        "dev": ("null", "pts", "shm", "tty"),
        "etc": ("passwd", "group", "hosts"),
    }[where]
    (rootfs / where).mkdir(exist_ok=True)
    for name in names:
        path = rootfs / where / name
        if where == "etc" or name in ("null", "tty"):
            path.touch()
        else:
            path.mkdir(exist_ok=True)
    with _swapping(rootfs / where, bait, *names):
        for _ in _rounds(SECONDS / 3, 4):
            try:
                with target.box(image=str(rootfs)) as box:
                    seen = box.run(
                        "cat /proc/sys/kernel/hostname /etc/passwd /tmp/passwd /workspace/passwd /dev/null 2>/dev/null"
                    )
                    assert "the host's" not in seen.stdout, "READ"
                    box.run("for f in /dev/null /etc/passwd /tmp/passwd /dev/shm; do echo evil > $f; done", cwd="/")
                    fs = box.run("cat /proc/self/mounts").stdout
                    assert fs == "" or " /proc proc " in fs, "what is read at /proc is the sandbox's own"
            except SlopletError:
                continue


def test_e10_race_while_executing(target: Target, box: Sandbox, neighbour: Sandbox) -> None:
    """Masks stay, and files stay inside, while the sandbox itself swaps what the agent opens by name."""
    target.need("private_filesystem")
    user = "root" if target.can.users else "agent"
    box.run("mkdir -p race /tmp/cwd && touch race/a /tmp/etc; echo inside > /tmp/inside")
    before = fingerprint("/etc", "/usr/bin")
    path = install(box, "swap")
    attacks = [
        box.spawn([path, f"{box.workdir}/race", "/etc/passwd", "a"], user="agent"),
        box.spawn([path, "/tmp", "/proc/1/root", "cwd"], user="agent"),
        box.spawn([path, "/etc", "/proc/self/environ", "passwd", "group"], user=user),
    ]
    for attack in attacks:
        if attack is not attacks[2] or target.can.users:
            assert next(iter(attack)) == (1, "swapping\n")
    for _ in _rounds(SECONDS / 2, 20):
        for operation in (
            lambda: box.run(["true"], cwd="/tmp/cwd"),
            lambda: box.files.write("race/a", "evil"),
            lambda: box.files.read("race/a"),
            lambda: box.files.list("/tmp/cwd"),
            lambda: box.run(["true"], user="agent", pty=True),
        ):
            try:
                operation()
            except SlopletError:
                continue
    for attack in attacks:
        attack.kill()
    for name in ("kcore", "kmsg", "kallsyms", "timer_list", "interrupts"):
        assert box.run(["cat", f"/proc/{name}"]).stdout == ""
    assert not box.run("echo x > /proc/sys/kernel/hostname").ok
    assert fingerprint("/etc", "/usr/bin") == before
