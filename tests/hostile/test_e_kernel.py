"""E-02 and E-04: the parts of the kernel that a sandbox must not reach, by any system call ABI."""

from __future__ import annotations

import errno
import os

import pytest
from hostile_kit import Target, ask, ask_host, install, parse

from sloplet import Sandbox

HARMLESS = {"unix", "tcp", "udp", "tcp6", "route"}
REFUSED = {errno.EPERM, errno.ENOSYS}
#: What any user's process may do on a bare kernel: the filter alone stands between these and the sandbox.
OPEN_TO_ALL = {"unshare-user", "clone-user", "clone3-user", "keyctl", "add_key", "io_uring_setup", "userfaultfd"}


def test_e02_socket_families(target: Target, box: Sandbox) -> None:
    found = ask(box, "sockets")
    opened = {key for key, value in found.lines.items() if value == "0"}
    allowed = {f"native:{name}" for name in HARMLESS} | {"pair:unix"}
    assert opened <= allowed, sorted(opened - allowed)
    assert found["i386:getpid"] == found["x32:getpid"] == "1", "a foreign ABI gets nothing at all"


def test_e02_positive_control(target: Target) -> None:
    with target.weakened("seccomp").box() as weak:
        found = ask(weak, "sockets")
    host = ask_host("sockets")
    names = {"vsock", "netlink-xfrm", "netlink-netfilter", "netlink-generic"}
    exotic = {abi + name for abi in ("native:", "i386:") for name in names}
    missing = {name for name in exotic if host[name] != "0"}
    assert len(missing) < len(exotic), "this host has none of the families"
    assert {name for name in exotic - missing if found[name] != "0"} == set()
    assert found["i386:getpid"] == host["i386:getpid"]


@pytest.mark.parametrize("user", ["agent", "root"])
def test_e04_refused_calls(target: Target, box: Sandbox, user: str) -> None:
    if user == "root":
        target.need("users")
    found = ask(box, "syscalls", box.workdir, user=user)
    reached = {name: code for name, code in found.lines.items() if int(code) not in REFUSED}
    assert reached == {}
    assert len(found.lines) > 100


def test_e04_positive_control(target: Target) -> None:
    weak = target.weakened("seccomp", "caps", "landlock")
    with weak.box() as box:
        found = ask(box, "syscalls", box.workdir)
    reached = {name for name, code in found.lines.items() if int(code) not in REFUSED}
    assert reached >= OPEN_TO_ALL - _closed_on_this_host(), sorted(OPEN_TO_ALL - reached)
    assert len(reached) > 30, sorted(reached)


def _closed_on_this_host() -> set[str]:
    """What this kernel refuses to any process of an ordinary user (sysctls, build options)."""
    demote = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    host = ask_host("syscalls", "/tmp", **demote)
    return {name for name in OPEN_TO_ALL if host.number(name) in REFUSED}


def test_e04_namespace_then_mount(target: Target, box: Sandbox) -> None:
    """The classic first step of nearly every kernel exploit: a user namespace, and capabilities in it."""
    attempts = (
        "unshare -Ur true",
        "unshare -Urm mount -t tmpfs x /mnt",
        "unshare -Urn true",
        "unshare -Urpf true",
        "unshare -Urm mount -t overlay -o lowerdir=/usr:/etc x /mnt",
        "mount --bind /usr /mnt",
        "chroot / true",
        "nsenter -t 1 -m true",
        "umount /proc",
        "setpriv --reuid 0 true",
        "hostname evil",
    )
    for attempt in attempts:
        result = box.run(attempt + " && echo DONE")
        assert "DONE" not in result.stdout, attempt
    assert box.run("echo alive").stdout == "alive\n"


def test_e04_nobody_gains_privileges_by_exec(target: Target, box: Sandbox) -> None:
    """setuid programs of the host's /usr do nothing: no_new_privs, nosuid, an empty bounding set."""
    script = "for f in su sudo mount umount newuidmap passwd chsh pkexec; do p=$(command -v $f) && ls -l $p; done; true"
    assert box.run(script).ok
    path = install(box, "posture")
    result = box.run(f"cp {path} ./suid && chmod 6755 suid 2>/dev/null; ./suid self")
    said = parse(result.stdout)
    assert said["no_new_privs"] == "1"
    assert int(said["cap_effective"], 16) == 0
    assert said["uid"] == said["euid"]
