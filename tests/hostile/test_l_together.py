"""L: what runs inside goes on through pauses, snapshots and rollbacks as if nothing had been; many at it at once."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hostile_kit import Waiting, eventually
from live_kit import CHAIN, Chain, Talk, box, home, outcome, talk, talk_on

from sloplet import Sandbox, errors

pytestmark = [pytest.mark.anyone, pytest.mark.usefixtures("gvisor")]


def test_commands_that_are_killed_hurt_nobody_else() -> None:
    """Their ends are seen while they are reaped: init is not taken for one of them (it was, and stopped for good)."""
    with box() as made:
        bystander = made.spawn(["sleep", "1000"], detached=True)
        for _ in range(60):
            made.spawn(["sleep", "1000"], detached=True).kill()
        assert made.run("echo on", timeout=20).stdout == "on\n"
        assert [each.pid for each in made.processes() if each.running] == [bystander.pid]


#: Shells, terminals, servers: each is asked before and after.
SERVER = """
import socket, threading
def serve(listener):
    count = 0
    while True:
        peer, _ = listener.accept()
        count += 1
        peer.sendall(b"%d" % count)
        peer.close()
listener = socket.create_server(("127.0.0.1", 8000))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
print("listening", flush=True)
import sys
for line in sys.stdin:
    peer = socket.create_connection(("127.0.0.1", 8000))
    print(peer.recv(10).decode(), flush=True)
"""


WRITER = """
import time
for number in range(400):
    print(number + 1)
    time.sleep(0.005)
"""


def test_everything_inside_goes_on() -> None:
    """A REPL in mid-sentence, a shell's variables and jobs, a listening server, a pipe's writer, one that was stopped
    before, output that nobody was there to read: after a pause, and after a rollback to before it."""
    with box() as made:
        repl = Talk(made.spawn(["python3", "-qi"], pty=True, detached=True))
        repl.until(">>> ")
        repl.process.send("kept = [1, 2, 3]\n")
        repl.until(">>> ")
        repl.process.send("sum(kept) * 10")  # half a line: no Return yet
        repl.until("* 10")
        shell = Talk(made.spawn(["sh", "-i"], pty=True, detached=True))
        shell.until("$ ")
        shell.process.send("A=before; sleep 1000 &\n")
        shell.until("$ ")
        server = talk(made, SERVER)
        assert server.line() == "listening"
        assert server.ask("x") == "1"
        stopped = made.spawn(["sleep", "1000"], detached=True)
        stopped.signal("STOP")
        eventually(lambda: "T" in _state(made, stopped.pid), what="it is not stopped")
        writer = made.spawn(["python3", "-uc", WRITER], detached=True)
        first = _some(writer)
        made.snapshot("here")
        made.pause()
        made.resume()
        for count, turn in enumerate(("paused", "rolled back"), 2):
            assert talk_on(made, server.pid).ask("x") == str(count), turn
            assert _finish(made, repl.pid, "\n") == "60", turn
            answer = _say(made, shell.pid, "echo $A; jobs\n")
            assert "before" in answer, turn
            assert "Stopped" not in answer, f"the shell saw its job being stopped: {answer!r}"
            assert "T" in _state(made, stopped.pid), "who had been stopped stays stopped"
            whole = made.attach(writer.pid)
            assert whole.offsets == (0, 0)
            assert whole.wait().stdout == "".join(f"{number}\n" for number in range(1, 401)), "each byte once"
            if turn == "paused":
                assert first
                made.rollback("here")
                server_after = talk_on(made, server.pid).ask("x")
                assert server_after == "2", "as it was then"


def _state(made: Sandbox, pid: int) -> str:
    process = next(each for each in made.processes() if each.pid == pid)
    return made.run(f"sed 's/.*) //' /proc/{process.os_pid}/stat").stdout.split()[0]


def _some(process: Any) -> str:
    return str(next(iter(process))[1])


def _finish(made: Sandbox, pid: int, rest: str) -> str:
    """The rest of the line, and what the REPL answers."""
    terminal = Talk(made.attach(pid, replay=False))
    terminal.process.send(rest)
    said = terminal.until(">>> ")
    terminal.process.send("sum(kept) * 10")
    terminal.until("* 10")
    return said.split()[0]


def _say(made: Sandbox, pid: int, line: str) -> str:
    terminal = Talk(made.attach(pid, replay=False))
    terminal.process.send(line + "echo E''ND\n")
    return terminal.until("END\r\n")


def test_a_time_limit_does_not_run_while_it_sleeps() -> None:
    with box() as made:
        process = made.spawn("sleep 1; echo done", timeout=2, detached=True)
        made.pause()
        time.sleep(2.1)  # the point of it: more than the limit, asleep
        assert abs(int(made.run("date +%s").stdout) - time.time()) <= 2, "its clock stood still"
        result = made.attach(process.pid).wait()
        assert (result.stdout, result.timed_out) == ("done\n", False)
        late = made.spawn("sleep 100", timeout=1, detached=True)
        made.pause()
        assert made.attach(late.pid).wait().timed_out, "control: after it woke the limit counts on"


def test_who_waits_is_told_and_can_come_back() -> None:
    with box() as made:
        waiting = Waiting(lambda: made.run("until [ -e go ]; do sleep 0.02; done; echo went on"))
        eventually(lambda: any(each.running for each in made.processes()))
        pid = next(each.pid for each in made.processes() if each.running)
        made.pause()
        assert isinstance(waiting.error(10), errors.SandboxPaused)
        made.files.write("go", "")  # wakes it
        assert made.attach(pid).wait().stdout == "went on\n"


def test_a_command_during_a_snapshot_waits_and_works() -> None:
    with box() as made:
        results = []
        stop = threading.Event()

        def run_on() -> None:
            while not stop.is_set():
                results.append(made.run("echo hello", timeout=20).stdout)

        running = Waiting(run_on)
        for _ in range(4):
            made.delete_snapshot(made.snapshot("x"))
        stop.set()
        running.result(20)
        assert set(results) == {"hello\n"}


GC = """
import sys
from sloplet.engines import registry
from sloplet.state.home import Home
from sloplet.state.reaper import reap
from sloplet.state.store import Store
home, rounds = Home(sys.argv[1]), 0
store = Store(home)
print("cleaning", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    report = reap(home, store, registry.reap)
    assert not report.errors, report.errors
    rounds += 1
print(rounds)
"""


def test_cleaning_up_meanwhile_takes_nothing_away() -> None:
    """Another program cleans up after the dead, again and again, while snapshots, forks and pauses are made."""
    with box() as made:
        made.files.write("kept", "kept")
        cleaner = subprocess.Popen(
            [sys.executable, "-c", "import select" + GC, str(home().path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert cleaner.stdout is not None
        assert cleaner.stdout.readline() == "cleaning\n"
        made.snapshot("first")
        for child in made.fork(3) + made.fork(2, snapshot="first"):
            assert child.files.read_text("kept") == "kept"
            child.kill()
        made.pause()
        assert made.files.read_text("kept") == "kept"
        made.rollback("first")
        assert made.files.read_text("kept") == "kept"
        told, _ = cleaner.communicate("x")
        assert cleaner.returncode == 0
        assert int(told) > 5, "control: it has cleaned up meanwhile"


ACTS = ("pause", "resume", "run", "read", "snapshot", "rollback", "fork", "info")


def test_many_at_it_at_once() -> None:
    """Each call ends, with a result or a typed error; then all is as it was, and the process has lost nothing."""
    with box() as made:
        made.files.write("kept", "kept")
        program, mirror = talk(made, CHAIN), Chain()
        assert program.ask("a") == mirror.add("a")
        made.snapshot("first")

        def act(seed: int) -> list[str]:
            dice, found = random.Random(seed), []
            for _ in range(5):
                name = dice.choice(ACTS)
                done = outcome(lambda name=name: _act(made, name))
                found.append(f"{name} {type(done).__name__ if isinstance(done, Exception) else 'ok'}")
            return found

        workers = [Waiting(lambda seed=seed: act(seed)) for seed in range(4)]
        told = [line for worker in workers for line in worker.result(100)]
        refused = {line for line in told if not line.endswith(" ok")}
        assert refused <= {"run SandboxPaused", "read SandboxPaused"}, told
        assert made.files.read_text("kept") == "kept"
        assert talk_on(made, program.pid).ask("b") == mirror.add("b")


def _act(made: Sandbox, name: str) -> Any:
    if name == "fork":
        for child in made.fork(1):
            child.kill()
        return None
    calls: dict[str, Any] = {
        "pause": made.pause,
        "resume": made.resume,
        "run": lambda: made.run("echo hello", timeout=30),
        "read": lambda: made.files.read_text("kept"),
        "snapshot": made.snapshot,
        "rollback": lambda: made.rollback("first"),
        "info": made.info,
    }
    return calls[name]()
