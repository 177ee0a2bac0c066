"""What leaves the machine of an error: no path of the host's, and every path of the sandbox's."""

from __future__ import annotations

import pytest

from sloplet.errors import CommandNotFound, FileMissing, KernelError, SlopletError, StateUnwritable, from_dict
from sloplet.server.problems import problem, told
from sloplet.state.home import default_path

pytestmark = pytest.mark.anyone


def test_paths_of_the_host_are_not_told() -> None:
    error = StateUnwritable(f"cannot write {default_path()}/state.db: no room", hint=f"rm -r {default_path()}/cache")
    document = problem(error)
    assert str(default_path()) not in str(document)
    assert document["detail"] == "cannot write <host>: no room"


@pytest.mark.parametrize(
    "error",
    [
        FileMissing("/tmp/x/y: there is no such file", errno=2),
        CommandNotFound("cannot run /root/bin/app"),
        KernelError("/var/lib/thing ended"),
    ],
)
def test_paths_of_the_sandbox_are(error: SlopletError) -> None:
    assert told(error)["message"] == error.message
    assert from_dict(told(error)).message == error.message
    assert problem(error)["detail"] == error.message
