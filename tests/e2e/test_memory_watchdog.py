"""Memory without cgroups, as an ordinary user: a bomb spread over many processes is ended, and said to be one."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import sloplet
from sloplet.engines.agentbin import agent_path

#: 60 processes of 40 MiB each: every one far below the 512 MiB that each may have
BOMB = """
import os, time
kids = []
for i in range(60):
    pid = os.fork()
    if pid == 0:
        b = bytearray(40 << 20)
        b[::4096] = bytes([1]) * (40 * 256)
        time.sleep(1)
        os._exit(0)
    kids.append(pid)
killed = sum(os.waitpid(pid, 0)[1] == 9 for pid in kids)
print(killed)
raise SystemExit(killed > 0)
"""

#: 20 processes of 150 MiB each, which they share
WORKERS = """
import os, time
b = bytearray(150 << 20)
b[::4096] = bytes([1]) * (150 * 256)
kids = []
for i in range(20):
    pid = os.fork()
    if pid == 0:
        time.sleep(0.3)
        os._exit(0)
    kids.append(pid)
raise SystemExit(any(os.waitpid(pid, 0)[1] for pid in kids))
"""

SCRIPT = """
import json, sys
from sloplet import Sandbox
from sloplet.errors import ControlUnavailable

engine, bomb, workers = sys.argv[1:]
with Sandbox(engine=engine) as neighbour, Sandbox(engine=engine) as box:
    neighbour.files.write("mine", "untouched")
    memory = next(item for item in box.guarantees() if item.control == "memory")
    shared = neighbour.run(["python3", "-c", workers], timeout=60)
    result = box.run(["python3", "-c", bomb], timeout=60)
    said = {
        "enforced": memory.enforced, "how": memory.how, "oom": result.oom, "describe": result.describe(),
        "killed": int(result.stdout or -1), "stderr": result.stderr, "kills": box.metrics().oom_kills,
        "after": box.run("echo alive").to_dict(), "neighbour": neighbour.run("cat mine").stdout,
        "neighbour_kills": neighbour.metrics().oom_kills, "shared": [shared.exit_code, shared.oom],
    }
try:
    with Sandbox(engine=engine, memory="64m") as box:
        box.start()
    said["named"] = "taken"
except ControlUnavailable:
    said["named"] = "refused"
print(json.dumps(said))
"""


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="sloplet-user-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_user(place: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script as an ordinary user: ourselves, or for root another one, with a copy that he may read."""
    home, package, python = place / "home", Path(sloplet.__file__).parent, sys.executable
    home.mkdir()
    options: dict[str, object] = {}
    if os.geteuid() == 0:
        found = next((entry for entry in pwd.getpwall() if entry.pw_name == name), None)
        python = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), "")
        if found is None or not python:
            pytest.skip(f"no user {name}, or no python3 that he can run")
        agent_path()  # built anew if it must be
        copy = place / "lib" / "sloplet"
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (copy.parent, *copy.parent.rglob("*")):
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        os.chown(home, found.pw_uid, found.pw_gid)
        package, options = copy, {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
        runs = "import sys; raise SystemExit(sys.version_info < (3, 11))"
        if subprocess.run([python, "-c", runs], check=False).returncode:
            pytest.skip("the system's Python is too old")
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "SLOPLET_HOME": str(home / "state"),
        "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    return subprocess.run(
        [python, "-c", SCRIPT, *arguments], env=env, cwd="/", capture_output=True, text=True, timeout=120, check=False,
        **options,  # type: ignore[call-overload]
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["container", "process"])
@pytest.mark.parametrize(  # with a range of subordinate ids (as himself, in his half of scripts/test), and without
    "name", [pytest.param("sloplet-test", marks=pytest.mark.anyone), "nobody"]
)
def test_a_spread_bomb_is_ended_and_the_neighbour_lives(place: Path, name: str, engine: str) -> None:
    if os.geteuid() != 0 and name == "nobody":
        pytest.skip("only root can become someone else")
    done = as_user(place, name, engine, BOMB, WORKERS)
    if "EngineUnavailable" in done.stderr:
        pytest.skip(f"no {engine} for an ordinary user here")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    if said["enforced"]:
        pytest.skip("this user has a memory cgroup")
    assert "watchdog" in said["how"]
    assert said["oom"], said
    assert "memory" in said["describe"]
    assert 45 <= said["killed"] <= 60  # 2400 MiB asked for, 512 there
    assert said["kills"] == said["killed"]
    assert (said["after"]["stdout"], said["after"]["oom"]) == ("alive\n", False)
    assert (said["neighbour"], said["neighbour_kills"]) == ("untouched", 0)
    assert said["shared"] == [0, False]
    assert said["named"] == "refused"
