"""E-13 and E-15: nothing crosses from a sandbox to the host's processes, to another sandbox, or to a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_kit import Target, ask, ask_host, eventually, host_pids, install, name_of, parse, probe, status_of

from sloplet import Sandbox
from sloplet.errors import CommandError, SandboxDead

#: What may be seen of a process without touching it, where there is no pid namespace.
HARMLESS = {"signal-0", "prlimit"}


def _worked(lines: dict[str, str]) -> set[str]:
    return {way for way, code in lines.items() if code == "0"}


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the caller's on the host."""
    with subprocess.Popen(["sleep", "300"], env={"SECRET": "canary-in-environ"}) as process:
        yield process
        assert process.poll() is None, "the host's process was killed"
        process.kill()


def test_e13_abstract_sockets(target: Target, box: Sandbox) -> None:
    name = f"sloplet-hostile-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        listener.bind("\0" + name)
        datagrams.bind("\0" + name + "-d")
        listener.listen()
        assert _worked(ask(box, "crossing", "abstract", name).lines) == set()
        assert _worked(ask(box, "crossing", "abstract", name + "-d").lines) == set()
        assert "abstract" in _worked(ask_host("crossing", "abstract", name).lines)


def test_e13_sockets_by_path(target: Target, box: Sandbox, tmp_path: Path) -> None:
    """docker.sock and its like: none is in view, none can be connected to."""
    path = str(tmp_path / "docker.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o777)
        listener.listen()
        assert _worked(ask_host("crossing", "path", path).lines) == {"path"}
        for wanted in (path, "/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"):
            assert _worked(ask(box, "crossing", "path", wanted).lines) == set()
    if target.can.private_filesystem:
        assert box.run("find / -xdev -type s 2>/dev/null; true").stdout == ""


def test_e13_processes_of_the_host(target: Target, box: Sandbox, victim: subprocess.Popen[bytes]) -> None:
    nice = os.getpriority(os.PRIO_PROCESS, victim.pid)
    found = _worked(ask(box, "crossing", "process", str(victim.pid)).lines)
    if target.can.private_processes:
        mine = set(box.run("ls /proc | grep -E '^[0-9]+$'").stdout.split())
        assert len(mine) < 8
        assert "canary-in-environ" not in box.run("cat /proc/*/environ /proc/*/cmdline 2>/dev/null").stdout
        if str(victim.pid) not in mine:
            assert found == set()
    assert found <= HARMLESS, found
    assert os.getpriority(os.PRIO_PROCESS, victim.pid) == nice
    control = _worked(ask_host("crossing", "process", str(victim.pid)).lines)
    assert {"signal-cont", "proc-environ", "setpriority"} <= control


def test_e13_processes_of_a_neighbour(target: Target, box: Sandbox, neighbour: Sandbox) -> None:
    theirs = neighbour.spawn(["sleep", "300"], env={"SECRET": "canary-of-the-neighbour"})
    eventually(lambda: [pid for pid in host_pids(neighbour) if name_of(pid) == "sleep"], 5)
    pid = next(pid for pid in host_pids(neighbour) if name_of(pid) == "sleep")
    for number in (pid, *host_pids(neighbour)):
        said = ask(box, "crossing", "process", str(number))
        if target.can.private_processes and box.run(["test", "-e", f"/proc/{number}"]).ok:
            continue  # the same number, another process
        assert _worked(said.lines) <= HARMLESS
    assert status_of(pid)["State"].startswith("S")
    theirs.kill()


def test_e13_nobody_can_kill_all(target: Target, box: Sandbox, victim: subprocess.Popen[bytes]) -> None:
    """kill(-1): as far as the sandbox, no further."""
    try:
        for user in ("agent", "root") if target.can.users else ("agent",):
            box.run(["sh", "-c", "kill -9 -1"], user=user, timeout=10)
        assert box.run("echo alive").stdout == "alive\n"
    except SandboxDead as error:
        ended = error.message
        assert not target.can.private_processes, "as pid 1 the agent is not to be killed"
        assert "signal 9" in ended
    assert victim.poll() is None


def test_e13_ipc(target: Target, box: Sandbox, neighbour: Sandbox) -> None:
    key = 0x51070000 | os.getpid() & 0xFFFF
    try:
        ask_host("crossing", "ipc", "make", str(key))
        assert {"shm", "sem", "msg", "posix-shm"} <= _worked(ask_host("crossing", "ipc", "find", str(key)).lines)
        assert _worked(ask(box, "crossing", "ipc", "find", str(key)).lines) == set()
    finally:
        ask_host("crossing", "ipc", "remove", str(key))
    made = _worked(ask(box, "crossing", "ipc", "make", str(key)).lines)
    assert _worked(ask(neighbour, "crossing", "ipc", "find", str(key)).lines) == set()
    assert _worked(ask_host("crossing", "ipc", "find", str(key)).lines) == set()
    if target.can.private_processes:
        assert {"shm", "sem", "msg", "posix-shm"} <= made, "inside it works: isolation, not refusal"


def test_e13_keyrings(target: Target, box: Sandbox) -> None:
    try:
        ask_host("crossing", "keyring", "make")
        assert _worked(ask_host("crossing", "keyring", "find").lines) == {"search"}, "the host's own key is found"
        assert _worked(ask(box, "crossing", "keyring", "find").lines) == set()
        assert _worked(ask(box, "crossing", "keyring", "make").lines) == set()
    finally:
        ask_host("crossing", "keyring", "remove")


def test_e13_shared_folders(target: Target, box: Sandbox, neighbour: Sandbox) -> None:
    """/tmp, /dev/shm and the working directory belong to one sandbox alone."""
    name = f"sloplet-hostile-{os.getpid()}"
    for folder in ("/tmp", "/dev/shm", "/var/tmp", "$HOME", "$PWD"):
        box.run(f"echo mine > {folder}/{name}")
        assert not neighbour.run(f"cat {folder}/{name} 2>/dev/null").ok
        if folder.startswith("/"):
            assert not Path(folder, name).exists()
    assert not neighbour.run(["cat", f"{box.workdir}/{name}"]).ok or target.can.private_filesystem


def _has_terminals(box: Sandbox) -> bool:
    """Under the caller's own uid the host's other terminals would be open too: there a sandbox gets none."""
    try:
        return box.run("true", pty=True).ok
    except CommandError:
        return False


@pytest.mark.parametrize("with_pty", [False, True])
def test_e15_no_typing_into_terminals(target: Target, box: Sandbox, with_pty: bool) -> None:
    if with_pty and not _has_terminals(box):
        pytest.skip("no terminals at all here")
    path = install(box, "crossing")
    said = parse(box.run([path, "terminal"], pty=with_pty).stdout.replace("\r\n", "\n"))
    typed = {way for way in _worked(said.lines) if way != "tty-open"}
    assert typed == set()
    assert ("tty-open" in _worked(said.lines)) == with_pty, "a terminal of its own, or none"


def test_e15_positive_control(target: Target) -> None:
    if ask_host("crossing", "own-terminal")["own-sti"] != "0":
        pytest.skip("this kernel refuses TIOCSTI to everybody (legacy_tiocsti=0)")
    with target.weakened("seccomp").box() as weak:
        if not _has_terminals(weak):
            pytest.skip("no terminals at all here")
        path = install(weak, "crossing")
        said = parse(weak.run([path, "terminal"], pty=True).stdout.replace("\r\n", "\n").replace("x", ""))
        if target.can.private_filesystem:
            assert said["sti-0"] == "0"


HOLDER = """
import sys
sys.path[:0] = sys.argv[3:]
from sloplet import Sandbox
from sloplet.errors import CommandError
with Sandbox(engine=sys.argv[1]) as box:
    box.files.write("probe", open(sys.argv[2], "rb").read(), mode=0o755)
    for pty in (False, True):
        try:
            print(box.run(["./probe", "terminal"], pty=pty).exit_code, flush=True)
        except CommandError:
            print(0)
    print(box.run("ls -l /proc/self/fd 2>/dev/null; tty").stdout, flush=True)
"""


def test_e15_the_callers_terminal(target: Target, tmp_path: Path) -> None:
    """A holder on a terminal: nothing that the sandbox does arrives there as if it had been typed."""
    if target.facts is not None:
        pytest.skip("the holder is another process")
    arguments = [sys.executable, "-c", HOLDER, target.name, str(probe("crossing")), *sys.path]
    pid, master = pty.fork()
    if pid == 0:
        os.execv(sys.executable, arguments)
    typed, until = b"", time.monotonic() + 30
    try:
        while time.monotonic() < until:
            if select.select([master], [], [], 0.2)[0]:
                try:
                    data = os.read(master, 4096)
                except OSError:
                    break
                if not data:
                    break
                typed += data
    finally:
        os.close(master)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    text = typed.decode(errors="replace")
    assert "0\r\n0\r\n" in text, text
    assert "not a tty" in text
    assert "x" not in text.partition("0\r\n0\r\n")[0], "an echoed letter: something was typed"
    assert "/dev/pts" not in text
