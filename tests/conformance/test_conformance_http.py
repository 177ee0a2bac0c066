"""The conformance suite over a server: the same sandboxes, and between them and this program HTTP and a tunnel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("sloplet.testing.conformance")

from server_kit import Served, served  # noqa: E402
from sloplet import Sandbox  # noqa: E402
from sloplet.controller import Controller  # noqa: E402
from sloplet.errors import NotAllowed  # noqa: E402
from sloplet.portal import portal  # noqa: E402
from sloplet.remote.controller import RemoteController  # noqa: E402
from sloplet.remote.place import parse  # noqa: E402
from sloplet.testing.conformance import *  # noqa: E402, F403
from sloplet.testing.conformance import TestWire as _TestWire  # noqa: E402
from sloplet.testing.conformance.support import inner  # noqa: E402
from sloplet.wire.mux import request as asked  # noqa: E402
from sloplet.wire.schema import Op  # noqa: E402

#: What the way to the server has a part in, on every engine. The rest is seen on the quick one.
_ON_ALL = {"TestLifeCycle", "TestDeath", "TestPorts", "TestTerminal", "TestFlowControl"}
#: What only an engine that saves memory can show.
_LIVE = {"TestFilesOnly", "TestLiveState", "TestSnapshots", "TestTimeToLive"}
_REFUSED_HERE = {"TestBadCommands", "TestBadInput"}


def engines_for(tests: str) -> tuple[str, ...]:
    if tests in _REFUSED_HERE:
        return ("fake",)
    return ("fake", "container", "gvisor") if tests in _ON_ALL | _LIVE else ("fake", "container")


def same_for_everyone(tests: str) -> bool:
    """The server and the tunnel are the same for all; what root's engines do differently the other files have tried."""
    return tests not in _LIVE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One of the tests' own home, so that its volumes are the tests'."""
    options = ["--allow-fake", "--allow-private", "host.sloplet"]
    options += ["--allow-path", f"{tmp_path_factory.getbasetemp().resolve()}:rw"]
    with served(Path(os.environ["SLOPLET_HOME"]), *options) as running:
        running.key = running.new_key(f"conformance-{os.urandom(4).hex()}", "--admin")
        yield running


@pytest.fixture
def controller(server: Served) -> Controller:
    return RemoteController(parse(server.url, server.key))


@pytest.fixture(scope="module", autouse=True)
def goodbye(server: Served) -> Iterator[None]:
    """While the server is there."""
    yield
    portal().call(RemoteController(parse(server.url, server.key)).aclose())


class TestWire(_TestWire):
    @pytest.mark.parametrize("op", [Op.SHUTDOWN, Op.FREEZE, Op.THAW, Op.CHANGES, Op.UNPACK, Op.CONNECT, Op.CONTROL])
    def test_shutdown(self, box: Sandbox, op: Op) -> None:
        """What is the holder's own is nobody else's."""

        async def ask() -> None:
            await (await inner(box)._open(asked(op))).result()

        with pytest.raises(NotAllowed):
            portal().call(ask())
        assert box.run("echo alive").stdout == "alive\n"
