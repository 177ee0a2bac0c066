"""Nothing of the caller's is in view: files, variables, arguments, descriptors, names."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hostile_kit import Target

from sloplet import Sandbox
from sloplet.errors import FileError

#: Folders in which people keep secrets. Those that this user may write get a canary.
HOMES = (
    "~",
    "/root",
    "/home",
    "/var/lib",
    "/var/log",
    "/var/tmp",
    "/run",
    "/srv",
    "/opt",
    "/mnt",
    "/tmp",
    "/dev/shm",
    "/etc",
)


@pytest.fixture
def canaries() -> Iterator[tuple[str, list[Path]]]:
    word = f"canary-{uuid.uuid4().hex}"
    planted: list[Path] = []
    for folder in dict.fromkeys([*(os.path.expanduser(home) for home in HOMES), os.environ["SLOPLET_HOME"]]):
        for name in (f"sloplet-{word}", f".ssh-{word}"):
            with suppress(OSError):
                path = Path(folder, name)
                path.write_text(word + "\n")
                path.chmod(0o644)
                planted.append(path)
    yield word, planted
    for path in planted:
        path.unlink()


@pytest.mark.parametrize("user", ["agent", "root"])
def test_v_files(target: Target, box: Sandbox, canaries: tuple[str, list[Path]], user: str) -> None:
    if user == "root":
        target.need("users")
    word, planted = canaries
    assert len(planted) >= 4
    reader = box.spawn(["sh", "-c", 'for f in "$@"; do cat "$f"; done', "sh", *map(str, planted)], user=user)
    assert word not in reader.wait().stdout
    for path in planted:
        with pytest.raises(FileError):
            box.files.read(str(path))
        for way in (f"/proc/self/root{path}", f"/proc/1/root{path}", f"../../../../../..{path}"):
            assert word not in box.run(["cat", way], user=user).stdout
    if target.can.private_filesystem:
        found = box.run(
            f"find / -xdev -name '*{word}*' 2>/dev/null; ls -A /root /home /var/lib /var/log /srv /run", user=user
        )
        assert word not in found.stdout
    # positive control
    shown = subprocess.run(["cat", *map(str, planted)], capture_output=True, text=True, check=True).stdout
    assert shown.count(word) == len(planted)


def test_v_environment(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-in-the-environment")
    monkeypatch.setenv("LD_PRELOAD_CANARY", "canary-in-the-environment")
    with target.box(env={"MINE": "given"}) as box:
        names = {line.partition("=")[0] for line in box.run("env -0 | tr '\\0' '\\n'").stdout.splitlines()}
        assert names <= {
            "MINE",
            "SLOPLET_GENERATION_FILE",
            "PATH",
            "HOME",
            "USER",
            "LOGNAME",
            "LANG",
            "SHELL",
            "PWD",
            "TMPDIR",
            "SHLVL",
            "_",
            "OLDPWD",
        }
        assert "MINE" in names
        everything = box.run("cat /proc/*/environ /proc/*/cmdline /proc/self/status 2>/dev/null; env")
        assert "canary-in-the-environment" not in everything.stdout


def test_v_arguments_of_the_host(target: Target, box: Sandbox) -> None:
    """What the host's processes were called with, as `ps` would show it."""
    with subprocess.Popen(["sleep", "300.0001234"], env={"A": "canary-in-environ"}) as victim:
        try:
            shown = box.run("ps auxww 2>/dev/null; cat /proc/*/cmdline 2>/dev/null | tr '\\0' ' '")
            assert "300.0001234" not in shown.stdout
            assert b"300.0001234" in Path(f"/proc/{victim.pid}/cmdline").read_bytes()
        finally:
            victim.kill()


def test_v_who_made_it(target: Target, box: Sandbox) -> None:
    """Names of the host's users, of the host itself and of the state folder do not come in."""
    home = os.environ["SLOPLET_HOME"]
    if target.can.private_filesystem:
        seen = box.run(
            "cat /proc/self/mountinfo /proc/self/mounts /proc/self/cgroup /proc/self/maps /etc/passwd /etc/hosts"
        ).stdout
        assert home not in seen
        assert os.uname().nodename not in box.run("hostname; cat /etc/hostname /etc/hosts").stdout.split()
        assert box.run("cat /proc/self/cgroup").stdout.count("sloplet-") == 0, "the cgroup's own name stays outside"
        users = {line.split(":")[0] for line in box.run("cat /etc/passwd").stdout.splitlines()}
        assert users == {"root", "nobody", "agent"}


def test_v_shadow_and_keys(target: Target, box: Sandbox) -> None:
    paths = (
        "/etc/shadow",
        "/etc/sudoers",
        "/etc/ssh/ssh_host_rsa_key",
        "/etc/ssh",
        "/root/.ssh/id_rsa",
        "/root/.bash_history",
    )
    for path in (
        *paths,
        "/etc/machine-id",
        "/etc/fstab",
        "/var/lib/dpkg/status",
        "/proc/1/environ",
        "/sys/class/dmi/id",
    ):
        assert box.run(["cat", path]).exit_code != 0, path
        assert box.run(["ls", path]).stdout.strip() in ("", path), path
