"""GAUNTLET G, from the side of a tenant with a good key and bad intentions: what he writes himself (archives, bodies,
messages) gives him nothing of the host's, and does not hold up the others."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import socket
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import zstandard

from server_kit import Served, served
from sloplet.archive import layout, rootfs
from sloplet.errors import RateLimited
from sloplet.server.incoming import MAX_NAMES, MAX_VALUES
from sloplet.server.outputs import Outputs, in_base64, in_text, let_go
from sloplet.server.streams import _Input

pytestmark = pytest.mark.anyone


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("tenant") / "home") as server:
        yield server


@pytest.fixture(scope="module")
def evil(server: Served) -> Iterator[httpx.Client]:
    with server.client(server.new_key("evil")) as client:
        yield client


def edited(archive: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The same archive with another manifest. All digests are right again."""
    body = io.BytesIO(archive[layout.MARK_BYTES : -layout.TRAILER_BYTES])
    raw = zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True).read()
    made = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(raw)) as old, tarfile.open(fileobj=made, mode="w") as new:
        for member in old:
            file = old.extractfile(member)
            assert file is not None
            data = file.read()
            if member.name == layout.MANIFEST_MEMBER:
                manifest = json.loads(data)
                change(manifest)
                data = json.dumps(manifest).encode()
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))
        end = new.offset
    found = layout.mark() + zstandard.ZstdCompressor().compress(made.getvalue()[:end] + bytes(1024))
    return found + layout.trailer(hashlib.sha256(found).digest())


@pytest.fixture(scope="module")
def archive(evil: httpx.Client) -> bytes:
    assert evil.post("/v1/sandboxes", json={"engine": "fake", "name": "source"}).status_code == 201
    answer = evil.get("/v1/sandboxes/source/export")
    assert answer.status_code == 200, answer.text
    return answer.content


def test_an_archive_names_no_path_of_the_host(evil: httpx.Client, archive: bytes, tmp_path: Path) -> None:
    """A rootfs of the host's whose content he can guess: he would see it change. And the rest of the disk by how the
    looking fails, at the cost of a walk through all of it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").write_text("#!")
    content = rootfs.measure(tmp_path, owners=False)[1]
    told = set()
    for reference in (f"dir:{tmp_path}", str(tmp_path), f"{tmp_path}/no", "dir:/usr", "/etc/shadow", "x.tar", "~/x"):

        def change(manifest: dict[str, Any], reference: str = reference) -> None:
            manifest["image"].update(kind="rootfs", reference=reference, host="", key="", content=content)

        answer = evil.post("/v1/sandboxes/import?name=taken", content=edited(archive, change))
        assert (answer.status_code, answer.json()["error"]) == (403, "NotAllowed"), answer.text
        if reference.startswith("/"):
            told.add(answer.json()["detail"].replace(repr(reference), "..."))
    assert len(told) <= 2, told  # the paths below <host> are not shown
    untouched = evil.post("/v1/sandboxes/import?name=mine", content=edited(archive, lambda manifest: None))
    assert untouched.status_code == 201, untouched.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"command": "true", "x": [' + b"[]," * 2_000_000 + b"1]}", 413),
        (b"{" + b",".join(b'"%07x":0' % number for number in range(1_000_000)) + b"}", 413),
        (b"{" + b",".join(b'"%x":0' % number for number in range(MAX_NAMES + 1)) + b"}", 400),
        (b'{"a\\\\":0,' * 500_000, 413),
        (json.dumps({"command": "cat", "stdin": '[{,\\"' * 1_000_000}).encode(), 200),
        (json.dumps({"command": ["true", *["x"] * 1000]}).encode(), 200),
    ],
    ids=["lists", "names", "names in one", "escapes", "text", "arguments"],
)
def test_a_body_of_many_parts_holds_nobody_up(evil: httpx.Client, archive: bytes, body: bytes, status: int) -> None:
    """Sixteen MiB of short names took the only loop there is for twenty seconds."""
    answer = evil.post(
        "/v1/sandboxes/source/exec", content=body, headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == status, answer.text[:300]


def test_a_first_message_of_many_parts_is_refused(server: Served, evil: httpx.Client, archive: bytes) -> None:
    from websockets.sync.client import connect

    url = server.url.replace("http", "ws") + "/v1/sandboxes/source/exec/ws"
    headers = {"Authorization": evil.headers["authorization"]}
    with connect(url, additional_headers=headers, proxy=None, max_size=None) as socket:
        socket.send("{" + ",".join(f'"{number:x}":0' for number in range(MAX_VALUES + 2)) + "}")
        told = json.loads(socket.recv(30))
    assert (told["type"], told["status"]) == ("error", 413)


@pytest.mark.parametrize("piece", [None, b"x"])
def test_input_that_nobody_takes_is_bounded(piece: bytes | None) -> None:
    """Also ends of it, and bytes one by one."""

    async def flood() -> int:
        given = _Input()
        for count in range(20_000):
            task = asyncio.ensure_future(given.put(piece))
            await asyncio.sleep(0)
            if not task.done():  # held up
                task.cancel()
                return count
        raise AssertionError("nothing holds it up")

    assert asyncio.run(flood()) > 1000


def test_who_does_not_read_holds_little(server: Served, evil: httpx.Client) -> None:
    """Sixteen MiB of control characters are a hundred as JSON, for each connection whose client sleeps."""
    made = evil.post("/v1/sandboxes", json={"engine": "process", "name": "loud", "allow_weaker": True})
    assert made.status_code == 201, made.text
    command = "head -c 16777216 /dev/zero | tr '\\0' '\\1'"
    whole = evil.post("/v1/sandboxes/loud/exec", json={"command": command, "max_output": 16 << 20}).json()
    assert (len(whole["stdout"]), whole["truncated"], set(whole["stdout"])) == (16 << 20, False, {"\x01"})
    before = memory(server.pid)
    body = json.dumps({"command": command, "max_output": 16 << 20}).encode()
    head = "POST /v1/sandboxes/loud/exec HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Authorization: {evil.headers['authorization']}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    url = urlsplit(server.url)
    with ExitStack() as stack:
        for _ in range(8):
            sleeper = stack.enter_context(socket.socket())
            sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sleeper.settimeout(60)
            sleeper.connect((url.hostname, url.port))
            sleeper.sendall(head.encode() + body)
            assert sleeper.recv(12) == b"HTTP/1.1 200"  # all of it is there
        assert memory(server.pid) - before < 8 * (40 << 20)
    evil.delete("/v1/sandboxes/loud")


def memory(pid: int) -> int:
    """Bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_what_is_held_for_answers_is_bounded() -> None:
    outputs = Outputs(64 << 20)
    scopes: list[dict[str, Any]] = [{} for _ in range(6)]
    outputs.hold(scopes[0], "one", 20 << 20)
    with pytest.raises(RateLimited):
        outputs.hold(scopes[1], "one", 20 << 20)
    outputs.hold(scopes[1], "one", 100)  # little is always possible
    outputs.hold(scopes[2], "two", 30 << 20)
    with pytest.raises(RateLimited):  # of all
        outputs.hold(scopes[3], "three", 20 << 20)
    for scope in scopes:
        let_go(scope)
        let_go(scope)
    assert outputs.held == {}


@pytest.mark.parametrize(
    "data", [b"", b"abc", 'ä€😀\n"\\\x00'.encode() * 30_000, b"\xff\xe2\x82" * 40_001, bytes(range(256)) * 999]
)
def test_long_texts_are_written_as_short_ones_are(data: bytes) -> None:
    assert json.loads(b'"' + b"".join(in_text(data)) + b'"') == data.decode("utf-8", "replace")
    assert base64.b64decode(b"".join(in_base64(data))) == data


def test_exports_that_nobody_reads_are_few(server: Served, evil: httpx.Client) -> None:
    """Each is a file without a name on the server's disk until it is read to its end."""
    made = evil.post("/v1/sandboxes", json={"engine": "process", "name": "large", "allow_weaker": True})
    assert made.status_code == 201, made.text
    fill = evil.post("/v1/sandboxes/large/exec", json={"command": "head -c 20000000 /dev/urandom > noise"})
    assert fill.json()["exit_code"] == 0
    folder, fds = server.home / "server" / "exchange", Path(f"/proc/{server.pid}/fd")

    def held() -> int:
        return sum(os.readlink(fd).startswith(str(folder)) for fd in fds.iterdir() if fd.is_symlink())

    head = "GET /v1/sandboxes/large/export HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Authorization: {evil.headers['authorization']}\r\n\r\n"
    url = urlsplit(server.url)
    with ExitStack() as stack:
        sleepers = []
        for _ in range(6):
            sleeper = stack.enter_context(socket.socket())
            sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sleeper.connect((url.hostname, url.port))
            sleeper.sendall(head.encode())
            sleepers.append(sleeper)
        for sleeper in sleepers[:4]:
            sleeper.settimeout(60)
            assert sleeper.recv(12) == b"HTTP/1.1 200"
        sleepers[4].settimeout(1)
        with pytest.raises(TimeoutError):
            sleepers[4].recv(12)
        assert held() == 4
        sleepers[0].close()
        sleepers[4].settimeout(60)
        assert sleepers[4].recv(12) == b"HTTP/1.1 200"
    whole = evil.get("/v1/sandboxes/large/export")
    assert (whole.status_code, len(whole.content) > 20_000_000) == (200, True)
    evil.delete("/v1/sandboxes/large")


def test_sessions_of_mcp_that_come_at_once_are_bounded_too(evil: httpx.Client) -> None:
    pytest.importorskip("mcp")
    info = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    ask = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": info}

    async def flood() -> list[int]:
        headers = {"Accept": "application/json, text/event-stream", "Authorization": evil.headers["authorization"]}
        limits = httpx.Limits(max_connections=150)
        async with httpx.AsyncClient(
            base_url=evil.base_url, headers=headers, limits=limits, timeout=60, trust_env=False
        ) as client:
            answers = await asyncio.gather(*(client.post("/mcp", json=ask) for _ in range(150)))
            opened = [answer.headers["mcp-session-id"] for answer in answers if answer.status_code == 200]
            await asyncio.gather(*(client.delete("/mcp", headers={"mcp-session-id": each}) for each in opened))
            again = await client.post("/mcp", json=ask)
            await client.delete("/mcp", headers={"mcp-session-id": again.headers["mcp-session-id"]})
        return [answer.status_code for answer in answers]

    statuses = asyncio.run(flood())
    assert (statuses.count(200), statuses.count(429)) == (100, 50)


@pytest.mark.skipif("SLOPLET_TEST_RUNSC" not in os.environ, reason="SLOPLET_TEST_RUNSC names no runsc")
@pytest.mark.skipif(os.geteuid() != 0, reason="gvisor with a network needs root here")
def test_a_link_wakes_nobody_past_a_quota(server: Served) -> None:
    """Make, pause, make, pause; then one that runs wakes all of them from inside."""
    with server.client(server.new_key("few", "--max-sandboxes", "2")) as few:
        for body in ({"name": "target"}, {"name": "source", "network": {}, "links": {"db": "target"}}):
            answer = few.post("/v1/sandboxes", json={"engine": "gvisor", **body})
            assert answer.status_code == 201, answer.text
        serve = few.post("/v1/sandboxes/target/processes", json={"command": "exec python3 -m http.server 8000"})
        assert serve.status_code == 201
        ask = {"command": "for n in $(seq 50); do curl -sS -m 5 http://db:8000/ && exit; sleep 0.2; done; exit 1"}
        assert few.post("/v1/sandboxes/source/exec", json=ask).json()["exit_code"] == 0
        assert few.post("/v1/sandboxes/target/pause").json()["state"] == "paused"
        assert few.post("/v1/sandboxes", json={"engine": "gvisor", "name": "third"}).status_code == 201
        ask["command"] = "curl -sS -m 5 http://db:8000/"
        assert few.post("/v1/sandboxes/source/exec", json=ask).json()["exit_code"] != 0
        states = {item["name"]: item["state"] for item in few.get("/v1/sandboxes").json()["items"]}
        assert states == {"target": "paused", "source": "running", "third": "running"}
        for name in states:
            few.delete(f"/v1/sandboxes/{name}")
