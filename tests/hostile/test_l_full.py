"""L: a disk that runs full while a sandbox is saved. (Every step that may fail then: tests/unit/test_timeline.py.)"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from live_kit import CHAIN, Traces, box, folder_of_its_own

pytestmark = pytest.mark.usefixtures("gvisor")

#: In a mount namespace of its own: SLOPLET_HOME on a file system of a few megabytes, which something fills.
FULL = """
import os, subprocess, sys
home = sys.argv[1]
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m,mode=700", "tmpfs", home], check=True)
os.environ["SLOPLET_HOME"] = home + "/home"
from sloplet import Sandbox
from sloplet.errors import SlopletError
made = Sandbox(engine="gvisor", disk="64m")
made.start()
made.snapshot("first")
program = made.spawn(["python3", "-uc", sys.argv[2]], stdin=True, detached=True)
program.send("a\\n")
pieces = iter(program)
first = next(pieces)[1]
stat = os.statvfs(home)
free = stat.f_bavail * stat.f_frsize
with open(home + "/filler", "wb") as filler:
    for left in (6 << 20, 1 << 20, 64 << 10, 0):
        while os.statvfs(home).f_bavail * stat.f_frsize > left:
            try:
                filler.write(bytes(4096))
                filler.flush()
            except OSError:
                break
        for what in ("snapshot", "pause", "fork", "template"):
            try:
                done = {"snapshot": made.snapshot, "pause": made.pause, "fork": lambda: made.fork(2),
                        "template": lambda: made.template("t")}[what]()
                print(what, left, "DONE", flush=True)
                if what == "pause": made.resume()
            except SlopletError as error:
                print(what, left, type(error).__name__, str(error)[:150], flush=True)
        assert made.run("echo on").stdout == "on\\n"
os.unlink(home + "/filler")
left = sorted(os.listdir(home + "/home/snapshots"))
made.pause()
made.resume()
program = made.attach(program.pid, replay=False)
program.send("b\\n")
print("chain", first.split()[0], next(iter(program))[1].split()[0])
made.rollback("first")
print("left", len(left) - len(made.snapshots()), made.run("echo on").stdout.strip())
made.kill()
"""


def test_a_disk_that_is_full() -> None:
    """In mid-snapshot, mid-pause, mid-fork, with less and less room: a typed error, the sandbox runs on, nothing half
    written stays, and with room again it works."""
    if os.geteuid() != 0:
        pytest.skip("root's: mounts a small file system")
    with box():  # what is made once in a process is there
        pass
    before = Traces()
    with folder_of_its_own() as folder:
        program = subprocess.run(
            ["unshare", "--mount", sys.executable, "-c", FULL, str(folder), CHAIN],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    lines = program.stdout.splitlines()
    print(program.stdout, program.stderr)
    assert program.returncode == 0, program.stderr
    refused = [line.split() for line in lines[:-2]]
    assert {words[0] for words in refused if words[1] == "0"} == {"snapshot", "pause", "fork", "template"}
    assert all(words[2] == "SaveFailed" for words in refused if words[1] == "0"), lines
    assert {words[2] for words in refused} <= {"SaveFailed", "DONE", "StateUnwritable", "StartFailed"}
    assert lines[-2] == "chain 1 2"
    assert lines[-1] == "left 0 on"
    assert before.left() == []
