"""The network through the CLI, as people use it: policies, questions, secrets, URLs, on every engine that has one.

Servers are this process's own, on loopback, reached from inside as ``host.sloplet``.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_helpers import SLOPLET, Terminal, gvisor_environment, sloplet

from netkit.authority import Authority

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(180)]

CANARY = "canary-5f1c2e-never-seen-inside"
FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())"
#: Connects to what nothing allows.
OUTSIDE = "import socket; socket.create_connection(('outside.example', 443), timeout=20).recv(1)"
SERVE = "cd /tmp && echo from $(hostname) > index.html && exec python3 -m http.server 8000"


class Web(http.server.ThreadingHTTPServer):
    """Answers every request with the token that came with it."""

    daemon_threads = True

    def __init__(self) -> None:
        self.tokens: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def port(self) -> int:
        return self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a connection that was refused on its way


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server: Any = self.server
        server.tokens.append(self.headers.get("Authorization", ""))
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *args: object) -> None: ...


@contextmanager
def serving(web: Web) -> Iterator[Web]:
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    try:
        yield web
    finally:
        web.shutdown()
        web.server_close()
        thread.join()


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(Web()) as made:
        yield made


@pytest.fixture(params=["container", "gvisor"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from sloplet.engines import registry

    name: str = request.param
    monkeypatch.setenv("SLOPLET_HOME", str(tmp_path / "home"))
    if name == "gvisor":
        for key, value in gvisor_environment().items():
            monkeypatch.setenv(key, value)
    probe = registry.load(name).probe()
    if not probe.available or not probe.capabilities.egress:
        pytest.skip(probe.reason or probe.capabilities.no_egress)
    yield name
    assert sloplet("rm", "--all", "--force").returncode == 0


def said(*words: str, **more: Any) -> str:
    done = sloplet(*words, **more)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def fetch(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=60) as answer:
        return str(answer.read().decode().strip())


def serve_inside(name: str) -> None:
    said("exec", name, "--detach", "-c", SERVE)
    wait = "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))' 2>/dev/null; do :; done"
    said("exec", name, "--timeout", "60", "-c", wait)


def test_what_is_allowed_passes_and_what_is_refused_is_told(engine: str, web: Web) -> None:
    rule = f"host.sloplet:{web.port}"
    url = f"http://{rule}/"
    assert said("run", "--engine", engine, "--allow", rule, "--", "python3", "-c", FETCH, url) == "hello"
    done = sloplet("run", "--engine", engine, "--allow", rule, "--", "python3", "-c", OUTSIDE)
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("sloplet: refused: ")
    assert "outside.example" in last
    document = json.loads(
        sloplet("run", "--engine", engine, "--allow", rule, "--json", "--", "python3", "-c", OUTSIDE).stdout
    )
    assert "outside.example" in document["denied"][0]
    # without any of it there is no network at all, and nothing to tell
    done = sloplet("run", "--engine", engine, "--json", "--", "python3", "-c", FETCH, url)
    assert json.loads(done.stdout)["exit_code"] == 1
    assert json.loads(done.stdout)["denied"] == []


def test_a_policy_changes_while_it_runs_and_the_log_tells(engine: str, web: Web, tmp_path: Path) -> None:
    rule = f"host.sloplet:{web.port}"
    ask = ("exec", "dev", "--", "python3", "-c", FETCH, f"http://{rule}/")
    said("create", "dev", "--engine", engine, "--network", "learn", "--deny", "*")
    (tmp_path / "nothing.toml").write_text("allow = []")
    said("net", "set", "dev", "--policy", str(tmp_path / "nothing.toml"))
    assert sloplet(*ask).returncode == 1
    said("net", "allow", "dev", rule)
    assert said(*ask) == "hello"
    said("net", "deny", "dev", rule)
    assert sloplet(*ask).returncode == 1
    rows = json.loads(said("net", "log", "dev", "--json"))
    assert [row["verdict"] for row in rows] == ["deny", "allow", "deny"]
    assert rows[1]["bytes_in"] > 5
    assert len(json.loads(said("net", "log", "dev", "--denied", "--json"))) == 2
    assert tomllib.loads(said("net", "show", "dev"))["deny"] == [rule]


def test_what_was_learned_is_a_policy(engine: str, web: Web, tmp_path: Path) -> None:
    rule, policy = f"host.sloplet:{web.port}", str(tmp_path / "policy.toml")
    run = ("--", "python3", "-c", FETCH, f"http://{rule}/")
    learned = said("net", "learn", "--engine", engine, "--allow", rule, "--output", policy, *run)
    assert learned == "hello"
    assert tomllib.loads(Path(policy).read_text()) == {"allow": [rule]}
    assert said("run", "--engine", engine, "--network", policy, *run) == "hello"
    assert sloplet("run", "--engine", engine, "--network", policy, "--", "python3", "-c", OUTSIDE).returncode == 1


def test_what_a_rule_about_requests_let_through_is_learned_as_that_rule(engine: str, web: Web, tmp_path: Path) -> None:
    rule, policy = f"GET http://host.sloplet:{web.port}/3", str(tmp_path / "policy.toml")
    run = ("--", "python3", "-c", FETCH)
    said("net", "learn", "--engine", engine, "--allow", rule, "--output", policy, *run, rule.removeprefix("GET "))
    assert tomllib.loads(Path(policy).read_text()) == {"allow": [rule]}
    locked = ("run", "--engine", engine, "--network", policy, *run)
    assert said(*locked, rule.removeprefix("GET ")) == "hello"
    assert sloplet(*locked, f"http://host.sloplet:{web.port}/4").returncode == 1


def test_none_of_a_template_reaches_nothing(engine: str, web: Web) -> None:
    rule = f"host.sloplet:{web.port}"
    said("create", "base", "--engine", engine, "--allow", rule)
    said("template", "create", "warm", "base")
    run = ("run", "--template", "warm")
    fetch = ("--", "python3", "-c", FETCH, f"http://{rule}/")
    assert said(*run, *fetch) == "hello"
    assert sloplet(*run, "--network", "none", *fetch).returncode == 1
    said("create", "dev", "--template", "warm", "--network", "none")
    assert tomllib.loads(said("net", "show", "dev")) == {"allow": []}
    assert sloplet("exec", "dev", *fetch).returncode == 1


def test_changes_of_several_programs_at_the_same_time_are_all_made(engine: str) -> None:
    said("create", "dev", "--engine", engine, "--allow", "first.example")
    words = [("allow", f"a{number}.example") for number in range(3)] + [
        ("deny", f"d{number}.example") for number in range(3)
    ]
    running = [
        subprocess.Popen([*SLOPLET, "net", verb, "dev", rule], stdout=subprocess.DEVNULL) for verb, rule in words
    ]
    assert [each.wait() for each in running] == [0] * 6
    assert tomllib.loads(said("net", "show", "dev")) == {
        "allow": ["a0.example", "a1.example", "a2.example", "first.example"],
        "deny": ["d0.example", "d1.example", "d2.example"],
    }


def test_one_that_has_used_up_its_budget_is_dead_and_says_so(engine: str, web: Web) -> None:
    rule = f"host.sloplet:{web.port}"
    said("create", "dev", "--engine", engine, "--allow", rule, "--budget", "1", "--on-budget", "kill")
    assert sloplet("exec", "dev", "--", "python3", "-c", FETCH, f"http://{rule}/").returncode == 125
    (found,) = json.loads(said("ls", "--json"))
    assert (found["name"], found["state"]) == ("dev", "dead")
    assert "budget" in found["reason"]


@pytest.mark.parametrize(("typed", "told"), [("n", "refused: "), ("v", "refused: ")])
def test_questions_are_put_at_the_terminal(engine: str, typed: str, told: str) -> None:
    words = ("run", "--engine", engine, "--allow", "other.example", "--ask", "--", "python3", "-c", OUTSIDE)
    with Terminal(*words) as terminal:
        terminal.expect("may it connect to outside.example:443?", timeout=60)
        terminal.send(f"{typed}\n")
        terminal.expect(told)
        assert terminal.wait() == 1


def test_without_a_terminal_nobody_is_asked(engine: str) -> None:
    words = ("run", "--engine", engine, "--allow", "other.example", "--ask", "--", "python3", "-c", OUTSIDE)
    done = subprocess.run([*SLOPLET, *words], stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True)
    assert done.returncode == 1
    assert b"no terminal to ask at" in done.stderr


def test_questions_of_a_named_sandbox_are_answered_elsewhere(engine: str) -> None:
    said("create", "dev", "--engine", engine, "--ask")
    with Terminal("net", "ask", "dev") as terminal:
        terminal.expect("questions of dev come here")
        asking = subprocess.Popen([*SLOPLET, "exec", "dev", "--", "python3", "-c", OUTSIDE], stderr=subprocess.PIPE)
        terminal.expect("may it connect to outside.example:443?", timeout=60)
        terminal.send("v\n")
        _, errors = asking.communicate(timeout=60)
        assert b"sloplet: refused: " in errors
        terminal.send("\x03")
        assert terminal.wait() == 0
    assert tomllib.loads(said("net", "show", "dev"))["deny"] == ["outside.example:443"]


def test_a_secret_is_sent_and_never_seen(engine: str, tmp_path: Path) -> None:
    folder = tmp_path / "ca"
    folder.mkdir()
    authority = Authority(folder)
    web = Web()
    web.socket = authority.context("host.sloplet").wrap_socket(web.socket, server_side=True)
    (tmp_path / "token").write_text(CANARY)
    script = (
        "import os, sys, urllib.request as u\n"
        "assert os.environ['TOKEN'].startswith('sloplet-secret-')\n"
        "request = u.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + os.environ['TOKEN']})\n"
        "print(u.urlopen(request, timeout=20).read().decode())"
    )
    with serving(web):
        rule = f"host.sloplet:{web.port}"
        words = ("run", "--engine", engine, "--allow", rule, "--allow", "other.example", "--secret",
                 f"TOKEN=file:{tmp_path / 'token'}@{rule}")  # fmt: skip
        url = f"https://{rule}/"
        trusted = {"SSL_CERT_FILE": str(authority.file)}
        done = sloplet(*words, "--", "python3", "-c", script, url, env=trusted)
        assert (done.returncode, done.stdout) == (0, b"hello\n"), done.stderr.decode()
        assert web.tokens == [f"Bearer {CANARY}"]
        # the server it goes to is checked: without its CA nothing is sent
        assert sloplet(*words, "--", "python3", "-c", script, url).returncode == 1
        assert len(web.tokens) == 1
        inside = sloplet(*words, "-c", "env; cat /proc/*/environ /proc/*/cmdline", env=trusted)
        assert b"sloplet-secret-token-" in inside.stdout
        assert CANARY.encode() not in inside.stdout + inside.stderr
    assert _holders(tmp_path / "home") == []


def test_the_keeper_holds_values_in_memory_only(engine: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(CANARY)
    said("create", "dev", "--engine", engine, "--allow", "api.example.com", "--secret",
         f"TOKEN=file:{tmp_path / 'token'}@api.example.com")  # fmt: skip
    said("secret", "set", "dev", "TOKEN", "--file", "-", input=CANARY.encode() + b"2\n")
    said("exec", "dev", "-c", "echo $TOKEN > note")
    said("snapshot", "dev", "base")
    said("export", "dev", str(tmp_path / "home" / "dev.sloplet"))
    listed = said("secret", "ls", "dev", "--json") + said("info", "dev", "--json") + said("net", "dev", "--json")
    assert CANARY not in listed
    assert _holders(tmp_path / "home") == []
    # the positive control: the same search finds what a sandbox's files hold
    assert _holders(tmp_path / "home", b"TOKEN") != []


def _holders(folder: Path, canary: bytes = CANARY.encode()) -> list[Path]:
    """Files of a home that hold the canary."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if canary in file.read():
                    found.append(path)
    return found


def test_a_url_works_from_the_first_moment_to_the_last(engine: str) -> None:
    said("create", "dev", "--engine", engine)
    serve_inside("dev")
    url = said("url", "dev", "8000")
    assert url.startswith("http://127.0.0.1:")
    assert fetch(url) == "from dev"
    assert said("url", "dev", "8000") == url
    with pytest.raises((ConnectionResetError, urllib.error.URLError)):
        fetch(said("url", "dev", "8001"))
    said("url", "dev", "8000", "--close")
    with pytest.raises(urllib.error.URLError, match="refused"):
        fetch(url)
    url = said("url", "dev", "8000")
    said("rm", "dev")
    with pytest.raises(urllib.error.URLError, match="refused"):
        fetch(url)


def test_forward_until_it_is_ended(engine: str) -> None:
    said("create", "dev", "--engine", engine)
    serve_inside("dev")
    forwarding = subprocess.Popen([*SLOPLET, "forward", "dev", "8000:0", "--json"], stdout=subprocess.PIPE, text=True)
    try:
        assert forwarding.stdout is not None
        text = ""
        while not text.rstrip().endswith("]"):
            text += forwarding.stdout.readline()
        (port,) = json.loads(text)
        assert fetch(port["url"]) == "from dev"
        forwarding.send_signal(signal.SIGINT)
        assert forwarding.wait(30) == 0
    finally:
        forwarding.kill()
        forwarding.communicate()
    with pytest.raises(urllib.error.URLError, match="refused"):
        fetch(port["url"])


def test_a_connection_wakes_a_sleeper_and_a_fork_has_its_own(engine: str) -> None:
    if engine != "gvisor":
        pytest.skip("the container engine cannot save processes")
    said("create", "dev", "--engine", engine, "--port", "8000", "--allow", "api.example.com")
    serve_inside("dev")
    url = said("url", "dev", "8000")
    said("pause", "dev")
    assert json.loads(said("ls", "--json"))[0]["state"] == "paused"
    assert fetch(url) == "from dev"
    assert json.loads(said("ls", "--json"))[0]["state"] == "running"
    said("snapshot", "dev", "base")
    said("rollback", "dev", "base")
    assert fetch(url) == "from dev"
    said("fork", "dev", "2")
    urls = [said("url", f"dev-{number}", "8000") for number in (1, 2)]
    assert len({url, *urls}) == 3
    assert [fetch(each) for each in urls] == ["from dev", "from dev"]  # the page was written before
    said("rm", "dev")
    assert fetch(urls[0]) == "from dev"


def test_one_sandbox_reaches_another_by_its_link(engine: str) -> None:
    said("create", "server", "--engine", engine)
    serve_inside("server")
    said("create", "client", "--engine", engine, "--allow", "other.example", "--link", "web=server:8000")
    assert said("exec", "client", "--", "python3", "-c", FETCH, "http://web:8000/").strip() == "from server"
    done = sloplet("exec", "client", "--", "python3", "-c", FETCH, "http://web:8001/")
    assert done.returncode == 1
    assert b"leads to port 8000 only" in done.stderr


def test_nothing_listens_that_was_not_asked_for(engine: str) -> None:
    said("create", "dev", "--engine", engine, "--allow", "api.example.com")
    serve_inside("dev")
    keeper = json.loads(said("info", "dev", "--json"))["keeper_pid"]
    assert _listening(keeper) == []
    said("url", "dev", "8000")
    (made,) = _listening(keeper)  # the positive control
    assert made.startswith("0100007F:")


def _listening(pid: int) -> list[str]:
    """Local addresses that a process of this machine listens on."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in own]
