"""The data plane of E2B's API against who does not keep to it: broken and huge messages, slow ones, headers that can be
read in two ways. The server answers each, and serves the next."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from image_kit import BUSYBOX, busybox_image
from server_kit import Served, need_container, served
from sloplet.state.home import Home

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(180)]

STREAM = "application/connect+json"
START, CONNECT, INPUT = "/process.Process/Start", "/process.Process/Connect", "/process.Process/StreamInput"
STREAMS = (START, CONNECT, INPUT, "/filesystem.Filesystem/WatchDir")
HELLO = {"process": {"cmd": "/bin/sh", "args": ["-c", "echo hello"]}, "stdin": False}


def envelope(document: Any, flags: int = 0) -> bytes:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack(">BI", flags, len(body)) + body


def frames(data: bytes) -> list[tuple[int, Any]]:
    found = []
    while data:
        flags, size = struct.unpack_from(">BI", data)
        found.append((flags, json.loads(data[5 : 5 + size])))
        data = data[5 + size :]
    return found


@dataclass
class World:
    server: Served
    ids: tuple[str, str]
    tokens: tuple[str, str]

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.server.url.rpartition(":")[2])

    @property
    def headers(self) -> dict[str, str]:
        return {"E2b-Sandbox-Id": self.ids[0], "E2b-Sandbox-Port": "49983", "X-Access-Token": self.tokens[0]}

    def post(self, path: str, content: bytes, kind: str = STREAM, **headers: str) -> httpx.Response:
        with self.server.client("") as client:
            return client.post(path, content=content, headers={**self.headers, "Content-Type": kind, **headers})

    def raw(self, request: bytes) -> bytes:
        """All bytes of the answer."""
        with socket.create_connection(self.address, timeout=30) as link:
            link.sendall(request)
            parts = []
            while piece := link.recv(65536):
                parts.append(piece)
            return b"".join(parts)

    def works(self) -> None:
        found = frames(self.post(START, envelope(HELLO)).content)
        assert found[0][1]["event"]["start"]["pid"] > 0
        assert [each["event"]["data"]["stdout"] for _, each in found if "data" in each.get("event", {})] == ["aGVsbG8K"]
        assert found[-1] == (2, {})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    need_container()
    if BUSYBOX is None:
        pytest.skip("busybox-static is not installed")
    home = tmp_path_factory.mktemp("gauntlet") / "home"
    home.mkdir(mode=0o700)
    passwd = "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    busybox_image(Home(home), "sloplet/e2b-base", files={"etc/passwd": passwd, "home/user/.keep": ""})
    with served(home, "--e2b-engine", "container") as server:
        told = []
        with server.client() as client:
            for _ in range(2):
                answer = client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600})
                assert answer.status_code == 201, answer.text
                told.append(answer.json())
        ids, tokens = ([each[name] for each in told] for name in ("sandboxID", "envdAccessToken"))
        yield World(server, (ids[0], ids[1]), (tokens[0], tokens[1]))


@pytest.fixture
def world(made: World) -> Iterator[World]:
    """Afterwards it serves as before."""
    yield made
    made.works()


# -- envelopes --------------------------------------------------------------------------

DEEP = b'{"process":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}"
CODES = ("invalid_argument", "unimplemented", "internal", "resource_exhausted", "not_found")
BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "half-a-head": b"\0\0",
    "half-a-message": envelope(HELLO)[:-3],
    "no-envelope": json.dumps(HELLO).encode(),
    "two-messages": envelope(HELLO) + envelope(HELLO),
    "only-an-end": envelope({}, 2),
    "compressed": envelope(HELLO, 1),
    "unknown-flags": envelope(HELLO, 0x80),
    "no-json": envelope(b"\xff\xfe{"),
    "no-object": envelope(b"[1, 2]"),
    "no-utf8": envelope(b'{"process": {"cmd": "\xff"}}'),
    "twice-the-same-name": envelope(b'{"process": {"cmd": "a"}, "process": {"cmd": "b"}}'),
    "deep": envelope(DEEP),
    "not-a-number": envelope(b'{"process": {"pid": NaN}}'),
    "longer-than-may-be": struct.pack(">BI", 0, 0xFFFFFFFF) + b"x" * 1000,
    "much-longer-than-said": envelope({}) + b"\0" * 100_000,
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_message_is_an_error_in_the_last_frame(world: World, path: str, name: str) -> None:
    answer = world.post(path, BROKEN[name])
    if answer.status_code == 200:
        flags, last = frames(answer.content)[-1]
        assert flags == 2
        if path == INPUT and name in ("nothing", "only-an-end", "much-longer-than-said"):  # so may a client's stream be
            return
        assert last["error"]["code"] in CODES
        assert last["error"]["message"]
    else:
        assert 400 <= answer.status_code < 500
        assert answer.json()["message"]


def test_a_huge_message_is_refused_before_it_is_read(world: World) -> None:
    """Its length alone says so; nobody waits for the rest."""
    with socket.create_connection(world.address, timeout=30) as link:
        link.sendall(_head(world, START, b"transfer-encoding: chunked") + b"5\r\n" + b"\0\x7f\xff\xff\xff" + b"\r\n")
        began = time.monotonic()
        answer = link.recv(65536)
        while b"resource_exhausted" not in answer:
            piece = link.recv(65536)
            assert piece, answer
            answer += piece
        assert time.monotonic() - began < 10


def test_a_huge_unary_message(world: World) -> None:
    answer = world.post("/process.Process/List", b'{"a": "' + b"x" * (17 << 20) + b'"}', "application/json")
    assert answer.status_code in (413, 429)
    assert answer.json()["code"] == "resource_exhausted"


def _head(world: World, path: str, *more: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1".encode(), b"host: localhost", b"content-type: application/connect+json"]
    lines += [f"{name}: {value}".encode() for name, value in world.headers.items()]
    return b"\r\n".join([*lines, *more]) + b"\r\n\r\n"


def test_slow_ones_hold_up_nobody(world: World) -> None:
    links = []
    try:
        for _ in range(40):
            link = socket.create_connection(world.address, timeout=30)
            links.append(link)
            link.sendall(_head(world, START, b"transfer-encoding: chunked") + b"3\r\n\0\0\0\r\n")
        for _ in range(3):
            began = time.monotonic()
            world.works()
            assert time.monotonic() - began < 10
    finally:
        for link in links:
            link.close()


def test_who_goes_in_the_middle_leaves_nothing(world: World) -> None:
    for _ in range(20):
        with socket.create_connection(world.address, timeout=30) as link:
            link.sendall(_head(world, START, b"content-length: 1000") + b"\0\0\0\0\x10")
    listed = world.post("/process.Process/List", b"{}", "application/json").json()
    assert listed.get("processes", []) == []


# -- values -----------------------------------------------------------------------------

PIDS: list[Any] = [None, "1", -1, 0, 1, 2**31, 2**63, 2**70, 1.5, True, [], {}, "x" * 100_000]


@pytest.mark.parametrize("method", ["SendSignal", "SendInput", "CloseStdin", "Update"])
def test_pids_that_are_none(world: World, method: str) -> None:
    """1 is there, and nobody's to end."""
    for pid in PIDS:
        asked = {
            "process": {"pid": pid}, "signal": "SIGNAL_SIGKILL", "input": {"stdin": "eA=="},
            "pty": {"size": {"cols": 1, "rows": 1}},
        }  # fmt: skip
        answer = world.post(f"/process.Process/{method}", json.dumps(asked).encode(), "application/json")
        assert answer.status_code in (400, 404), (pid, answer.text)
        assert answer.json()["code"] in ("invalid_argument", "not_found")


@pytest.mark.parametrize(
    "process",
    [
        {}, {"cmd": ""}, {"cmd": 1}, {"cmd": ["sh"]}, {"cmd": "sh\0"}, {"cmd": "/bin/sh", "args": "x"},
        {"cmd": "/bin/sh", "args": [1]}, {"cmd": "/bin/sh", "args": ["\0"]}, {"cmd": "/bin/sh", "envs": ["A=b"]},
        {"cmd": "/bin/sh", "envs": {"A": 1}}, {"cmd": "/bin/sh", "envs": {"A=B": "x"}}, {"cmd": "/bin/sh", "cwd": 7},
        {"cmd": "/bin/sh", "envs": {"A": "x\0y"}}, {"cmd": "/bin/sh", "cwd": "/\0"}, {"cmd": "/bin/sh", "cwd": "/none"},
        {"cmd": "x" * 2_000_000}, {"cmd": "/bin/sh", "args": ["x" * 3_000_000]},
    ],
)  # fmt: skip
def test_processes_that_are_none(world: World, process: dict[str, Any]) -> None:
    answer = world.post(START, envelope({"process": process}))
    assert answer.status_code == 200
    flags, last = frames(answer.content)[-1]
    assert flags == 2
    ended = [each["event"]["end"] for _, each in frames(answer.content) if "end" in each.get("event", {})]
    assert "error" in last or ended[0]["exitCode"] != 0, last


@pytest.mark.parametrize("user", ["nobody-here", "root\0", "../root", "0", "1000", "user:", "x" * 5000, "\u00fc"])
def test_users_that_are_none(world: World, user: str) -> None:
    import base64

    basic = base64.b64encode(f"{user.rstrip(':')}:".encode()).decode()
    answer = world.post(START, envelope(HELLO), Authorization=f"Basic {basic}")
    last = frames(answer.content)[-1][1] if answer.status_code == 200 else answer.json()
    if user == "user:":  # the positive control
        assert last == {}
    else:
        assert (last.get("error") or last)["code"] in ("unauthenticated", "invalid_argument")


# -- headers ----------------------------------------------------------------------------


def _request(*lines: str, path: str = "/process.Process/List", body: str = "{}") -> bytes:
    given = [f"POST {path} HTTP/1.1", *lines, "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return ("\r\n".join([*given, "Connection: close"]) + f"\r\n\r\n{body}").encode()


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_headers_that_can_be_read_in_two_ways(world: World) -> None:
    (first, second), (right, other) = world.ids, world.tokens
    host, one = "Host: localhost", f"E2b-Sandbox-Id: {first}"
    token = f"X-Access-Token: {right}"
    assert _status(world.raw(_request(host, one, token))) == 200
    refused = [
        (host, one, f"E2b-Sandbox-Id: {second}", token),
        (host, one, f"e2b-sandbox-id: {first}", token),
        (host, one, token, f"X-Access-Token: {other}"),
        (host, one, f"X-Access-Token: {other}", token),
        (host, one, token, "E2b-Sandbox-Port: 49983", "E2b-Sandbox-Port: 49999"),
        (host, "Host: other", one, token),
    ]
    for lines in refused:
        assert _status(world.raw(_request(*lines))) == 400, lines


def test_a_host_and_headers_that_name_different_sandboxes(world: World) -> None:
    (first, second), (right, other) = world.ids, world.tokens
    host = f"Host: 49983-{first}.sbx.localhost"
    assert _status(world.raw(_request(host, f"X-Access-Token: {right}"))) == 200
    assert _status(world.raw(_request(host, f"E2b-Sandbox-Id: {first}", f"X-Access-Token: {right}"))) == 200
    assert _status(world.raw(_request(host, f"X-Access-Token: {other}"))) == 401
    for token in (right, other):
        assert _status(world.raw(_request(host, f"E2b-Sandbox-Id: {second}", f"X-Access-Token: {token}"))) == 400


def test_names_of_headers_that_only_look_alike(world: World) -> None:
    token = f"X-Access-Token: {world.tokens[0]}"
    for line in (f"E2b_Sandbox_Id: {world.ids[0]}", f"X-E2b-Sandbox-Id: {world.ids[0]}"):
        assert _status(world.raw(_request("Host: localhost", line, token))) in (401, 404)


@pytest.mark.parametrize(
    "sandbox", ["", "x", "../x", "%2e%2e", "zzzzzzzzzzzz", "a" * 50_000, "\u00e9", "*", "x,y", "' OR 1=1 --"]
)
def test_sandboxes_that_are_none(world: World, sandbox: str) -> None:
    lines = ("Host: localhost", f"E2b-Sandbox-Id: {sandbox}", f"X-Access-Token: {world.tokens[0]}")
    answer = world.raw(_request(*lines))
    assert _status(answer) == 502
    assert b"was not found" in answer


def test_by_a_name_of_a_sandbox_there_is_no_api(world: World) -> None:
    """Neither E2B's nor the server's own."""
    for port in (49983, 8000):
        for path in ("/v2/sandboxes", "/v1/sandboxes", "/sandboxes"):
            lines = (f"Host: {port}-{world.ids[0]}.sbx.localhost", f"X-API-Key: {world.server.key}")
            answer = world.raw(_request(*lines, path=path))
            assert _status(answer) in (401, 404, 502)
            assert world.ids[1].encode() not in answer
    with world.server.client() as client:
        api = client.get("/v2/sandboxes", headers={"Host": "api.sbx.localhost:123"})
        assert world.ids[1] in api.text
        assert client.get("/v2/sandboxes", headers={"Host": "api.localhost.evil.test"}).status_code == 403


def test_web_pages_do_not_get_in(world: World) -> None:
    answer = world.post("/process.Process/List", b"{}", "application/json", Origin="https://evil.test")
    assert answer.status_code == 403
