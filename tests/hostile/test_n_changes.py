"""N-12: another policy on a running sandbox holds at once, also for what is open. N-13: what fails, fails closed."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile_kit import eventually, runtime
from live_kit import call, talk
from net_kit import ATTEMPTS, EVIL, EVIL_AT, GOOD, GOOD_AT, HELLO, Rung, attempt, decisions, http, set_network, tcp

import sloplet.network.egress
import sloplet.network.policy
from netkit import Internet
from sloplet import Network, Sandbox
from sloplet.engines import registry
from sloplet.errors import SandboxMismatch, SlopletError, SpecError

pytestmark = pytest.mark.anyone  # the host's part, over whichever rung

#: Holds a connection to the echo server, and says what becomes of it.
HOLDS = """
import socket, sys
line = socket.create_connection((sys.argv[1] if len(sys.argv) > 1 else "%s", 7))
line.sendall(b"one")
print(line.recv(10).decode(), flush=True)
try:
    print(repr(line.recv(10)), flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""

#: Tries one address for ever, and prints what it got, once it got something.
HAMMERS = """
import socket, sys
while True:
    try:
        line = socket.create_connection(("%s", 80), 5)
        line.sendall(b"GET / HTTP/1.1\\r\\nHost: %s\\r\\nConnection: close\\r\\n\\r\\n")
        data = line.recv(1000)
    except OSError:
        continue
    if data:
        print(data, flush=True)
        break
"""


# -- N-12 ----------------------------------------------------------------------------------------------------


def test_n12_open_connections_are_cut(shared: Sandbox, net: Internet) -> None:
    set_network(shared, Network(allow=[f"{GOOD}:7", f"{EVIL}:7", f"{EVIL_AT}:7"]))
    by_name, other, by_address = (talk(shared, HOLDS % each) for each in (EVIL, GOOD, EVIL_AT))
    assert [each.line() for each in (by_name, other, by_address)] == ["one"] * 3
    set_network(shared, Network(allow=[f"{GOOD}:7"]))
    assert [by_name.line(), by_address.line()] == ["ConnectionResetError"] * 2
    assert len(decisions(shared, verdict="cut")) == 2
    assert [line.state for line in decisions(shared, name=GOOD, verdict="allow")] == ["open"]
    assert [line.address for line in decisions(shared, state="open")] == [GOOD_AT]
    set_network(shared, Network())
    assert other.line() == "ConnectionResetError"


def test_n12_no_window(shared: Sandbox, net: Internet) -> None:
    """Between two policies there is no moment at which what neither allows is allowed."""
    hammers = talk(shared, HAMMERS % (EVIL, EVIL))
    try:
        for _ in range(40):
            set_network(shared, Network(allow=[GOOD]))
            set_network(shared, Network(allow=["*"], deny=[EVIL]))
            set_network(shared, Network(allow=[f"{EVIL}:443"]))
            set_network(shared, Network())
        assert net.packets(address=EVIL_AT) == []
        assert not net.seen("http")
        set_network(shared, Network(allow=[EVIL]))  # the positive control: it has been trying all the time
        assert f"hello from {EVIL}" in hammers.line()
    finally:
        hammers.process.kill()


def test_n12_what_is_being_dialled(shared: Sandbox, net: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that changes while a connection is made counts for it."""
    began, go_on = threading.Event(), threading.Event()
    truly = net.upstream.connect

    async def slowly(address: str, port: int) -> Any:
        began.set()
        while not go_on.is_set():
            await net.upstream._in_thread(lambda: go_on.wait(0.05))
        return await truly(address, port)

    monkeypatch.setattr(net.upstream, "connect", slowly)
    set_network(shared, Network(allow=[EVIL]))
    process = shared.spawn(["curl", "-sS", "-m", "20", f"http://{EVIL}/"])
    assert began.wait(20)
    set_network(shared, Network(allow=[GOOD]))
    go_on.set()
    assert not process.wait().ok
    assert net.seen("http") == []


def test_n12_a_policy_that_is_nonsense_changes_nothing(shared: Sandbox, net: Internet) -> None:
    set_network(shared, Network(allow=[GOOD]))
    for bad in ({"allow": [""]}, {"allow": ["*."]}, {"deny": [None]}):
        with pytest.raises(SpecError):
            shared.network.set(**bad)
    assert HELLO in attempt(shared, http(GOOD)).one.data
    attempt(shared, http(EVIL)).all_refused()


def test_n12_it_is_kept_over_pauses(rung: Rung, net: Internet) -> None:
    """Paused and woken, rolled back, forked: always the policy as it was last, never the first."""
    if not rung.can.live_snapshots:
        pytest.skip(f"capability: {rung.label} cannot save processes")
    with rung.box(network=Network(allow=[GOOD, EVIL])) as box:
        before = box.snapshot()
        assert f"hello from {EVIL}" in attempt(box, http(EVIL)).one.data
        set_network(box, Network(allow=[GOOD]))
        net.forget()
        box.pause()
        attempt(box, http(EVIL)).all_refused()
        box.rollback(before)
        attempt(box, http(EVIL)).all_refused()
        (child,) = box.fork(1)
        try:
            attempt(child, http(EVIL)).all_refused()
            assert HELLO in attempt(child, http(GOOD)).one.data
        finally:
            child.kill()
        assert net.packets(address=EVIL_AT) == []


#: Makes a named sandbox, narrows its policy, and leaves it: by going (it is paused), or killed in the middle.
ELSEWHERE = """
import os, signal, sys
from sloplet import Network, Sandbox
with Sandbox("n12", engine="gvisor", network=Network(allow=[%r, %r])) as box:
    box.files.write("attempts.py", sys.stdin.read())
    box.pause()
    box.network.set(Network(allow=[%r]))
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("ending", ["left", "killed"])
def test_n12_by_another_process(
    rung: Rung, net: Internet, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Woken by another process it has the policy that it was given last, not the one that it was made with."""
    if not rung.can.live_snapshots:
        pytest.skip(f"capability: {rung.label} cannot save processes")
    monkeypatch.setenv("SLOPLET_HOME", str(tmp_path / "home"))  # another keeper may know no runsc
    with rung.here():
        script = ELSEWHERE % (GOOD, EVIL, GOOD)
        done = subprocess.run([sys.executable, "-c", script, ending], input=ATTEMPTS, text=True, check=False)
        assert done.returncode == (-9 if ending == "killed" else 0)
        with pytest.raises(SandboxMismatch, match="network"):  # what it may reach now is not what is asked for here
            Sandbox("n12", engine=rung.name, network=Network(allow=[GOOD, EVIL])).start()
        box = Sandbox("n12", engine=rung.name, network=Network(allow=[GOOD]))
        box.start()
        try:
            assert box.network.policy().allow == (GOOD,)
            tried = attempt(box, http(EVIL))  # refused before anybody is asked: a keeper's world is the real one
            tried.all_refused()
            assert EVIL in tried.denied[0]
        finally:
            box.kill()


# -- N-13 ----------------------------------------------------------------------------------------------------


def egress_of(box: Sandbox) -> Any:
    return runtime().networks.find(box.id)


@pytest.fixture
def errors_are_expected() -> Any:
    """What the loop's exception handler is told meanwhile."""
    from sloplet.portal import portal

    told: list[Any] = []

    async def handler(new: Any) -> Any:
        import asyncio

        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()
        loop.set_exception_handler(new)
        return before

    before = portal().call(handler(lambda _, context: told.append(context)))
    yield told
    portal().call(handler(before))


def test_n13_a_fault_while_judging(
    shared: Sandbox, net: Internet, monkeypatch: pytest.MonkeyPatch, errors_are_expected: list[Any]
) -> None:
    """One connection ends, by an error; the next is judged as ever."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    set_network(shared, Network(allow=[GOOD]))
    with monkeypatch.context() as patch:
        patch.setattr(sloplet.network.policy.Policy, "judge", broken)
        for outcome in attempt(shared, http(GOOD), http(EVIL)).outcomes:
            assert outcome.refused, outcome
        assert net.dialled() == set()
    assert errors_are_expected
    assert HELLO in attempt(shared, http(GOOD)).one.data


def test_n13_the_proxy_fails(rung: Rung, net: Internet, errors_are_expected: list[Any]) -> None:
    """All that is open is cut, nothing passes any more, and everybody who asks is told so."""
    with rung.box(network=Network(allow=["*:*"])) as box:
        held = talk(box, HOLDS % GOOD)
        assert held.line() == "one"
        promised = {item.control: item for item in box.guarantees()}
        assert promised["network"].enforced

        egress = egress_of(box)

        async def fail() -> None:
            egress.fail("a test says so")

        call(fail())
        assert held.line() == "ConnectionResetError"
        net.forget()
        tried = attempt(box, http(GOOD), tcp(GOOD, 7, ("x", None)), http(EVIL_AT))
        tried.all_refused()
        assert net.packets() == []
        after = {item.control: item for item in box.guarantees()}
        assert "fail" in after["network"].how
        assert box.run("echo lives").stdout == "lives\n"


def test_n13_the_upstream_fails(shared: Sandbox, net: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    """No resolver, no descriptors, no answer: an error for the program, and the next one works."""
    set_network(shared, Network(allow=[GOOD, "broken.example", "nobody.example", f"{GOOD}:81"]))
    net.name("broken.example", GOOD_AT, code=2)

    async def none(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    tried = attempt(shared, http("broken.example"), http("nobody.example"), http(GOOD, 81))
    tried.all_refused()
    with monkeypatch.context() as patch:
        patch.setattr(net.upstream, "connect", none)
        attempt(shared, http(GOOD)).all_refused()
    assert HELLO in attempt(shared, http(GOOD)).one.data
    assert len(decisions(shared, verdict="fail")) >= 3


def test_n13_the_wire_without_a_network(rung: Rung, net: Internet) -> None:
    """With network="none" there is nothing to connect to, and nobody who would answer."""
    with rung.box(network="none") as box:
        tried = attempt(box, http(GOOD), http(GOOD_AT), http("198.18.0.1"), tcp("127.0.0.1", 53))
        tried.all_refused()
        with pytest.raises(SlopletError):
            set_network(box, Network(allow=["*"]))
        attempt(box, http(GOOD)).all_refused()
    assert net.packets() == []


def test_n13_the_agent_is_killed(rung: Rung, net: Internet) -> None:
    """The sandbox dies with it: no connection outlives it."""
    with rung.box(network=Network(allow=[f"{GOOD}:7"])) as box:
        held = talk(box, HOLDS % GOOD)
        assert held.line() == "one"
        port = net.packets(address=GOOD_AT, port=7)[0]["source_port"]
        box.kill()
        eventually(lambda: any(each["port"] == port and each["size"] == 0 for each in net.packets(port=port)), 10)


def test_n13_a_rung_that_cannot(rung: Rung, net: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no way to bring to the agent what leaves (no nft, no tables), nothing is started without it."""
    with rung.here():
        engine = registry.load(rung.name)
        probe = engine.probe()
        without = replace(probe.capabilities, egress=False, no_egress="egress: nf_tables: Operation not supported")
        monkeypatch.setattr(type(engine), "probe", lambda _: replace(probe, capabilities=without))
        before = runtime().held
        with pytest.raises(SlopletError, match=r"nf_tables: Operation not supported"):
            Sandbox(engine=rung.name, network=Network(allow=[GOOD])).start()
        assert runtime().held == before
        with Sandbox(engine=rung.name) as box:
            assert box.run("echo without").stdout == "without\n"
    for other in ("process", "fake"):
        if registry.load(other).probe().available:
            with pytest.raises(SlopletError, match="network"):
                Sandbox(engine=other, network=Network()).start()
