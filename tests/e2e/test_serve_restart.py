"""The end of a server: TERM lets short requests finish, KILL loses nothing, and sandboxes see neither."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from server_kit import Served, end_keepers, start

BOXES = 20


class Servers:
    """One after the other, on one home; none is left."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.now = start(home)

    def again(self) -> Served:
        """Another one, where the first was: same home, same port."""
        before = self.now
        self.close()
        self.now = start(self.home, key=before.key, port=int(before.url.rpartition(":")[2]))
        return self.now

    def close(self) -> None:
        self.now.stop()
        if self.now.process.stdout is not None:
            self.now.process.stdout.close()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    found = Servers(tmp_path / "home")
    try:
        yield found
    finally:
        found.close()
        end_keepers(found.home)


@pytest.fixture
def real(servers: Servers) -> Servers:
    """With the container engine."""
    with servers.now.client() as client:
        made = client.post("/v1/sandboxes", json={"engine": "container"})
        if made.status_code == 422:
            pytest.skip(made.json()["detail"])
        assert made.status_code == 201, made.text
        client.delete(f"/v1/sandboxes/{made.json()['id']}")
    return servers


def run(client: httpx.Client, box: str, command: str) -> str:
    answer = client.post(f"/v1/sandboxes/{box}/exec", json={"command": command})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["stdout"])


@pytest.mark.timeout(180)
def test_twenty_sandboxes_survive_kill_and_term(real: Servers) -> None:
    server = real.now
    other = server.new_key("team")
    boxes = {}
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        small = {"engine": "container"}

        def make(number: int) -> str:
            made = client.post("/v1/sandboxes", json={**small, "name": f"box{number}"})
            assert made.status_code == 201, made.text
            run(client, f"box{number}", f"echo {number} > /tmp/mine")
            return str(made.json()["id"])

        boxes = dict(enumerate(pool.map(make, range(BOXES))))
        spawned = client.post("/v1/sandboxes/box0/processes", json={"command": "sleep 1000", "tag": "kept"})
        assert spawned.status_code == 201, spawned.text
    with server.client(other) as client:
        assert client.post("/v1/sandboxes", json={**small, "name": "theirs"}).status_code == 201
    for number in (signal.SIGKILL, signal.SIGTERM):
        code = server.stop(number)
        assert code == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        server = real.again()
        with server.client() as client:
            found = {each["name"]: each for each in client.get("/v1/sandboxes").json()["items"]}
            assert {name: each["id"] for name, each in found.items()} == {f"box{n}": id for n, id in boxes.items()}
            assert {each["state"] for each in found.values()} == {"running"}
            for each in range(BOXES):
                assert run(client, f"box{each}", "cat /tmp/mine").strip() == str(each)
            pid = spawned.json()["pid"]
            there = client.get("/v1/sandboxes/box0/processes").json()["items"]
            assert [each["pid"] for each in there if each.get("tag") == "kept"] == [pid]
            # What runs on is counted from the first request on.
            assert client.get("/v1/me").json()["used"]["sandboxes"] == BOXES
        with server.client(other) as client:
            assert [each["name"] for each in client.get("/v1/sandboxes").json()["items"]] == ["theirs"]
            assert run(client, "theirs", "echo here") == "here\n"


def test_term_ends_streams_and_lets_requests_finish(real: Servers) -> None:
    server = real.now
    headers = {"Authorization": f"Bearer {server.key}"}
    place = server.url.replace("http", "ws") + "/v1/sandboxes/box/exec/ws"
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        client.post("/v1/sandboxes", json={"engine": "container", "name": "box"})
        with connect(place, additional_headers=headers, proxy=None) as socket:
            socket.send(json.dumps({"command": "sleep 100"}))
            assert json.loads(socket.recv(10))["type"] == "started"
            slow = pool.submit(
                client.post, "/v1/sandboxes/box/exec", json={"command": "touch /tmp/begun; sleep 1; echo done"}
            )
            with client.stream("POST", "/v1/sandboxes/box/exec/stream", json={"command": "sleep 100"}) as events:
                pieces = events.iter_raw()
                assert b"started" in next(pieces)
                deadline = time.monotonic() + 10
                while run(client, "box", "ls /tmp/begun 2>/dev/null || true") == "":
                    assert time.monotonic() < deadline
                server.process.send_signal(signal.SIGTERM)
                assert b"exit" not in b"".join(pieces)  # it ends, without an error: the client comes back
            with pytest.raises(ConnectionClosed) as closed:
                deque(iter(lambda: socket.recv(10), None), maxlen=0)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        answer = slow.result()
        assert (answer.status_code, answer.json()["stdout"]) == (200, "done\n")
        with pytest.raises(httpx.TransportError):
            client.get("/healthz")
    assert server.process.wait(20) == 0
    assert server.log is not None
    log = server.log.read_text()
    assert "Traceback" not in log, log[-3000:]
    assert '"stopped"' in log
    server = real.again()
    with server.client() as client:
        assert run(client, "box", "echo again") == "again\n"
        assert client.delete("/v1/sandboxes/box").status_code == 204


def test_what_takes_too_long_is_cut_and_a_second_term_does_not_wait(real: Servers) -> None:
    server = real.now
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        client.post("/v1/sandboxes", json={"engine": "container", "name": "box"})
        slow = pool.submit(client.post, "/v1/sandboxes/box/exec", json={"command": "touch /tmp/begun; sleep 60"})
        deadline = time.monotonic() + 10
        while run(client, "box", "ls /tmp/begun 2>/dev/null || true") == "":
            assert time.monotonic() < deadline
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        while True:  # until it listens no more
            try:
                httpx.get(server.url + "/healthz", trust_env=False)
            except httpx.TransportError:
                break
            assert time.monotonic() - began < 10
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 5
        with pytest.raises(httpx.TransportError):
            slow.result()
    server = real.again()
    with server.client() as client:
        assert client.get("/v1/sandboxes/box").json()["state"] == "running"
        assert client.delete("/v1/sandboxes/box").status_code == 204


def test_a_keeper_that_holds_nothing_leaves(servers: Servers) -> None:
    """The server does not keep it: an idle tenant costs nothing."""
    server = servers.now
    key = server.new_key("brief")
    with server.client(key) as client:
        made = client.post("/v1/sandboxes", json={"engine": "fake", "name": "box"})
        assert made.status_code == 201
        place = servers.home / "tenants" / "brief" / "run" / "keeper.sock"
        assert place.exists()
        assert client.delete("/v1/sandboxes/box").status_code == 204
        deadline = time.monotonic() + 40
        while place.exists():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert client.get("/v1/sandboxes").json()["items"] == []
        assert not place.exists()  # and looking starts none
        assert client.post("/v1/sandboxes", json={"engine": "fake", "name": "box"}).status_code == 201


def test_a_keeper_is_in_a_session_of_its_own(servers: Servers) -> None:
    """A terminal's Ctrl-C, or whoever ends the server's process group, does not reach it."""
    server = servers.now
    with server.client() as client:
        assert client.post("/v1/sandboxes", json={"engine": "fake", "name": "box"}).status_code == 201
    keepers = [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdecimal() and _command(path).endswith("keeper/__main__.py") and _home(path) == str(servers.home)
    ]
    assert len(keepers) == 1
    assert os.getsid(keepers[0]) != os.getsid(server.pid)
    assert os.getpgid(keepers[0]) != os.getpgid(server.pid)


def _command(path: Path) -> str:
    try:
        words = (path / "cmdline").read_bytes().split(b"\0")
        return next((word.decode() for word in words if word.endswith(b"__main__.py")), "")
    except OSError:
        return ""


def _home(path: Path) -> str:
    try:
        for pair in (path / "environ").read_bytes().split(b"\0"):
            if pair.startswith(b"SLOPLET_HOME="):
                return pair.partition(b"=")[2].decode()
    except OSError:
        pass
    return ""
