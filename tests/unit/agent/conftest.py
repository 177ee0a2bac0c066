"""The agent alone, at the end of two pipes, in several places."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_helpers import INIT, Marker, can, connect

from agentclient import AGENT, AgentClient
from sloplet.wire.schema import Tag

USERS_SETUP = """
mount -t tmpfs -o mode=755 t /etc && mount -t tmpfs -o mode=755 t /mnt &&
printf 'root:x:0:0:r:/root:/bin/sh\\nweb:x:1234:1235:w:/mnt/web:/bin/sh\\nbroken:line' > /etc/passwd &&
printf 'root:x:0:\\nweb:x:1235:\\nextra:x:777:root,web\\nalso:x:778:web' > /etc/group && exec "$0" agent
"""


@pytest.fixture
def mark() -> Iterator[Marker]:
    marker = Marker()
    yield marker
    for pid in marker.pids():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(params=["bare", "init"])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AgentClient]:
    """The agent as an ordinary process, and as PID 1 of a namespace with one uid."""
    if request.param == "init" and not can(INIT):
        pytest.skip("no user namespaces here")
    client = connect(INIT if request.param == "init" else [], tmp_path)
    yield client
    client.close()
    assert client.process.returncode == 0


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[AgentClient]:
    client = connect([], tmp_path)
    yield client
    client.close()


@pytest.fixture
def users() -> Iterator[AgentClient]:
    """PID 1 with real uids, an /etc of its own and a default user that is missing there."""
    if os.getuid() != 0 or not can(["unshare", "-mpf", "--mount-proc"]):
        pytest.skip("several uids need root")
    client = AgentClient(
        ["unshare", "-mpf", "--mount-proc", "/bin/sh", "-c", USERS_SETUP, str(AGENT)],
        [(Tag.USER, "agent"), (Tag.WORKDIR, "/mnt/work"), (Tag.HOME, "/mnt/agent"), (Tag.ENTROPY, os.urandom(64))],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    yield client
    client.close()
