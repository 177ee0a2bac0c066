"""Headers of a sandbox's requests over HTTP, and through the remote client: values are taken, and never told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from http_kit import Box, made
from server_kit import Served, served
from sloplet import Network, Sandbox
from sloplet.engines import registry

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(180)]

VALUE = "v4lue-that-nobody-is-told"


class _Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = (self.headers.get("X-Token") or "none").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    """A server on this machine's loopback, as sandboxes call it."""
    web = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    yield f"host.sloplet:{web.server_address[1]}"
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


def fetch(place: str) -> list[str]:
    return ["python3", "-c", f"import urllib.request as u; print(u.urlopen('http://{place}/', timeout=20).read())"]


def test_over_http(server: Served, place: str) -> None:
    asked = {"allow": [place], "inspect": "on-demand", "headers": {place: {"X-Token": VALUE}}}
    with made(server, "dev", network=asked) as box:
        _over_http(box, place)


def _over_http(box: Box, place: str) -> None:
    assert VALUE in box.run(fetch(place))["stdout"]
    path = f"{box.path}/network"
    found = box.http.get(path).json()
    assert (found["headers"], found["inspect"]) == ({place: ["X-Token"]}, "on-demand")
    assert VALUE not in box.http.get(box.path).text
    again = box.http.put(path, json=found)
    assert again.status_code == 200, again.text
    assert VALUE in box.run(fetch(place))["stdout"], "what is read can be written, and a value that is known stays"
    changed = box.http.put(path, json={**found, "headers": {place: {"x-token": "another"}}})
    assert changed.status_code == 200, changed.text
    assert "another" not in changed.text
    assert "another" in box.run(fetch(place))["stdout"]
    key = f"x-token@{place}"
    assert box.http.put(f"{box.path}/secrets", json={"values": {key: None}}).status_code == 204
    refused = box.run(fetch(place))
    assert refused["exit_code"] != 0
    assert any("has no value now" in reason for reason in refused["denied"])
    assert box.http.put(f"{box.path}/secrets", json={"values": {key: "third"}}).status_code == 204
    assert "third" in box.run(fetch(place))["stdout"]
    for headers in (
        {place: {"Host": "x"}},
        {place: {"X": f"{VALUE}\r\n"}},
        {"10.0.0.1": {"X": VALUE}},
        {place: {"X": VALUE * 999}},
        {place: {"X": [VALUE]}},
    ):
        wrong = box.http.put(path, json={**found, "headers": headers})
        assert wrong.status_code in (400, 422), wrong.text
        assert VALUE not in wrong.text
    assert box.http.put(path, json={"allow": [place], "inspect": "on-demand"}).status_code == 200
    assert "none" in box.run(fetch(place))["stdout"]


def test_the_remote_client(server: Served, place: str) -> None:
    network = Network(allow=[place], inspect="on-demand", headers={place: {"X-Token": VALUE}})
    with Sandbox(engine="container", network=network, server=server.url, key=server.key) as box:
        assert VALUE in box.run(fetch(place)).stdout
        assert box.network.policy() == network.spec
        box.network.set(Network(allow=[place], inspect="on-demand", headers={place: {"X-Token": "another"}}))
        assert "another" in box.run(fetch(place)).stdout
        box.network.allow("more.example")
        assert "another" in box.run(fetch(place)).stdout
