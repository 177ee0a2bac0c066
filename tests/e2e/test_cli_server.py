"""The CLI over a server: ``sloplet --server URL VERB``. The same words, the same output, another machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import SLOPLET, Terminal, sloplet

from remote_kit import until
from server_kit import Served, served

pytestmark = pytest.mark.anyone


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("cli") / "home", "--grace", "3") as running:
        yield running


@pytest.fixture
def environment(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The server in the environment; this machine's own home is empty, and must stay so."""
    mine = {"SLOPLET_URL": server.url, "SLOPLET_KEY": server.key, "SLOPLET_HOME": str(tmp_path / "nothing")}
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    return mine


@pytest.fixture
def dev(environment: dict[str, str]) -> Iterator[str]:
    """A named sandbox."""
    name = f"dev-{os.urandom(3).hex()}"
    said("create", name, "--engine", "container")
    yield name
    said("rm", "--force", name)


def said(*words: str, input: bytes | None = None) -> str:
    """What a verb that does its work prints."""
    done = sloplet(*words, input=input)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_flags_and_variables(server: Served, tmp_path: Path) -> None:
    env = {"SLOPLET_HOME": str(tmp_path / "nothing")}
    done = sloplet(
        "--server", server.url, "--key", server.key, "run", "--engine", "fake", "--", "echo", "there", env=env
    )
    assert (done.stdout, done.returncode) == (b"there\n", 0)
    done = sloplet("--server", server.url, "run", "--", "true", env=env)
    assert done.returncode == 125
    assert b"needs a key" in done.stderr
    done = sloplet("--server", "nonsense", "ls", env=env)
    assert b"not the URL of a server" in done.stderr
    done = sloplet("--server", "http://127.0.0.1:9", "--key", "slp_x", "ls", env=env)
    assert b"cannot be reached" in done.stderr
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("verb", ["gc", "doctor", "setup", "serve", "key", "bench"])
def test_what_is_about_this_machine(server: Served, verb: str) -> None:
    done = sloplet("--server", server.url, "--key", server.key, verb)
    assert done.returncode == 125
    assert b"about the machine it runs on" in done.stderr


def test_run(environment: dict[str, str]) -> None:
    done = sloplet("run", "--engine", "container", "-i", "-c", "cat; echo err >&2; exit 3", input=b"in\n")
    assert (done.stdout, done.stderr, done.returncode) == (b"in\n", b"err\n", 3)
    assert json.loads(sloplet("run", "--engine", "fake", "--json", "--", "echo", "x").stdout)["stdout"] == "x\n"
    assert sloplet("run", "--engine", "fake", "--timeout", "0.2", "--", "sleep", "100").returncode == 124
    assert sloplet("run", "--engine", "container", "--", "no-such-program").returncode == 127
    assert json.loads(said("ls", "--json")) == []


def test_a_sandbox_with_a_name(dev: str, environment: dict[str, str], tmp_path: Path) -> None:
    assert said("exec", dev, "--", "sh", "-c", "echo $0 > file; cat file") == "sh\n"
    assert dev in said("ls", "-q")
    document = json.loads(said("info", dev, "--json"))
    assert (document["name"], document["server"]) == (dev, environment["SLOPLET_URL"])
    assert environment["SLOPLET_URL"] in said("info", dev)
    assert "enforced" in said("guarantees", dev) or "+" in said("guarantees", dev)
    assert json.loads(said("top", "--once", "--json", dev))[0]["metrics"]["pids"] >= 1
    local = tmp_path / "in"
    local.write_text("from here\n")
    said("cp", str(local), f"{dev}:there")
    said("cp", f"{dev}:there", str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "from here\n"
    assert "there" in said("diff", dev)
    pid = said("exec", dev, "--detach", "--", "sh", "-c", "echo begun; sleep 0.3; echo ended").strip()
    assert pid in said("ps", dev)
    assert said("logs", "-f", dev, pid) == "begun\nended\n"
    assert said("code", dev, "-c", "print(6 * 7)").strip() == "42"
    assert not Path(environment["SLOPLET_HOME"]).exists()


def test_saved_states(dev: str, tmp_path: Path) -> None:
    said("exec", dev, "-c", "echo one > file")
    said("snapshot", dev, "first")
    said("exec", dev, "-c", "echo two > file")
    assert "first" in said("snapshots", dev)
    copies = said("fork", dev, "2", "--snapshot", "first").split()
    assert copies == [f"{dev}-1", f"{dev}-2"]
    assert said("exec", copies[1], "-c", "cat file") == "one\n"
    said("rollback", dev, "first")
    assert said("exec", dev, "-c", "cat file") == "one\n"
    said("template", "create", f"warm-{dev}", dev)
    assert f"warm-{dev}" in said("template", "ls")
    assert said("run", "--engine", "container", "--template", f"warm-{dev}", "-c", "cat file") == "one\n"
    said("template", "rm", f"warm-{dev}")
    archive = tmp_path / "dev.sloplet"
    said("export", dev, str(archive))
    assert archive.stat().st_size > 1000
    loaded = said("import", str(archive), "--name", f"{dev}-loaded").strip()
    assert said("exec", loaded, "-c", "cat file") == "one\n"
    said("rm", loaded, *copies)


def test_the_network(environment: dict[str, str]) -> None:
    said("create", "netted", "--engine", "container", "--allow", "one.example", "--label", "team=cli")
    try:
        assert "one.example" in said("net", "show", "netted")
        said("net", "allow", "netted", "two.example")
        assert "two.example" in said("net", "show", "netted")
        assert json.loads(said("net", "log", "netted", "--json")) == []
        assert said("ls", "-q", "--label", "team=cli").strip() == "netted"
    finally:
        said("rm", "netted")


def test_ports(dev: str) -> None:
    said("exec", dev, "--detach", "--", "python3", "-m", "http.server", "8123", "--bind", "127.0.0.1")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with subprocess.Popen([*SLOPLET, "forward", dev, "8123:0"], stdout=subprocess.PIPE, text=True) as forward:
        assert forward.stdout is not None
        url = forward.stdout.readline().split()[0]

        def answers() -> bool:
            try:
                return bool(opener.open(url, timeout=10).status == 200)
            except OSError:
                return False  # it may still be starting

        until(answers)
        forward.send_signal(signal.SIGTERM)
        assert forward.wait(20) == 0
    link = said("url", dev, "8123").strip()
    assert re.fullmatch(r"http://8123-[a-z0-9]+\.localhost:\d+/\?sloplet_token=\S+", link)
    assert "no" in said("url", dev)
    assert "sloplet_token" not in said("url", dev, "8123", "--public")
    said("url", dev, "8123", "--close")
    assert "8123" not in said("url", dev)
    assert b"forward" in sloplet("url", dev, "8123", "--host-port", "9999").stderr


def test_a_terminal(dev: str) -> None:
    """Raw, with the window's size, signals and a way out."""
    with Terminal("shell", dev, rows=31, cols=101) as terminal:
        terminal.expect("$")
        terminal.send("stty size\n")
        terminal.expect("31 101")
        terminal.resize(40, 120)
        terminal.send("sleep 0.2; stty size\n")
        terminal.expect("40 120")
        terminal.send("echo star''ted; sleep 1000\n")
        terminal.expect("started")
        terminal.send("\x03")
        terminal.send("echo still $((40 + 2))\n")
        terminal.expect("still 42")
        terminal.send("exit 7\n")
        assert terminal.wait() == 7
        assert terminal.modes_restored()


def test_in_tmux(dev: str, environment: dict[str, str], tmp_path: Path) -> None:
    tmux = ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null"]
    if subprocess.run(["which", "tmux"], capture_output=True, check=False).returncode:
        pytest.skip("capability: no tmux here")

    def screen() -> str:
        return subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout

    command = " ".join([*SLOPLET, "shell", dev])
    subprocess.run([*tmux, "new-session", "-d", "-x", "90", "-y", "20", command], check=True)
    try:
        until(lambda: "$" in screen())
        subprocess.run([*tmux, "send-keys", "printf 'a%sb\\n' $((21 * 2))", "Enter"], check=True)
        until(lambda: "a42b" in screen())
        subprocess.run([*tmux, "send-keys", "tput cols", "Enter"], check=True)
        until(lambda: "\n90" in screen())
        subprocess.run([*tmux, "resize-window", "-x", "70", "-y", "20"], check=True)
        subprocess.run([*tmux, "send-keys", "clear; tput cols", "Enter"], check=True)
        until(lambda: "70" in screen().split())
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)


def test_interrupted(server: Served, environment: dict[str, str]) -> None:
    """Ctrl-C ends the command and its sandbox, there too."""
    process = subprocess.Popen(
        [*SLOPLET, "run", "--engine", "container", "-c", "echo up; sleep 1000"], stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert len(json.loads(said("ls", "--json"))) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    until(lambda: json.loads(said("ls", "--json")) == [], 10)


def test_killed(server: Served, environment: dict[str, str]) -> None:
    """One that cannot say goodbye: what it ran goes after a while."""
    command = [*SLOPLET, "run", "--engine", "container", "-c", "echo up; sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
    until(lambda: json.loads(said("ls", "--json")) == [])


def test_secrets_are_asked_for_here(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_HERE", "the-value-of-the-secret")
    code = (
        "from sloplet import Sandbox, Network, Secret\n"
        "box = Sandbox('with-secret', engine='container', network=Network(allow=['api.example.org']),\n"
        "              secrets={'TOKEN': Secret(env='TOKEN_HERE', hosts=['api.example.org'])})\n"
        "print(box.run('echo $TOKEN').stdout)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "the-value-of-the-secret" not in done.stdout
    try:
        assert "TOKEN" in said("secret", "ls", "with-secret")
        assert "the-value-of-the-secret" not in said("info", "with-secret", "--json")
    finally:
        said("rm", "with-secret")
