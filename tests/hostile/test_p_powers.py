"""Root with powers (``sudo=True``): it does what installing software takes, and not a bit more."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from hostile_kit import Target, host_pids, install, name_of, status_of

from sloplet import Sandbox
from sloplet.engines.cgroups import Hierarchy
from sloplet.errors import ControlUnavailable, UnsupportedOperation

#: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE, SYS_CHROOT
POWERS = 0x404FB


@pytest.fixture
def box(target: Target) -> Iterator[Sandbox]:
    target.need("users", "private_filesystem")
    with target.box(sudo=True) as found:
        yield found


def _caps(box: Sandbox, *command: str, user: str = "agent") -> dict[str, int]:
    text = box.run([*command, "cat", "/proc/self/status"], user=user, check=True).stdout
    lines = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("Cap", "NoNewPrivs")))
    return {name: int(value.strip(), 16) for name, value in lines.items()}


def test_root_has_these_and_no_others(box: Sandbox) -> None:
    for command, user in (((), "root"), (("sudo",), "agent")):
        found = _caps(box, *command, user=user)
        assert found["CapEff"] == found["CapPrm"] == POWERS
        assert found["CapBnd"] & ~POWERS == 0
        assert found.get("NoNewPrivs", 1) == 1


def test_others_have_none(box: Sandbox) -> None:
    for command, user in (((), "agent"), (("sudo", "-u", "nobody"), "agent"), (("sudo", "-u", "agent"), "root")):
        found = _caps(box, *command, user=user)
        assert found["CapEff"] == found["CapPrm"] == found["CapInh"] == 0
        assert found.get("CapAmb", 0) == 0


def test_without_it_root_has_none_and_sudo_says_so(target: Target) -> None:
    target.need("users", "private_filesystem")
    with target.box() as box:
        assert _caps(box, user="root")["CapEff"] == 0
        assert not box.run("test -e /run/sloplet/sudo -o -e /run/sloplet/bin/sudo").ok
        privileges = next(item for item in box.guarantees() if item.control == "privileges")
        assert "no capabilities" in privileges.how


def test_what_is_enforced_is_told(box: Sandbox) -> None:
    privileges = next(item for item in box.guarantees() if item.control == "privileges")
    assert privileges.enforced
    assert "root's commands have powers" in privileges.how
    pids = next(item for item in box.guarantees() if item.control == "pids")
    assert ("for each user" in pids.how) == ("can be many" in pids.how), "a limit per user is none for who can be any"
    assert pids.enforced == ("for each user" not in pids.how)


def test_a_limit_that_root_could_get_around_is_refused(target: Target) -> None:
    target.need("users", "private_filesystem")
    if "cgroup" in target.can.controls["pids"]:
        with target.box(sudo=True, pids=64) as box:
            assert box.run("true").ok
        return
    with pytest.raises(ControlUnavailable, match="pids=64") as caught, target.box(sudo=True, pids=64):
        pass
    assert "sudo=False" in str(caught.value.hint)
    with target.box(sudo=False, pids=64) as box:
        assert box.run("true").ok, "the control"


def test_where_there_is_one_user_it_is_refused(target: Target) -> None:
    if target.can.users:
        pytest.skip(f"{target.label} has several users")
    with pytest.raises(UnsupportedOperation, match="sudo"), target.box(sudo=True):
        pass


def test_what_installing_takes(box: Sandbox) -> None:
    script = """
    set -e
    mkdir -p /opt/a/b && echo x > /opt/a/b/f
    chown -R nobody /opt/a && chmod 600 /opt/a/b/f
    cat /opt/a/b/f                       # of another, closed to all: DAC_OVERRIDE
    chmod 2755 /opt/a && chgrp nogroup /opt/a
    touch -d 2001-01-01 /opt/a/b/f       # FOWNER
    rm -r /opt/a
    """
    assert box.run(script, user="root", check=True).stdout == "x\n"
    assert box.run("sudo sh -c 'echo hi > /etc/made'; cat /etc/made").stdout == "hi\n"


def test_sudo_passes_everything_through(box: Sandbox) -> None:
    assert box.run("echo in | sudo cat; sudo sh -c 'echo err >&2'").stdout == "in\n"
    assert box.run(["sudo", "sh", "-c", "exit 7"]).exit_code == 7
    assert box.run(["sudo", "sh", "-c", "kill -9 $$"]).exit_code == 137
    assert box.run("cd /usr && sudo pwd").stdout == "/usr\n"
    assert box.run(["sudo", "printf", "%s|", "a b", "", "*"]).stdout == "a b||*|"
    assert box.run(["sudo", "A=1", "sh", "-c", "echo $A $HOME $USER $SUDO_USER"]).stdout == "1 /root root agent\n"
    assert box.run("SECRETISH=1 sudo env | grep -c SECRETISH").stdout == "0\n"
    assert box.run("KEPT=1 sudo -E sh -c 'echo $KEPT'").stdout == "1\n"
    assert box.run("A=1 B=2 C=3 sudo --preserve-env=A,C sh -c 'echo $A$B$C'").stdout == "13\n"
    assert box.run("seq 30000 | xargs sudo echo | wc -w").stdout.strip() == "30000"
    result = box.run(["sudo", "no-such-command"])
    assert (result.exit_code, result.stderr) == (1, "sudo: no-such-command: command not found\n")
    assert "no such user" in box.run(["sudo", "-u", "nobody-here", "id"]).stderr
    assert "does not know" in box.run(["sudo", "--chroot=/x", "id"]).stderr


def test_sudo_in_a_terminal(box: Sandbox) -> None:
    result = box.run("sudo sh -c 'test -t 0 && test -t 1 && echo a terminal'", pty=True)
    assert "a terminal" in result.stdout


def test_only_who_may(box: Sandbox) -> None:
    result = box.run(["sudo", "id"], user="nobody")
    assert result.exit_code == 1
    assert "may not use sudo" in result.stderr
    box.run("getent group sudo >/dev/null || echo sudo:x:27:nobody >> /etc/group", user="root", check=True)
    box.run("sed -i 's/^sudo:.*/sudo:x:27:nobody/' /etc/group", user="root", check=True)
    assert box.run(["sudo", "id", "-u"], user="nobody").stdout == "0\n", "the control: now it may"


def test_what_is_killed_takes_what_sudo_started_along(box: Sandbox) -> None:
    marker = "7654.25"
    assert box.run(f"sudo sleep {marker}", timeout=0.7).timed_out
    process = box.spawn(["sudo", "sh", "-c", f"echo up; sleep {marker} & wait"])
    assert next(iter(process)) == (1, "up\n")
    process.kill()
    look = f"for i in $(seq 100); do ps -eo args | grep -q '[s]leep {marker}' || exit 0; sleep 0.05; done; exit 1"
    assert box.run(look, user="root").ok


#: Ways for root to have a process outlive the command: in the background; without the shim, the server, both of them.
EVADING = {
    "background": "sudo sh -c 'setsid sleep {marker} > /dev/null 2>&1 &'; sleep 60",
    "shim": "sudo sh -c 'setsid sleep {marker} > /dev/null 2>&1 & kill -9 $PPID; sleep 60'; sleep 60",
    "both": """sudo sh -c 'setsid sleep {marker} > /dev/null 2>&1 & shim=$PPID
        read a b c server rest < /proc/$shim/stat
        kill -STOP $shim; kill -9 $server; sleep 0.1; kill -9 $shim; sleep 60'; sleep 60""",
    "nested": "sudo sudo sh -c 'setsid sleep {marker} > /dev/null 2>&1 & kill -9 $PPID; sleep 60'; sleep 60",
}
LOOK = "for i in $(seq 100); do ps -eo args | grep -q '^sleep {marker}' {until} exit 0; sleep 0.05; done; exit 1"


def _is_there(box: Sandbox, marker: str) -> bool:
    return box.run(LOOK.format(marker=marker, until="&&"), user="root").ok


def _is_gone(box: Sandbox, marker: str) -> bool:
    return box.run(LOOK.format(marker=marker, until="||"), user="root").ok


def _outlives(box: Sandbox) -> None:
    """What sudo leaves in the background stays when the command ends, and goes when it is killed."""
    box.run(["sudo", "sh", "-c", "setsid sleep 8642.1 > /dev/null 2>&1 &"], check=True)
    for number, script in enumerate(EVADING.values()):
        marker = f"8643.{number}"
        process = box.spawn(["sh", "-c", script.format(marker=marker)])
        assert _is_there(box, marker)
        process.kill()
        assert _is_gone(box, marker), script
    assert _is_there(box, "8642.1")


def test_what_sudo_leaves_behind_is_the_commands(box: Sandbox) -> None:
    _outlives(box)


IDLE = """
import os, socket, time
def reach():
    while True:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            s.connect("/run/sloplet/sudo")
            return s
        except BlockingIOError:
            s.close()
            time.sleep(0.005)
idle = [reach() for _ in range(300)]
last = reach()
print(b"".join(iter(lambda: last.recv(4096), b""))[8:].decode())
print(len([pid for pid in os.listdir("/proc") if pid.isdigit()]))
"""


def _only_so_many(box: Sandbox) -> None:
    """Who asks and says nothing is a process of the agent's, whom no limit holds for."""
    said, count = box.run(["python3", "-c", IDLE], user="nobody", check=True, timeout=60).stdout.splitlines()
    assert "too many ask at once" in said
    assert int(count) < 300
    done = box.run("for i in $(seq 100); do sudo -n id -u && exit; sleep 0.1; done", timeout=60)
    assert done.stdout == "0\n", "they are gone with who asked"


def test_who_only_asks_is_not_served_without_end(box: Sandbox) -> None:
    _only_so_many(box)


#: Five that take 100 MiB each once nobody minds them, and wait for the watchdog to have seen it.
HOG = "import time, sys; time.sleep(1); b = bytearray(100 << 20); b[::4096] = bytes([1]) * (100 * 256); time.sleep(60)"
DESERTED = """
import os, signal
def stat(pid):
    with open(f"/proc/{pid}/stat") as file:
        name, rest = file.read().split("(", 1)[1].rsplit(")", 1)
    return name, int(rest.split()[1])
found = {pid: stat(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
servers = [pid for pid, (name, _) in found.items() if name == "sloplet-sudo"]
shims = [pid for pid, (_, parent) in found.items() if parent in servers]
for each in (signal.SIGSTOP, signal.SIGKILL):
    for pid in servers + shims:
        os.kill(pid, each)
print(len(servers), len(shims))
"""


@pytest.mark.parametrize("deserted", [False, True])
def test_the_watchdog_sees_what_no_command_runs(target: Target, deserted: bool) -> None:
    """Where no cgroup holds memory, processes that outlive their command count too, whoever minds them."""
    target.need("users", "private_filesystem")
    bare = target.with_facts(cgroup=Hierarchy(0, reason="a test"))
    with bare.box(sudo=True, memory="200m", allow_weaker=True) as box:
        many = f"for i in 1 2 3 4 5; do setsid python3 -c '{HOG}' > /dev/null 2>&1 & done"
        box.run(["sudo", "sh", "-c", many], check=True)
        if deserted:
            assert box.run(["python3", "-c", DESERTED], user="root", check=True).stdout == "1 1\n"
        until = time.monotonic() + 30
        while box.metrics().oom_kills < 4 and time.monotonic() < until:
            pass  # asking is no command: nothing but the watchdog's own timer looks
        assert box.metrics().oom_kills >= 4


def test_signals_reach_what_sudo_runs(box: Sandbox) -> None:
    """Also those that come as soon as it can be heard of."""
    for _ in range(20):
        command = "trap 'echo got it; exit 5' USR1; echo up; while :; do sleep 0.05; done"
        process = box.spawn(["sudo", "sh", "-c", command])
        output = iter(process)
        assert next(output) == (1, "up\n")
        process.signal("USR1", tree=False)
        assert process.wait().exit_code == 5


BROKEN = """
import array, os, socket, struct, sys
PATH = "/run/sloplet/sudo"
def ask(data, fds=(0, 1, 2)):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(20)
        s.connect(PATH)
        try:
            s.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
            s.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: s.recv(4096), b""))
        except OSError as error:
            return str(error).encode()
MAGIC = 0x4F445553
def head(argc, envc, size): return struct.pack("<IIII", MAGIC, argc, envc, size)
def posing():  # as root, for root's powers
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(20)
        s.connect(PATH)
        data = head(2, 0, 14) + b"root\\0/\\0id\\0-u\\0"
        fds = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (0, 1, 2)))
        try:
            s.sendmsg([data], [fds, (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("iii", os.getpid(), 0, 0))])
            return s.recv(4096)
        except PermissionError:
            return b"refused by the kernel"
answers = [
    ask(b"x" * 100), ask(head(1, 0, 9), ()), ask(head(1, 0, 9), (0, 1)), ask(head(2**31, 1, 9)), ask(head(1, 1, 2**31)),
    ask(head(1, 0, 16) + b"root\\0/\\0id"), ask(head(3, 0, 10) + b"root\\0/\\0id\\0"),
    ask(head(1, 1, 12) + b"root\\0/\\0id\\0x\\0"),
    ask(head(1, 0, 8) + b"root\\0/\\0\\0"), ask(b""),
]
print(len([a for a in answers if b"uid=0" in a]))
idle = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(50)]
for each in idle: each.connect(PATH)
print(posing() if os.getuid() else "")
"""


def test_nonsense_is_answered_and_the_agent_lives(box: Sandbox) -> None:
    result = box.run(["python3", "-c", BROKEN], timeout=60)
    assert result.stdout.splitlines()[0] == "0", result.stderr
    posing = box.run(["python3", "-c", BROKEN], timeout=60, user="nobody").stdout
    assert "refused by the kernel" in posing or "may not use sudo" in posing, posing
    assert box.run(["sudo", "id", "-u"]).stdout == "0\n"


def test_powers_end_at_the_sandbox(target: Target, box: Sandbox) -> None:
    """What Docker's root can and this one cannot, and what neither can."""
    for attempt in (
        "mount -t tmpfs none /mnt", "mknod /tmp/disk b 8 0", "unshare -m true", "unshare -Ur true", "dmesg",
        "echo 1 > /proc/sys/kernel/panic", "nsenter -t 1 -m true", "cat /proc/1/environ", "sethostname=1 hostname evil",
        "chroot /proc/1/root true", "kill -9 1; kill -0 1 && false",
    ):  # fmt: skip
        result = box.run(attempt, user="root", timeout=20)
        if attempt.startswith("chroot"):
            assert result.exit_code in (0, 1, 125, 126), "either its own root, or nothing"
        elif not attempt.startswith("kill"):
            assert not result.ok, attempt
    assert box.run("true").ok, "the agent lives"


def test_setuid_programs_still_give_nothing(target: Target, box: Sandbox) -> None:
    if not target.can.shared_kernel:
        pytest.skip("the probe reads Linux's own rules")
    box.run("cp /usr/bin/id /tmp/suid-id && chmod 4755 /tmp/suid-id", user="root", check=True)
    assert "euid=0" not in box.run(["/tmp/suid-id"]).stdout


def test_the_agent_is_out_of_reach_of_its_root(target: Target, box: Sandbox) -> None:
    probe = install(box, "posture")
    for attempt in (
        "cat /proc/1/maps",
        "head -c 1 /proc/1/mem",
        "cat /proc/1/exe > /tmp/x && test -s /tmp/x",
        "ls /proc/1/fd/",
    ):
        assert not box.run(attempt, user="root").stdout.strip(), attempt
    assert box.run([probe, "--help"], user="root", timeout=5).exit_code is not None


def test_ids_outside_are_no_ones(target: Target, box: Sandbox) -> None:
    if os.geteuid() != 0 or not target.can.shared_kernel:
        pytest.skip("seen from the host as root only, and in gVisor nothing is")
    process = box.spawn(["sudo", "tail", "-f", "/etc/passwd"])
    assert next(iter(process))[0] == 1, "it runs"
    running = [pid for pid in host_pids(box) if name_of(pid) == "tail"]
    assert running
    for pid in running:
        assert min(int(uid) for uid in status_of(pid)["Uid"].split()) >= 0x70000000
        assert status_of(pid)["Seccomp"] == "2"
    process.kill()


@pytest.mark.usefixtures("gvisor")
def test_in_gvisor() -> None:
    with Sandbox(engine="gvisor", sudo=True) as box:
        for command, user in (((), "root"), (("sudo",), "agent")):
            found = _caps(box, *command, user=user)
            assert found["CapEff"] == POWERS
            assert found["CapBnd"] & ~POWERS == 0
        assert _caps(box)["CapEff"] == 0
        assert box.run("echo in | sudo cat; sudo sh -c 'exit 7'").exit_code == 7
        assert "may not use sudo" in box.run(["sudo", "id"], user="nobody").stderr
        assert not box.run("sudo mount -t tmpfs none /mnt").ok
        posing = box.run(["python3", "-c", BROKEN], timeout=60, user="nobody").stdout
        assert "refused by the kernel" in posing or "may not use sudo" in posing, posing
        child = box.fork(1)[0]
        try:
            assert child.run(["sudo", "id", "-u"]).stdout == "0\n", "what was saved still asks its own agent"
        finally:
            child.kill()
        assert box.run(["sudo", "id", "-u"]).stdout == "0\n"
        _outlives(box)
        _only_so_many(box)
