"""Operating a server: keys, quotas, metrics, audit, backups, logs, over HTTP and by the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from server_kit import Served, end_keepers, environment, served, start

pytestmark = pytest.mark.anyone

FAKE = {"engine": "fake"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("operated") / "home") as found:
        yield found


@pytest.fixture(scope="module")
def admin(server: Served) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def new_client(server: Served, admin: httpx.Client, name: str, **limits: Any) -> httpx.Client:
    """A key's, which is made over HTTP."""
    made = admin.post("/v1/keys", json={"name": name, "limits": limits})
    assert made.status_code == 201, made.text
    return server.client(made.json()["key"])


def cli(server: Served, *words: str) -> str:
    command = [sys.executable, "-m", "sloplet.cli", *words]
    return subprocess.run(
        command, env=environment(server.home), capture_output=True, text=True, check=True, timeout=60
    ).stdout


# -- keys and quotas ------------------------------------------------------------------------


def test_keys_over_http(server: Served, admin: httpx.Client) -> None:
    with new_client(server, admin, "one", max_memory="1g", max_ttl=60) as client:
        me = client.get("/v1/me").json()
        assert (me["name"], me["tenant"], me["admin"], me["limits"]["max_memory"]) == ("one", "one", False, 1 << 30)
        for method, path in (
            ("GET", "/v1/keys"),
            ("GET", "/v1/tenants"),
            ("POST", "/v1/backup"),
            ("DELETE", "/v1/keys/one"),
        ):
            assert client.request(method, path).status_code == 403
        assert client.post("/v1/keys", json={"name": "mine", "admin": True}).status_code == 403
        listed = admin.get("/v1/keys").json()["items"]
        assert {key["name"] for key in listed} >= {"admin", "one"}
        assert "slp_" not in json.dumps(listed)
        assert admin.post("/v1/keys", json={"name": "one"}).status_code == 422
        assert admin.post("/v1/keys", json={"name": "x", "limits": {"max_memroy": 1}}).status_code == 422
        assert admin.delete("/v1/keys/one").status_code == 204
        assert client.get("/v1/me").status_code == 401  # at once: it was this server that did it
        assert admin.delete("/v1/keys/one").status_code == 404


def test_a_revoked_key_loses_what_it_has_open(server: Served, admin: httpx.Client) -> None:
    with new_client(server, admin, "leaver") as client:
        headers = {"Authorization": client.headers["Authorization"]}
        assert client.post("/v1/sandboxes", json={**FAKE, "name": "box"}).status_code == 201
        place = server.url.replace("http", "ws") + "/v1/sandboxes/box/exec/ws"
        with connect(place, additional_headers=headers, proxy=None) as socket:
            socket.send(json.dumps({"command": "sleep 100"}))
            assert json.loads(socket.recv(10))["type"] == "started"
            with client.stream("POST", "/v1/sandboxes/box/exec/stream", json={"command": "sleep 100"}) as events:
                pieces = events.iter_raw()
                assert b"started" in next(pieces)
                assert admin.delete("/v1/keys/leaver").status_code == 204
                assert b"exit" not in b"".join(pieces)
            with pytest.raises(ConnectionClosed) as closed:
                deque(iter(lambda: socket.recv(10), None), maxlen=0)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008
    assert admin.get("/v1/sandboxes/box", headers={"Sloplet-Tenant": "leaver"}).json()["state"] == "running"


def test_creates_at_once_pass_no_limit_together(server: Served, admin: httpx.Client) -> None:
    with new_client(server, admin, "ci", max_sandboxes=20) as client, ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/sandboxes", json=FAKE), range(50)))
        assert Counter(answer.status_code for answer in answers) == {201: 20, 429: 30}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"] == "QuotaExceeded"
        assert "20" in refused.json()["detail"]
        assert refused.headers["retry-after"]
        made = [answer.json()["id"] for answer in answers if answer.status_code == 201]
        assert client.delete(f"/v1/sandboxes/{made[0]}").status_code == 204
        assert client.post("/v1/sandboxes", json=FAKE).status_code == 201
        fork = client.post(f"/v1/sandboxes/{made[1]}/fork", json={"count": 2})
        assert fork.status_code in (422, 429), fork.text
        assert client.get("/v1/me").json()["used"]["sandboxes"] == 20


@pytest.mark.parametrize(("limit", "value"), [("max_memory", "1g"), ("max_cpus", 2.5), ("max_disk", "2g")])
def test_what_limits_add_up_to(server: Served, admin: httpx.Client, limit: str, value: object) -> None:
    """Two with the usual limits: 512m, one processor, 1g of disk."""
    what = limit.removeprefix("max_")
    with new_client(server, admin, f"sum-{what}", **{limit: value}) as client:
        assert [client.post("/v1/sandboxes", json=FAKE).status_code for _ in range(2)] == [201, 201]
        refused = client.post("/v1/sandboxes", json=FAKE)
        assert (refused.status_code, refused.json()["error"]) == (429, "QuotaExceeded")
        assert f"of {what}" in refused.json()["detail"]


def test_what_ended_by_itself_is_not_counted(server: Served, admin: httpx.Client) -> None:
    with new_client(server, admin, "brief", max_sandboxes=1) as client:
        assert client.post("/v1/sandboxes", json={**FAKE, "ttl": 0.5}).status_code == 201
        deadline = time.monotonic() + 10
        while (answer := client.post("/v1/sandboxes", json=FAKE)).status_code != 201:
            assert answer.status_code == 429
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_turns_to_make_sandboxes(tmp_path: Path) -> None:
    """One at a time: those that come meanwhile wait, and all are made."""
    with served(tmp_path / "home", "--max-creating", "1") as narrow, narrow.client() as client:
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda _: client.post("/v1/sandboxes", json=FAKE), range(20)))
        assert {answer.status_code for answer in answers} == {201}


# -- what is told ------------------------------------------------------------------------------


def test_metrics(server: Served, admin: httpx.Client) -> None:
    with new_client(server, admin, "seen") as client:
        assert client.post("/v1/sandboxes", json={**FAKE, "name": "box"}).status_code == 201
        own = client.get("/metrics")
        assert own.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'sloplet_sandboxes_cpus{tenant="seen"} 1' in own.text
        assert set(re.findall(r'tenant="([^"]*)"', own.text)) == {"seen"}
        assert "http_requests" not in own.text
    text = admin.get("/metrics").text
    for line in text.splitlines():
        assert re.match(
            r'(# (HELP|TYPE) [a-z_]+ .+|[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [-+0-9.e]+)\Z', line
        ), line
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert int(found['sloplet_http_requests_total{method="POST",route="/v1/sandboxes",status="201"}']) >= 1
    assert int(found['sloplet_http_request_seconds_count{route="/v1/sandboxes"}']) >= 1
    assert int(found["process_resident_memory_bytes"]) > 1 << 20
    assert int(found["process_open_fds"]) > 5
    assert int(found["sloplet_keepers"]) >= 1
    assert not [name for name in found if "/v1/sandboxes/box" in name]  # routes, not paths: bounded


def test_audit(server: Served, admin: httpx.Client) -> None:
    with new_client(server, admin, "watched") as client:
        made = client.post("/v1/sandboxes", json={**FAKE, "name": "box"})
        secret = {"command": ["echo", "sesame-1234"], "env": {"TOKEN": "sesame-5678"}, "stdin": "sesame-9"}
        ran = client.post("/v1/sandboxes/box/exec", json=secret)
        assert ran.status_code == 200, ran.text
        assert client.get("/v1/keys").status_code == 403
        assert client.get("/v1/sandboxes/nothing").status_code == 404
        headers = {"Authorization": client.headers["Authorization"]}
        place = server.url.replace("http", "ws") + "/v1/sandboxes/box/exec/ws"
        with connect(place, additional_headers=headers, proxy=None) as socket:
            socket.send(json.dumps({"command": "echo sesame-ws"}))
            socket.recv(10)
        mine = client.get("/v1/audit?limit=1000").json()["items"]
    assert {line["name"] for line in mine} == {"watched"}  # nobody else's
    by_action = {line["action"]: line for line in mine}
    assert by_action["sandboxes.create"]["sandbox"] == made.json()["id"]
    assert by_action["exec.run"]["detail"] == "echo"
    assert by_action["exec.run"]["request"] == ran.headers["sloplet-request-id"]
    assert by_action["exec.run"]["address"] == "127.0.0.1"
    assert by_action["admin.keys"]["verdict"] == "refused"
    assert by_action["admin.keys"]["error"] == "NotAllowed"
    assert by_action["sandboxes.info"]["status"] == 404
    assert any(line["status"] == 101 for line in mine)
    assert all(line["ms"] >= 0 and line["time"] > 1e9 for line in mine)
    everything = admin.get("/v1/audit?limit=1000&action=exec").json()["items"]
    assert any(line["name"] == "watched" for line in everything)
    told = json.loads(cli(server, "audit", "--key", "watched", "--json", "--since", "1h"))
    assert {line["request"] for line in told} >= {line["request"] for line in mine}
    assert "exec.run echo" in cli(server, "audit", "--action", "exec")
    assert "sesame" not in (server.home / "server" / "audit.jsonl").read_text()
    first = admin.get("/v1/audit?limit=2").json()
    second = admin.get(f"/v1/audit?limit=2&cursor={first['next']}").json()
    assert second["items"][0]["time"] <= first["items"][-1]["time"]
    assert admin.get("/v1/audit?cursor=nonsense").status_code == 400


def test_who_has_no_key_is_told_of_too_but_not_for_ever(server: Served, admin: httpx.Client) -> None:
    with server.client(key="slp_" + "z" * 12 + "_" + "z" * 43) as client:
        for _ in range(30):
            assert client.get("/v1/me").status_code in (401, 429)
    lines = admin.get("/v1/audit?limit=1000&verdict=refused").json()["items"]
    assert [line for line in lines if line["error"] == "KeyRefused" and not line["key"]]


def test_readiness(server: Served, admin: httpx.Client) -> None:
    assert admin.get("/readyz").status_code == 200
    os.chmod(server.home, 0o500)
    try:
        if os.geteuid() != 0:  # root may write anyway
            answer = admin.get("/readyz")
            assert (answer.status_code, answer.json()["error"]) == (503, "ServerBusy")
            assert "/" not in answer.json()["detail"]
    finally:
        os.chmod(server.home, 0o700)
    assert admin.get("/readyz").status_code == 200


def test_logs_are_json_where_nobody_looks(server: Served) -> None:
    assert server.log is not None
    for line in server.log.read_text().splitlines():
        found = json.loads(line)
        assert {"time", "level", "message"} <= set(found)
        assert found["level"] in ("info", "warning"), line


# -- backups -----------------------------------------------------------------------------------


def test_a_backup_of_a_running_server_is_a_server(server: Served, admin: httpx.Client, tmp_path: Path) -> None:
    with new_client(server, admin, "kept") as client:
        assert client.post("/v1/sandboxes", json={**FAKE, "name": "box"}).status_code == 201
        key = client.headers["Authorization"].removeprefix("Bearer ")
        with ThreadPoolExecutor(2) as pool:  # while others write
            busy = [pool.submit(_churn, client, number) for number in range(2)]
            made = admin.post("/v1/backup")
            assert made.status_code == 201, made.text
            for each in busy:
                each.result()
    found = made.json()
    assert "tenants/kept/state.db" in found["files"]
    assert str(server.home) not in made.text
    folder = server.home / "backups" / found["name"]
    assert cli(server, "backup", "--check", str(folder)) == "whole\n"
    told = json.loads(cli(server, "backup", str(tmp_path / "copy"), "--json"))
    assert set(told["files"]) >= set(found["files"]) - {"manifest.json"}
    # Restored: copied to a new home, as docs/server.md says.
    home = tmp_path / "restored"
    shutil.copytree(tmp_path / "copy", home)
    (home / "manifest.json").unlink()
    again = start(home, key=server.key)
    try:
        with again.client(key) as client:
            boxes = client.get("/v1/sandboxes").json()["items"]
            assert [(box["name"], box["state"]) for box in boxes if box["name"] == "box"] == [("box", "dead")]
        with again.client() as client:
            assert client.get("/v1/audit").json()["items"]
    finally:
        again.stop()
        assert again.process.stdout is not None
        again.process.stdout.close()
        end_keepers(home)


def _churn(client: httpx.Client, number: int) -> None:
    for _ in range(5):
        name = f"churn{number}"
        assert client.post("/v1/sandboxes", json={**FAKE, "name": name}).status_code == 201
        assert client.delete(f"/v1/sandboxes/{name}").status_code == 204
