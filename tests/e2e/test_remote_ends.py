"""Remote sandboxes when something ends: the server, the program, a child of it. What goes, what stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from remote_kit import goodbye, listed, until
from server_kit import Served, served, start
from sloplet import Sandbox
from sloplet.errors import ServerUnreachable

pytestmark = pytest.mark.anyone

ENGINE = "container"
GRACE = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("remote") / "home", "--grace", str(GRACE)) as running:
        yield running
        goodbye(running.url, running.key)


# -- servers that end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_in_the_middle(tmp_path: Path, number: int) -> None:
    """Its sandboxes go on; a command that was followed is ended, once; the next server knows everything."""
    home = tmp_path / "home"
    with served(home, "--grace", "20") as server:
        port = int(server.url.rpartition(":")[2])
        named = Sandbox("survivor", engine=ENGINE, server=server.url, key=server.key)
        own = Sandbox(engine=ENGINE, server=server.url, key=server.key)
        named.start()
        own.start()
        running = named.spawn("echo ran >> ran; echo up; sleep 1000")
        stays = named.spawn("echo stays; sleep 1000", detached=True)
        for process in (running, stays):
            for _ in process:
                break
        server.stop(number)
        again = start(home, ["--grace", "20"], key=server.key, port=port)
        try:
            with pytest.raises(ServerUnreachable, match="nothing is run twice"):
                running.wait()
            assert named.files.read_text("ran") == "ran\n"
            states = {info.pid: info.running for info in named.processes()}
            assert states[stays.pid]
            until(lambda: not {info.pid: info.running for info in named.processes()}[running.pid])
            # What was leased is still ours: the new server has it on record, and we came back.
            assert own.run("echo here").stdout == "here\n"
            with again.client() as client:
                assert len(client.get("/v1/sandboxes").json()["items"]) == 2
            own.close()
            named.kill()
        finally:
            goodbye(again.url, again.key)
            again.stop()
            assert again.process.stdout is not None
            again.process.stdout.close()


# -- programs that end ---------------------------------------------------------------------------------------------

_PROGRAM = """
import sys, time
from sloplet import Sandbox
own = Sandbox(engine="fake", server=sys.argv[1], key=sys.argv[2])
named = Sandbox("of-a-program", engine="fake", server=sys.argv[1], key=sys.argv[2])
own.start(); named.start()
print(own.id, named.id, flush=True)
if sys.argv[3] == "wait":
    time.sleep(1000)
"""


@contextmanager
def program(server: Served, how: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    command = [sys.executable, "-c", _PROGRAM, server.url, server.key, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        own, named = process.stdout.readline().split()
        try:
            yield process, own, named
        finally:
            process.kill()
            Sandbox.connect(named, server=server.url, key=server.key).kill()


def test_a_program_that_is_killed(server: Served) -> None:
    """What it made for itself goes after a while; what has a name stays."""
    with program(server, "wait") as (process, own, named):
        deadline = time.monotonic() + GRACE + 1
        while time.monotonic() < deadline:  # it lives as long as its program does
            assert own in listed(server)
        process.kill()
        process.wait()
        until(lambda: own not in listed(server))
        assert named in listed(server)


def test_a_program_that_ends(server: Served) -> None:
    """It says so: what it made for itself goes at once."""
    began = time.monotonic()
    with program(server, "end") as (process, own, named):
        assert process.wait(20) == 0
        until(lambda: own not in listed(server), GRACE)
        assert named in listed(server)
    assert time.monotonic() - began < 20


def test_a_lease_outlives_the_server(tmp_path: Path) -> None:
    """One that was killed together with its program: the next ends what is left."""
    home = tmp_path / "home"
    with served(home, "--grace", "2") as server:
        with program_alone(server) as own:
            pass  # it is killed
        server.stop(signal.SIGKILL)
        again = start(home, ["--grace", "2"], key=server.key)
        try:
            assert own in {info.id for info in Sandbox.list(server=again.url, key=again.key)}
            until(lambda: own not in {info.id for info in Sandbox.list(server=again.url, key=again.key)})
        finally:
            goodbye(again.url, again.key)
            again.stop()
            assert again.process.stdout is not None
            again.process.stdout.close()


@contextmanager
def program_alone(server: Served) -> Iterator[str]:
    code = (
        "import sys, time; from sloplet import Sandbox\n"
        "box = Sandbox(engine='container', server=sys.argv[1], key=sys.argv[2]); box.start()\n"
        "print(box.id, flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, server.url, server.key], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


_FORKING = """
import os, sys
from sloplet import Sandbox
box = Sandbox("forker", engine="container", server=sys.argv[1], key=sys.argv[2])
assert box.run("echo parent >> who").ok
pid = os.fork()
if pid == 0:
    same = Sandbox.connect("forker", server=sys.argv[1], key=sys.argv[2])
    os._exit(0 if same.run("echo child >> who").ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
for _ in range(20):
    assert box.run("true").ok
assert box.files.read_text("who") == "parent\\nchild\\n"
pids = [os.fork() for _ in range(3)]
if 0 in pids:
    os._exit(0)
for pid in pids:
    os.waitpid(pid, 0)
assert box.run("echo still").stdout == "still\\n"
box.kill()
print("fine")
"""


def test_a_forked_child(server: Served) -> None:
    """It has a connection of its own, and the parent's is not disturbed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _FORKING, server.url, server.key],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)


def test_what_asyncio_leaves(server: Served) -> None:
    """A loop of one's own, run and left, twice: nothing complains, and nothing stays."""
    code = """
import asyncio, sys
from sloplet import AsyncSandbox
async def main():
    async with AsyncSandbox(engine="fake", server=sys.argv[1], key=sys.argv[2]) as box:
        assert (await box.run("echo x")).stdout == "x\\n"
    left = AsyncSandbox(engine="fake", server=sys.argv[1], key=sys.argv[2])
    await left.start()
    return left.id
print(asyncio.run(main()), asyncio.run(main()))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, server.url, server.key],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stderr, done.returncode) == ("", 0)
    until(lambda: not set(done.stdout.split()) & set(listed(server)), GRACE)


def test_two_programs_of_one_sandbox(server: Served) -> None:
    """Who lets go of a name does not pause it under the other's hands."""
    if not os.environ.get("SLOPLET_TEST_RUNSC"):
        pytest.skip("capability: only gvisor can pause; SLOPLET_TEST_RUNSC names one")
    box = Sandbox("shared", engine="gvisor", server=server.url, key=server.key)
    box.start()
    code = (
        "import sys; from sloplet import Sandbox\n"
        "with Sandbox('shared', engine='gvisor', server=sys.argv[1], key=sys.argv[2]) as box: box.run('true')\n"
    )
    other = [sys.executable, "-c", code, server.url, server.key]
    try:
        subprocess.run(other, check=True, timeout=60)
        assert box.info().state == "running"
        box.close()
        assert listed(server)[box.id].state == "paused"
        subprocess.run(other, check=True, timeout=60)
        assert listed(server)[box.id].state == "paused"
    finally:
        Sandbox.connect("shared", server=server.url, key=server.key).kill()
