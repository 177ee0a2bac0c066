"""G: what gVisor's own processes could do if the sandbox took them over: what they see of the host, and as whom."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hostile_kit import eventually, host_pids, name_of, status_of

from sloplet import Sandbox
from sloplet.engines import registry
from sloplet.engines.gvisor import GvisorEngine
from sloplet.engines.machine import FIRST_RANGE, machine
from sloplet.errors import ProcessLimit

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
#: What runsc may have in the sandbox's user namespace (engines/shell.py), and what its kernel keeps of that.
STARTS_WITH = 0x802C01FF
KEEPS = 0x002C01FF


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    if named := os.environ.get("SLOPLET_TEST_RUNSC"):
        monkeypatch.setenv("SLOPLET_RUNSC", named)
    probe = registry.load("gvisor").probe()
    if not probe.available:
        pytest.skip(f"capability: gvisor cannot run here: {probe.reason}")
    with Sandbox(engine="gvisor") as made:
        made.spawn(["sleep", "1000"], detached=True)
        yield made


def inside(box: Sandbox) -> dict[str, list[int]]:
    """The sandbox's processes on the host by what they are: our minder, runsc's."""
    found: dict[str, list[int]] = {"minder": [], "runsc": []}
    for pid in host_pids(box)[1:]:
        found["minder" if name_of(pid) == "sloplet-minder" else "runsc"].append(pid)
    assert len(found["minder"]) == 1
    assert len(found["runsc"]) >= 3, "the kernel, its helper, and a process for each address space"
    return found


def test_g01_namespaces(box: Sandbox) -> None:
    own = {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    supervisor = host_pids(box)[0]
    assert all(os.readlink(f"/proc/{supervisor}/ns/{name}") == own[name] for name in NAMESPACES), "the positive control"
    for pids in inside(box).values():
        for pid in pids:
            assert len(status_of(pid)["NSpid"].split()) > 1, f"{name_of(pid)} is in the host's pid namespace"
            try:
                shared = [name for name in NAMESPACES if os.readlink(f"/proc/{pid}/ns/{name}") == own[name]]
            except PermissionError:
                assert os.geteuid() != 0  # to an ordinary user the kernel shows no more of another user namespace
                continue
            assert not shared, f"{name_of(pid)} shares {shared} with the host"


def test_g02_ids_and_rights(box: Sandbox) -> None:
    groups = inside(box)
    facts = machine()
    for pid in (*groups["minder"], *groups["runsc"]):
        status = status_of(pid)
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        assert int(status["CapBnd"], 16) & ~STARTS_WITH == 0
        assert int(status["CapEff"], 16) & ~STARTS_WITH == 0
        if pid in groups["runsc"]:
            assert int(status["CapEff"], 16) & ~KEEPS == 0
        uids = {int(word) for word in status["Uid"].split()}
        if facts.root:
            assert min(uids) >= FIRST_RANGE, "root's sandboxes have ids of their own outside"
        else:
            assert uids == {facts.uid}


def mount_points(pid: int) -> set[str]:
    return {line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()}


def test_g03_files(box: Sandbox, tmp_path: Path) -> None:
    """Nothing of the host is mounted where they are but the image, read-only, runsc and six devices."""
    (tmp_path / "canary").write_text("x")
    groups = inside(box)
    minder = groups["minder"][0]
    for point in mount_points(minder):
        assert re.fullmatch(r"/|/proc|/runsc|/dev(/(null|zero|full|random|urandom|tty))?|/image(/.*)?", point), point
    for line in Path(f"/proc/{minder}/mountinfo").read_text().splitlines():
        if line.split()[4].startswith(("/image", "/runsc")):
            assert "ro" in line.split()[5].split(","), line
    if os.geteuid() == 0:  # only root may look through another's root
        assert Path(f"/proc/{minder}/root/image/usr/bin").is_dir(), "the positive control"
        for pid in (minder, *groups["runsc"]):
            assert not Path(f"/proc/{pid}/root{tmp_path}/canary").exists()
            assert not Path(f"/proc/{pid}/root/image{tmp_path}/canary").exists()
            assert not Path(f"/proc/{pid}/root/etc/shadow").exists()


def test_g04_network(box: Sandbox) -> None:
    for pid in host_pids(box)[1:]:
        lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
        assert [line.split(":")[0].strip() for line in lines] in ([], ["lo"])
    assert box.run("ls /sys/class/net 2>/dev/null; cat /proc/net/dev").ok


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files that only root may read")
def test_g05_what_only_root_may_read(box: Sandbox) -> None:
    """Owners show as they are, but root inside is nobody to the host's files."""
    path = Path("/usr/local/lib/sloplet-canary")
    try:
        path.write_text("secret")
        path.chmod(0o644)
        with Sandbox(engine="gvisor") as fresh:
            assert fresh.run(["cat", str(path)], user="root").stdout == "secret", "the positive control"
        path.chmod(0o600)
        with Sandbox(engine="gvisor") as fresh:
            result = fresh.run(["cat", str(path)], user="root")
            assert "secret" not in result.stdout
            assert not result.ok
    finally:
        path.unlink()


def test_g06_the_agents_own_program(box: Sandbox) -> None:
    """Root inside can neither write nor read what the agent runs on: it is covered, and its memory is its own."""
    script = "echo x > /.sloplet/agent; cat /proc/1/exe > /dev/null; cat /proc/1/mem > /dev/null; umount /.sloplet"
    result = box.run(script + "; ls -A /.sloplet", user="root")
    assert result.stdout == ""
    assert box.run("echo alive").stdout == "alive\n"


def test_g07_commands_have_no_rights(box: Sandbox) -> None:
    for user in ("agent", "root"):
        status = box.run("cat /proc/self/status", user=user).stdout
        sets = dict(re.findall(r"^(Cap\w+):\s*([0-9a-f]+)$", status, re.MULTILINE))
        assert set(sets.values()) == {"0" * 16}, sets
        for attempt in ("mount -t tmpfs none /mnt", "umount /.sloplet", "hostname other", "chroot / true"):
            assert not box.run(attempt, user=user).ok, attempt
    assert "CapEff:" in Path("/proc/self/status").read_text(), "the positive control: that is how it reads"


STATE = """
cat /proc/self/status | grep -E '^(PPid|SigBlk|SigIgn|SigCgt|CapEff|Groups|Uid):' | grep -v PPid
pwd; umask; ulimit -n; env | sort | grep -v ^_=; ls -l /proc/self/fd | sed 's/.*-> //' | grep -vE 'pipe|/proc/|^total'
"""


def parent(box: Sandbox, **settings: object) -> int:
    """The shim that a command has."""
    return int(box.run("exec awk '/^PPid/ {print $2}' /proc/self/status", **settings).stdout)


def waiting(box: Sandbox) -> int:
    """A shim that waits for the next command, when the one before it was no passing one."""
    found = [0, 0]
    eventually(lambda: found.append(parent(box)) or found[-1] == found[-2], 10)
    return found[-1]


def test_g10_one_shim_for_many_commands(box: Sandbox) -> None:
    """And nothing of one is found by the next."""
    fresh = box.run(STATE, user="agent").stdout
    assert "/workspace\n0022\n" in fresh, "the positive control"
    shims = {parent(box) for _ in range(10)}
    assert len(shims) <= 4, "another is made only where one is long in coming back"
    box.run("cd /; umask 0; trap '' TERM; ulimit -n 99; exec 7</etc/passwd; sleep 0", user="root", env={"LEFT": "1"})
    parent(box, user="root")
    assert box.run(STATE, user="agent").stdout == fresh


def test_g11_a_shim_with_a_daemon_takes_nothing_new(box: Sandbox) -> None:
    first = box.spawn("setsid sleep 999 >/dev/null 2>&1 & exec awk '/^PPid/ {print $2}' /proc/self/status")
    shim = int(first.wait().stdout)
    assert shim not in {parent(box) for _ in range(3)}
    assert box.run("pkill -x -f 'sleep 999'").ok
    assert parent(box) > 1


@pytest.mark.parametrize("signal", ["KILL", "STOP", "TERM"])
def test_g12_a_waiting_shim_that_a_command_attacks(box: Sandbox, signal: str) -> None:
    """A command of root's can: it is its sandbox. The next one runs all the same."""
    script = f"while read it; do kill -{signal} $it 2>/dev/null && echo done || echo gone; done"
    attacker = box.spawn(["sh", "-c", script], user="root", stdin=True)
    answers = iter(attacker)

    def attack() -> bool:
        attacker.send(f"{waiting(box)}\n")
        return next(answers)[1] == "done\n"  # else it had been let go: another waits

    for _ in range(3):
        eventually(attack, 10)
        for _ in range(3):
            assert box.run("echo on", timeout=20).stdout == "on\n"
    attacker.kill()


@pytest.mark.parametrize(
    "facts", [{"seccomp": False}, {"kernel": (4, 19), "landlock_abi": 0}, {"arch": "riscv64"}], ids=str
)
def test_g13_a_kernel_that_lacks_it(box: Sandbox, facts: dict[str, object]) -> None:
    assert GvisorEngine(facts=machine()).probe().available, "the positive control"
    probe = GvisorEngine(facts=replace(machine(), **facts)).probe()
    assert not probe.available
    assert probe.reason


#: Forks whenever it can, threads too if asked, and says how often it could and whether it got a user namespace.
PERSISTENT = """
import ctypes, os, sys, threading, time
namespace = ctypes.CDLL(None).unshare(0x10000000) == 0
made = 0
for number in range(300):
    try:
        if sys.argv[1] == "threads":
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        elif os.fork() == 0:
            time.sleep(1000)
        made += 1
    except (OSError, RuntimeError):
        pass
print(made, namespace, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("user", ["", "root"])
@pytest.mark.parametrize("kind", ["forks", "threads"])
def test_g14_the_process_limit_holds_however_often_it_is_tried(gvisor: None, user: str, kind: str) -> None:
    """gVisor's pids groups refuse one fork of seven beyond the limit (agent/gvisor_pids.c): who asks on gets more."""
    with Sandbox(engine="gvisor", pids=40) as box:
        bomb = box.spawn(["python3", "-c", PERSISTENT, kind], user=user or None)
        said = ""
        while "\n" not in said:
            said += next(iter(bomb))[1]
        made, namespace = said.split()
        assert namespace == "False", "in a namespace of its own it would be held by no limit"
        if user:  # as whom the agent and its shims run
            assert 40 <= int(made) <= 40 + 16
        else:
            assert int(made) == 39, "and itself"
        with pytest.raises(ProcessLimit):
            box.run("true", user=user or None)
        assert box.metrics().pids <= 40 + 16
        bomb.kill()
        bomb.wait()
        assert box.run("echo alive", user=user or None).stdout == "alive\n"
