"""C-08: a server that is ended, politely or not, under twenty clients in the middle of something.

Each has a sandbox of its own, and is running a command (server-sent events, WebSocket, buffered) or uploading. Each
sees the end, none takes it for a result; the next server has all twenty sandboxes, with their files as they were, and
nothing runs on that nobody follows. (tests/e2e/test_serve_restart.py: what goes on on purpose, and how a server ends.)
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from rude_http import Raw, request
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from server_kit import Served, end_keepers, need_container, start

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(180)]

CLIENTS = 20
OLD = b"as it was"
WAITING = "echo up; exec sleep 98765"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    need_container()
    yield tmp_path / "home"
    end_keepers(tmp_path / "home")
    assert not _of(tmp_path / "home"), "processes of the server's are left"


def _of(home: Path) -> list[str]:
    """Processes that were started for this home, by what their command lines say."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            line = Path(f"/proc/{entry}/cmdline").read_bytes() if entry.isdecimal() else b""
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if str(home).encode() in line and int(entry) != os.getpid():
            found.append(line.replace(b"\0", b" ").decode("utf-8", "replace"))
    return found


# -- clients: each tells when it is in the middle, and what it saw of the end ----------------------------------------

Begun = Callable[[], object]


def by_events(server: Served, box: str, begun: Begun) -> str:
    seen = []
    try:
        with (
            server.client() as client,
            client.stream("POST", f"/v1/sandboxes/{box}/exec/stream", json={"command": WAITING}) as answer,
        ):
            for line in answer.iter_lines():
                seen.append(line)
                if "up" in line:
                    begun()
    except httpx.HTTPError as error:
        seen.append(f"broken: {type(error).__name__}")
    assert not any(line == "event: exit" for line in seen), seen
    return "the stream ended without an exit"


def by_socket(server: Served, box: str, begun: Begun) -> str:
    address = server.url.replace("http", "ws", 1) + f"/v1/sandboxes/{box}/exec/ws"
    with connect(address, additional_headers={"Authorization": f"Bearer {server.key}"}, proxy=None) as socket:
        socket.send(json.dumps({"command": WAITING, "pty": True}))
        try:
            while True:
                message = socket.recv(timeout=60)
                if isinstance(message, bytes) and b"up" in message:
                    begun()
                assert not (isinstance(message, str) and json.loads(message)["type"] == "exit"), message
        except ConnectionClosed as closed:
            return f"closed {closed.rcvd.code if closed.rcvd else None}"


def buffered(server: Served, box: str, begun: Begun) -> str:
    def look() -> None:
        with server.client() as client:
            until = time.monotonic() + 30
            while client.get(f"/v1/sandboxes/{box}/files/stat", params={"path": "begun"}).status_code != 200:
                assert time.monotonic() < until
        begun()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with server.client() as client:
            answer = client.post(f"/v1/sandboxes/{box}/exec", json={"command": f"touch begun; {WAITING}"})
        assert answer.status_code == 503, answer.text  # it may be told that the server ends
        return "told"
    except httpx.HTTPError as error:
        return f"broken: {type(error).__name__}"
    finally:
        looking.join()


def uploading(server: Served, box: str, begun: Begun) -> str:
    path = f"/v1/sandboxes/{box}/files?path=kept"
    with Raw(server.url, timeout=60) as raw:
        raw.send(request("PUT", path, raw.host, [("Content-Length", str(64 << 20))], key=server.key))
        raw.send(b"n" * (4 << 20))
        begun()
        answer = raw.answer()
        assert answer is None or answer.status in (400, 503), answer
    return "broken" if answer is None else "told"


KINDS = (by_events, by_socket, buffered, uploading)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
def test_c08_clients_in_the_middle_of_something(home: Path, number: int) -> None:
    server = start(home)
    try:
        with server.client() as client:
            ids = {}
            for each in range(CLIENTS):
                made = client.post("/v1/sandboxes", json={"engine": "container", "name": f"box{each}"})
                assert made.status_code == 201, made.text
                ids[f"box{each}"] = made.json()["id"]
                put = client.put(f"/v1/sandboxes/box{each}/files", params={"path": "kept"}, content=OLD)
                assert put.status_code == 201, put.text
        counted = threading.Semaphore(0)
        with ThreadPoolExecutor(CLIENTS) as pool:
            waiting: list[Future[str]] = [
                pool.submit(KINDS[each % len(KINDS)], server, f"box{each}", counted.release) for each in range(CLIENTS)
            ]
            for _ in range(CLIENTS):
                assert counted.acquire(timeout=60), [each for each in waiting if each.done()]
            assert not any(each.done() for each in waiting)
            began = time.monotonic()
            assert server.stop(number) in (0, -signal.SIGKILL)
            saw = [each.result(timeout=30) for each in waiting]
            assert time.monotonic() - began < 30
        assert len(saw) == CLIENTS
        again = start(home, key=server.key, port=int(server.url.rpartition(":")[2]))
        try:
            _check(again, ids)
        finally:
            _end(again)
    finally:
        _end(server)


def _check(server: Served, ids: dict[str, str]) -> None:
    """All are there as they were, serve again, and run nothing for those who have gone."""
    with server.client() as client:
        found = {each["name"]: each for each in client.get("/v1/sandboxes").json()["items"]}
        assert {name: each["id"] for name, each in found.items()} == ids
        assert {each["state"] for each in found.values()} == {"running"}
        for name in ids:
            at = f"/v1/sandboxes/{name}"
            assert client.get(f"{at}/files", params={"path": "kept"}).content == OLD
            listed = {each["name"] for each in client.get(f"{at}/files/list").json()["items"]}
            assert listed <= {"kept", "begun"}, "a part of an upload is left"
            until = time.monotonic() + 20
            while "98765" in client.post(f"{at}/exec", json={"command": "cat /proc/[0-9]*/cmdline"}).json()["stdout"]:
                assert time.monotonic() < until, f"{name}: a command that nobody follows runs on"
            assert client.put(f"{at}/files", params={"path": "kept"}, content=b"new").status_code == 200


def _end(server: Served) -> None:
    server.stop()
    if server.process.stdout is not None:
        server.process.stdout.close()
