"""How a server starts: where it listens, what it makes on the first start, TLS, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
import pytest

from server_kit import Served, end_keepers, environment, served, start
from sloplet.cli.serve import serve, settings_of
from sloplet.errors import ServerError, SpecError
from sloplet.server.tls import make_context, make_own, own_addresses
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


def refused(home: Path, *arguments: str) -> dict[str, str]:
    """What it says, when it does not start."""
    command = [sys.executable, "-m", "sloplet.cli", "serve", "--port", "0", "--json", *arguments]
    done = subprocess.run(command, env=environment(home), capture_output=True, timeout=60)
    assert done.returncode == 125
    assert done.stdout == b""
    found: dict[str, str] = json.loads(done.stderr.splitlines()[-1])
    return found


@contextmanager
def running(home: Path, *arguments: str, key: str = "", port: int = 0) -> Iterator[Served]:
    """A server that holds no sandbox."""
    server = start(home, arguments, key=key, port=port)
    try:
        yield server
    finally:
        server.stop()
        assert server.process.stdout is not None
        server.process.stdout.close()


def listening_on(pid: int) -> set[str]:
    return {address for address, _ in listening(pid)}


def listening(pid: int) -> set[tuple[str, int]]:
    """The local addresses and ports that a process listens on."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                raw = bytes.fromhex(address)
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.add((socket.inet_ntop(family, words), int(port, 16)))
    return found


def test_by_default_only_this_machine_reaches_it(tmp_path: Path) -> None:
    with running(tmp_path / "home") as server:
        assert listening_on(server.pid) == {"127.0.0.1"}
        assert urlsplit(server.url).hostname == "127.0.0.1"
        with server.client(key="") as client:
            assert client.get("/v1/me").status_code == 401
            assert client.get("/healthz").json()["status"] == "ok"
            assert client.get("/readyz").status_code == 200
        with server.client() as client:
            assert client.get("/v1/me").json()["admin"] is True


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_others_reach_it_by_tls_only(tmp_path: Path, host: str) -> None:
    said = refused(tmp_path / "home", "--host", host)
    assert said["error"] == "SpecError"
    assert "--tls" in said["hint"]
    assert "--insecure" in said["hint"]
    assert not (tmp_path / "home" / "server" / "audit.jsonl").exists()


def test_unless_that_is_meant(tmp_path: Path) -> None:
    with running(tmp_path / "home", "--host", "0.0.0.0", "--insecure") as server:
        port = urlsplit(server.url).port
        for address in {"127.0.0.1", *(each for each in own_addresses() if ":" not in each)}:
            answer = httpx.get(
                f"http://{address}:{port}/v1/me", headers={"X-API-Key": server.key}, trust_env=False, timeout=20
            )
            assert answer.status_code == 200, address  # an address of this machine is its name


def test_the_first_start_makes_a_key_and_later_ones_do_not(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with running(home) as first:
        key = first.key
        assert key.startswith("slp_")
        assert "already" in refused(home)["message"]  # one server a home
    with running(home, key="none") as second:
        assert second.key == "none"
        with second.client(key) as client:
            assert client.get("/v1/me").status_code == 200


def test_a_start_that_fails_makes_no_key(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused(home, "--port", str(taken.getsockname()[1]))
    assert "cannot listen" in said["message"]
    listed = subprocess.run(
        [sys.executable, "-m", "sloplet.cli", "key", "ls", "-a", "--json"], env=environment(home), capture_output=True
    )
    assert json.loads(listed.stdout) == []


def test_a_port_for_ssh_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused(tmp_path / "home", "--ssh-port", str(taken.getsockname()[1]))
    assert "cannot listen for SSH" in said["message"]
    assert "--ssh-port" in said["hint"]


def test_without_the_package_for_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "asyncssh.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'asyncssh'\", name='asyncssh')\n"
    )
    said = refused(tmp_path / "home", "--ssh-port", "0")
    assert "asyncssh" in said["message"]
    assert "sloplet[server]" in said["hint"]


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    said = refused(tmp_path / "home", "--host", "192.0.2.1", "--tls")
    assert "cannot listen" in said["message"]
    assert "--host" in said["hint"]


def test_what_people_see(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sloplet.cli", "serve", "--port", "0", "--log-format", "text"]
    process = subprocess.Popen(
        command, env=environment(tmp_path / "home"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 0
    assert lines[0].startswith("export SLOPLET_URL=http://127.0.0.1:")
    assert lines[1].startswith("export SLOPLET_KEY=slp_")
    key = lines[1].strip().partition("=")[2]
    assert "key create" in told
    assert "curl" in told
    assert key not in told  # stderr is kept in logs
    assert "info stopping" in told


def test_behind_a_proxy(tmp_path: Path) -> None:
    home = tmp_path / "home"
    front = ("--url", "https://sandbox.test", "--trust-proxy", "127.0.0.1")
    with running(home, *front) as server:
        assert server.url == "https://sandbox.test"
        port = next(iter(listening_ports(server.pid)))
        headers = {"Host": "sandbox.test", "X-Forwarded-For": "198.51.100.1, 203.0.113.9", "X-API-Key": server.key}
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/audit", headers=headers, trust_env=False, timeout=20)
        assert answer.status_code == 200
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/audit", headers=headers, trust_env=False, timeout=20)
        assert {line["address"] for line in answer.json()["items"]} == {"203.0.113.9"}  # as the proxy saw it
    with running(home, key=server.key) as server:
        with server.client() as client:
            client.get("/v1/me", headers={"X-Forwarded-For": "203.0.113.77"})
            lines = client.get("/v1/audit").json()["items"]
    assert "203.0.113.77" not in {line["address"] for line in lines}  # nobody's word


def listening_ports(pid: int) -> set[int]:
    return {port for _, port in listening(pid)}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tls-key", "x"],
        ["--tls", "--tls-cert", "x"],
        ["--origin", "*"],
        ["--origin", "null"],
        ["--origin", "https://a/b"],
        ["--name", "a b"],
        ["--domain", "*.x"],
        ["--url", "ftp://x"],
        ["--host", "no such host"],
        ["--max-upload", "much"],
        ["--port", "70000"],
        ["--trust-proxy", "*"],
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises((SpecError, click.UsageError)):
        settings_of(Home(tmp_path / "home").open(), options(*arguments))
    assert not (tmp_path / "home" / "server").exists()


def options(*arguments: str) -> dict[str, Any]:
    parsed = serve.make_context("serve", list(arguments)).params
    del parsed["as_json"]
    return parsed


def test_options_become_settings(tmp_path: Path) -> None:
    words = "--host localhost --name A.Example.org. --name [::1] --origin https://UI.example.org:8443/ --no-mcp"
    found = settings_of(Home(tmp_path / "home").open(), options(*words.split(), "--url", "https://s.example.org/"))
    assert found.loopback
    assert found.names == ("a.example.org", "::1", "s.example.org")
    assert found.origins == ("https://ui.example.org:8443",)
    assert found.url == "https://s.example.org"
    assert not found.mcp


# -- TLS ------------------------------------------------------------------------------------


def test_tls_of_its_own(tmp_path: Path) -> None:
    home = tmp_path / "home"
    arguments = ("--tls", "--host", "0.0.0.0", "--name", "sandbox.test", "--domain", "boxes.test")
    with running(home, *arguments) as server:
        assert server.url.startswith("https://sandbox.test:")
        port = urlsplit(server.url).port
        ca = home / "server" / "tls" / "ca.pem"
        context = ssl.create_default_context(cafile=str(ca))
        key = {"X-API-Key": server.key}
        with httpx.Client(verify=context, trust_env=False, headers=key, timeout=20) as client:
            assert client.get(f"https://127.0.0.1:{port}/v1/me").status_code == 200
            assert client.get(f"https://localhost:{port}/v1/me").status_code == 200
        with httpx.Client(trust_env=False, timeout=20) as client:  # who has not been told trusts it not
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                client.get(f"https://127.0.0.1:{port}/healthz")
        names = _names(context, port or 0, "sandbox.test")
        assert {"sandbox.test", "boxes.test", "*.boxes.test", "localhost", "127.0.0.1", "::1"} <= {
            _plain(name) for name in names
        }
        before = (home / "server" / "tls" / "server.pem").read_bytes(), ca.read_bytes()
        plain = socket.create_connection(("127.0.0.1", port or 0), 20)
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP/1.1 200")
        plain.close()
    for path in (home / "server" / "tls").iterdir():
        assert path.stat().st_mode & 0o077 == 0 or path.name == "ca.pem"
    settings_of(Home(home), options(*arguments))
    assert before == ((home / "server" / "tls" / "server.pem").read_bytes(), ca.read_bytes())
    settings_of(Home(home), options(*arguments, "--name", "other.test"))
    assert ca.read_bytes() == before[1]  # who trusts it trusts the new names, too
    assert (home / "server" / "tls" / "server.pem").read_bytes() != before[0]


def _names(context: ssl.SSLContext, port: int, name: str) -> list[str]:
    with socket.create_connection(("127.0.0.1", port), 20) as link:
        with context.wrap_socket(link, server_hostname=name) as secure:
            found = secure.getpeercert()
            assert found is not None
            assert secure.version() in ("TLSv1.2", "TLSv1.3")
    return [str(entry[1]) for entry in found["subjectAltName"] if entry[0] in ("DNS", "IP Address")]


def _plain(name: str) -> str:
    return "::1" if name == "0:0:0:0:0:0:0:1" else name


def test_what_is_made_is_nobody_elses(tmp_path: Path) -> None:
    """Whatever the umask: the folders are the server's own from the start, and so are its keys."""
    before = os.umask(0)
    try:
        _, pair = make_own(Home(tmp_path / "home").open(), ["localhost"])
    finally:
        os.umask(before)
    for each in (pair, pair.with_name("ca.key"), pair.parent, pair.parent.parent, tmp_path / "home"):
        assert each.stat().st_mode & 0o077 == 0, each


def test_a_certificate_of_the_operators(tmp_path: Path) -> None:
    authority, pair = make_own(Home(tmp_path / "authority").open(), ["localhost", "127.0.0.1"])
    text = pair.read_text()
    (tmp_path / "cert.pem").write_text(text[: text.index("-----BEGIN PRIVATE KEY")])
    (tmp_path / "key.pem").write_text(text[text.index("-----BEGIN PRIVATE KEY") :])
    files = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with running(tmp_path / "home", *files) as server:
        context = ssl.create_default_context(cafile=str(authority))
        with httpx.Client(verify=context, trust_env=False, timeout=20) as client:
            assert client.get(server.url + "/healthz").status_code == 200
    with pytest.raises(ServerError):
        make_context(str(tmp_path / "cert.pem"), str(tmp_path / "nonexistent"))
    (tmp_path / "key.pem").write_text("nonsense")
    assert refused(tmp_path / "home", *files)["error"] == "ServerError"


# -- what a machine can lack ------------------------------------------------------------------


def test_few_open_files_and_many_idle_connections(tmp_path: Path) -> None:
    """GAUNTLET R-05: it answers 503 or refuses, and recovers by itself."""
    home = tmp_path / "home"
    limited = f"ulimit -n 64 && exec {sys.executable} -m sloplet.cli serve --port 0 --json --allow-fake"
    log = tmp_path / "log"
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            ["/bin/sh", "-c", limited], env=environment(home), stdout=subprocess.PIPE, stderr=errors
        )
    assert process.stdout is not None
    text = b""
    while not text.rstrip().endswith(b"}"):
        line = process.stdout.readline()
        assert line, log.read_text()
        text += line
    told = json.loads(text)
    server = Served(process, home, told["url"], told["key"], [], log)
    try:
        parts = urlsplit(server.url)
        idle = []
        for _ in range(500):
            try:
                idle.append(socket.create_connection((parts.hostname or "", parts.port or 0), 5))
            except OSError:
                break  # refused is fine
        slow = [link for number, link in enumerate(idle) if number % 2]
        for link in slow:
            try:
                link.sendall(b"GET /v1/me HTTP/1.1\r\nHost: localhost\r\nX: ")
            except OSError:
                pass
        statuses = []
        for _ in range(20):  # while they are all there
            try:
                with server.client() as client:
                    statuses.append(client.get("/v1/me", timeout=10).status_code)
            except httpx.TransportError:
                statuses.append(0)
        assert set(statuses) <= {200, 503, 0}
        assert 200 in statuses, statuses
        for link in idle:
            link.close()
        with server.client() as client:  # as if nothing had been
            assert [client.get("/v1/me").status_code for _ in range(10)] == [200] * 10
            made = client.post("/v1/sandboxes", json={"engine": "fake", "name": "after"})
            assert made.status_code == 201, made.text
            assert client.delete("/v1/sandboxes/after").status_code == 204
        assert process.poll() is None
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 50
    finally:
        server.stop()
        process.stdout.close()
        end_keepers(home)


def test_served_leaves_nothing(tmp_path: Path) -> None:
    with served(tmp_path / "home") as server, server.client() as client:
        assert client.post("/v1/sandboxes", json={"engine": "fake"}).status_code == 201
    assert not (tmp_path / "home" / "run" / "keeper.sock").exists()
