"""``sloplet serve --e2b``: what is said is what works, with each kind of certificate, beside what was there before."""

from __future__ import annotations

import json
import os
import shlex
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import httpx
import pytest

from server_kit import environment, served
from sloplet.cli import serve_e2b
from sloplet.cli.serve import serve, settings_of
from sloplet.errors import ServerError, SpecError
from sloplet.server import tls
from sloplet.server.e2b.keys import from_e2b, to_e2b
from sloplet.server.e2b.settings import domain_of
from sloplet.server.run import listen
from sloplet.server.settings import ServeSettings
from sloplet.state.home import Home

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(120)]


def options(*arguments: str) -> dict[str, Any]:
    parsed = serve.make_context("serve", list(arguments)).params
    del parsed["as_json"]
    return parsed


def ask(port: int, name: str, path: str, context: ssl.SSLContext, **headers: str) -> httpx.Response:
    with httpx.Client(verify=context, trust_env=False, timeout=20) as client:
        return client.get(
            f"https://127.0.0.1:{port}{path}", headers={"Host": f"{name}:{port}", **headers},
            extensions={"sni_hostname": name},
        )  # fmt: skip


def test_both_ways_at_once(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with served(home, "--e2b", "--e2b-port", "0") as server:
        ways = server.told["e2b"]
        domain = ways["domain"]
        assert ways["url"] == {
            **dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL"), server.url),
            **{name: value for name, value in domain.items() if name != "E2B_DOMAIN"},  # for what get_host() names
        }
        name, _, port = domain["E2B_DOMAIN"].partition(":")
        assert name == "sbx.localhost"
        assert f":{port}" not in server.url
        assert domain["E2B_API_KEY"] == to_e2b(server.key)
        for trusted in (domain["SSL_CERT_FILE"], domain["NODE_EXTRA_CA_CERTS"]):
            context = ssl.create_default_context(cafile=trusted)
            key = {"X-API-Key": domain["E2B_API_KEY"]}
            assert ask(int(port), f"api.{name}", "/v2/sandboxes", context, **key).json() == []
            gone = ask(int(port), f"49983-zzzzzzzzzzzz.{name}", "/health", context)
            assert gone.json()["message"] == "The sandbox was not found"
        with server.client() as client:  # what was there before is as it was
            assert client.get("/v1/sandboxes").status_code == 200
            assert client.get("/healthz").status_code == 200
        with httpx.Client(trust_env=False, timeout=20) as client, pytest.raises(httpx.ConnectError):
            client.get(f"https://127.0.0.1:{port}/healthz")
        with socket.create_connection(("127.0.0.1", int(port)), 20) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP/")
        assert server.stop() == 0
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(port)), 5)


def test_the_lines_can_be_copied(tmp_path: Path) -> None:
    """As people see them: shell, with both ways, and the key."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    command = [sys.executable, "-m", "sloplet.cli", "serve", "--port", "0", "--e2b", "--e2b-port", "0"]
    process = subprocess.Popen(command, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    lines: list[str] = []
    while (
        not lines or not lines[-1].startswith("export E2B_API_KEY") or sum("E2B_API_KEY" in line for line in lines) < 2
    ):
        lines.append(process.stdout.readline().decode().rstrip("\n"))
        assert process.poll() is None
    process.terminate()
    _, told = process.communicate(timeout=30)
    names = dict(shlex.split(line)[1].partition("=")[::2] for line in lines if line.startswith("export "))
    assert from_e2b(names["E2B_API_KEY"]) == names["SLOPLET_KEY"]
    assert names["E2B_API_URL"] == names["SLOPLET_URL"]
    assert names["E2B_DOMAIN"].startswith("sbx.localhost:")
    assert Path(names["SSL_CERT_FILE"]).is_file()
    assert ("PYTHONPATH" in names) == ("NODE_OPTIONS" in names)
    assert [line for line in lines if line.startswith("#")] == [
        "# E2B's clients, by URL:", "# E2B's clients, by name and over TLS (instead of by URL):"
    ]  # fmt: skip
    assert b"localhost" in told


def test_python_finds_names_below_localhost(tmp_path: Path) -> None:
    """By a sitecustomize that hides no other one."""
    for folder, text in (("ours", serve_e2b._SITE), ("theirs", "import builtins\nbuiltins.theirs = __name__\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sitecustomize.py").write_text(text)
    program = """if True:
        import asyncio, socket
        for name in ("8000-abc.sbx.localhost", b"api.sbx.LOCALHOST.", "127.0.0.1"):
            assert socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)[0][4] == ("127.0.0.1", 80)
            assert asyncio.run(asyncio.wait_for(look(name), 5))[0][4] == ("127.0.0.1", 80)
        assert theirs == "sitecustomize"
    """
    look = "async def look(name):\n    return await asyncio.get_running_loop().getaddrinfo(name, 80)\n"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'ours'}:{tmp_path / 'theirs'}"}
    subprocess.run([sys.executable, "-c", look + program], env=env, check=True, timeout=60)


def test_the_bundle_has_the_systems_authorities_and_ours_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home").open()
    authority, _ = tls.make_own(home, ["localhost"])
    bundle = tls.make_bundle(home)
    system = len(ssl.create_default_context().get_ca_certs())
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))  # the server is started from a shell that has the lines
    assert tls.make_bundle(home) == bundle
    assert bundle.read_bytes().count(authority.read_bytes()) == 1
    found = ssl.create_default_context(cafile=str(bundle)).get_ca_certs()
    assert len(found) == system + 1


def test_a_server_with_tls_of_its_own_needs_no_second_port(tmp_path: Path) -> None:
    with served(tmp_path / "home", "--tls", "--e2b", "--domain", "boxes.test") as server:
        ways = server.told["e2b"]
        port = int(server.url.rpartition(":")[2])
        assert ways["domain"]["E2B_DOMAIN"] == f"boxes.test:{port}"
        assert ways["url"]["SSL_CERT_FILE"] == ways["domain"]["SSL_CERT_FILE"]
        context = ssl.create_default_context(cafile=ways["domain"]["SSL_CERT_FILE"])
        key = {"X-API-Key": to_e2b(server.key)}
        assert ask(port, "api.boxes.test", "/v2/sandboxes", context, **key).json() == []
        assert ask(port, "49983-zzzzzzzzzzzz.boxes.test", "/health", context).status_code == 502
        assert ask(port, "boxes.test", "/v1/sandboxes", context, **key).status_code == 200


def test_behind_a_proxy(tmp_path: Path) -> None:
    """It is the proxy that has the certificate, and the names."""
    arguments = ("--e2b", "--url", "https://boxes.test", "--domain", "boxes.test")
    with served(tmp_path / "home", *arguments) as server:
        ways = server.told["e2b"]
        assert ways["domain"] == {"E2B_DOMAIN": "boxes.test", "E2B_API_KEY": to_e2b(server.key)}
        assert ways["url"]["E2B_API_URL"] == "https://boxes.test"


def test_without_it(tmp_path: Path) -> None:
    with served(tmp_path / "home", "--no-e2b") as server:
        assert "e2b" not in server.told
        with server.client() as client:
            assert client.get("/v2/sandboxes").status_code == 404
            assert client.get("/v1/sandboxes", headers={"Host": "api.sbx.localhost"}).status_code == 403
            named = client.get("/health", headers={"Host": "49983-zzzzzzzzzzzz.localhost"})
            assert named.status_code == 404
            at = {"E2b-Sandbox-Id": "zzzzzzzzzzzz", "E2b-Sandbox-Port": "8000"}
            assert client.get("/v1/sandboxes", headers=at).status_code == 200


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-e2b", "--e2b"], ["--no-e2b", "--e2b-engine", "gvisor"], ["--no-e2b", "--e2b-pool", "0"],
        ["--no-e2b", "--e2b-prepare"], ["--e2b-port", "7668"], ["--e2b", "--tls", "--e2b-port", "7668"],
        ["--e2b-pool", "-1"], ["--e2b-port", "70000"],
    ],
)  # fmt: skip
def test_options_that_make_no_sense(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises((SpecError, click.UsageError)):
        settings_of(Home(tmp_path / "home").open(), options(*arguments))


def test_options_become_settings(tmp_path: Path) -> None:
    home = Home(tmp_path / "home").open()
    plain = settings_of(home, options("--e2b-engine", "container", "--e2b-pool", "3", "--e2b-prepare")).e2b
    assert plain is not None
    assert (plain.engine, plain.pool, plain.prepare, plain.port) == ("container", 3, True, None)
    assert not (home.path / "server").exists()
    asked = settings_of(home, options("--e2b")).e2b
    assert asked is not None
    assert asked.port == 7668
    assert Path(asked.certificate).is_file()
    assert settings_of(home, options("--no-e2b")).e2b is None


def test_a_port_that_is_taken_names_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ServerError) as caught:
            listen(ServeSettings(), taken.getsockname()[1], "--e2b-port")
    assert "--e2b-port" in (caught.value.hint or "")


@pytest.mark.parametrize(("domain", "names"), [("localhost", "sbx.localhost"), ("a.test", "a.test")])
def test_no_certificate_is_for_names_below_a_single_word(domain: str, names: str) -> None:
    assert domain_of(domain) == names
    assert {names, f"*.{names}"} <= set(tls.names_of(ServeSettings(domain=domain)))


def test_a_key_as_e2b_has_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sloplet.cli", "key", "create", "--name"]
    given: dict[str, Any] = {"env": environment(tmp_path / "home"), "capture_output": True, "check": True}
    text = subprocess.run([*command, "a", "--e2b"], **given).stdout.decode().strip()
    assert from_e2b(text).startswith("slp_")
    assert all(letter in "0123456789abcdef" for letter in text.removeprefix("e2b_"))  # older clients check
    told = json.loads(subprocess.run([*command, "b", "--json"], **given).stdout)
    assert from_e2b(told["e2b_key"]) == told["key"]
