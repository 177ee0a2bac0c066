"""Time to live and sleep over HTTP, on a real server: set anew, what a key may, files only, without names, restarts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server_kit import Served, end_keepers, served

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(180)]
_PATIENCE = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def create(http: httpx.Client, **asked: Any) -> Any:
    answer = http.post("/v1/sandboxes", json={"engine": "fake", **asked})
    assert answer.status_code == 201, answer.text
    return answer.json()


def set_ttl(http: httpx.Client, box: str, ttl: Any, status: int = 200) -> Any:
    answer = http.put(f"/v1/sandboxes/{box}/ttl", json={"ttl": ttl})
    assert answer.status_code == status, answer.text
    return answer.json()


def run(http: httpx.Client, box: str, command: str) -> str:
    answer = http.post(f"/v1/sandboxes/{box}/exec", json={"command": command})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["stdout"])


def test_set_anew(http: httpx.Client) -> None:
    box = create(http, ttl="1h")["id"]
    made = set_ttl(http, box, "2h")
    assert 7190 < made["expires_at"] - time.time() < 7210
    assert http.get(f"/v1/sandboxes/{box}").json()["expires_at"] == made["expires_at"]
    listed = {item["id"]: item["expires_at"] for item in http.get("/v1/sandboxes").json()["items"]}
    assert listed[box] == made["expires_at"]
    assert set_ttl(http, box, None)["expires_at"] is None
    for wrong in (-1, "soon", [], True, "1000000d"):
        assert set_ttl(http, box, wrong, 422)["status"] == 422
    assert http.put(f"/v1/sandboxes/{box}/ttl", json={}).status_code == 422
    assert set_ttl(http, box, 0)["state"] == "ended"
    assert http.get(f"/v1/sandboxes/{box}").status_code == 404
    assert set_ttl(http, box, 5, 404)["error"] == "SandboxNotFound"


def test_the_limit_of_a_key(server: Served) -> None:
    """A limited key and another one of the same tenant."""
    limited = server.new_key("limited", "--tenant", "short", "--max-ttl", "60s")
    with server.client(limited) as http, server.client(server.new_key("free", "--tenant", "short")) as free:
        box = create(http, on_ttl="pause-disk")
        assert (box["spec"]["ttl"], box["spec"]["longest"]) == (60, 60)
        for asked in (None, 3600):
            assert set_ttl(http, box["id"], asked)["expires_at"] <= time.time() + 60
        assert set_ttl(http, box["id"], 30)["expires_at"] <= time.time() + 30
        assert set_ttl(free, box["id"], 3600)["expires_at"] > time.time() + 3000  # the control
        asleep = set_ttl(http, box["id"], 0)
        assert (asleep["state"], asleep["expires_at"]) == ("paused", None)
        assert run(http, box["id"], "echo awake") == "awake\n"
        assert http.get(f"/v1/sandboxes/{box['id']}").json()["expires_at"] <= time.time() + 60

        mine = create(free)["id"]
        made = free.post(f"/v1/sandboxes/{mine}/snapshots", json={"name": "s"})
        assert made.status_code == 201
        for ttl, status in ((None, 403), (61, 403), (60, 201), ("30s", 201)):
            answer = http.post(f"/v1/sandboxes/{mine}/fork", json={"snapshot": "s", "ttl": ttl})
            assert answer.status_code == status, answer.text
            if status == 201:
                (child,) = answer.json()["items"]
                assert child["expires_at"] <= time.time() + 60
        unlimited = free.post(f"/v1/sandboxes/{mine}/fork", json={"snapshot": "s"}).json()["items"]
        assert unlimited[0]["expires_at"] is None


def test_files_only(http: httpx.Client) -> None:
    box = create(http)["id"]
    run(http, box, "echo kept > note")
    refused = http.post(f"/v1/sandboxes/{box}/pause")
    assert (refused.status_code, refused.json()["error"]) == (422, "UnsupportedOperation")
    info = http.post(f"/v1/sandboxes/{box}/pause", json={"memory": False}).json()
    assert info["state"] == "paused"
    saved = http.get(f"/v1/snapshots/{info['saved']}").json()
    assert (saved["kind"], saved["role"]) == ("disk", "pause")
    assert http.post(f"/v1/sandboxes/{box}/resume").json()["id"] == box
    assert run(http, box, "cat note") == "kept\n"
    for path, body in ((f"sandboxes/{box}/snapshots", {"name": "f"}), ("templates", {"sandbox": box, "name": "t"})):
        made = http.post(f"/v1/{path}", json={**body, "memory": False})
        assert (made.status_code, made.json()["kind"]) == (201, "disk")
    child = create(http, engine="auto", template="t")["id"]
    assert run(http, child, "cat note") == "kept\n"


def test_it_sleeps_at_its_time_s_end_and_through_a_restart(server: Served, http: httpx.Client) -> None:
    """Without a name: by its id it is there, also after its keeper was ended."""
    refused = http.post("/v1/sandboxes", json={"engine": "fake", "on_ttl": "pause"})
    assert (refused.status_code, refused.json()["error"]) == (422, "UnsupportedOperation")
    box = create(http, ttl="300ms", on_ttl="pause-disk")["id"]
    run(http, box, "echo kept > note")
    deadline = time.monotonic() + _PATIENCE
    while (info := http.get(f"/v1/sandboxes/{box}").json())["state"] != "paused":
        assert time.monotonic() < deadline, info
        time.sleep(0.02)
    assert info["expires_at"] is None
    assert run(http, box, "cat note") == "kept\n"
    plain = create(http)["id"]
    end_keepers(server.home)
    states = {item["id"]: item["state"] for item in http.get("/v1/sandboxes").json()["items"]}
    assert (states[box], states[plain]) == ("paused", "dead")
    assert run(http, box, "cat note") == "kept\n"


def test_a_server_that_is_ended_leaves_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("again")
    with served(home) as server:
        key = server.new_key("mine", "--tenant", "mine")
        with server.client(key) as http:
            box = create(http, on_ttl="pause-disk")["id"]
            run(http, box, "echo kept > note")
    with served(home) as server, server.client(key) as http:
        assert http.get(f"/v1/sandboxes/{box}").json()["state"] == "paused"
        assert run(http, box, "cat note") == "kept\n"
