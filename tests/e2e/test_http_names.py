"""Public names against a real server, with a real server inside a sandbox: curl, httpx, websockets, raw sockets, and a
real browser. What is inside lies as well as it can."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from server_kit import Served, served
from sloplet.engines import registry
from sloplet.server.names.wires import MOST_OF_SANDBOX

pytestmark = pytest.mark.anyone

INSIDE = (Path(__file__).parent / "inside_server.py").read_text()
LIES = re.findall(r'^    "([a-z0-9-]+)": b', INSIDE, re.MULTILINE)
WAIT = 30.0


@dataclass
class Site:
    """A published port of a sandbox, and how to visit it."""

    server: Served
    box: str
    port: int
    url: str
    token: str | None

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.server.url.rsplit(":", 1)[1])

    def client(self, *, token: bool = True, **headers: str) -> httpx.Client:
        given = {"Host": self.host, **headers}
        if token and self.token:
            given["Sloplet-Token"] = self.token
        return httpx.Client(base_url=self.server.url, headers=given, timeout=WAIT, trust_env=False)

    def raw(self, request: bytes) -> bytes:
        """All bytes of the answer to these."""
        with socket.create_connection(self.address, timeout=WAIT) as sock:
            sock.sendall(request.replace(b"HOST", self.host.encode()).replace(b"TOKEN", (self.token or "").encode()))
            parts = []
            while piece := sock.recv(65536):
                parts.append(piece)
            return b"".join(parts)

    def socket(self, path: str, **options: Any) -> ClientConnection:
        options.setdefault("additional_headers", {"Sloplet-Token": self.token or ""})
        sock = socket.create_connection(self.address, timeout=WAIT)
        options = {"max_size": 64 << 20, "compression": None, "proxy": None, **options}
        return connect(f"ws://{self.host}{path}", sock=sock, **options)

    def seen(self) -> dict[str, int]:
        with self.client() as client:
            return dict(client.get("/seen").json())


def publish(server: Served, box: str, port: int = 8000, *, public: bool = False, key: str | None = None) -> Site:
    with server.client(key) as client:
        answer = client.put(f"/v1/sandboxes/{box}/ports/{port}", json={"public": public})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["port"] == port
    assert told["public"] is public
    return Site(server, box, port, told["url"], told["token"])


def start_inside(server: Served, box: str, port: int = 8000, key: str | None = None) -> None:
    with server.client(key) as client:
        command = ["python3", "-c", INSIDE, str(port)]
        assert client.post(f"/v1/sandboxes/{box}/processes", json={"command": command}).status_code == 201
    site = publish(server, box, port, key=key)
    deadline = time.monotonic() + WAIT
    with site.client() as client:
        while client.get("/seen").status_code == 502:
            assert time.monotonic() < deadline, "the server inside did not start"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("names") / "home") as running:
        yield running


@pytest.fixture(scope="module")
def made(server: Served) -> str:
    if not registry.load("container").probe().available:
        pytest.skip("capability: container")
    with server.client() as client:
        box = client.post("/v1/sandboxes", json={"engine": "container", "pids": 64}).json()["id"]
    start_inside(server, box)
    return str(box)


@pytest.fixture
def site(server: Served, made: str) -> Site:
    """Private, and new: nobody's token but this test's."""
    with server.client() as client:
        assert client.delete(f"/v1/sandboxes/{made}/ports/8000").status_code == 204
    return publish(server, made)


# -- who may come in -------------------------------------------------------------------


def test_all_that_a_stranger_may_not_know_looks_the_same(server: Served, site: Site) -> None:
    port = site.address[1]
    hosts = [site.host, site.host.replace("8000", "8001"), f"8000-zzzzzzzzzzzz.localhost:{port}"]
    answers = []
    with httpx.Client(base_url=server.url, trust_env=False, timeout=WAIT) as client:
        for host in hosts:
            for headers in ({}, {"Sloplet-Token": "wrong"}, {"Cookie": "sloplet-token=wrong"}):
                answers.append(client.get("/", headers={"Host": host, **headers}))
        answers.append(client.get("/?sloplet_token=wrong", headers={"Host": site.host}))
        answers.append(client.post("/", headers={"Host": site.host}, content=b"x"))
    assert {(each.status_code, each.content, str(each.headers)) for each in answers} == {
        (404, answers[0].content, str(answers[0].headers))
    }
    assert b"sloplet_token" in answers[0].content


def test_the_token_opens_it_and_stays_outside(site: Site, server: Served) -> None:
    with site.client(Authorization="Bearer of the app", **{"X-Forwarded-For": "1.2.3.4"}) as client:
        told = client.get("/echo?a=1", headers={"Cookie": "app=1; sloplet-token=x", "X-Mine": "yes"}).json()
    headers = dict(told["headers"])
    assert told["target"] == "/echo?a=1"
    assert headers["host"] == headers["x-forwarded-host"] == site.host
    assert headers["x-forwarded-for"] == "127.0.0.1"
    assert headers["x-forwarded-proto"] == "http"
    assert headers["authorization"] == "Bearer of the app"
    assert headers["cookie"] == "app=1"
    assert headers["x-mine"] == "yes"
    assert len(told["headers"]) == len(headers)
    assert site.token is not None
    assert site.token not in json.dumps(told)
    # A key of the server that was sent to the wrong host does not go in either; a stranger's does.
    with site.client(**{"X-API-Key": server.key}) as client:
        told = client.get("/echo", headers={"Authorization": f"Bearer {server.key}"}).json()
        assert server.key not in json.dumps(told)
        other = "Bearer slp_" + "a" * 12 + "_" + "b" * 43
        assert dict(client.get("/echo", headers={"Authorization": other}).json()["headers"])["authorization"] == other


def test_a_link_with_the_token_becomes_a_cookie(site: Site) -> None:
    with site.client(token=False) as client:
        answer = client.get(f"/echo?a=1&sloplet_token={site.token}&b=2")
        assert (answer.status_code, answer.headers["location"]) == (302, "/echo?a=1&b=2")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert "omain" not in cookie
        assert answer.headers["cache-control"] == "no-store"
        client.cookies.clear()
        pair = cookie.split(";")[0]
        told = client.get("/echo?a=1&b=2", headers={"Cookie": pair}).json()
        assert "cookie" not in dict(told["headers"])
        # What another page makes the browser send does not count.
        for said in ({"Origin": "http://8000-zzzzzzzzzzzz.localhost"}, {"Sec-Fetch-Site": "same-site"}):
            assert client.post("/echo", headers={"Cookie": pair, **said}, content=b"x").status_code == 404
        # A program that posts is not redirected.
        told = client.post(f"/echo?sloplet_token={site.token}&c=3", content=b"abc").json()
        assert (told["target"], told["length"]) == ("/echo?c=3", 3)


def test_public_is_for_anybody_and_private_again_is_not(server: Served, site: Site) -> None:
    public = publish(server, site.box, public=True)
    assert public.token is None
    with public.client() as client:
        assert client.get("/seen").status_code == 200
        with public.socket("/ws", additional_headers={}) as visitor:
            visitor.send("hello")
            assert visitor.recv(WAIT) == "hello"
            again = publish(server, site.box)
            assert again.token == site.token
            with pytest.raises(ConnectionClosed):
                visitor.recv(WAIT)
        assert client.get("/seen").status_code == 404


def test_a_name_taken_back_cuts_who_is_in(server: Served, site: Site) -> None:
    with site.socket("/ws") as visitor:
        visitor.send("hello")
        assert visitor.recv(WAIT) == "hello"
        with server.client() as client:
            path = f"/v1/sandboxes/{site.box}/ports"
            assert [each["port"] for each in client.get(path).json()["items"]] == [8000]
            assert client.delete(f"{path}/8000").status_code == 204
            assert client.delete(f"{path}/8000").status_code == 204
            assert client.get(path).json()["items"] == []
        with pytest.raises(ConnectionClosed):
            visitor.recv(WAIT)
    with site.client() as client:
        assert client.get("/seen").status_code == 404
    assert publish(server, site.box).token != site.token


def test_another_tenant_sees_and_touches_nothing(server: Served, site: Site) -> None:
    with server.client(server.new_key("stranger")) as client:
        path = f"/v1/sandboxes/{site.box}/ports"
        assert client.get(path).status_code == 404
        assert client.put(f"{path}/8000", json={"public": True}).status_code == 404
        assert client.delete(f"{path}/8000").status_code == 404
        assert client.get("/seen", headers={"Host": site.host}).status_code == 404
    with site.client() as client:
        assert client.get("/seen").status_code == 200


def test_the_api_never_answers_there(server: Served, site: Site) -> None:
    with server.client() as api:
        for path in ("/healthz", "/readyz", "/v1/me", "/openapi.json", "/v1/sandboxes", "/metrics"):
            assert "sloplet-request-id" not in api.get(path, headers={"Host": site.host}).headers
            inside = api.get(path, headers={"Host": site.host, "Sloplet-Token": site.token or ""})
            assert (inside.status_code, inside.text) == (404, "not here")
        odd = api.get("/v1/me", headers={"Host": f"x.{site.host}"})
        assert odd.status_code == 403
    with pytest.raises(InvalidStatus, match="404"):
        site.socket("/v1/wire", additional_headers={"Authorization": f"Bearer {server.key}"})


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1", "8000.5"])
def test_ports_that_are_none(server: Served, made: str, port: str) -> None:
    with server.client() as client:
        assert client.put(f"/v1/sandboxes/{made}/ports/{port}", json={"public": False}).status_code == 422
        assert client.put(f"/v1/sandboxes/{made}/ports/80", json={"public": False, "x": 1}).status_code == 422


# -- what passes -----------------------------------------------------------------------


def test_methods_and_bodies(site: Site) -> None:
    body = os.urandom(8 << 20)
    with site.client() as client:
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"):
            assert client.request(method, "/echo").json()["method"] == method
        head = client.head("/echo")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 0
        for content in (body, iter([body[at : at + 65536] for at in range(0, len(body), 65536)])):
            told = client.post("/echo", content=content).json()
            assert (told["length"], told["sha256"]) == (len(body), hashlib.sha256(body).hexdigest())
        assert client.request("GET", "/echo", content=b"abc").json()["length"] == 3
        assert client.request("TRACE", "/echo").status_code == 405


def test_answers_of_every_shape(site: Site) -> None:
    with site.client() as client:
        chunked = client.get("/chunked")
        assert chunked.text == "onetwothree"
        assert "x-trailer" not in chunked.headers
        assert client.get("/until-close").text == "until the end"
        assert client.get("/204").status_code == 204
        unchanged = client.get("/304", headers={"If-None-Match": '"x"'})
        assert (unchanged.status_code, unchanged.headers["etag"]) == (304, '"x"')
        assert client.get("/nowhere").status_code == 404
        answer = client.get("/cookies")
    assert answer.headers.get_list("set-cookie") == ["app=1; Path=/"]
    assert not {"alt-svc", "strict-transport-security", "sloplet-request-id", "trailer"} & set(answer.headers)


def test_a_large_answer_is_streamed_whole(site: Site) -> None:
    size = (48 << 20) + 17
    digest, count = hashlib.sha256(), 0
    with site.client() as client, client.stream("GET", f"/big?{size}") as answer:
        assert int(answer.headers["content-length"]) == size
        for piece in answer.iter_bytes():
            digest.update(piece)
            count += len(piece)
    assert count == size
    assert digest.digest() == hashlib.sha256((bytes(range(256)) * (size // 256 + 1))[:size]).digest()


def test_events_come_as_they_happen(site: Site) -> None:
    with site.client() as client, client.stream("GET", "/events") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        events = answer.iter_text()
        assert next(events) == "data: first\n\n"  # the second does not exist yet
        with site.client() as other:
            assert other.post("/go").status_code == 200
        assert "".join(events) == "data: second\n\n"


def test_connections_inside_are_used_again(site: Site) -> None:
    with site.client() as client:
        before = site.seen()["connections"]
        for _ in range(20):
            assert client.get("/echo").status_code == 200
        assert site.seen()["connections"] - before <= 2
        before = site.seen()["connections"]
        for _ in range(3):  # what must not happen twice has a connection of its own
            assert client.post("/echo", content=b"x").status_code == 200
        assert site.seen()["connections"] - before >= 3


def test_curl_by_name_with_100_continue(site: Site, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(2 << 20))
    port = site.address[1]
    name = site.host.split(":")[0]
    command = ["curl", "-sS", "--max-time", "30", "--resolve", f"{name}:{port}:127.0.0.1"]
    command += ["-H", f"Sloplet-Token: {site.token}", "-H", "Expect: 100-continue", "--data-binary", f"@{big}"]
    told = json.loads(subprocess.run([*command, f"{site.url}/echo"], capture_output=True, check=True).stdout)
    assert told["length"] == 2 << 20
    # One that refuses before it has seen the body is heard, and was sent none.
    early = subprocess.run([*command, "-w", "%{http_code}", f"{site.url}/early"], capture_output=True, check=True)
    assert early.stdout == b"no413"
    deadline = time.monotonic() + WAIT
    assert site.seen()["early"] == 0
    assert time.monotonic() < deadline


def test_a_visitor_that_goes_is_noticed_inside(site: Site) -> None:
    before = site.seen()["cut"]
    with socket.create_connection(site.address, timeout=WAIT) as sock:
        sock.sendall(f"GET /hang HTTP/1.1\r\nHost: {site.host}\r\nSloplet-Token: {site.token}\r\n\r\n".encode())
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            sock.recv(1)
    deadline = time.monotonic() + WAIT
    while site.seen()["cut"] == before:
        assert time.monotonic() < deadline


def test_a_visitor_that_does_not_read_holds_up_nobody(site: Site) -> None:
    with socket.create_connection(site.address, timeout=WAIT) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"GET /big?{1 << 30} HTTP/1.1\r\nHost: {site.host}\r\nSloplet-Token: {site.token}\r\n\r\n"
        sock.sendall(head.encode())
        assert sock.recv(10)
        before = _rss(site.server.pid)
        with site.client() as client:
            for _ in range(50):
                assert client.get("/echo").status_code == 200
        assert _rss(site.server.pid) - before < 16 << 20


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- lies from inside ------------------------------------------------------------------

#: Those whose head is good: the visitor sees an answer that ends too early, never one that seems whole.
TORN = ("half", "half-chunked", "bad-chunk", "huge-length")


@pytest.mark.parametrize("lie", LIES)
def test_lies(site: Site, lie: str) -> None:
    with site.client() as client:
        if lie in TORN[:3]:
            with pytest.raises(httpx.RemoteProtocolError):
                client.get(f"/lie/{lie}")
        else:
            answer = client.get(f"/lie/{lie}")
            assert answer.status_code == 502, answer.text
            assert answer.headers["content-type"].startswith("text/plain")
            assert "8000" in answer.text
            assert "injected" not in answer.headers
        assert client.get("/seen").status_code == 200
    log = (site.server.log or Path("/dev/null")).read_text()
    assert "Traceback" not in log


def test_an_endless_head_is_given_up(site: Site) -> None:
    with site.client() as client:
        assert client.get("/endless").status_code == 502


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/wslie-accept", 502),
        ("/wslie-extension", 502),
        ("/wslie-protocol", 502),
        ("/lie/garbage", 502),
        ("/lie/nothing", 502),
        ("/lie/101", 502),
        ("/endless", 502),
        ("/wslie-login", 401),
    ],
)
def test_websockets_that_are_none(site: Site, path: str, code: int) -> None:
    with pytest.raises(InvalidStatus) as caught:
        site.socket(path)
    response = caught.value.response
    assert response.status_code == code
    if code == 401:
        assert bytes(response.body) == b"log in first"
        assert response.headers["X-Why"] == "login"


@pytest.mark.parametrize(
    ("lie", "code"), [("masked", 1002), ("utf8", 1007), ("huge", 1009), ("gone", 1011), ("empty-parts", None)]
)
def test_websocket_frames_that_lie(site: Site, lie: str, code: int | None) -> None:
    with site.socket(f"/wslie-{lie}") as visitor:
        if code is None:
            assert visitor.recv(WAIT) == "end"
            return
        closed = None
        while closed is None:
            try:
                visitor.recv(WAIT)
            except ConnectionClosed as error:
                closed = error
        assert closed.rcvd is not None
        assert closed.rcvd.code == code
    assert site.seen()


# -- lies from outside -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"400"),
        (b"Content-Length: 5\r\nContent-Length: 6", b"400"),
        (b"Transfer-Encoding: gzip, chunked", b"400"),
        (b"Content-Length: +5", b"400"),
        (b"Host: 8000-zzzzzzzzzzzz.localhost", b"400"),
        (b"X-Bad: a\rb", b"400"),
        (b"X-Long: " + b"x" * 100_000, b"400 431"),
        (b"\r\n".join(b"X-%d: 1" % each for each in range(300)), b"431"),
    ],
)
def test_requests_that_could_be_two(site: Site, head: bytes, status: bytes) -> None:
    told = site.raw(
        b"POST /echo HTTP/1.1\r\nHost: HOST\r\nSloplet-Token: TOKEN\r\nConnection: close\r\n" + head
        + b"\r\n\r\n5\r\nhello\r\n0\r\n\r\nGET /go HTTP/1.1\r\nHost: HOST\r\n\r\n"
    )  # fmt: skip
    assert told.split(b" ")[1] in status.split(), told[:200]
    assert told.count(b"HTTP/1.1") == 1


def test_a_second_host_header_counts_for_nobody(site: Site) -> None:
    told = site.raw(b"GET /echo HTTP/1.1\r\nHost: x\r\nHost: HOST\r\nSloplet-Token: TOKEN\r\nConnection: close\r\n\r\n")
    assert told.split(b" ")[1] == b"400"


def test_more_visitors_than_there_is_room_for(site: Site) -> None:
    request = f"GET /hang HTTP/1.1\r\nHost: {site.host}\r\nSloplet-Token: {site.token}\r\n\r\n".encode()
    visitors = []
    try:
        for _ in range(MOST_OF_SANDBOX):
            visitors.append(socket.create_connection(site.address, timeout=WAIT))
            visitors[-1].sendall(request)
        deadline = time.monotonic() + WAIT
        with site.client() as client:
            while (answer := client.get("/seen")).status_code != 503:
                assert time.monotonic() < deadline, "there is always room"
            assert "retry-after" in answer.headers
        # The owner's own way in is not theirs.
        with site.server.client() as api:
            assert api.post(f"/v1/sandboxes/{site.box}/exec", json={"command": "echo hi"}).json()["stdout"] == "hi\n"
    finally:
        for each in visitors:
            each.close()
    deadline = time.monotonic() + WAIT
    with site.client() as client:
        while client.get("/seen").status_code != 200:
            assert time.monotonic() < deadline


# -- WebSocket -------------------------------------------------------------------------


def test_websocket_messages_pass_as_they_are(site: Site) -> None:
    with site.socket(
        "/ws", subprotocols=["chat", "other"], additional_headers={"Sloplet-Token": site.token or ""}
    ) as ws:
        assert ws.subprotocol == "chat"
        assert ws.response is not None
        assert ws.response.headers.get_all("Set-Cookie") == ["ws=1"]
        for message in ("hello", "", "ünïcode", b"", b"\0\xff", os.urandom(3 << 20)):
            ws.send(message)
            assert ws.recv(WAIT) == message
        ws.send("parts")
        assert ws.recv(WAIT) == "abc"
        ws.send("headers")
        headers = dict(json.loads(ws.recv(WAIT)))
        assert headers["host"] == site.host
        assert "sloplet-token" not in headers
        assert "sec-websocket-extensions" not in headers
        for _ in range(50):
            ws.send("x")
        assert [ws.recv(WAIT) for _ in range(50)] == ["x"] * 50


def test_pings_from_inside_do_not_break_into_messages(site: Site) -> None:
    with site.socket("/ws") as ws:
        ws.send("storm")
        for _ in range(20):
            message = os.urandom(1 << 20)
            ws.send(message)
            assert ws.recv(WAIT) == message


def test_websocket_close_codes(site: Site) -> None:
    for asked, expected in (("close 4001", (4001, "as asked")), ("close", (1000, ""))):
        with site.socket("/ws") as ws:
            ws.send(asked)
            with pytest.raises(ConnectionClosed) as caught:
                ws.recv(WAIT)
            assert caught.value.rcvd is not None
            assert (caught.value.rcvd.code, caught.value.rcvd.reason) == expected
    with site.socket("/ws") as ws:
        ws.send("hello")
        ws.recv(WAIT)
        ws.close(4002, "goodbye")
    deadline = time.monotonic() + WAIT
    while site.seen().get("closed") != 4002:
        assert time.monotonic() < deadline


def test_a_websocket_by_a_token_in_the_query_and_by_a_cookie(site: Site) -> None:
    with site.socket(f"/ws?a=1&sloplet_token={site.token}", additional_headers={}) as ws:
        ws.send("hello")
        assert ws.recv(WAIT) == "hello"
    cookie = {"Cookie": f"sloplet-token={site.token}"}
    with site.socket("/ws", additional_headers=cookie, origin=site.url) as ws:
        ws.send("hello")
        assert ws.recv(WAIT) == "hello"
    for origin in ("http://8000-zzzzzzzzzzzz.localhost", "null"):
        with pytest.raises(InvalidStatus, match="404"):
            site.socket("/ws", additional_headers=cookie, origin=origin)


# -- sandboxes that are not there ------------------------------------------------------


def test_nothing_listens_and_then_the_sandbox_is_gone(server: Served) -> None:
    with server.client() as client:
        box = client.post("/v1/sandboxes", json={"engine": "container"}).json()["id"]
        site = publish(server, box, 3000)
        with site.client() as visitor:
            answer = visitor.get("/", headers={"Accept": "application/json"})
            assert (answer.status_code, answer.headers["content-type"]) == (502, "application/problem+json")
            assert "3000" in answer.json()["detail"]
        assert client.delete(f"/v1/sandboxes/{box}").status_code == 204
        with site.client() as visitor, site.client(token=False) as stranger:
            gone = visitor.get("/")
            assert (gone.status_code, gone.content) == (404, stranger.get("/").content)


def test_a_visit_wakes_who_sleeps(server: Served) -> None:
    if not os.environ.get("SLOPLET_TEST_RUNSC"):
        pytest.skip("capability: gvisor needs runsc")
    with server.client() as client:
        made = client.post("/v1/sandboxes", json={"engine": "gvisor", "name": "sleeper"})
        assert made.status_code == 201, made.text
        box = made.json()["id"]
        start_inside(server, box)
        site = publish(server, box)
        paused = client.post(f"/v1/sandboxes/{box}/pause")
        assert (paused.status_code, paused.json()["state"]) == (200, "paused")
        with site.client(token=False) as stranger:
            assert stranger.get("/seen").status_code == 404
        assert client.get(f"/v1/sandboxes/{box}").json()["state"] == "paused"
        with site.client() as visitor:
            assert visitor.get("/seen").status_code == 200
        assert client.get(f"/v1/sandboxes/{box}").json()["state"] == "running"
        assert client.delete(f"/v1/sandboxes/{box}").status_code == 204


def test_ports_of_a_new_sandbox_have_names_and_a_removed_one_has_none(server: Served) -> None:
    with server.client(server.new_key("porter")) as client:
        box = client.post("/v1/sandboxes", json={"engine": "container", "ports": [3000, 8080]}).json()["id"]
        there = client.get(f"/v1/sandboxes/{box}/ports").json()["items"]
        assert [(each["port"], each["public"]) for each in there] == [(3000, False), (8080, False)]
        assert len({each["token"] for each in there}) == 2
        assert client.post("/v1/sandboxes", json={"engine": "container", "ports": {"80": 8080}}).status_code == 403
        assert client.delete(f"/v1/sandboxes/{box}").status_code == 204
        assert client.get(f"/v1/sandboxes/{box}/ports").status_code == 404


def test_over_tls_with_a_domain_of_its_own(tmp_path: Path) -> None:
    with served(tmp_path / "home", "--tls", "--domain", "box.localhost") as server:
        certificate = server.told["ca"]
        with server.client(verify=ssl.create_default_context(cafile=certificate)) as client:
            box = client.post("/v1/sandboxes", json={"engine": "container"}).json()["id"]
            command = ["python3", "-c", INSIDE, "8000"]
            assert client.post(f"/v1/sandboxes/{box}/processes", json={"command": command}).status_code == 201
            told = client.put(f"/v1/sandboxes/{box}/ports/8000", json={"public": False}).json()
        port = server.url.rsplit(":", 1)[1]
        assert told["url"] == f"https://8000-{box}.box.localhost:{port}"
        jar = tmp_path / "jar"
        curl = ["curl", "-sS", "--max-time", "30", "--cacert", certificate, "--retry", "50", "--retry-all-errors",
                "--retry-delay", "0", "--fail", "--resolve", f"8000-{box}.box.localhost:{port}:127.0.0.1",
                "-b", str(jar), "-c", str(jar)]  # fmt: skip
        url = f"{told['url']}/echo?sloplet_token={told['token']}"
        told = json.loads(subprocess.run([*curl, "-L", url], capture_output=True, check=True).stdout)
        assert dict(told["headers"])["x-forwarded-proto"] == "https"
        assert "cookie" not in dict(told["headers"])
        assert re.search(r"#HttpOnly_8000-\S+\tFALSE\t/\tTRUE\t0\t__Host-sloplet-token\t", jar.read_text())


# -- a browser -------------------------------------------------------------------------


def test_chromium(site: Site, tmp_path: Path) -> None:
    """By the link with the token, at *.localhost as it is: cookie, redirect, fetch and WebSocket of the page."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("capability: chromium is not installed")
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server",
        f"--user-data-dir={tmp_path}", f"{site.url}/page?x=1&sloplet_token={site.token}",
    ]  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as output:
        browser = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        with site.client() as client:
            while not (told := client.get("/report").json()):
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                assert browser.poll() is None, log.read_text()[-2000:]
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
    assert told == ["query=?x=1 cookie=none fetch=3 ws=hello/chat closed=4000"]
