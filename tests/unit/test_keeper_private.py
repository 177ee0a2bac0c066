"""Who may talk to a keeper, and what a keeper knows of who started it."""

from __future__ import annotations

import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_helpers import CREATE, Keeping, keeping


@pytest.fixture
def world() -> Iterator[Keeping]:
    with keeping() as world:
        yield world


def test_the_socket_is_private_and_the_keeper_inherits_next_to_nothing(world: Keeping) -> None:
    world.env |= {"AWS_SECRET_ACCESS_KEY": "canary", "LC_TIME": "C"}
    world.run(CREATE)
    path = world.home / "run" / "keeper.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(world.home.stat().st_mode) == 0o700
    keeper = world.keeper()
    assert keeper is not None
    assert b"canary" not in Path(f"/proc/{keeper}/environ").read_bytes()
    assert os.readlink(f"/proc/{keeper}/cwd") == "/"
    assert os.readlink(f"/proc/{keeper}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{keeper}/fd/2") == str(world.home / "run" / "keeper.log")
    assert os.getsid(keeper) != os.getsid(0)
    fields = Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) not in (0, os.getpid())  # no zombie will wait for us


def test_a_keeper_that_crashes_leaves_no_core(world: Keeping) -> None:
    """The values of secrets would be in it, whatever the shell of who started it says."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("nobody here could write a core")
    allow = "import resource as r; r.setrlimit(r.RLIMIT_CORE, (r.getrlimit(r.RLIMIT_CORE)[1],) * 2); "
    world.run(allow + CREATE)
    limits = Path(f"/proc/{world.keeper()}/limits").read_text().splitlines()
    (core,) = [line.split() for line in limits if line.startswith("Max core file size")]
    assert core[4] == "0"
    assert core[5] != "0", "what it starts may ask for more"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_other_users_are_refused(world: Keeping) -> None:
    world.run(CREATE)
    path = world.home / "run" / "keeper.sock"
    for opened in (path, *list(path.parents)[:3]):  # as if the modes had failed us
        os.chmod(opened, 0o777)
    try:
        for uid, expected in ((12345, b""), (0, b"1")):
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                try:
                    os.setresuid(uid, uid, uid)
                    with socket.socket(socket.AF_UNIX) as connection:
                        connection.connect(str(path))
                        os.write(writer, connection.recv(1) and b"1")  # the keeper greets first
                finally:
                    os._exit(0)
            os.close(writer)
            os.waitpid(child, 0)
            assert os.read(reader, 10) == expected
            os.close(reader)
        assert "refused user 12345" in world.log()
    finally:
        os.chmod(world.home, 0o700)
