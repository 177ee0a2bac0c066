"""A-01 and A-02: who may talk to a server. The address it listens on, a key on every route, and web pages.

Every route of the application is asked (tests/routes_kit.py), WebSockets and the names of ports too; a route that is
added is in these tables by itself.
"""

from __future__ import annotations

import hmac
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rude_http import Answer, Raw, request

from routes_kit import Route, document, keyed, routes
from server_kit import Served, environment, served
from sloplet.errors import KeyRefused
from sloplet.server import keys as keys_module
from sloplet.server.keys import Keys
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone

WRONG = f"slp_{'a' * 12}_{'b' * 43}"
UPGRADE = (
    ("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
)  # fmt: skip
ORIGIN = "https://ok.test"
PAGES = (
    "http://evil.test", "https://evil.test", "null", "", "http://localhost:3000", "https://ok.test.evil.test",
    "http://ok.test", "https://ok.test:444", "https://OK.test/", "file://", "chrome-extension://abc",
    "https://ok.test, x",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("g") / "home", "--origin", ORIGIN) as made:
        yield made


@pytest.fixture(scope="module")
def box(server: Served) -> str:
    """A sandbox of the admin's, for what needs one that is there."""
    with server.client() as client:
        answer = client.post("/v1/sandboxes", json={"engine": "fake", "name": "box"})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


def ask(
    server: Served, route: Route, *headers: tuple[str, str], key: str = "", target: str = "", **values: str
) -> Answer:
    """One request by hand. A WebSocket is one until it is accepted or refused."""
    given = list(headers)
    body = None
    if route.method == "WS":
        given += UPGRADE
    elif route.method in ("POST", "PUT", "PATCH"):
        body = b"{}"
        if not any(name.casefold() == "content-type" for name, _ in given):
            given.append(("Content-Type", "application/json"))
    with Raw(server.url) as raw:
        method = "GET" if route.method == "WS" else route.method
        hosts = [value for name, value in given if name == "Host"]
        given = [pair for pair in given if pair[0] != "Host"]
        raw.send(request(method, (target or route.at(**values)), (hosts or [raw.host])[0], given, body, key=key))
        answer = raw.answer(head=method == "HEAD")
    assert answer is not None, f"{route}: closed without an answer"
    return answer


# -- A-01 ----------------------------------------------------------------------------------------------------------


def _listening(pid: int) -> set[str]:
    """The addresses that a process listens on, as /proc has them."""
    inodes = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
        except FileNotFoundError:
            continue
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[n] for n in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in inodes:
                found.add(local.rpartition(":")[0])
    return found


def test_a01_only_this_machine_is_listened_to(server: Served) -> None:
    assert _listening(server.pid) == {"0100007F"}  # 127.0.0.1; and nothing else, on no other port


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a01_other_addresses_need_tls_or_a_word(tmp_path: Path, host: str) -> None:
    command = [sys.executable, "-m", "sloplet.cli", "serve", "--host", host, "--port", "0"]
    done = subprocess.run(command, env=environment(tmp_path / "home"), capture_output=True, text=True, timeout=60)
    assert done.returncode not in (0, None)
    assert "tls" in done.stderr.casefold()
    assert "--insecure" in done.stderr, done.stderr


NO_KEYS: dict[str, list[tuple[str, str]]] = {
    "none": [],
    "empty": [("Authorization", "")],
    "empty bearer": [("Authorization", "Bearer ")],
    "wrong": [("Authorization", f"Bearer {WRONG}")],
    "no scheme": [("Authorization", "KEY")],
    "basic": [("Authorization", "Basic dXNlcjpwYXNz")],
    "empty api key": [("X-Api-Key", "")],
    "wrong api key": [("X-Api-Key", WRONG)],
    "cookie": [("Cookie", "key=KEY; token=KEY; Authorization=KEY")],
    "not ascii": [("Authorization", "Bearer slp_ä")],
    "long": [("Authorization", "Bearer slp_" + "a" * 6000)],
    "of the secret all but the end": [("Authorization", "Bearer PART")],
}


@pytest.mark.parametrize("how", NO_KEYS, ids=str)
def test_a01_every_route_needs_a_key(server: Served, box: str, how: str) -> None:
    for route in keyed():
        given = [
            (name, value.replace("KEY", server.key).replace("PART", server.key[:-1])) for name, value in NO_KEYS[how]
        ]
        answer = ask(server, route, *given, box=box)
        assert answer.status == 401, f"{route}: {answer.status} {answer.body!r}"
        if route.method != "HEAD":
            assert answer.document["error"] == "KeyRefused"
        assert "www-authenticate" in answer.headers
        assert server.key.encode() not in answer.body


def test_a01_nothing_is_told_of_what_there_is(server: Served, box: str) -> None:
    """Without a key a route that is there, one that is not, and a sandbox that is there or not: all the same."""
    seen = set()
    for path in (
        f"/v1/sandboxes/{box}",
        "/v1/sandboxes/nothing",
        "/v1/nothing",
        "/nothing",
        "/docs",
        "/redoc",
        "//",
        "/v1",
    ):
        answer = ask(server, Route("GET", path))
        document = {name: value for name, value in answer.document.items() if name != "request_id"}
        seen.add((answer.status, json.dumps(document, sort_keys=True)))
    assert len(seen) == 1
    assert next(iter(seen))[0] == 401


@pytest.mark.parametrize("name", ["key", "token", "access_token", "api_key", "authorization", "sloplet_token"])
def test_a01_a_key_in_the_address_is_none(server: Served, box: str, name: str) -> None:
    for route in keyed():
        answer = ask(server, route, target=f"{route.at(box=box)}?{name}={server.key}")
        assert answer.status == 401, f"{route}: {answer.status}"


def test_a01_keys_cannot_be_guessed_quickly(server: Served) -> None:
    """Who tries many is made to wait; who has a good one is not, from wherever."""
    seen = []
    source = "127.66.1.1"
    with Raw(server.url, source=source) as raw:
        for _ in range(60):
            raw.send(request("GET", "/v1/me", raw.host, key=WRONG))
            answer = raw.answer()
            assert answer is not None
            seen.append(answer.status)
        assert seen[0] == 401
        assert seen[-1] == 429
        assert int(answer.headers["retry-after"]) >= 1
        raw.send(request("GET", "/v1/me", raw.host, key=server.key))
        good = raw.answer()
        assert good is not None
        assert good.status == 200
    with Raw(server.url, source="127.66.1.2") as raw:
        raw.send(request("GET", "/v1/me", raw.host, key=WRONG))
        other = raw.answer()
        assert other is not None
        assert other.status == 401


def test_a01_positive_control(server: Served, box: str) -> None:
    """With the key nothing of this is 401: what is asked is judged by its route."""
    for route in keyed():
        if route.method in ("GET", "HEAD", "WS"):
            for header in (("Authorization", f"Bearer {server.key}"), ("X-Api-Key", server.key)):
                assert ask(server, route, header, box=box).status != 401, route


def test_a01_health_needs_none_and_tells_nothing(server: Served) -> None:
    open_to_all = [route for route in routes() if route not in keyed()]
    assert {route.path for route in open_to_all} == {"/healthz", "/readyz"}
    for route in open_to_all:
        answer = ask(server, route)
        assert answer.status == 200
        assert str(server.home).encode() not in answer.body


def test_a01_a_private_port_needs_its_token(server: Served, box: str) -> None:
    """The name of a port is no way around: neither to the server's own routes, nor, without the token, inside."""
    with server.client() as client:
        found = client.put(f"/v1/sandboxes/{box}/ports/8000", json={"public": False}).json()
    host = httpx.URL(found["url"]).netloc.decode()
    plain = Route("GET", "/v1/sandboxes")
    socket = Route("WS", "/v1/wire")
    for route in (plain, socket):
        for headers in ([], [("Sloplet-Token", "wrong")], [("Authorization", f"Bearer {server.key}")]):
            answer = ask(server, route, ("Host", host), *headers)
            assert answer.status in (401, 403, 404), (route, headers, answer)
            assert b'"items"' not in answer.body
    unpublished = host.replace("8000-", "8001-")
    assert ask(server, plain, ("Host", unpublished), ("Sloplet-Token", found["token"])).status in (401, 403, 404)
    allowed = ask(server, plain, ("Host", host), ("Sloplet-Token", found["token"]))
    assert allowed.status not in (401, 403, 404), allowed  # nothing listens inside: but it was asked


def test_a01_keys_are_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with a key, and also if nothing is: one comparison of two digests of the same length."""
    compared: list[tuple[int, int]] = []

    def recording(left: Any, right: Any) -> bool:
        compared.append((len(left), len(right)))
        return hmac.compare_digest(left, right)

    class Recorded:
        compare_digest = staticmethod(recording)

    monkeypatch.setattr(keys_module, "hmac", Recorded)
    keys = Keys(Home(tmp_path / "home").open())
    try:
        _, text = keys.create("one")
        head, secret = text.rsplit("_", 1) if "_" not in text[-43:] else (text[:-44], text[-43:])
        flipped = secret[:-1] + ("A" if secret[-1] != "A" else "B")
        for wrong in (WRONG, "", "slp_", "nonsense", f"{head}_{flipped}", f"slp_{'a' * 12}_{secret}", text + "x"):
            with pytest.raises(KeyRefused):
                keys.verify(wrong)
        keys.verify(text)
    finally:
        keys.close()
    assert compared == [(32, 32)] * 8


# -- A-02 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", PAGES)
def test_a02_web_pages_are_refused(server: Served, box: str, origin: str) -> None:
    """Also with the key: a page that has come by it can do nothing with it."""
    for route in routes():
        answer = ask(server, route, ("Origin", origin), key=server.key, box=box)
        assert answer.status == 403, f"{route} {origin}: {answer.status} {answer.body!r}"
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_a02_the_origin_that_was_allowed(server: Served) -> None:
    """Positive control; and even then no credentials and no star."""
    answer = ask(server, Route("GET", "/v1/me"), ("Origin", ORIGIN), key=server.key)
    assert answer.status == 200
    assert answer.headers.get("access-control-allow-origin") in (None, ORIGIN)
    assert "access-control-allow-credentials" not in answer.headers
    assert ask(server, Route("WS", "/v1/wire"), ("Origin", ORIGIN), key=server.key).status == 101


@pytest.mark.parametrize("origin", ["http://evil.test", "null"])
def test_a02_preflights_allow_nothing(server: Served, origin: str) -> None:
    for headers in ([("Access-Control-Request-Method", "POST")], [("Access-Control-Request-Private-Network", "true")]):
        answer = ask(server, Route("OPTIONS", "/v1/sandboxes"), ("Origin", origin), *headers)
        assert answer.status in (401, 403)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def _described(route: Route) -> dict[str, Any]:
    return dict(document()["paths"].get(route.path, {}).get(route.method.lower(), {}))


FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "text/json", "x")


@pytest.mark.parametrize("kind", FORMS)
def test_a02_json_is_only_what_says_so(server: Served, box: str, kind: str) -> None:
    """What a page's form can send without being asked is not taken for JSON."""
    takes_json = [
        route for route in keyed() if "application/json" in _described(route).get("requestBody", {}).get("content", {})
    ]
    assert len(takes_json) > 5
    for route in takes_json:
        answer = ask(server, route, ("Content-Type", kind), key=server.key, box=box)
        assert answer.status == 415, f"{route} {kind!r}: {answer.status} {answer.body!r}"


def test_a02_json_positive_control(server: Served, box: str) -> None:
    for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        answer = ask(server, Route("POST", "/v1/sandboxes/{box}/exec"), ("Content-Type", kind), key=server.key, box=box)
        assert answer.status not in (415, 403), answer


HOSTS = (
    "rebind.test", "evil.test:80", "localhost.evil.test", "127.0.0.1.evil.test", "evil-localhost", "127.0.0.2",
    "0.0.0.0", "[::]", "[::ffff:127.0.0.1]", "127.1", "2130706433", "localhost@evil.test", "localhost/", "",
    "user@localhost", "localhost:x", "local\u017fost",
)  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_a02_another_name_is_refused(server: Served, box: str, host: str) -> None:
    """A name of an attacker's that leads to this machine: DNS rebinding."""
    for route in (
        Route("GET", "/v1/me"),
        Route("GET", "/healthz"),
        Route("WS", "/v1/wire"),
        Route("POST", "/v1/sandboxes"),
    ):
        answer = ask(server, route, ("Host", host), key=server.key)
        assert answer.status in (400, 403, 421), f"{route} {host!r}: {answer.status} {answer.body!r}"


def test_a02_hosts_positive_control(server: Served) -> None:
    port = httpx.URL(server.url).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost", "LOCALHOST", f"[::1]:{port}"):
        assert ask(server, Route("GET", "/v1/me"), ("Host", host), key=server.key).status == 200, host


def test_a02_two_hosts_or_none(server: Served) -> None:
    """Whoever is in front and we must not understand different names."""
    line = b"GET /v1/me HTTP/1.1\r\n"
    key = b"Authorization: Bearer " + server.key.encode() + b"\r\n\r\n"
    for hosts in (b"", b"Host: evil.test\r\nHost: localhost\r\n", b"Host: localhost\r\nHost: evil.test\r\n"):
        with Raw(server.url) as raw:
            raw.send(line + hosts + key)
            answer = raw.answer()
            assert answer is None or answer.status in (400, 403, 421), (hosts, answer)
    with Raw(server.url) as raw:  # the absolute form: what is asked for is in the line itself
        raw.send(b"GET http://evil.test/v1/me HTTP/1.1\r\nHost: localhost\r\n" + key)
        answer = raw.answer()
        assert answer is None or answer.status in (400, 403, 404, 421), answer


def test_a02_two_keys(server: Served) -> None:
    for pair in ((WRONG, server.key), (server.key, WRONG)):
        headers = [("Authorization", f"Bearer {key}") for key in pair]
        assert ask(server, Route("GET", "/v1/me"), *headers).status in (400, 401)
        assert ask(
            server, Route("GET", "/v1/me"), ("Authorization", f"Bearer {pair[0]}"), ("X-Api-Key", pair[1])
        ).status in (
            200 if pair[0] == server.key else 401,
            400,
            401,
        )
