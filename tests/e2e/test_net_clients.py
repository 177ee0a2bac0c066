"""Real clients through the way out, against real servers: curl, pip, npm, git, requests, Node, psql.

Each runs twice: once with its TLS left alone (the servers' CA is told to it), and once with TLS opened by the host
(``Network(inspect=True)``), where nothing is told to it: the sandbox's own CA has to be trusted everywhere.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from netkit import Internet
from netkit.database import postgres
from netkit.sites import npm_registry, package_index, repositories
from sloplet import Network, Sandbox
from sloplet.engines import registry
from sloplet.portal import portal
from sloplet.results import Result
from sloplet.runtime import embedded_runtime

WEB, INDEX, NPM, GIT, DATABASE, OTHER = (
    f"{name}.clients.example" for name in ("web", "pypi", "npm", "git", "db", "other")
)  # fmt: skip
ALLOWED = [WEB, INDEX, NPM, GIT, f"{DATABASE}:5432"]
CA = "/workspace/servers-ca.pem"
#: How each client is told of a CA; what it needs where TLS is not opened.
TOLD = dict.fromkeys(("CURL_CA_BUNDLE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO"), CA)


@dataclass
class Place:
    """A sandbox, and what its programs are told."""

    box: Sandbox
    net: Internet
    inspected: bool

    def run(self, *argv: str, **more: str) -> Result:
        env = {**({} if self.inspected else TOLD), "PIP_CONFIG_FILE": "/dev/null", **more}
        return self.box.run(list(argv), env=env, timeout=100)

    def said(self, *argv: str, **more: str) -> str:
        result = self.run(*argv, **more)
        assert result.ok, f"{argv}: {result.describe()}\n{result.stdout}\n{result.stderr}\n{result.denied}"
        return str(result.stdout)

    def requests(self, host: str) -> list[str]:
        return [line.request for line in self.box.network.log() if line.name == host and line.request]


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    """With all the servers in it; the embedded runtime's way to the world meanwhile."""
    folder = tmp_path_factory.mktemp("servers")
    with Internet() as net:
        net.name(WEB)
        net.name(OTHER)
        net.site(INDEX, package_index(folder / "index", INDEX))
        net.site(NPM, npm_registry(folder / "npm", NPM))
        net.site(GIT, repositories(folder / "git"), git=True)
        with net.serves(portal().call(embedded_runtime())):
            yield net


@pytest.fixture(scope="module", params=["container", pytest.param("gvisor", marks=pytest.mark.anyone)])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gvisor" and "SLOPLET_TEST_RUNSC" in os.environ:
            patch.setenv("SLOPLET_RUNSC", os.environ["SLOPLET_TEST_RUNSC"])
        probe = registry.load(request.param).probe()
        if not probe.available or not probe.capabilities.egress:
            pytest.skip(f"capability: {request.param} has no egress here: {probe.reason}")
        yield request.param


@pytest.fixture(scope="module", params=[False, True], ids=["untouched", "inspected"])
def place(request: pytest.FixtureRequest, engine: str, internet: Internet) -> Iterator[Place]:
    network = Network(allow=ALLOWED, inspect=request.param)
    with Sandbox(engine=engine, network=network, memory="1g", allow_weaker=True) as box:
        box.files.write(CA, internet.ca_file.read_bytes())
        yield Place(box, internet, request.param)


def needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program, path="/usr/local/bin:/usr/bin:/bin") is None:
            pytest.skip(f"capability: no {program} on this machine for the sandbox to run (scripts/test installs it)")


# -- clients ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def database(internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    internet.name(DATABASE)
    with postgres(internet, DATABASE, tmp_path_factory.mktemp("pg")):
        yield


def test_curl(place: Place) -> None:
    needs("curl")
    assert place.said("curl", "-sS", f"https://{WEB}/") == f"hello from {WEB}\n"
    assert place.said("curl", "-sS", f"http://{WEB}/") == f"hello from {WEB}\n"
    sent = place.said("curl", "-sS", "-d", "a=b", "-H", "X-Mine: yes", f"https://{WEB}/echo?x=1")
    told = json.loads(sent)
    assert (told["method"], told["target"], told["body"]) == ("POST", "/echo?x=1", "a=b")
    assert ["X-Mine", "yes"] in told["headers"]
    assert len(place.said("curl", "-sS", f"https://{WEB}/chunks")) == 71011
    place.box.run("head -c 3m /dev/urandom > big")
    digest = place.said("sha256sum", "big").split()[0]
    assert place.said("curl", "-sS", "-T", "big", f"https://{WEB}/digest") == f"3145728 {digest}\n"
    refused = place.run("curl", "-sS", "-m", "10", f"https://{OTHER}/")
    assert not refused.ok
    assert any(OTHER in text for text in refused.denied)
    seen = {event["sni"] for event in place.net.seen("tls")}
    assert OTHER not in seen
    assert ("POST /echo" in place.requests(WEB)) == place.inspected


def test_websocket(place: Place) -> None:
    program = """
import base64, os, socket, ssl, sys
name = sys.argv[1]
trust = ssl.create_default_context(cafile=os.environ.get("CURL_CA_BUNDLE"))
line = trust.wrap_socket(socket.create_connection((name, 443)), server_hostname=name)
key = base64.b64encode(bytes(16)).decode()
lines = ["GET /ws HTTP/1.1", "Host: " + name, "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
line.sendall("\\r\\n".join([*lines, "Sec-WebSocket-Key: " + key, "", ""]).encode())
head = b""
while not head.endswith(b"\\r\\n\\r\\n"):
    head += line.recv(1)
line.sendall(b"\\x81\\x85\\0\\0\\0\\0hello")
print(head.split()[1].decode(), line.recv(100)[2:].decode())
"""
    assert place.said("python3", "-c", program, WEB) == "101 hello\n"


def test_pip(place: Place) -> None:
    needs("pip3")
    install = ["/usr/bin/python3", "-m", "pip", "install", "-q", "--no-cache-dir", "--disable-pip-version-check"]
    place.said(*install, "--target", "lib", "-i", f"https://{INDEX}/simple/", "tiny-wheel")
    assert (
        place.said("/usr/bin/python3", "-c", "import tiny_wheel; print(tiny_wheel.ANSWER)", PYTHONPATH="lib") == "42\n"
    )
    refused = place.run(*install, "--retries", "0", "--target", "no", "-i", f"https://{OTHER}/simple/", "tiny-wheel")
    assert not refused.ok
    assert any(OTHER in text for text in refused.denied)


def test_npm(place: Place) -> None:
    needs("npm", "node")
    place.box.run("mkdir -p js", check=True)
    options = [
        "--no-audit",
        "--no-fund",
        "--no-update-notifier",
        "--registry",
        f"https://{NPM}/",
        "--cache",
        "/tmp/npm",
    ]
    place.said("npm", "install", "--prefix", "js", *options, "tiny-package")
    assert place.said("node", "-e", "console.log(require('./js/node_modules/tiny-package'))") == "42\n"


def test_node_fetch(place: Place) -> None:
    needs("node")
    script = f"fetch('https://{WEB}/').then(r => r.text()).then(t => process.stdout.write(t))"
    assert place.said("node", "-e", script) == f"hello from {WEB}\n"
    refused = place.run("node", "-e", f"fetch('https://{OTHER}/').then(r => r.text())")
    assert not refused.ok


def test_requests(place: Place) -> None:
    if not place.run("/usr/bin/python3", "-c", "import requests").ok:
        pytest.skip("capability: no requests for /usr/bin/python3 (apt-get install python3-requests)")
    script = (
        "import requests\nwith requests.Session() as s:\n"
        f"  print(s.get('https://{WEB}/').text, s.post('https://{WEB}/echo', json=dict(a=1)).json()['body'], end='')"
    )
    assert place.said("/usr/bin/python3", "-c", script) == f'hello from {WEB}\n {{"a": 1}}'


def test_git(place: Place) -> None:
    needs("git")
    place.said("git", "clone", "-q", f"https://{GIT}/repo.git", "cloned")
    assert place.box.files.read_text("cloned/README") == "first\n"
    assert place.said("git", "-C", "cloned", "log", "--format=%s") == "two\none\n"
    assert place.said("git", "-C", "cloned", "fetch", "--all", "--quiet") == ""
    assert not place.run("git", "clone", "-q", f"https://{OTHER}/repo.git", "not-cloned").ok


@pytest.mark.parametrize("mode", ["disable", "verify-full"])
def test_psql(place: Place, database: None, mode: str) -> None:
    """Not HTTP, and TLS only after some words in the clear: it is relayed as it is, by its name."""
    needs("psql")
    target = f"host={DATABASE} user=someone dbname=postgres sslmode={mode} sslrootcert={CA} connect_timeout=10"
    script = "create temp table t as select generate_series(1, 50000) n; select sum(n), count(*) from t"
    assert place.said("psql", "-qXAt", "-d", target, "-c", script) == "1250025000|50000\n"
    encrypted = place.said(
        "psql", "-qXAt", "-d", target, "-c", "select ssl from pg_stat_ssl where pid = pg_backend_pid()"
    )
    assert encrypted == ("t\n" if mode == "verify-full" else "f\n")
