"""What sandboxes may reach, over HTTP: policies, the log, questions; and what no key may open."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from http_kit import Box, made
from server_kit import Served, served
from sloplet.engines import registry

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(180)]


class _Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"hello from the host"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server on this machine's loopback, which is the operator's to open."""
    web = ThreadingHTTPServer(("127.0.0.1", 0), _Hello)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    yield web.server_address[1]
    web.shutdown()
    thread.join()
    web.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    probe = registry.load("container").probe()
    if not probe.available or not probe.capabilities.egress:
        pytest.skip(f"capability: container: {probe.reason or probe.capabilities.no_egress}")
    with served(tmp_path_factory.mktemp("served"), "--allow-private", "host.sloplet") as running:
        yield running


@pytest.fixture(scope="module")
def box(server: Served) -> Iterator[Box]:
    with made(server, "dev", network={"allow": []}) as found:
        yield found


def fetch(box: Box, url: str) -> dict[str, Any]:
    script = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=20).read().decode())"
    return box.run(["python3", "-c", script])


def policy(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_policy_log_and_learned(box: Box, port: int) -> None:
    url, rule = f"http://host.sloplet:{port}/", f"host.sloplet:{port}"
    refused = fetch(box, url)
    assert refused["exit_code"] != 0
    assert any(rule in reason for reason in refused["denied"])
    path = f"{box.path}/network"
    assert policy(box.http.put(path, json={"allow": [rule], "deny": ["evil.example"]}))["allow"] == [rule]
    assert fetch(box, url)["stdout"] == "hello from the host\n"
    changed = policy(box.http.patch(path, json={"add_allow": ["pypi.org"], "remove": ["evil.example"]}))
    assert (changed["allow"], changed["deny"]) == ([rule, "pypi.org"], [])
    assert policy(box.http.get(path)) == changed
    assert policy(box.http.put(path, json=changed)) == changed, "what is read can be written"
    log = box.get("/network/log").json()["items"]
    assert [(row["verdict"], row["name"], row["port"]) for row in log] == [
        ("deny", "host.sloplet", port),
        ("allow", "host.sloplet", port),
    ]
    assert log[1]["bytes_in"] > 0
    after = box.get("/network/log", params={"after": log[0]["seq"], "limit": 1}).json()["items"]
    assert [row["seq"] for row in after] == [log[1]["seq"]]
    assert policy(box.get("/network/learned"))["allow"] == [rule]
    policy(box.http.patch(path, json={"allow": []}))
    assert fetch(box, url)["exit_code"] != 0


@pytest.mark.parametrize("rule", ["127.0.0.1:80", "10.0.0.0/8", "169.254.169.254", "[::1]:80", "192.168.0.1:443"])
def test_what_no_key_may_open(box: Box, rule: str) -> None:
    before = policy(box.get("/network"))
    for answer in (
        box.http.post("/v1/sandboxes", json={"engine": "container", "network": {"allow": [rule]}}),
        box.http.put(f"{box.path}/network", json={"allow": [rule]}),
        box.http.patch(f"{box.path}/network", json={"add_allow": [rule]}),
        box.http.patch(f"{box.path}/network", json={"allow": [rule]}),
    ):
        assert answer.status_code == 403, answer.text
        assert answer.json()["error"] == "NotAllowed"
    assert policy(box.get("/network")) == before


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("PUT", {"allow": ["no rule!"]}),
        ("PUT", {"nonsense": 1}),
        ("PUT", {"connections": 0}),
        ("PUT", {"mode": "everything"}),
        ("PATCH", {"remove": ["not.there"]}),
        ("PATCH", {"add_allow": "pypi.org"}),
        ("PATCH", {"add_allow": ["no rule!"]}),
        ("PATCH", {"mode": "learn"}),
    ],
)
def test_nonsense(box: Box, method: str, body: dict[str, Any]) -> None:
    before = policy(box.get("/network"))
    answer = box.http.request(method, f"{box.path}/network", json=body)
    assert answer.status_code == 422, answer.text
    assert policy(box.get("/network")) == before


def test_one_without_a_network_gets_none(server: Served) -> None:
    with made(server, "closed") as closed:
        assert policy(closed.get("/network"))["mode"] == "none"
        answer = closed.http.put(f"{closed.path}/network", json={"allow": ["pypi.org"]})
        assert answer.status_code == 422, answer.text


def test_questions(server: Served) -> None:
    """By a WebSocket, and by server-sent events."""
    with made(server, "asks", network={"ask": True}) as box:
        with box.websocket("/network/asks") as socket:
            pid = box.post("/processes", {"command": ["python3", "-c", _CONNECT]}).json()["pid"]
            ask = json.loads(socket.recv(30))
            assert (ask["name"], ask["port"], ask["sandbox"]) == ("one.example", 8080, box.get("").json()["id"])
            assert box.post(f"/network/asks/{ask['id']}", {"verdict": "never"}).status_code == 204
            assert box.post(f"/network/asks/{ask['id']}", {"verdict": "once"}).status_code == 204  # let be
            assert box.post(f"/network/asks/{ask['id']}", {"verdict": "perhaps"}).status_code == 422
            assert box.wait_for_end(pid)["exit_code"] == 3
        assert policy(box.get("/network"))["deny"] == ["one.example:8080"]
        with box.http.stream("GET", f"{box.path}/network/asks") as answer:
            lines = answer.iter_lines()
            script = _CONNECT.replace("one.example", "two.example")
            box.post("/processes", {"command": ["python3", "-c", script]})
            told = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
            assert told["name"] == "two.example"
            assert box.post(f"/network/asks/{told['id']}", {"verdict": "always"}).status_code == 204
        assert policy(box.get("/network"))["allow"] == ["two.example:8080"]
        # Nobody listens any more: what is undecided is refused at once.
        script = _CONNECT.replace("one.example", "three.example")
        assert box.run(["python3", "-c", script])["exit_code"] == 3


_CONNECT = """
import socket, sys
try:
    sys.exit(0 if socket.create_connection(("one.example", 8080), timeout=60).recv(1) else 3)
except OSError:
    sys.exit(3)
"""
