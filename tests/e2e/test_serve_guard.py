"""Who comes in: Host, Origin, keys, bodies, as raw bytes against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from raw_http import Answer, answer_on, connected, exchange, request
from server_kit import Served, environment, served

pytestmark = pytest.mark.anyone

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("guarded") / "home"
    with served(home, "--name", "sandbox.example.org", "--origin", "https://ui.example.org") as found:
        yield found


def problem(answer: Answer | httpx.Response, status: int, error: str) -> None:
    found = answer.status if isinstance(answer, Answer) else answer.status_code
    body = answer.body if isinstance(answer, Answer) else answer.content
    assert found == status, body
    document = json.loads(body)
    assert (document["status"], document["error"]) == (status, error)
    assert document["request_id"]
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"


# -- keys -------------------------------------------------------------------------------


def operations(server: Served) -> list[tuple[str, str]]:
    with server.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def test_every_route_needs_a_key(server: Served) -> None:
    found = operations(server)
    assert len(found) > 20
    with server.client(key="") as client:
        for method, path in [*found, ("GET", "/metrics"), ("GET", "/openapi.json"), ("POST", "/mcp"), ("GET", "/no")]:
            if path in ("/healthz", "/readyz"):
                continue
            # Wrong ones are limited by address: the first are told why, later ones to come back later.
            answer = client.request(method, path.replace("{", "").replace("}", ""))
            assert answer.status_code in (401, 429), (method, path, answer.text)
            if answer.status_code == 401 and method != "HEAD":
                assert answer.headers["www-authenticate"] == "Bearer"
                problem(answer, 401, "KeyRefused")


def test_a_good_key_is_never_kept_out_by_bad_ones(server: Served) -> None:
    with server.client(key="slp_" + "a" * 12 + "_" + "b" * 43) as client:
        statuses = {client.get("/v1/me").status_code for _ in range(60)}
    assert 429 in statuses
    with server.client() as client:
        assert client.get("/v1/me").status_code == 200


@pytest.mark.parametrize("path", ["/v1/wire", "/v1/events", "/v1/sandboxes/x/exec/ws", "/v1/nothing"])
def test_no_websocket_without_a_key(server: Served, path: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(server.url.replace("http", "ws") + path).close()
    assert refused.value.response.status_code in (401, 429)


def test_refused_websockets_are_in_the_books(server: Served) -> None:
    place = f"{server.url.replace('http', 'ws')}/v1/wire"
    given = {"Authorization": f"Bearer {server.key}"}
    with server.client() as client:

        def refusals() -> int:
            return sum(item["status"] == 403 for item in client.get("/v1/audit?limit=1000").json()["items"])

        before = refusals()
        with pytest.raises(InvalidStatus) as refused:
            connect(place, additional_headers=given, origin=Origin("http://evil.example")).close()
        assert refused.value.response.status_code == 403
        assert refusals() == before + 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic {key}"},
        {"Authorization": "{key}"},
        {"Authorization": "Bearer {key}x"},
        {"Authorization": "Bearer {short}"},
        {"X-API-Key": ""},
        {"Cookie": "key={key}"},
    ],
)
def test_what_is_no_key(server: Served, headers: dict[str, str]) -> None:
    sent = {name: value.format(key=server.key, short=server.key[:-1]) for name, value in headers.items()}
    assert exchange(server.url, request(headers=sent)).status in (401, 429)


def test_both_ways_to_send_a_key(server: Served) -> None:
    assert exchange(server.url, request(key=server.key)).status == 200
    assert exchange(server.url, request(headers={"X-API-Key": server.key})).status == 200
    assert exchange(server.url, request(headers={"Authorization": f"bEaReR   {server.key}"})).status == 200


@pytest.mark.parametrize("query", ["key={}", "token={}", "access_token={}", "authorization=Bearer%20{}", "api_key={}"])
def test_a_key_in_the_url_is_none(server: Served, query: str) -> None:
    assert exchange(server.url, request(f"/v1/me?{query.format(server.key)}")).status in (401, 429)


def test_keys_that_are_made_and_revoked_while_it_runs(server: Served) -> None:
    key = server.new_key("short", "--expires", "2s")
    deadline = time.monotonic() + 10
    with server.client(key) as client:
        _until(lambda: client.get("/v1/me").status_code == 200, deadline)
        _until(lambda: client.get("/v1/me").status_code in (401, 429), deadline)
    key = server.new_key("gone")
    with server.client(key) as client:
        _until(lambda: client.get("/v1/me").status_code == 200, deadline)
        command = [sys.executable, "-m", "sloplet.cli", "key", "rm", "gone"]
        subprocess.run(command, env=environment(server.home), check=True, capture_output=True)
        _until(lambda: client.get("/v1/me").status_code in (401, 429), deadline)


def _until(true: object, deadline: float) -> None:
    assert callable(true)
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_only_admins_name_tenants(server: Served) -> None:
    key = server.new_key("modest")
    headers = {"Sloplet-Tenant": "main"}
    with server.client(key) as client:
        _until(lambda: client.get("/v1/me").status_code == 200, time.monotonic() + 5)
        problem(client.get("/v1/me", headers=headers), 403, "NotAllowed")
        assert client.get("/v1/me", headers={"Sloplet-Tenant": "modest"}).json()["tenant"] == "modest"
    with server.client() as client:
        problem(client.get("/v1/me", headers={"Sloplet-Tenant": "nobody"}), 404, "TenantNotFound")
        problem(client.get("/v1/me", headers={"Sloplet-Tenant": "../main"}), 404, "TenantNotFound")


# -- names and pages ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("[0:0:0:0:0:0:0:1]", 200),
        ("sandbox.example.org", 200),
        ("sandbox.example.org.:443", 200),
        ("rebind.test", 403),
        ("127.0.0.1.rebind.test", 403),
        ("169.254.169.254", 403),
        ("[::2]", 403),
        ("", 400),
        ("localhost@rebind.test", 400),
        ("localhost/", 400),
        ("local host", 400),
        ("localhost:80:80", 400),
        ("[::1", 400),
    ],
)
def test_host(server: Served, host: str, status: int) -> None:
    assert exchange(server.url, request(headers={"Host": host}, key=server.key)).status == status


def test_a_host_is_named_once(server: Served) -> None:
    auth = f"Authorization: Bearer {server.key}\r\n".encode()
    assert exchange(server.url, b"GET /v1/me HTTP/1.1\r\n" + auth + b"\r\n").status == 400
    assert exchange(server.url, b"GET /v1/me HTTP/1.0\r\n" + auth + b"\r\n").status == 400
    two = b"Host: localhost\r\nHost: localhost\r\n"
    assert exchange(server.url, b"GET /v1/me HTTP/1.1\r\n" + two + auth + b"\r\n").status == 400
    whole = b"GET http://rebind.test/v1/me HTTP/1.1\r\nHost: localhost\r\n" + auth + b"\r\n"
    assert exchange(server.url, whole).status == 400


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost", "https://ui.example.org.evil"])
def test_web_pages_of_others(server: Served, origin: str) -> None:
    problem(exchange(server.url, request(headers={"Origin": origin}, key=server.key)), 403, "NotAllowed")
    headers = {"Authorization": f"Bearer {server.key}"}
    with pytest.raises(InvalidStatus) as refused:
        connect(
            server.url.replace("http", "ws") + "/v1/wire", origin=Origin(origin), additional_headers=headers
        ).close()
    assert refused.value.response.status_code == 403
    asks = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "e2b-sandbox-id",
    }
    for path in ("/v1/sandboxes", "/v2/sandboxes"):  # E2B's, too: only `serve --e2b` is for every page
        answer = exchange(server.url, request(path, "OPTIONS", asks))
        assert answer.status == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert exchange(server.url, request("/v2/sandboxes", headers={"Origin": origin}, key=server.key)).status == 403


def test_web_pages_that_the_operator_allowed(server: Served) -> None:
    origin = {"Origin": "https://ui.example.org"}
    asks = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer = exchange(server.url, request("/v1/sandboxes", "OPTIONS", asks))
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == "https://ui.example.org"
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    answer = exchange(server.url, request(headers=origin, key=server.key))
    assert (answer.status, answer.headers["vary"]) == (200, "origin")
    assert exchange(server.url, request(headers=origin)).status in (401, 429)  # and a key as everybody


# -- bodies -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "text/json"]
)
def test_bodies_that_are_not_json(server: Served, kind: str) -> None:
    sent = request("/v1/sandboxes", "POST", {"Content-Type": kind}, key=server.key, body=b'{"engine":"fake"}')
    problem(exchange(server.url, sent), 415, "RequestInvalid")


def test_compressed_bodies(server: Served) -> None:
    headers = {**JSON, "Content-Encoding": "gzip"}
    problem(
        exchange(server.url, request("/v1/sandboxes", "POST", headers, key=server.key, body=b"x")),
        415,
        "RequestInvalid",
    )


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b'{"name":"a","name":"b"}',
        b'{"env":{"A":"1","A":"2"}}',
        b'{"cpus":NaN}',
        b'{"cpus":-Infinity}',
        b'{"cpus":' + b"9" * 10_000 + b"}",
        b"[" * 50_000,
        b"[" * 100 + b"]" * 100,
        b'{"a":' * 70 + b"1" + b"}" * 70,
        b"[" * 900 + b"]" * 900,
    ],
    ids=["cut", "bytes", "twice", "twice-below", "nan", "infinity", "digits", "open", "deep", "deep-objects", "deeper"],
)
def test_json_that_is_not_sound(server: Served, body: bytes) -> None:
    answer = exchange(server.url, request("/v1/sandboxes", "POST", JSON, key=server.key, body=body))
    problem(answer, 400, "RequestInvalid")


def test_bodies_that_are_too_long_are_told_at_once(server: Served) -> None:
    headers = {**JSON, "Content-Length": str(1 << 30)}
    began = time.monotonic()
    problem(exchange(server.url, request("/v1/sandboxes", "POST", headers, key=server.key)), 413, "RequestInvalid")
    assert time.monotonic() - began < 5
    huge = {"Content-Length": str(1 << 50)}
    sent = request("/v1/sandboxes/x/files?path=/a", "PUT", huge, key=server.key)
    problem(exchange(server.url, sent), 413, "RequestInvalid")


def test_bodies_that_grow_too_long(server: Served) -> None:
    """Their client gets an answer, although it is still sending."""

    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 20)

    with server.client() as client:
        answer = client.post("/v1/sandboxes", content=pieces(), headers=JSON)
    problem(answer, 413, "RequestInvalid")


def test_without_a_key_a_body_is_not_waited_for(server: Served) -> None:
    headers = {**JSON, "Content-Length": "1000000"}
    assert exchange(server.url, request("/v1/sandboxes", "POST", headers)).status in (401, 429)


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 0x10\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Bad Name: 1\r\n",
        b"X: a\r\n b\r\n",
    ],
)
def test_requests_that_could_hide_another(server: Served, lines: bytes) -> None:
    head = b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    auth = f"Authorization: Bearer {server.key}\r\n".encode()
    hidden = b"0\r\n\r\nGET /v1/me HTTP/1.1\r\nHost: localhost\r\n" + auth + b"\r\n"
    with connected(server.url) as link:
        link.sendall(head + auth + lines + b"\r\n" + hidden)
        first = answer_on(link)
        assert 400 <= first.status < 500
        link.settimeout(2)
        rest = b""
        while piece := link.recv(65536):
            rest += piece
        assert b"slp_" not in rest
        assert b"HTTP/1.1 200" not in rest


def test_heads_have_a_longest_length(server: Served) -> None:
    assert exchange(server.url, request(headers={"X": "a" * 70_000}, key=server.key)).status == 400
    assert exchange(server.url, request("/v1/me?" + "a" * 70_000, key=server.key)).status == 400
    with connected(server.url) as link:
        link.sendall(b"GET /v1/me HTTP/1.1\r\nHost: localhost\r\nX: ")
        sent = 0
        with suppress(ConnectionError):
            while sent < 1 << 30:
                sent += link.send(b"a" * 65536)
        assert sent < 32 << 20  # what is on its way when the connection is closed
    with server.client() as client:
        assert client.get("/v1/me").status_code == 200


def test_unknown_paths_and_methods(server: Served) -> None:
    with server.client() as client:
        problem(client.get("/v1/nothing"), 404, "RequestInvalid")
        assert "/openapi.json" in client.get("/v1/nothing").json()["hint"]
        assert "PATCH" in client.patch("/v1/sandboxes").json()["detail"]
        problem(client.get("/v1/sandboxes/"), 404, "RequestInvalid")
        answer = client.patch("/v1/me")
        problem(answer, 405, "RequestInvalid")
        assert answer.headers["allow"] == "GET"
        for path in ("/docs", "/redoc", "/", "/favicon.ico", "/..%2f..%2fetc/passwd"):
            assert client.get(path).status_code == 404


# -- how fast, how much at once -------------------------------------------------------------


def test_rate(server: Served) -> None:
    key = server.new_key("slow", "--rate", "5")
    with server.client(key) as client:
        _until(lambda: client.get("/v1/me").status_code in (200, 429), time.monotonic() + 5)
        answers = [client.get("/v1/me") for _ in range(20)]
    late = [answer for answer in answers if answer.status_code == 429]
    assert late
    problem(late[0], 429, "RateLimited")
    assert int(late[0].headers["retry-after"]) >= 1
    assert late[0].json()["retry_after"] <= 1


def test_requests_at_a_time_and_streams_besides(server: Served) -> None:
    key = server.new_key("few", "--concurrency", "2")
    with server.client(key) as client, ThreadPoolExecutor(3) as pool:
        _until(lambda: client.get("/v1/me").status_code == 200, time.monotonic() + 5)
        assert client.post("/v1/sandboxes", json={"engine": "fake", "name": "box"}).status_code == 201
        sleep = {"command": "sleep 100"}
        with client.stream("POST", "/v1/sandboxes/box/exec/stream", json=sleep) as events:
            first = next(events.iter_raw())
            assert b"started" in first
            # What streams counts no more: two requests are possible besides, and not three.
            waiting = [
                pool.submit(client.post, "/v1/sandboxes/box/exec", json={"command": "sleep 3"}) for _ in range(2)
            ]
            _until(lambda: client.get("/v1/me").status_code == 429, time.monotonic() + 5)
            assert [each.result().status_code for each in waiting] == [200, 200]
            assert client.get("/v1/me").status_code == 200


def test_the_log_holds_no_key(server: Served) -> None:
    """Whatever the other tests here made the server say."""
    assert server.log is not None
    secret = server.key.split("_", 2)[2]
    texts = [server.log.read_text(), *(path.read_text() for path in (server.home / "server").glob("audit*.jsonl"))]
    assert len(texts) == 2
    assert all(secret not in text for text in texts)
    assert "Traceback" not in texts[0], texts[0][-3000:]


def test_state_is_private(server: Served) -> None:
    for path in (server.home, server.home / "state.db", server.home / "server", server.home / "server" / "audit.jsonl"):
        assert path.stat().st_mode & 0o077 == 0, path
