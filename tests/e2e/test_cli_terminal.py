"""The CLI on a terminal: raw mode and back, size, job control, the ways out."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_helpers import Terminal, sloplet

pytestmark = pytest.mark.anyone


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOPLET_HOME", str(tmp_path / "home"))


@pytest.fixture(params=["container", "process"])
def engine(request: pytest.FixtureRequest) -> str:
    from sloplet.engines import registry

    name: str = request.param
    probe = registry.load(name).probe()
    if not probe.available:
        pytest.skip(probe.reason)
    return name


def test_shell_has_the_terminals_size_and_follows_it(engine: str) -> None:
    with Terminal("shell", "--engine", engine, "--shell", "sh -i", rows=33, cols=101) as terminal:
        terminal.send("stty size\r")
        terminal.expect("33 101")
        terminal.resize(40, 120)
        # The new size and what is typed go separate ways, here as at any terminal: wait for it inside.
        terminal.send("until [ \"$(stty size)\" = '40 120' ]; do :; done; echo now $(stty size) $TERM\r")
        terminal.expect("now 40 120 xterm-256color")
        terminal.send("exit 3\r")
        assert terminal.wait() == 3
        assert terminal.modes_restored()


def test_control_keys_are_the_commands(engine: str) -> None:
    with Terminal("shell", "--engine", engine) as terminal:
        terminal.send("set +o history; PS1='prompt''> '\r")
        terminal.expect("prompt> ")
        terminal.send("trap 'echo caught' INT; echo set''up; read x\r")
        terminal.expect("setup\r\n")
        terminal.send("\x03")
        terminal.expect("caught")
        terminal.send("\r")
        terminal.expect("prompt> ")
        terminal.send("tty | cat; [ -t 0 ] && echo is-a-tty\r")
        terminal.expect("/dev/pts/")
        terminal.expect("\r\nis-a-tty")
        terminal.expect("prompt> ")  # before it nobody would read the end
        terminal.send("\x04")
        terminal.wait()
        assert terminal.modes_restored()


def test_job_control(engine: str) -> None:
    with Terminal("shell", "--engine", engine) as terminal:
        terminal.send("PS1='prompt''> '\r")
        terminal.expect("prompt> ")
        terminal.send("echo rea''dy; cat\r")
        terminal.expect("ready\r\n")  # by now the line editor has given the terminal back
        terminal.send("echoed\r")
        terminal.expect("echoed\r\nechoed\r\n")
        terminal.send("\x1a")
        terminal.expect("Stopped")
        terminal.expect("prompt> ")
        terminal.send("fg\r")
        terminal.expect("cat\r\n")
        terminal.send("again\r")
        terminal.expect("again\r\nagain\r\n")
        terminal.send("\x04")
        terminal.expect("prompt> ")
        terminal.send("exit\r")
        assert terminal.wait() == 0


def test_a_dumb_terminal_will_do(engine: str) -> None:
    with Terminal("shell", "--engine", engine, term="dumb") as terminal:
        terminal.send("echo $TERM-$((40+2))\r")
        terminal.expect("dumb-42")
        terminal.send("exit\r")
        assert terminal.wait() == 0


def test_run_at_a_terminal_gets_one(engine: str) -> None:
    with Terminal("run", "--engine", engine, "-c", "tty; read x; echo got $x; exit 4") as terminal:
        terminal.expect("/dev/pts/")
        terminal.send("hello\r")
        terminal.expect("got hello")
        assert terminal.wait() == 4
        assert terminal.modes_restored()


def test_run_without_a_terminal_on_request(engine: str) -> None:
    with Terminal("run", "--engine", engine, "-T", "-c", "tty; [ -t 1 ] || echo no terminal") as terminal:
        terminal.expect("not a tty")
        terminal.expect("no terminal")
        assert terminal.wait() == 0


def test_interrupt_key_without_a_terminal_of_its_own(engine: str) -> None:
    with Terminal("run", "--engine", engine, "-T", "-c", "echo ready; while :; do :; done") as terminal:
        terminal.expect("ready")
        terminal.send("\x03")
        assert terminal.wait() == 130


def test_a_terminal_on_request_without_being_at_one(engine: str) -> None:
    done = sloplet("run", "--engine", engine, "-t", "--", "sh", "-c", "stty size; [ -t 0 ] && echo tty")
    assert done.returncode == 0
    assert done.stdout == b"24 80\r\ntty\r\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_restore_the_terminal(engine: str, number: int, code: int) -> None:
    with Terminal("shell", "--engine", engine) as terminal:
        terminal.send("echo rea''dy\r")
        terminal.expect("ready")
        assert not terminal.modes_restored()
        os.kill(terminal.process.pid, number)
        assert terminal.wait() == code
        assert terminal.modes_restored()


def test_the_way_out(engine: str) -> None:
    with Terminal("run", "--engine", engine, "-c", "stty raw -echo; trap '' INT HUP; echo ready; cat") as terminal:
        terminal.expect("ready")
        terminal.send("\x03\r~.")
        assert terminal.wait() == 0
        assert terminal.modes_restored()


def test_modes_that_a_killed_program_left_on_are_switched_off(engine: str) -> None:
    text = "printf '\\033[?1049h\\033[?25l\\033[?2004hready'; kill -9 $$"
    with Terminal("run", "--engine", engine, "-c", text) as terminal:
        terminal.expect("ready")
        terminal.expect("\x1b[?1049l")
        terminal.expect("\x1b[?25h")
        assert terminal.wait() == 137


def test_stop_and_continue_keep_the_terminal_right(engine: str) -> None:
    with Terminal("shell", "--engine", engine) as terminal:
        terminal.send("echo rea''dy\r")
        terminal.expect("ready")
        os.kill(terminal.process.pid, signal.SIGSTOP)
        os.kill(terminal.process.pid, signal.SIGCONT)
        terminal.send("echo st''ill here; exit 6\r")
        terminal.expect("still here")
        assert terminal.wait() == 6
        assert terminal.modes_restored()


def test_errors_restore_the_terminal(engine: str) -> None:
    with Terminal("run", "--engine", engine, "--", "no-such-command") as terminal:
        terminal.expect("sloplet: ")
        assert terminal.wait() == 127
        assert terminal.modes_restored()
