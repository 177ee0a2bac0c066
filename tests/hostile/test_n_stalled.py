"""N-14 and saving: connections full of what nobody reads. gVisor takes many times their size to write it down, and that
must not be what a sandbox dies of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hostile_kit import eventually
from live_kit import Talk, all_ended, box, talk, talk_on
from net_kit import GOOD

from netkit import Internet
from sloplet import Network, Sandbox
from sloplet.engines import headroom
from sloplet.errors import SandboxDead, SaveFailed

pytestmark = [pytest.mark.anyone, pytest.mark.usefixtures("gvisor")]

COUNT = 60

#: Downloads that nobody reads. Later: what has become of them, "kept" and "reset" by number.
STALLED = """
import collections, socket, sys
lines = [socket.create_connection(("%s", 19)) for _ in range(%d)]
print("up", flush=True)
def fate(line):
    line.settimeout(20)
    got = 0
    try:
        line.sendall(b"x")
        while got < 3 << 20:
            data = line.recv(65536)
            if not data:
                return "ended"
            got += len(data)
    except ConnectionError:
        return "reset"
    except TimeoutError:
        return "silent"
    return "kept"
for _ in sys.stdin:
    print(sorted(collections.Counter(map(fate, lines)).items()), flush=True)
"""


@pytest.fixture
def made(net: Internet) -> Iterator[Sandbox]:
    """With the memory that is usual, so that it starts where no limit can be enforced too."""
    with box(network=Network(allow=[f"{GOOD}:19"]), user="root") as each:
        yield each


def stalled(made: Sandbox, count: int) -> Talk:
    """Downloads that are stuck: nothing has moved for two looks."""
    program = talk(made, STALLED % (GOOD, count))
    assert program.line() == "up"
    seen = [-1]

    def stands() -> bool:
        seen.append(sum(row.bytes_in for row in made.network.log(limit=count)))
        return seen[-1] == seen[-2] > count * 4096

    eventually(stands, 60)
    return program


def test_saved_with_downloads_that_nobody_reads(made: Sandbox, net: Internet) -> None:
    program = stalled(made, COUNT)
    saved = made.snapshot("full")
    peak = made.metrics().memory_peak  # None where there is no group
    assert peak is None or peak < 640 * 2**20
    children = made.fork(1, snapshot=saved)
    with all_ended(list(children)):
        assert talk_on(children[0], program.pid).ask("go") == f"[('reset', {COUNT})]"
    assert program.ask("go") == f"[('kept', {COUNT})]"
    made.pause()
    made.resume()
    assert talk_on(made, program.pid).ask("go") == f"[('reset', {COUNT})]"


def enlarge(made: Sandbox) -> None:
    for name in ("tcp_rmem", "tcp_wmem"):
        made.run(f"echo 4096 1048576 4194304 > /proc/sys/net/ipv4/{name}", check=True)


def test_root_inside_has_made_them_large(made: Sandbox, net: Internet) -> None:
    """The limit of its group is lifted for as long as it takes. What it holds then is above it, and it goes on."""
    enlarge(made)
    program = stalled(made, COUNT // 2)
    made.snapshot("full")
    assert program.ask("go") == f"[('kept', {COUNT // 2})]"
    assert made.run("python3 -c 'print(len(bytearray(200 << 20)))'").stdout.strip() == str(200 << 20)


def test_more_than_can_be_had(made: Sandbox, net: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is lost, and that is what is said."""
    if made.metrics().memory_peak is None:
        pytest.skip("capability: no memory cgroup here")
    monkeypatch.setattr(headroom, "_room", lambda: 0)
    enlarge(made)
    stalled(made, COUNT // 2)
    with pytest.raises((SaveFailed, SandboxDead), match="out of memory"):
        made.snapshot("full")
