"""E-01: what a sandbox's processes hold, seen from the host, compared with the file of what is expected."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hostile_kit import Target, ask, host_pids, install, name_of, parse, status_of

from sloplet import Sandbox

EXPECTED = json.loads((Path(__file__).parent / "expected_posture.json").read_text())
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def _threads(pid: int) -> list[dict[str, str]]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        text = Path(f"/proc/{pid}/task/{task}/status").read_text()
        found.append({key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())})
    return found


def _role(pid: int, command: str) -> str:
    return "command" if name_of(pid) == command else "agent"


@pytest.mark.parametrize("user", ["agent", "root"])
def test_e01_posture_seen_from_the_host(target: Target, box: Sandbox, user: str) -> None:
    if user == "root":
        target.need("users")
    process = box.spawn([install(box, "posture"), "hold"], user=user)
    assert next(iter(process)) == (1, "holding\n")
    supervisor, *inside = host_pids(box)
    commands = [pid for pid in inside if _role(pid, "posture") == "command"]
    assert len(commands) == 3
    assert max(len(_threads(pid)) for pid in commands) == 5
    for pid in inside:
        allowed = EXPECTED[_role(pid, "posture")]
        for status in _threads(pid):
            assert status["NoNewPrivs"] == "1"
            assert status["Seccomp"] == "2"
            for name in SETS:
                if name == "CapBnd" and not target.can.private_filesystem and os.geteuid() != 0:
                    continue  # an ordinary user cannot shrink it; no_new_privs makes it void
                extra = int(status[name], 16) & ~int(allowed[name], 16)
                assert extra == 0, f"{name_of(pid)}: {name} has {extra:x} more than expected"
            if os.geteuid() == 0:
                uids = [int(uid) for uid in status["Uid"].split()]
                assert min(uids) >= 0x70000000, "root's sandboxes have ids of their own outside"
    # the supervisor stays outside, and nothing of it may be known inside
    assert status_of(supervisor)["PPid"] == str(os.getpid())
    process.kill()


def test_e01_namespaces_differ(target: Target, box: Sandbox) -> None:
    target.need("private_processes", "private_filesystem")
    for kind in NAMESPACES:
        path = f"/proc/self/ns/{kind}"
        inside, outside = box.run(["readlink", path]).stdout.strip(), os.readlink(path)
        assert inside.startswith(f"{kind}:["), inside
        assert inside != outside, kind
    first, outside_first, count = (int(word) for word in box.run(["cat", "/proc/self/uid_map"]).stdout.split()[:3])
    if os.geteuid() == 0:
        assert (first, count) == (0, 65536)
    assert outside_first != 0, "root outside is nobody inside"


@pytest.mark.parametrize("user", ["agent", "root"])
def test_e01_posture_seen_from_inside(target: Target, box: Sandbox, user: str) -> None:
    if user == "root":
        target.need("users")
    said = ask(box, "posture", "self", user=user)
    for name in ("cap_effective", "cap_permitted", "cap_inheritable"):
        assert int(said[name], 16) == 0, name
    assert said["no_new_privs"] == "1"
    assert said["seccomp"] == "2"
    assert said["ambient"] == "0"
    assert said["core"] == "0"
    assert said["fds"] == "3", "no descriptor of the agent or the host comes along"
    assert said["uid"] == said["euid"] == said["suid"]


def test_e01_mounts(target: Target, box: Sandbox) -> None:
    target.need("private_filesystem")
    rules = EXPECTED["mounts"]
    for line in box.run("cat /proc/self/mountinfo").stdout.splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        point, options, kind = words[4], words[5].split(","), after.split()[0]
        assert "nosuid" in options, line
        assert "nodev" in options or point.startswith("/dev"), line
        assert kind in rules["types"], line
        assert not any(point == bad or point.startswith(bad + "/") for bad in rules["never"]), line
        own_disk = after.split()[1].startswith("/dev/loop") and point in ("/", "/workspace")
        if kind not in rules["private"] and not point.startswith("/dev/") and not own_disk:
            assert "ro" in options, f"a filesystem of the host is writable: {line}"
        assert len(words) == 6 or "shared" not in before, f"it propagates: {line}"


def test_e01_positive_control(target: Target) -> None:
    with target.weakened("seccomp", "caps").box() as weak:
        path = install(weak, "posture")
        said = parse(weak.run([path, "self"]).stdout)
        assert said["seccomp"] == "0"
        agent = host_pids(weak)[1]
        if target.can.private_processes and target.weakened("caps").weaken:
            assert int(status_of(agent)["CapEff"], 16) & ~int(EXPECTED["agent"]["CapEff"], 16)
