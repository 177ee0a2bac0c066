"""Users of the sandbox: who commands and file operations run as."""

from __future__ import annotations

import errno
import re

import pytest

from agentclient import AGENT, AgentClient
from sloplet.wire.schema import ListFlag, Op, StatFlag, Tag, WriteFlag

pytestmark = pytest.mark.skipif(not AGENT.exists(), reason="the agent is not built here")


def test_default_user_is_made(users: AgentClient) -> None:
    assert users.hello is not None
    assert users.hello[Tag.UID] == 1000
    assert users.hello[Tag.PID] == 1
    passwd = users.output(["cat", "/etc/passwd"], (Tag.USER, "root"))
    assert re.search(r"^broken:line\nagent:x:1000:1000::/mnt/agent:/bin/(ba)?sh\n\Z", passwd, re.M)
    out = users.output("id -u; id -g; echo $HOME $USER $LOGNAME; pwd; touch mine; stat -c %U . $HOME mine")
    assert out.splitlines() == ["1000", "1000", "/mnt/agent agent agent", "/mnt/work", "agent", "agent", "agent"]


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("web", "1234 1235 1235 777 778"),
        ("root", "0 0 0 777"),
        ("1234", "1234 1235 1235 777 778"),
        ("4321", "4321 0 0"),
        ("4321:99", "4321 99 99"),
        ("web:extra", "1234 777 777 778"),
    ],
)
def test_users(users: AgentClient, user: str, expected: str) -> None:
    assert users.output("echo $(id -u) $(id -g) $(id -G)", (Tag.USER, user)).strip() == expected


def test_users_have_no_capabilities_nor_a_way_to_the_agent(users: AgentClient) -> None:
    for user in ("root", "web"):
        status = users.output("cat /proc/self/status", (Tag.USER, user))
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert re.search(rf"{name}:\s+0+\n", status), (user, name)
        for pid in ("1", "$PPID"):
            probe = users.run(
                f"cd /proc/{pid}; readlink fd/0 fd/1 fd/3 cwd exe; cat environ mem maps fd/0; echo end",
                (Tag.USER, user),
            )
            assert probe.out == b"end\n", user
    users.run("kill -9 1 $PPID", (Tag.USER, "web"))
    users.ping()


@pytest.mark.parametrize("user", ["nobody-here", "4294967295", "-1", "web:nogroup", "x" * 300, ""])
def test_missing_users(users: AgentClient, user: str) -> None:
    for stream in (users.run(["true"], (Tag.USER, user)), users.call(Op.STAT, (Tag.PATH, "/"), (Tag.USER, user))):
        assert stream.error == errno.ESRCH
        assert stream.closed[Tag.WHAT] == b"user"


def test_odd_passwd_files(users: AgentClient) -> None:
    for make in (
        "mkfifo /etc/passwd",
        "ln -s /dev/zero /etc/passwd",
        "mkdir /etc/passwd",
        "truncate -s 1G /etc/passwd",
    ):
        assert users.run(f"rm -rf /etc/passwd; {make}", (Tag.USER, "0:0")).closed[Tag.EXIT_CODE] == 0
        assert users.output(["id", "-u"], (Tag.USER, "agent")).strip() == "1000"  # what HELLO said is remembered
        assert users.run(["true"], (Tag.USER, "web")).error == errno.ESRCH


def test_files_are_touched_as_the_user(users: AgentClient) -> None:
    assert users.write("/mnt/work/a", b"1").error is None
    assert users.write("/mnt/b", b"1").error == errno.EACCES
    assert users.write("/mnt/b", b"1", (Tag.USER, "root"), (Tag.MODE, 0o600)).error is None
    assert users.call(Op.READ, (Tag.PATH, "/mnt/b")).error == errno.EACCES
    assert users.call(Op.READ, (Tag.PATH, "/mnt/b"), (Tag.USER, "root")).out == b"1"
    assert users.call(Op.REMOVE, (Tag.PATH, "/mnt/b")).error == errno.EACCES
    assert users.call(Op.CHOWN, (Tag.PATH, "/mnt/work/a"), (Tag.OWNER, "web")).error == errno.EPERM
    chown = users.call(Op.CHOWN, (Tag.PATH, "/mnt/work/a"), (Tag.OWNER, "web"), (Tag.USER, "root"))
    assert chown.error is None
    close = users.call(Op.STAT, (Tag.PATH, "/mnt/work/a")).closed
    assert (close[Tag.UID], close[Tag.GID]) == (1234, 1235)
    assert users.call(Op.CHOWN, (Tag.PATH, "/mnt/work/a"), (Tag.OWNER, "77"), (Tag.USER, "root")).error is None
    close = users.call(Op.STAT, (Tag.PATH, "/mnt/work/a")).closed
    assert (close[Tag.UID], close[Tag.GID]) == (77, 1235)
    # a group reaches what its members may
    users.run("mkdir /mnt/shared; chown 0:777 /mnt/shared; chmod 770 /mnt/shared", (Tag.USER, "root"))


def test_replacing_needs_the_right_to_write(users: AgentClient) -> None:
    assert users.write("/mnt/work/ro", b"old", (Tag.USER, "root")).error is None
    assert users.write("/mnt/work/ro", b"new").error == errno.EACCES
    assert users.call(Op.READ, (Tag.PATH, "/mnt/work/ro")).out == b"old"
    # and a file that may be written in a folder that may not, is
    assert users.write("/mnt/shared", b"old", (Tag.USER, "root"), (Tag.MODE, 0o666)).error is None
    assert users.write("/mnt/shared", b"new").error is None
    assert users.call(Op.READ, (Tag.PATH, "/mnt/shared")).out == b"new"


def test_stdout_can_be_opened_again(users: AgentClient) -> None:
    assert users.output("echo x > /dev/stdout; echo y > /proc/self/fd/1") == "x\ny\n"


def test_names_of_owners_are_those_of_now(users: AgentClient) -> None:
    flags = (Tag.FLAGS, StatFlag.NAMES)
    users.output("touch f")
    assert users.call(Op.CHOWN, (Tag.PATH, "f"), (Tag.OWNER, "1234:777"), (Tag.USER, "root")).error is None

    def names() -> tuple[bytes, bytes]:
        told = users.call(Op.STAT, (Tag.PATH, "f"), flags).closed
        listed = users.call(Op.LIST, (Tag.PATH, "."), (Tag.FLAGS, ListFlag.NAMES)).records()
        (same,) = [record for record in listed if record[Tag.NAME] == b"f"]
        assert (told[Tag.OWNER], told[Tag.GROUP]) == (same[Tag.OWNER], same[Tag.GROUP])
        return told[Tag.OWNER], told[Tag.GROUP]

    assert names() == (b"web", b"extra")
    users.output("sed -i s/^web:/www:/ /etc/passwd; sed -i s/^extra:/more:/ /etc/group", (Tag.USER, "root"))
    assert names() == (b"www", b"more")
    assert users.call(Op.CHOWN, (Tag.PATH, "f"), (Tag.OWNER, "4321:8765"), (Tag.USER, "root")).error is None
    assert names() == (b"4321", b"8765")
    users.output("rm /etc/passwd /etc/group", (Tag.USER, "root"))
    assert users.call(Op.STAT, (Tag.PATH, "f"), flags, (Tag.USER, "0")).closed[Tag.GROUP] == b"8765"
    assert users.call(Op.STAT, (Tag.PATH, "/etc"), flags, (Tag.USER, "0")).closed[Tag.OWNER] == b"0"


def test_written_in_place_it_is_the_users(users: AgentClient) -> None:
    users.output("chmod 777 .")
    flags = (Tag.FLAGS, WriteFlag.IN_PLACE | WriteFlag.PARENTS)
    assert users.write("a/b/c", b"1", flags, (Tag.USER, "web")).error is None
    assert users.output("stat -c %U:%G:%a a a/b a/b/c").split() == ["web:web:755", "web:web:755", "web:web:644"]
    assert users.write("a/b/c", b"2", flags).error == errno.EACCES
    assert users.write("a/b/c", b"3", flags, (Tag.USER, "root")).error is None
    assert users.output("stat -c %U:%G a/b/c; cat a/b/c").split() == ["root:root", "3"]
    assert users.call(Op.CHMOD, (Tag.PATH, "a/b/c"), (Tag.MODE, 0o666), (Tag.USER, "root")).error is None
    assert users.write("a/b/c", b"4", flags).error is None, "another's that may be written stays his"
    assert users.output("stat -c %U:%G:%a a/b/c; cat a/b/c").split() == ["root:root:666", "4"]
    assert users.write("a/b/c", b"5", flags, (Tag.MODE, 0o600)).error == errno.EPERM
