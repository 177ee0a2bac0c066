"""A fork in the middle of a transaction: the child's own store must not wait for a lock that nobody holds."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.anyone

_PROGRAM = """
    import os, sys, threading, time
    from sloplet.spec import SandboxSpec
    from sloplet.state.home import Home, new_id
    from sloplet.state.store import Store

    home = Home(sys.argv[1]).open()
    store, stop = Store(home), threading.Event()

    def write():
        while not stop.is_set():
            sandbox = new_id()
            store.reserve(sandbox, SandboxSpec(), engine="fake", rung="process", holder="embedded", owner="abcdefgh")
            store.remove(sandbox)
            time.sleep(0.0005)  # a thread that never lets go of the lock would starve the fork, which is no fault of it

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(40):
        pid = os.fork()
        if pid == 0:
            own = Store(Home(sys.argv[1]))
            sandbox = new_id()
            own.reserve(sandbox, SandboxSpec(), engine="fake", rung="process", holder="embedded", owner="abcdefgh")
            own.remove(sandbox)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    thread.join()
    print(len(store.list()))
"""


def test_a_fork_waits_for_the_transaction_under_way(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(tmp_path / "home")],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONWARNINGS": "default"},
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
